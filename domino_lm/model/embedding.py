"""Vocabulary-parallel word embedding, the first part of the chain."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from domino_lm.model.batch import Row, RowContext
from domino_lm.model.parameter import Parameter
from domino_lm.model.part import ALL_COLUMNS, Part
from domino_lm.parallel.collectives import Communicator, ReduceFromShards


class Lookup(NamedTuple):
    """Where a row's tokens lie in the local table."""

    ids: Tensor  # [s, b]
    ours: Tensor  # [s, b, 1] bool, False for tokens that other ranks hold


class Embedding(Part):
    """Rank r holds rows [r v/t, (r+1) v/t) of the table; other tokens add zero to its partial sum."""

    sharded = True
    forward_collective = "all_reduce"

    def __init__(self, tp: Communicator, weight: Parameter) -> None:
        self.tp = tp
        self.weight = weight  # [v/t, h]

    def body(self, x: None, ctx: RowContext) -> Lookup:
        """Rows of the local table, kept for backward."""
        ctx.saved = found = local_rows(ctx.row.tokens, self.weight, self.tp)
        return found

    def tail(self, mid: Lookup, columns: slice = ALL_COLUMNS, out: Tensor | None = None) -> Tensor:
        """Partial sum [s, b, columns] of the embedded tokens, in ``out`` if one is given."""
        return torch.mul(F.embedding(mid.ids, self.weight[:, columns]), mid.ours, out=out)

    def body_grad(self, dy: Tensor, ctx: RowContext) -> Tensor:
        """The gradient [s, b, h] with other ranks' tokens zeroed."""
        return dy * ctx.state(Lookup).ours

    def wgrad(self, ctx: RowContext, dy: Tensor) -> None:
        """Accumulate the table's gradient."""
        grad = self.weight.main_grad
        grad.index_add_(0, ctx.state(Lookup).ids.flatten(), dy.flatten(0, 1).to(grad.dtype))

    def forward(self, row: Row) -> Tensor:
        """Embedded tokens [s, b, h] through autograd."""
        return ReduceFromShards.apply(self.tail(local_rows(row.tokens, self.weight, self.tp)), self.tp)


def local_rows(tokens: Tensor, table: Parameter, tp: Communicator) -> Lookup:
    """Where ``tokens`` [s, b] lie in this rank's rows of ``table`` [v/t, h], and whether they do.

    Tokens of other ranks point at some row of ours; no element is selected by a mask, which would wait for the device.
    """
    local = tokens - tp.rank * table.shape[0]
    clamped = local.clamp(0, table.shape[0] - 1)
    return Lookup(clamped, (local == clamped).unsqueeze(-1))
