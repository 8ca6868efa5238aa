"""GEMMs in 8-bit floating point, each operand with one scale, computed from the tensor itself.

E4M3 holds more digits, E5M2 more range (Micikevicius et al., arXiv 2209.05433): *hybrid* takes E4M3 for weights and
activations and E5M2 for gradients, *e4m3* takes it for all three. Weights stay in their own dtype; 8-bit copies are made
once per step. Gradients of weights are formed in fp32 and accumulated as everywhere.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from domino_lm.model.linear import Linear
from domino_lm.model.parameter import Parameter

MULTIPLE = 16
"""Inner and output widths that 8-bit GEMMs take on GPUs are multiples of this; others are computed as without fp8."""


@dataclass(frozen=True)
class Fp8Format:
    """The 8-bit types of one recipe on one kind of device."""

    forward: torch.dtype
    """Of weights and activations."""

    gradient: torch.dtype

    @classmethod
    def of(cls, name: str, device: torch.device) -> Self:
        """``hybrid`` or ``e4m3``; AMD's first 8-bit units (gfx94) have types of their own, without negative zero."""
        e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
        if device.type == "cuda" and torch.version.hip and "gfx94" in torch.cuda.get_device_properties(device).gcnArchName:
            e4m3, e5m2 = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
        return cls(e4m3, e5m2 if name == "hybrid" else e4m3)


class Quantised(NamedTuple):
    """A matrix [m, k] in 8 bits; times ``inverse_scale`` [] it is the original, to rounding."""

    rows: Tensor  # [m, k]
    columns: Tensor | None  # [k, m], the transpose, contiguous, if some GEMM reads it
    inverse_scale: Tensor  # [] fp32


Quantise = Callable[[Tensor, torch.dtype, bool], Quantised]
"""Matrix, type, whether the transpose is wanted too."""


def quantise(matrix: Tensor, dtype: torch.dtype, transposed: bool = False) -> Quantised:
    """``matrix`` [m, k] scaled so that its largest magnitude is the type's largest, without waiting for the device.

    A matrix of zeros stays zeros. An element that is not finite makes the matrix NaN, so that the step's finite check sees
    it: not all types can hold infinity, and a saturated value would pass.
    """
    largest = matrix.abs().amax().float()  # []
    scale = torch.where(largest > 0, torch.finfo(dtype).max / largest, 1.0)
    # fp32 scales of the smallest numbers overflow; infinity times zero would spread NaN.
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    rows = (matrix.float() * scale).to(dtype)  # in fp32: rounded to bf16, the scale itself would move the largest element
    return Quantised(rows, rows.t().contiguous() if transposed else None, 1 / scale)


def scaled_mm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, precise: bool, out: Tensor | None) -> Tensor:
    """``a`` [m, k] times ``b`` [n, k] transposed, both in 8 bits, in ``dtype``: [m, n], in ``out`` if one is given.

    ``precise`` sums in fp32 throughout; otherwise the tensor cores' shorter accumulator may be used.
    """
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=dtype, use_fast_accum=not precise, out=out)


class Fp8Linear(Linear):
    """Every GEMM of a layer with 8-bit operands; ``wide`` computes those whose sizes do not fit.

    A backend may give its own ``quantiser``, which must do what `quantise` does.
    """

    def __init__(self, fmt: Fp8Format, wide: Linear, quantiser: Quantise = quantise) -> None:
        self.format, self.wide, self._quantise = fmt, wide, quantiser
        self._weights: dict[Parameter, Quantised] = {}
        self._stale: set[Parameter] = set()
        self._last: tuple[weakref.ref[Tensor], torch.dtype, Quantised] | None = None

    def invalidate(self) -> None:
        self._stale = set(self._weights)
        self._last = None

    def rebuild(self) -> None:
        for weight in [weight for weight in self._weights if weight in self._stale]:  # the order is that of the first step
            self._store(weight)

    def forward(self, x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
        if not _fits(x.shape[-1], weight.shape[0]):
            return self.wide.forward(x, weight, bias)
        a, b = self._rows(x, self.format.forward), self._weight(weight)
        y = scaled_mm(a.rows, a.inverse_scale, b.rows, b.inverse_scale, x.dtype, False, None).view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias)

    def forward_columns(self, x: Tensor, weight: Parameter, columns: slice, out: Tensor | None = None) -> Tensor:
        if not _fits(x.shape[-1], _length(columns, weight.shape[0])):
            return self.wide.forward_columns(x, weight, columns, out)
        b = self._weight(weight)
        return self._multiply(self._rows(x, self.format.forward), x, b.rows[columns], b.inverse_scale, False, out)

    def dgrad(self, dy: Tensor, weight: Parameter) -> Tensor:
        return self.dgrad_columns(dy, weight, slice(None))

    def dgrad_columns(self, dy: Tensor, weight: Parameter, columns: slice, out: Tensor | None = None) -> Tensor:
        if not _fits(dy.shape[-1], _length(columns, weight.shape[1])):
            return self.wide.dgrad_columns(dy, weight, columns, out)
        b = self._weight(weight)
        assert b.columns is not None, "weights are kept in both orders"
        return self._multiply(self._rows(dy, self.format.gradient), dy, b.columns[columns], b.inverse_scale, True, out)

    def accumulate_wgrad(self, weight: Parameter, dy: Tensor, x: Tensor) -> None:
        dy_2d, x_2d = dy.flatten(0, 1), x.flatten(0, 1)  # [tokens, o], [tokens, i]
        if not _fits(dy_2d.shape[0], dy_2d.shape[1], x_2d.shape[1]):
            self.wide.accumulate_wgrad(weight, dy, x)
            return
        a, b = self._quantise(dy_2d, self.format.gradient, True), self._quantise(x_2d, self.format.forward, True)
        assert a.columns is not None
        assert b.columns is not None
        product = scaled_mm(a.columns, a.inverse_scale, b.columns, b.inverse_scale, torch.float32, True, None)
        weight.main_grad.add_(product)

    def _multiply(self, a: Quantised, like: Tensor, b: Tensor, b_scale: Tensor, precise: bool, out: Tensor | None) -> Tensor:
        flat = None if out is None else out.view(-1, out.shape[-1])
        result = scaled_mm(a.rows, a.inverse_scale, b, b_scale, like.dtype, precise, flat)
        return result.view(*like.shape[:-1], -1) if out is None else out

    def _rows(self, tensor: Tensor, dtype: torch.dtype) -> Quantised:
        """``tensor`` [s, b, k] as [tokens, k] in 8 bits; the last one is kept, since column blocks read the same tensor in turn."""
        if self._last is not None and self._last[0]() is tensor and self._last[1] is dtype:
            return self._last[2]
        found = self._quantise(tensor.flatten(0, 1), dtype, False)
        self._last = weakref.ref(tensor), dtype, found
        return found

    def _weight(self, weight: Parameter) -> Quantised:
        if weight not in self._weights or weight in self._stale:
            self._store(weight)
        return self._weights[weight]

    def _store(self, weight: Parameter) -> None:
        """Quantise a weight into its copy's memory, which captured graphs read."""
        found = self._quantise(weight.detach(), self.format.forward, True)
        held = self._weights.setdefault(weight, found)
        if held is not found:
            for old, new in zip(held, found, strict=True):
                assert isinstance(old, Tensor), "a weight is kept in both orders"
                assert isinstance(new, Tensor)
                old.copy_(new)
        self._stale.discard(weight)


def _length(columns: slice, width: int) -> int:
    return len(range(*columns.indices(width)))


def _fits(*sizes: int) -> bool:
    return all(size % MULTIPLE == 0 for size in sizes)
