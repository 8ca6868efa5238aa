"""Causal self-attention as a sharded part, and the one seam to PyTorch's fused kernel."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from domino_lm.model.batch import RowContext
from domino_lm.model.parameter import Parameter
from domino_lm.model.part import ShardedPart
from domino_lm.model.rope import rotate
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.random import DropoutKey


class Attention(ShardedPart):
    """Self-attention with g query groups: ``w_in`` [(n + 2g) d / t, h], ``w_out`` [h, n d / t].

    Rows of ``w_in`` are ordered by group: its query heads, then its key head, then its value head (Megatron's order).
    ``rotation`` holds RoPE's cosines and sines, or None.
    """

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
        dropout: float,
        site: str,
    ) -> None:
        super().__init__(tp, w_in, w_out, b_in)
        self.local_groups = groups // tp.size
        self.head_width = head_width
        self.rotation = rotation
        self.dropout = dropout
        self.site = site

    def core(self, h: Tensor, ctx: RowContext) -> Tensor:
        s, b, _ = h.shape
        grouped = h.view(s, b, self.local_groups, -1, self.head_width)  # [s, b, g/t, n/g + 2, d]
        query = grouped[..., :-2, :].reshape(s, b, -1, self.head_width)  # [s, b, n/t, d]
        key, value = grouped[..., -2, :], grouped[..., -1, :]  # [s, b, g/t, d]
        if self.rotation is not None:
            cos, sin = (table[:s] for table in self.rotation)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, n/t, s, d], [b, g/t, s, d]
        row = ctx.row
        if self.dropout > 0 and row.dropout is not None:
            out = self._with_dropout(query, key, value, row.attention_mask, row.dropout)
        else:
            out = scaled_dot_product(query, key, value, row.attention_mask)  # [b, n/t, s, d]
        return out.permute(2, 0, 1, 3).reshape(s, b, -1)  # [s, b, n d / t]

    def _with_dropout(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: DropoutKey) -> Tensor:
        """The same attention spelled out, since the fused kernel cannot drop by global coordinates."""
        heads, s = query.shape[1], query.shape[2]
        key, value = (t.repeat_interleave(heads // self.local_groups, 1) for t in (key, value))  # [b, n/t, s, d]
        if mask is None:
            mask = torch.ones(s, s, dtype=torch.bool, device=query.device).triu(1)
        scores = (query @ key.transpose(-1, -2)) * self.head_width**-0.5  # [b, n/t, s, s]
        probabilities = scores.masked_fill(mask, -torch.inf).softmax(-1)
        columns = torch.arange(heads * s, device=query.device) + self.tp.rank * heads * s  # head x key, [n/t s]
        keep = dropout.keep(self.site, columns, self.dropout).view(s, -1, heads, s).permute(1, 2, 0, 3)  # [b, n/t, s, s]
        return (probabilities * keep / (1 - self.dropout)) @ value


def scaled_dot_product(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of ``query`` [b, n, s, d] over ``key`` and ``value`` [b, g, s, d]: [b, n, s, d].

    ``mask`` [b, 1, s, s] is True where a query must not look; None is causal. On CPUs the grouped heads are repeated,
    because grouped queries have no fused kernel there.
    """
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1 and not query.is_cuda:
        key, value, repeat = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1), 1
    allowed = None if mask is None else ~mask
    if repeat > 1:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, is_causal=mask is None, enable_gqa=True)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, is_causal=mask is None)
