"""Settings of number formats: of weights and activations, of what the optimizer keeps, and of the loss scale. Nothing here imports torch."""

from dataclasses import dataclass
from typing import Literal

from domino_lm.config.bounds import PositiveFloat, PositiveInt

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of a run, and the loss scale that keeps fp16's gradients in range."""

    bf16: bool = False
    """Weights, activations and collectives in bfloat16; gradients and the weights that the optimizer updates stay in fp32."""

    fp16: bool = False
    """The same in float16, under a loss scale: dynamic, or the constant of --loss-scale."""

    loss_scale: PositiveFloat | None = None
    """Constant factor of the loss, by which gradients are divided before the update; powers of 2 are exact. None: dynamic with --fp16, else none."""

    initial_loss_scale: PositiveFloat = 2.0**32
    """Dynamic loss scale of the first step; it halves at overflows until gradients fit."""

    min_loss_scale: PositiveFloat = 1.0
    """The dynamic loss scale falls no lower; an overflow there counts for --max-skipped-steps."""

    loss_scale_window: PositiveInt = 1000
    """Steps without overflow after which the dynamic loss scale doubles."""

    hysteresis: PositiveInt = 2
    """Overflows that the dynamic loss scale bears before it halves at each; it is as patient again when it has doubled."""

    grad_reduce_in_bf16: bool = False
    """Accumulate and reduce gradients in bfloat16: half the memory and bytes, and small contributions to large sums are lost. Needs --bf16."""

    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Gradients that the optimizer reads; bf16 is --grad-reduce-in-bf16."""

    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Weights that the optimizer updates; fp32 alone works."""

    exp_avg_dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """First moments as they are kept, fp32 or bf16; the update itself is in fp32."""

    exp_avg_sq_dtype: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    """Second moments as they are kept, fp32, or bf16 if --adam-beta2 moves them by more than bf16 rounds."""

    @property
    def params_dtype(self) -> str:
        """PyTorch's name of the type of weights and activations."""
        return "bfloat16" if self.bf16 else "float16" if self.fp16 else "float32"

    @property
    def gradient_dtype(self) -> str:
        """PyTorch's name of the type that gradients are accumulated and reduced in."""
        return "bfloat16" if self.grad_reduce_in_bf16 or self.main_grads_dtype == "bf16" else "float32"

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows the overflows."""
        return self.fp16 and self.loss_scale is None

    @property
    def scales_loss(self) -> bool:
        """Whether there is a loss scale at all."""
        return self.fp16 or self.loss_scale is not None

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or an activation."""
        return BYTES[self.params_dtype]

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient."""
        return BYTES[self.gradient_dtype]

    def optimizer_bytes(self, optimizer: str) -> int:
        """Bytes that ``optimizer`` (adam, sgd) keeps per weight: its moments, and a master weight if weights are narrower than fp32.

        Of muon, those of a weight that it leaves to AdamW.
        """
        moments = BYTES[NAMES[self.exp_avg_dtype]] + (BYTES[NAMES[self.exp_avg_sq_dtype]] if optimizer != "sgd" else 0)
        return moments + (4 if self.element_bytes < 4 else 0)
