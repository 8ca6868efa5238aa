"""AdamW with Megatron's decay groups, fed from ``main_grad``, and the global gradient norm over tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from domino_lm.config import OptimizerConfig
    from domino_lm.model.parameter import Parameter
    from domino_lm.parallel.collectives import Communicator


@dataclass(frozen=True)
class StepInfo:
    """What one optimizer step found, as device tensors: reading them is the caller's host synchronisation."""

    grad_norm: Tensor
    """Norm over all gradients of the unsharded model, before clipping; 0-d."""

    found_inf: Tensor
    """1.0 where the norm was not finite, and then neither weights nor moments nor the step count changed; else 0.0; 0-d float32."""


def takes_weight_decay(parameter: Parameter) -> bool:
    """Matrices and embeddings decay; biases and norm weights do not (Megatron's two groups)."""
    return parameter.dim() >= 2 and not parameter.spec.name.endswith(".bias")


class Optimizer:
    """AdamW over a rank's parameters, with clipping by the global norm.

    ``exp_avg`` and ``exp_avg_sq`` hold the moments in the order of ``parameters``, each of its parameter's shape; they
    exist from the start, so that a checkpoint can be loaded before the first step. Each parameter's ``main_grad`` must be
    of its parameter's dtype, and be reduced over data parallelism before `step`.
    """

    def __init__(self, parameters: Sequence[Parameter], config: OptimizerConfig, tp: Communicator) -> None:
        self.parameters = list(parameters)
        self.tp = tp
        self.clip_grad = config.clip_grad
        # AdamW updates views of the parameters, so that their own .grad stays free for the autograd path.
        self._targets = [parameter.detach() for parameter in self.parameters]
        self.exp_avg = [torch.zeros_like(target) for target in self._targets]
        self.exp_avg_sq = [torch.zeros_like(target) for target in self._targets]
        decay = [takes_weight_decay(parameter) for parameter in self.parameters]
        groups = [
            {"params": [t for t, d in zip(self._targets, decay, strict=True) if d], "weight_decay": config.weight_decay},
            {"params": [t for t, d in zip(self._targets, decay, strict=True) if not d], "weight_decay": 0.0},
        ]
        # Measured on 9 million parameters and one CPU thread: fused 5.5 ms, a loop 20 ms, foreach 31 ms.
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        self._steps = [torch.zeros((), dtype=torch.float32, device=target.device) for target in self._targets]
        for target, step, exp_avg, exp_avg_sq in zip(self._targets, self._steps, self.exp_avg, self.exp_avg_sq, strict=True):
            self._adamw.state[target] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    @property
    def step_count(self) -> int:
        """Updates made so far, the same for every parameter. Reading it synchronises with the device."""
        return int(self._steps[0].item())

    @step_count.setter
    def step_count(self, count: int) -> None:
        for step in self._steps:
            step.fill_(count)

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Return the norm of the unsharded model's gradient, 0-d, the same on every TP rank.

        Sharded parameters are summed over TP, replicated ones counted on TP rank 0 only; one all-reduce of one scalar.
        """
        counted = [p.main_grad for p in self.parameters if p.spec.shard_dim is not None or self.tp.rank == 0]
        if not counted:
            return self.tp.all_reduce(torch.zeros((), dtype=torch.float64, device=self.parameters[0].device)).sqrt()
        norms = torch.stack(torch._foreach_norm(counted))  # [parameters], one launch instead of one for each
        return self.tp.all_reduce(norms.double().square().sum()).sqrt()

    @torch.no_grad()
    def step(self, lr: float | Tensor, bad_loss: Tensor | None = None) -> StepInfo:
        """Clip and update from ``main_grad`` (which clipping scales in place), without waiting for the device.

        A norm that is not finite, or a ``bad_loss`` above 0 (0-d float32, the same on every rank), leaves weights, moments
        and step count as they were; the caller sees it in the result.
        """
        norm = self.gradient_norm()
        found_inf = torch.logical_not(torch.isfinite(norm)).to(torch.float32)
        if bad_loss is not None:
            found_inf = torch.maximum(found_inf, bad_loss.clamp(max=1.0))
        for target, parameter in zip(self._targets, self.parameters, strict=True):
            target.grad = parameter.main_grad
        for group in self._adamw.param_groups:
            group["lr"] = lr
        # The fused kernel divides gradients by this scale and skips on found_inf, in the pass that it makes anyway.
        self._adamw.grad_scale = self._clip_scale(norm)  # type: ignore[attr-defined]
        self._adamw.found_inf = found_inf  # type: ignore[attr-defined]
        self._adamw.step()
        return StepInfo(grad_norm=norm, found_inf=found_inf)

    def _clip_scale(self, norm: Tensor) -> Tensor | None:
        """What gradients are divided by: max(1, (norm + 1e-6) / clip), 0-d float32; None where clipping is off."""
        if self.clip_grad <= 0:
            return None
        return ((norm + 1e-6) / self.clip_grad).clamp(min=1.0).to(torch.float32)
