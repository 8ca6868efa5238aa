"""Gradient memory: flat buckets that parameters' ``main_grad`` are views of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Accumulates(Protocol):
    """A parameter that gradients are accumulated for."""

    main_grad: Tensor

    @property
    def data(self) -> Tensor:
        """The weights."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are reduced over data-parallel ranks together."""

    flat: Tensor  # [elements], padded to a multiple of the data-parallel size
    parameters: tuple[Accumulates, ...]


class GradientBuckets:
    """Allocates one flat buffer a bucket and points every parameter's ``main_grad`` into it.

    Gradients accumulate in fp32, or in float64 for float64 models. ``groups`` holds the parameters of each bucket; the
    caller orders them by the op that writes their gradient last, so that buckets complete one after another in backward.
    """

    def __init__(self, groups: Sequence[Sequence[Accumulates]], dp_size: int) -> None:
        self.buckets = tuple(self._allocate(tuple(group), dp_size) for group in groups)

    @staticmethod
    def _allocate(parameters: tuple[Accumulates, ...], dp_size: int) -> Bucket:
        dtypes = {torch.promote_types(p.data.dtype, torch.float32) for p in parameters}
        assert len(dtypes) == 1, f"one bucket holds gradients of one type, not {dtypes}"
        elements = sum(p.data.numel() for p in parameters)
        flat = parameters[0].data.new_zeros(-(-elements // dp_size) * dp_size, dtype=dtypes.pop())
        offset = 0
        for parameter in parameters:
            size = parameter.data.numel()
            parameter.main_grad = flat[offset : offset + size].view(parameter.data.shape)
            offset += size
        return Bucket(flat, parameters)

    def zero_(self) -> None:
        """Forget all gradients."""
        for bucket in self.buckets:
            bucket.flat.zero_()


def split_into_buckets(sizes: Sequence[int], bucket_size: int) -> list[range]:
    """Cut a sequence of parameters with ``sizes`` elements into runs that close once they hold ``bucket_size`` elements."""
    runs, start, held = [], 0, 0
    for position, size in enumerate(sizes):
        held += size
        if held >= bucket_size:
            runs.append(range(start, position + 1))
            start, held = position + 1, 0
    return [*runs, range(start, len(sizes))] if start < len(sizes) else runs
