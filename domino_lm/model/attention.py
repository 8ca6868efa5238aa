"""Causal self-attention as a sharded part."""

from collections.abc import Sequence

import torch
from torch import Tensor

from domino_lm.model.batch import Row, RowContext
from domino_lm.model.kernels.attention_kernels import attend, takes_grouped_heads
from domino_lm.model.parameter import Parameter
from domino_lm.model.part import ShardedPart
from domino_lm.parallel.collectives import Communicator


class Attention(ShardedPart):
    """Self-attention with g query groups: ``w_in`` [(n + 2g) d / t, h], ``w_out`` [h, n d / t].

    Rows of ``w_in`` are ordered by group: its query heads, then its key head, then its value head (Megatron's order).
    ``rotation`` holds RoPE's cosines and sines, or None. Rows of one sequence share their keys and values.
    """

    couples_tokens = True

    def __init__(
        self,
        tp: Communicator,
        w_in: Parameter,
        w_out: Parameter,
        b_in: Parameter | None,
        *,
        groups: int,
        head_width: int,
        rotation: tuple[Tensor, Tensor] | None,
        seq_length: int,
        dropout: float,
        site: str,
    ) -> None:
        super().__init__(tp, w_in, w_out, b_in)
        self.local_groups = groups // tp.size
        self.head_width = head_width
        self.rotation = rotation
        self.seq_length = seq_length
        self.dropout = dropout
        self.site = site

    def core(self, h: Tensor, ctx: RowContext) -> Tensor:
        s, b, _ = h.shape
        row = ctx.row
        grouped = h.view(s, b, self.local_groups, -1, self.head_width)  # [s, b, g/t, n/g + 2, d]
        pieces = grouped.split((grouped.shape[3] - 2, 1, 1), 3)  # its backward writes h's gradient in one pass
        query, key, value = (piece.flatten(2, 3) for piece in pieces)  # [s, b, n/t, d], 2 x [s, b, g/t, d]
        if self.rotation is not None:
            cos, sin = (table[row.start : row.start + s] for table in self.rotation)
            query, key = self.kernels.rotate(query, cos, sin), self.kernels.rotate(key, cos, sin)
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, n/t, s, d], 2 x [b, g/t, s, d]
        drops = self.dropout > 0 and row.dropout is not None
        repeat = query.shape[1] // self.local_groups
        if repeat > 1 and (drops or not takes_grouped_heads(query, row.attention_mask)):
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        keys, values = ctx.extend(key), ctx.extend(value)
        out = self._with_dropout(query, keys, values, row) if drops else attend(query, keys, values, row.attention_mask)
        return out.permute(2, 0, 1, 3).reshape(s, b, -1)  # [s, b, n d / t]

    def _with_dropout(self, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], row: Row) -> Tensor:
        """The same attention spelled out, since the fused kernel cannot drop by global coordinates."""
        assert row.dropout is not None, "a row in evaluation drops nothing"
        key, value = torch.cat(list(keys), 2), torch.cat(list(values), 2)  # 2 x [b, n/t, k, d]
        heads, s, k = query.shape[1], query.shape[2], key.shape[2]
        mask = row.attention_mask
        if mask is None:
            mask = torch.ones(s, k, dtype=torch.bool, device=query.device).triu(1 + k - s)
        scores = (query * self.head_width**-0.5) @ key.transpose(-1, -2)  # [b, n/t, s, k]; scaled first, since fp16 ends at 65504
        exact = torch.promote_types(scores.dtype, torch.float32)
        probabilities = scores.masked_fill(mask, -torch.inf).softmax(-1, dtype=exact).to(scores.dtype)
        head_numbers = torch.arange(heads, device=query.device) + self.tp.rank * heads
        columns = head_numbers[:, None] * self.seq_length + torch.arange(k, device=query.device)  # [n/t, k]
        keep = row.dropout.keep(self.site, columns.flatten(), self.dropout)  # [s, b, n/t k]
        keep = keep.unflatten(-1, (heads, k)).permute(1, 2, 0, 3)  # [b, n/t, s, k]
        return (probabilities * keep / (1 - self.dropout)) @ value
