"""A model as the chain of its parts."""

from collections.abc import Sequence

from torch import Tensor

from domino_lm.model.batch import MicroBatch, Row, RowContext
from domino_lm.model.embedding import Embedding
from domino_lm.model.head import Head
from domino_lm.model.norm import NormPart
from domino_lm.model.parameter import Parameter
from domino_lm.model.part import Part, ShardedPart


class Stack:
    """An alternating chain: embedding, then norm and sharded part in turn, then final norm and head."""

    def __init__(self, embedding: Embedding, blocks: Sequence[tuple[NormPart, ShardedPart]], final_norm: NormPart, head: Head) -> None:
        self.embedding = embedding
        self.blocks = tuple(blocks)
        self.final_norm = final_norm
        self.head = head

    @property
    def parts(self) -> tuple[Part, ...]:
        """The chain, sharded parts at even positions."""
        return (self.embedding, *(part for block in self.blocks for part in block), self.final_norm, self.head)

    def parameters(self) -> list[Parameter]:
        """Every weight once, a tied one where it first occurs, along the chain."""
        return list(dict.fromkeys(parameter for part in self.parts for parameter in part.parameters()))

    def forward(self, batch: MicroBatch) -> Tensor:
        """Loss of every token [s, b] through plain autograd, nothing dropped: evaluation, and what plans are judged by."""
        return self.forward_row(batch.whole())

    def forward_row(self, row: Row) -> Tensor:
        """Loss of every token [s, b] of a row, with dropout if the row has a key for it."""
        return self.head.forward(self.hidden_states(row), row)

    def hidden_states(self, row: Row, contexts: Sequence[RowContext | None] | None = None) -> Tensor:
        """The head's input [s, b, h]; ``contexts`` are the sharded parts' views of the row, by block, if it continues earlier ones."""
        branch, residual = self.embedding.forward(row), None
        for (norm, sharded), ctx in zip(self.blocks, contexts or [None] * len(self.blocks), strict=True):
            normed, residual = norm.forward(branch, residual, row)
            branch = sharded.forward(normed, row, ctx)
        return self.final_norm.forward(branch, residual, row)[0]
