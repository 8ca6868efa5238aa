"""Narrow weights, gradients and moments around an update in fp32."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from domino_lm.config.settings import OptimizerConfig
from domino_lm.model.kernels.attention_kernels import attend
from domino_lm.model.kernels.pointwise import normalise
from domino_lm.model.linear import Linear
from domino_lm.model.parameter import Parameter, ParameterSpec
from domino_lm.parallel.collectives import Communicator
from domino_lm.training import optimizer as optimizer_module
from domino_lm.training.loss_scale import LossScale
from domino_lm.training.optimizer import Optimizer

ALONE = Communicator.single()
CONFIG = OptimizerConfig(lr=0.01, weight_decay=0.1, clip_grad=1.0)
SHAPES = {"matrix.weight": (6, 4), "matrix.bias": (6,), "other.weight": (5, 3)}
NARROW = [torch.bfloat16, torch.float16]


def parameters_of(dtype: torch.dtype, gradient_dtype: torch.dtype = torch.float32) -> list[Parameter]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for name, shape in SHAPES.items():
        rounded = torch.randn(shape, generator=generator).bfloat16()
        parameter = Parameter.of(rounded.to(dtype), ParameterSpec(name=name, key=name, shape=shape))
        parameter.main_grad = torch.zeros(shape, dtype=gradient_dtype)
        found.append(parameter)
    return found


def train(parameters: list[Parameter], optimizer: Optimizer, steps: int = 3, factor: float = 1.0) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16().float()
            parameter.main_grad.copy_(gradient * factor)
        optimizer.step(0.01)


def mains(optimizer: Optimizer) -> list[Tensor]:
    return [piece.main.clone() for piece in optimizer.pieces]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_master_weights_take_the_very_updates_of_an_fp32_model(dtype: torch.dtype) -> None:
    wide, narrow = parameters_of(torch.float32), parameters_of(dtype)
    expected, found = Optimizer(wide, CONFIG, ALONE), Optimizer(narrow, CONFIG, ALONE)
    train(wide, expected)
    train(narrow, found)
    for a, b in zip(mains(found), mains(expected), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_weights_are_their_master_weights_rounded(dtype: torch.dtype) -> None:
    parameters = parameters_of(dtype)
    optimizer = Optimizer(parameters, CONFIG, ALONE)
    train(parameters, optimizer)
    assert all(torch.equal(piece.weights, piece.main.to(dtype)) for piece in optimizer.pieces)
    assert any(not torch.equal(piece.weights.float(), piece.main) for piece in optimizer.pieces)


def test_updates_too_small_for_bf16_add_up_in_the_master_weights() -> None:
    parameters = parameters_of(torch.bfloat16)
    before = [p.detach().clone() for p in parameters]
    optimizer = Optimizer(parameters, CONFIG, ALONE)
    for parameter in parameters:
        parameter.main_grad.fill_(1.0)
    optimizer.step(1e-5)
    assert all(torch.equal(p.detach(), b) for p, b in zip(parameters, before, strict=True))
    for _ in range(3000):
        optimizer.step(1e-5)
    assert all(not torch.equal(p.detach(), b) for p, b in zip(parameters, before, strict=True))


@pytest.mark.parametrize("clip_grad", [0.0, 1.0, 1e6])
def test_a_loss_scale_leaves_no_trace_in_updates_and_norm(clip_grad: float) -> None:
    config = dataclasses.replace(CONFIG, clip_grad=clip_grad)
    plain, scaled = parameters_of(torch.float32), parameters_of(torch.float32)
    expected = Optimizer(plain, config, ALONE)
    found = Optimizer(scaled, config, ALONE, loss_scale=LossScale(2.0**20, torch.device("cpu")))
    train(plain, expected)
    train(scaled, found, factor=2.0**20)
    for a, b in zip(mains(found), mains(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    for parameters, optimizer, factor in ((plain, expected, 1.0), (scaled, found, 2.0**20)):
        for parameter in parameters:
            parameter.main_grad.fill_(factor)
        assert float(optimizer.step(0.0).grad_norm) == pytest.approx(math.sqrt(sum(p.numel() for p in parameters)))


def test_an_overflow_changes_nothing_but_the_loss_scale() -> None:
    parameters = parameters_of(torch.float16)
    scale = LossScale(2.0**8, torch.device("cpu"), dynamic=True, hysteresis=1)
    optimizer = Optimizer(parameters, CONFIG, ALONE, loss_scale=scale)
    train(parameters, optimizer, 1)
    before = [t.clone() for t in (*map(torch.Tensor.detach, parameters), *mains(optimizer), *optimizer.exp_avg, *optimizer.exp_avg_sq)]
    parameters[1].main_grad[0] = torch.inf
    assert float(optimizer.step(0.01).found_inf) == 1
    after = [*map(torch.Tensor.detach, parameters), *mains(optimizer), *optimizer.exp_avg, *optimizer.exp_avg_sq]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert (scale.value.item(), optimizer.step_count) == (2.0**7, 1)


def test_moments_in_bf16_are_those_of_fp32_rounded_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_module, "WIDENED_ELEMENTS", 30)  # several runs of one parameter each
    parameters, exact = parameters_of(torch.float32), parameters_of(torch.float32)
    narrow = Optimizer(parameters, CONFIG, ALONE, moment_dtypes=(torch.bfloat16, torch.bfloat16))
    wide = Optimizer(exact, CONFIG, ALONE)
    for _ in range(3):
        train(parameters, narrow, 1)
        train(exact, wide, 1)
        for kept, moments in ((narrow.exp_avg, wide.exp_avg), (narrow.exp_avg_sq, wide.exp_avg_sq)):
            for short, long in zip(kept, moments, strict=True):
                assert short.dtype == torch.bfloat16
                assert torch.equal(short, long.bfloat16())
                long.copy_(short)
    assert all(torch.equal(a, b) for a, b in zip(mains(narrow), mains(wide), strict=True))


def test_gradients_in_bf16_update_as_their_values_in_fp32_do() -> None:
    wide, narrow = parameters_of(torch.bfloat16), parameters_of(torch.bfloat16, torch.bfloat16)
    expected, found = Optimizer(wide, CONFIG, ALONE), Optimizer(narrow, CONFIG, ALONE)
    train(wide, expected)
    train(narrow, found)
    for a, b in zip(mains(found), mains(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_64_micro_batches_add_up_in_fp32_and_not_in_bf16(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = Parameter.of(torch.zeros(8, 6, dtype=dtype), ParameterSpec(name="w", key="w", shape=(8, 6)))
    sums = {kind: torch.zeros(8, 6, dtype=kind) for kind in (torch.float32, torch.bfloat16)}
    exact = torch.zeros(8, 6, dtype=torch.float64)
    for _ in range(64):
        dy, x = ((torch.rand(5, 2, n, generator=generator) + 0.5).to(dtype) for n in (8, 6))
        exact += dy.flatten(0, 1).double().t() @ x.flatten(0, 1).double()
        for total in sums.values():
            weight.main_grad = total
            operands = (dy, x) if total.dtype == torch.float32 else (dy.to(total.dtype), x.to(total.dtype))
            Linear().accumulate_wgrad(weight, *operands)
    errors = {kind: ((total.double() - exact).abs() / exact).max().item() for kind, total in sums.items()}
    assert errors[torch.float32] < 1e-5
    assert errors[torch.bfloat16] > 1e-3


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["LayerNorm", "RMSNorm"])
def test_norms_take_their_statistics_in_fp32(dtype: torch.dtype, biased: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = (torch.randn(64, 1, 128, generator=generator) + 20 * biased).to(dtype)
    weight, bias = torch.ones(128, dtype=dtype), torch.zeros(128, dtype=dtype) if biased else None
    exact = normalise(hidden.double(), weight.double(), None if bias is None else bias.double(), 1e-5)
    found = normalise(hidden, weight, bias, 1e-5)
    assert ((found.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs().clamp(min=0.1)).all()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_attention_over_a_prefix_is_as_exact_as_over_the_whole_row(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, 3, 24, 8, generator=generator).to(dtype) for _ in range(3))
    scores = (query.double() @ key.double().transpose(-1, -2)) / 8**0.5
    exact = (scores + torch.full((24, 24), -torch.inf).triu(1)).softmax(-1) @ value.double()
    cut = [
        attend(query[:, :, 12:], [key[:, :, :12], key[:, :, 12:]], [value[:, :, :12], value[:, :, 12:]], None),
        attend(query, [key], [value], None),
    ]
    errors = [(found[:, :, -12:].double() - exact[:, :, 12:]).abs().max().item() for found in cut]
    assert errors[0] < 2 * errors[1]
