"""Micro-batches as ranks see them, and the rows that they are cut into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from domino_lm.parallel.random import DropoutKey


@dataclass(frozen=True)
class MicroBatch:
    """Samples that one forward and backward covers on this rank; s sequence, b samples."""

    tokens: Tensor  # [s, b] int64
    labels: Tensor  # [s, b] int64
    loss_mask: Tensor  # [s, b] fp32, 1 where a label counts
    position_ids: Tensor | None = None  # [s, b] int64; None counts from 0
    attention_mask: Tensor | None = None  # [b, 1, s, s] bool, True where a query must not look; None is causal
    sample_offset: int = 0  # number of its first sample within the global batch of the step

    @classmethod
    def from_samples(cls, samples: Mapping[str, NDArray[Any]], device: torch.device, sample_offset: int = 0) -> MicroBatch:
        """Collated samples [b, s] of a dataset, transposed and on ``device``."""

        def transposed(name: str) -> Tensor:
            return torch.as_tensor(samples[name]).t().contiguous().to(device, non_blocking=True)

        mask = samples.get("attention_mask")
        return cls(
            tokens=transposed("tokens"),
            labels=transposed("labels"),
            loss_mask=transposed("loss_mask"),
            position_ids=transposed("position_ids") if mask is not None or "position_ids" in samples else None,
            attention_mask=torch.as_tensor(mask).to(device) if mask is not None else None,
            sample_offset=sample_offset,
        )

    @property
    def size(self) -> int:
        """Samples b."""
        return self.tokens.shape[1]

    def rows(self, sizes: Sequence[int], loss_weight: Tensor | None = None, dropout: DropoutKey | None = None) -> list[Row]:
        """Cut along the samples; every row's tensors are contiguous. ``loss_weight`` [] scales each token's loss for backward."""
        weight = self.loss_mask if loss_weight is None else self.loss_mask * loss_weight  # [s, b]
        columns = [t.split(list(sizes), 1) for t in (self.tokens, self.labels, self.loss_mask, weight)]
        rows, start = [], 0
        for row, size in enumerate(sizes):
            tokens, labels, mask, weights = (column[row].contiguous() for column in columns)  # [s, size]
            rows.append(
                Row(
                    tokens=tokens,
                    labels=labels,
                    loss_mask=mask,
                    loss_weight=weights,
                    position_ids=None if self.position_ids is None else self.position_ids[:, start : start + size].contiguous(),
                    attention_mask=None if self.attention_mask is None else self.attention_mask[start : start + size],
                    dropout=None if dropout is None else dropout.rows(start, size),
                )
            )
            start += size
        return rows


@dataclass(frozen=True)
class Row:
    """The slice of a micro-batch that one row of the schedule works on; b are its samples alone."""

    tokens: Tensor  # [s, b]
    labels: Tensor  # [s, b]
    loss_mask: Tensor  # [s, b]
    loss_weight: Tensor  # [s, b], derivative of the objective by each token's loss
    position_ids: Tensor | None
    attention_mask: Tensor | None
    dropout: DropoutKey | None  # None in evaluation: nothing is dropped


class RowContext:
    """One part's view of one row: the row, and what the part keeps from forward for backward."""

    __slots__ = ("row", "saved")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.saved: Any = None
