"""Settings of kernels: which libraries and compilers compute, in how many bits. Nothing here imports torch."""

from dataclasses import dataclass
from typing import Literal

from domino_lm.config.bounds import PositiveInt


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """Which kernels compute, and what captures or compiles them."""

    compile: bool = False
    """Compile what lies between GEMMs (norms, residual joins, activations, rotations) with torch.compile, one graph each and without dynamic shapes."""

    compile_backend: str = "inductor"
    """Backend of torch.compile."""

    cuda_graph: bool = False
    """Capture a micro-batch and the step's end as CUDA graphs once warm, and replay them; the host then issues a step in a few calls."""

    cuda_graph_warmup_steps: int = 3
    """Steps that run eagerly before --cuda-graph captures."""

    tf32: bool = False
    """Multiply matrices of fp32 in TF32 on GPUs, several times as fast: operands are rounded to 11 bits, sums stay fp32."""

    fp8_format: Literal["hybrid", "e4m3"] | None = None
    """GEMMs of attention and MLP with 8-bit operands: hybrid takes E4M3 forward and E5M2 for gradients, e4m3 takes it everywhere; None computes in the model's dtype."""

    fp8_recipe: Literal["tensorwise"] = "tensorwise"
    """How 8-bit operands are scaled: tensorwise finds one number for each tensor from the tensor itself."""

    gradient_accumulation_fusion: bool = True
    """Add weight gradients to fp32 memory inside their GEMM on GPUs: by NVIDIA Apex if it is installed, else by PyTorch if it can."""

    persist_layer_norm: bool = True
    """Use Apex's persistent LayerNorm if it is installed and knows the width; --no-persist-layer-norm takes its fused one."""

    apex_optimizer: bool = False
    """AdamW by Apex's fused kernel in place of PyTorch's, which does the same in one pass too."""

    deterministic_mode: bool = False
    """Give the same bits in every run on the same machines and layout, on GPUs too: PyTorch's deterministic kernels alone, cuBLAS and NCCL with what is reproducible. Slower there; on CPUs it is so always."""

    high_priority_stream_groups: tuple[str, ...] = ()
    """Groups whose NCCL kernels run on streams of high priority: tp, dp."""

    nccl_max_ctas: PositiveInt | None = None
    """Most thread blocks that an NCCL collective occupies; fewer leave more of the GPU to compute and make transfers slower."""

    cuda_device_max_connections: PositiveInt | None = None
    """Hardware queues of the GPU (CUDA_DEVICE_MAX_CONNECTIONS), set before CUDA starts; None leaves the environment's."""
