"""The sharded part: two explicit GEMMs around a differentiable core, written once for every model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from domino_lm.model.batch import Row, RowContext
from domino_lm.model.linear import accumulate_bias_grad, accumulate_wgrad, dgrad, gemm
from domino_lm.model.parameter import Parameter
from domino_lm.parallel.collectives import Communicator, CopyToShards, ReduceFromShards

ALL_COLUMNS = slice(None)


class Part:
    """A link of the chain; even links are sharded, odd ones replicated."""

    sharded: bool
    forward_collective: str | None = None
    backward_collective: str | None = None

    def parameters(self) -> Iterator[Parameter]:
        """The part's weights, in the order in which they were given to it."""
        return (value for value in vars(self).values() if isinstance(value, Parameter))


class ShardedPart(Part, ABC):
    """Column-parallel GEMM, a core, row-parallel GEMM. A model writes ``core``; the rest stands here.

    The weights are local: ``w_in`` [n/t, h] with bias ``b_in`` [n/t], ``w_out`` [h, m/t]. Under the plan, ``body`` and
    ``tail`` go forward, ``body_grad``, ``tail_grad`` and ``wgrad`` back; the collectives between them are ops of the plan.
    `forward` is the same arithmetic through plain autograd.
    """

    sharded = True
    forward_collective = "all_reduce"
    backward_collective = "all_reduce"

    def __init__(self, tp: Communicator, w_in: Parameter, w_out: Parameter, b_in: Parameter | None = None) -> None:
        self.tp = tp
        self.w_in = w_in
        self.b_in = b_in
        self.w_out = w_out

    @abstractmethod
    def core(self, h: Tensor, ctx: RowContext) -> Tensor:
        """From the first GEMM's output [s, b, n/t] to the second one's input [s, b, m/t]; differentiable in ``h``."""

    def body(self, x: Tensor, ctx: RowContext) -> Tensor:
        """First GEMM and core of ``x`` [s, b, h]: [s, b, m/t]. Keeps what backward needs."""
        h = gemm(x, self.w_in, self.b_in).requires_grad_()  # [s, b, n/t]
        with torch.enable_grad():
            out = self.core(h, ctx)  # [s, b, m/t]
        ctx.saved = (x, h, out)
        return out.detach()

    def tail(self, mid: Tensor, columns: slice = ALL_COLUMNS) -> Tensor:
        """Second GEMM for the output ``columns``: this rank's partial sum [s, b, columns]."""
        return gemm(mid, self.w_out[columns])

    def body_grad(self, dy: Tensor, ctx: RowContext) -> Tensor:
        """From the gradient [s, b, h] of the reduced output to that of the first GEMM's output [s, b, n/t]."""
        x, h, out = ctx.saved
        (dh,) = torch.autograd.grad(out, h, dgrad(dy, self.w_out))
        ctx.saved = (x, out.detach(), dy)
        return dh

    def tail_grad(self, dh: Tensor, columns: slice = ALL_COLUMNS) -> Tensor:
        """Gradient by the input's ``columns``: this rank's partial sum [s, b, columns]."""
        return dgrad(dh, self.w_in[:, columns])

    def wgrad(self, contexts: Sequence[RowContext], dh: Sequence[Tensor]) -> None:
        """Accumulate both weights' gradients and the first bias's, of all given rows in one GEMM each."""
        x, mid, dy = (_join_rows(tensors) for tensors in zip(*(ctx.saved for ctx in contexts), strict=True))
        dh_rows = _join_rows(dh)
        accumulate_wgrad(self.w_out, dy, mid)
        accumulate_wgrad(self.w_in, dh_rows, x)
        if self.b_in is not None:
            accumulate_bias_grad(self.b_in, dh_rows)

    def forward(self, x: Tensor, row: Row) -> Tensor:
        """The whole part through autograd, collectives included: ``x`` [s, b, h] to the reduced [s, b, h]."""
        h = gemm(CopyToShards.apply(x, self.tp), self.w_in, self.b_in)  # [s, b, n/t]
        return ReduceFromShards.apply(gemm(self.core(h, RowContext(row)), self.w_out), self.tp)


def _join_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Rows side by side along the samples: [s, b1, n], [s, b2, n], ... to [s, b, n]; a single row is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), 1)
