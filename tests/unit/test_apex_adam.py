"""Apex's fused AdamW by a stand-in that takes the kernel's arguments, against PyTorch's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from domino_lm.config.kernels import KernelConfig
from domino_lm.config.settings import ConfigError, OptimizerConfig
from domino_lm.model.build import build_stack
from domino_lm.parallel.buckets import GradientBuckets
from domino_lm.parallel.collectives import Communicator
from domino_lm.training.apex_adam import CHUNK, ApexAdamW, find_adamw
from domino_lm.training.optimizer import Optimizer
from tests.distributed.models import GPT

CPU = torch.device("cpu")


def kernel(
    chunk: int,
    skip: Tensor,
    lists: list[list[Tensor]],
    lr: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    decay: float,
    inverse_scale: Tensor,
) -> None:
    """Apex's multi_tensor_adam_capturable: checks its arguments as the extension would, and computes."""
    assert (chunk, mode, bias_correction) == (CHUNK, 1, 1)
    assert (skip.dtype, skip.shape) == (torch.int32, (1,))
    assert (step.dtype, step.shape) == (torch.int32, (1,))
    assert (lr.dtype, lr.shape) == (inverse_scale.dtype, inverse_scale.shape) == (torch.float32, (1,))
    assert len(lists) == 4
    assert len({len(tensors) for tensors in lists}) == 1
    if skip.item() == 1:
        return
    for grad, weight, first, second in zip(*lists, strict=True):
        grad.mul_(inverse_scale)
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        corrected = (second / (1 - beta2 ** step.item())).sqrt().add_(eps)
        weight.mul_(1 - lr * decay).sub_(lr * (first / (1 - beta1 ** step.item())) / corrected)


EXTENSION: Any = SimpleNamespace(multi_tensor_adam_capturable=kernel)


def trained(on_gpu_kernel: bool, in_memory: bool) -> tuple[list[Tensor], int]:
    stack = build_stack(GPT, Communicator.single(), 1)
    parameters = stack.parameters()
    GradientBuckets([parameters], Communicator.single())
    kernels = {"kernel": ApexAdamW(EXTENSION)} if on_gpu_kernel else {}
    optimizer = Optimizer(parameters, OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5), Communicator.single(), **kernels)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        if step == 2:
            parameters[0].main_grad.view(-1)[0] = torch.inf
        lr = 1e-2 / (step + 1)
        optimizer.step(torch.tensor(lr) if in_memory else lr)
    return [parameter.detach().clone() for parameter in parameters], optimizer.step_count


@pytest.mark.parametrize("in_memory", [False, True], ids=["number", "tensor"])
def test_it_trains_as_pytorchs_does_and_skips_what_is_not_finite(in_memory: bool) -> None:
    (expected, steps), (found, found_steps) = trained(False, in_memory), trained(True, in_memory)
    assert found_steps == steps == 3
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_without_apex_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="--apex-optimizer needs NVIDIA Apex"):
        find_adamw(KernelConfig(apex_optimizer=True), CPU)


def test_apex_is_used_where_it_is_asked_for_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("domino_lm.training.apex_adam.find", {"amp_C": EXTENSION}.get)
    assert isinstance(find_adamw(KernelConfig(apex_optimizer=True), torch.device("cuda", 0)), ApexAdamW)
    assert find_adamw(KernelConfig(), torch.device("cuda", 0)) is adamw
