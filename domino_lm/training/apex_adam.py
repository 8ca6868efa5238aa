"""AdamW by NVIDIA Apex's fused kernel, under the signature of PyTorch's."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from domino_lm.config.kernels import KernelConfig
from domino_lm.config.settings import ConfigError
from domino_lm.model.kernels.apex import find

CHUNK = 2048 * 32
"""Elements of a thread block's share, Apex's own choice."""

DECOUPLED_DECAY = BIAS_CORRECTION = 1
"""Flags that the kernel takes as numbers."""


class ApexAdamW:
    """Apex's capturable kernel: learning rate, step and scale lie in device memory, and it skips if ``found_inf`` is 1."""

    def __init__(self, extension: ModuleType) -> None:
        self._kernel = extension.multi_tensor_adam_capturable

    def __call__(
        self,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        _: Sequence[Tensor],
        steps: Sequence[Tensor],
        *,
        grad_scale: Tensor | None,
        found_inf: Tensor,
        beta1: float,
        beta2: float,
        lr: float | Tensor,
        weight_decay: float,
        eps: float,
        **same: Any,
    ) -> None:
        """Update in place; ``grads`` are divided by ``grad_scale`` in place. A skipped step is not counted."""
        rate = lr if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float32, device=found_inf.device)
        inverse = torch.ones_like(found_inf) if grad_scale is None else 1 / grad_scale
        torch._foreach_add_(list(steps), 1 - found_inf)
        lists = [list(grads), list(weights), list(exp_avgs), list(exp_avg_sqs)]
        skip, step = found_inf.to(torch.int32).view(1), steps[0].to(torch.int32).view(1)
        modes = (DECOUPLED_DECAY, BIAS_CORRECTION)
        self._kernel(CHUNK, skip, lists, rate.view(1), beta1, beta2, eps, step, *modes, weight_decay, inverse.view(1))


def find_adamw(kernels: KernelConfig, device: torch.device) -> Callable[..., None]:
    """PyTorch's fused AdamW, or Apex's if it is asked for. Raises ConfigError if that is not there."""
    if not kernels.apex_optimizer:
        return adamw
    extension = find("amp_C") if device.type == "cuda" else None
    if extension is None or not hasattr(extension, "multi_tensor_adam_capturable"):
        raise ConfigError("--apex-optimizer needs NVIDIA Apex, built with its CUDA extensions, and a GPU; leave it out to use PyTorch's.")
    return ApexAdamW(extension)
