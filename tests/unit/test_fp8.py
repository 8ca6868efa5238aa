"""8-bit GEMMs: what quantising loses, what it must not hide, and that each GEMM agrees with its wide one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from domino_lm.model.kernels.fp8 import Fp8Format, Fp8Linear, Quantised, quantise
from domino_lm.model.linear import Linear
from domino_lm.model.parameter import Parameter

CPU = torch.device("cpu")
HYBRID = Fp8Format.of("hybrid", CPU)
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALF_STEP = {E4M3: 2**-4, E5M2: 2**-3}
"""Largest relative rounding error of a normal number."""


def original(found: Quantised) -> Tensor:
    return found.rows.double() * found.inverse_scale.double()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e8])
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=str)
def test_a_quantised_matrix_is_the_original_to_the_types_rounding(dtype: torch.dtype, size: float, wide: torch.dtype) -> None:
    matrix = (torch.randn(64, 96, generator=torch.Generator().manual_seed(1)) * size).to(wide)
    error = (original(quantise(matrix, dtype)) - matrix.double()).abs()
    subnormal = matrix.abs().amax().double() / torch.finfo(dtype).max * torch.finfo(dtype).smallest_normal
    assert (error <= 1.0001 * HALF_STEP[dtype] * matrix.double().abs().clamp(min=subnormal)).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_the_largest_element_becomes_the_types_largest(dtype: torch.dtype) -> None:
    matrix = torch.tensor([[0.5, -3.0], [1.0, 2.0]])
    assert quantise(matrix, dtype).rows.float().abs().max() == torch.finfo(dtype).max


def test_the_scale_is_not_rounded_to_the_models_type() -> None:
    matrix = torch.full((16, 16), 448 / 1.003, dtype=torch.bfloat16)  # a scale of 1.003 would be 1 in bf16
    assert (quantise(matrix, E4M3).rows.float() == 448).all()
    uneven = torch.linspace(1, 448 / 1.0039, 256).view(16, 16).to(torch.bfloat16)
    exact = (uneven.double() * (448 / uneven.double().max())).float()
    assert torch.equal(quantise(uneven, E4M3).rows.float(), exact.to(E4M3).float())


def test_zeros_stay_zeros() -> None:
    found = quantise(torch.zeros(16, 16), E4M3)
    assert original(found).abs().max() == 0
    assert found.inverse_scale == 1


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(dtype: torch.dtype, bad: float) -> None:
    matrix = torch.ones(16, 16)
    matrix[3, 5] = bad
    assert original(quantise(matrix, dtype)).isnan().any()


def test_the_transpose_is_the_transpose() -> None:
    matrix = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    found = quantise(matrix, E4M3, True)
    assert found.columns is not None
    assert found.columns.is_contiguous()
    assert torch.equal(found.columns.float(), found.rows.float().t())
    assert quantise(matrix, E4M3).columns is None


def test_formats() -> None:
    assert Fp8Format(E4M3, E5M2) == HYBRID
    assert Fp8Format.of("e4m3", CPU) == Fp8Format(E4M3, E4M3)


def parameter(rows: int, columns: int) -> Parameter:
    made = Parameter(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)))
    made.main_grad = torch.ones(rows, columns)
    return made


def activations(width: int, tokens: int = 16, seed: int = 7) -> Tensor:
    return torch.randn(tokens // 2, 2, width, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor) -> bool:
    """To what two operands rounded to 8 bits leave, relative to the whole result's size: E5M2 rounds to an eighth."""
    return bool((found - expected).norm() / expected.norm() < 0.1)


@pytest.mark.parametrize("name", ["hybrid", "e4m3"])
@torch.no_grad()
def test_every_gemm_agrees_with_its_wide_one(name: str) -> None:
    narrow, wide = Fp8Linear(Fp8Format.of(name, CPU), Linear()), Linear()
    weight, bias = parameter(48, 32), Parameter(torch.randn(48, generator=torch.Generator().manual_seed(3)))
    x, dy, half = activations(32), activations(48, seed=9), slice(16, 32)
    assert close(narrow.forward(x, weight, bias), wide.forward(x, weight, bias))
    assert close(narrow.forward_columns(x, weight, half), wide.forward_columns(x, weight, half))
    assert close(narrow.dgrad(dy, weight), wide.dgrad(dy, weight))
    assert close(narrow.dgrad_columns(dy, weight, half), wide.dgrad_columns(dy, weight, half))
    narrow.accumulate_wgrad(weight, dy, x)
    assert close(weight.main_grad - 1, dy.flatten(0, 1).t() @ x.flatten(0, 1))


@torch.no_grad()
def test_column_blocks_land_in_their_buffer_and_quantise_the_input_once() -> None:
    calls: list[torch.Size] = []

    def counted(matrix: Tensor, dtype: torch.dtype, transposed: bool) -> Quantised:
        calls.append(matrix.shape)
        return quantise(matrix, dtype, transposed)

    linear, weight, x = Fp8Linear(HYBRID, Linear(), counted), parameter(32, 48), activations(48)
    buffer = torch.empty(2, 8, 2, 16)
    for column in range(2):
        linear.forward_columns(x, weight, slice(16 * column, 16 * column + 16), buffer[column])
    whole = linear.forward(x, weight)
    assert torch.equal(buffer.permute(1, 2, 0, 3).flatten(2), whole)
    assert calls == [weight.shape, (16, 48)] or calls == [(16, 48), weight.shape]


@torch.no_grad()
def test_weights_are_quantised_once_a_step_in_the_same_memory() -> None:
    linear, weight, x = Fp8Linear(HYBRID, Linear()), parameter(48, 32), activations(32)
    before = linear.forward(x, weight)
    memory = linear._weights[weight].rows.data_ptr()
    weight.mul_(2)
    assert torch.equal(linear.forward(x, weight), before)
    linear.invalidate()
    assert torch.equal(linear.forward(x, weight), 2 * before)
    assert linear._weights[weight].rows.data_ptr() == memory
    weight.mul_(0.5)
    linear.invalidate()
    linear.rebuild()
    weight.zero_()
    assert torch.equal(linear.forward(x, weight), before)


@torch.no_grad()
def test_sizes_that_8_bit_units_do_not_take_are_computed_wide() -> None:
    linear, wide = Fp8Linear(HYBRID, Linear()), Linear()
    weight, x, dy = parameter(40, 24), activations(24, tokens=10), activations(40, tokens=10)
    assert torch.equal(linear.forward(x, weight), wide.forward(x, weight))
    assert torch.equal(linear.forward_columns(x, weight, slice(0, 20)), wide.forward_columns(x, weight, slice(0, 20)))
    assert torch.equal(linear.dgrad(dy, weight), wide.dgrad(dy, weight))
    linear.accumulate_wgrad(weight, dy, x)
    assert torch.equal(weight.main_grad, torch.ones(40, 24).addmm_(dy.flatten(0, 1).t(), x.flatten(0, 1)))
