"""Micro-batches as ranks see them, and the rows that they are cut into."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from domino_lm.parallel.random import DropoutKey

State = TypeVar("State")


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
        """Collated samples [b, s] of a dataset, transposed and copied to ``device`` asynchronously."""

        def transposed(name: str) -> Tensor:
            return to_device(torch.as_tensor(samples[name]).t().contiguous(), device)

        mask = samples.get("attention_mask")
        return cls(
            tokens=transposed("tokens"),
            labels=transposed("labels"),
            loss_mask=transposed("loss_mask"),
            position_ids=transposed("position_ids") if "position_ids" in samples else None,
            attention_mask=to_device(torch.as_tensor(mask), device) if mask is not None else None,
            sample_offset=sample_offset,
        )

    @property
    def size(self) -> int:
        """Samples b."""
        return self.tokens.shape[1]

    def whole(self, loss_weight: Tensor | None = None, dropout: DropoutKey | None = None) -> Row:
        """The micro-batch as a single row. ``loss_weight`` [] scales each token's loss for backward."""
        return Row(
            tokens=self.tokens,
            labels=self.labels,
            loss_mask=self.loss_mask,
            loss_weight=self.loss_mask if loss_weight is None else self.loss_mask * loss_weight,
            position_ids=self.position_ids,
            attention_mask=self.attention_mask,
            dropout=dropout,
        )


@dataclass(frozen=True)
class Row:
    """The slice of a micro-batch that one row of the schedule works on; s are its tokens, b its samples."""

    tokens: Tensor  # [s, b]
    labels: Tensor  # [s, b]
    loss_mask: Tensor  # [s, b]
    loss_weight: Tensor  # [s, b], derivative of the objective by each token's loss
    position_ids: Tensor | None  # [s, b]
    attention_mask: Tensor | None  # [b, 1, s, keys up to the row's last token]
    dropout: DropoutKey | None  # None in evaluation: nothing is dropped
    start: int = 0  # place of the first token in the sequence

    @property
    def length(self) -> int:
        """Tokens s of each sample."""
        return self.tokens.shape[0]

    def samples(self, start: int, size: int) -> Row:
        """``size`` samples from ``start``, contiguous."""

        def part(tensor: Tensor) -> Tensor:
            return tensor[:, start : start + size].contiguous()

        return replace(
            self._each(part),
            attention_mask=None if self.attention_mask is None else self.attention_mask[start : start + size],
            dropout=None if self.dropout is None else self.dropout.of_samples(start, size),
        )

    def token_range(self, start: int, size: int) -> Row:
        """``size`` tokens of every sample from ``start``, contiguous; their queries see all earlier keys."""

        def part(tensor: Tensor) -> Tensor:
            return tensor[start : start + size]

        end = self.start + start + size
        return replace(
            self._each(part),
            attention_mask=None if self.attention_mask is None else self.attention_mask[:, :, start : start + size, :end],
            dropout=None if self.dropout is None else self.dropout.of_tokens(start, size),
            start=self.start + start,
        )

    def cut(self, sizes: Sequence[int], along_sequence: bool = False) -> list[Row]:
        """Rows of ``sizes`` samples, or tokens, one after the other."""
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        piece = self.token_range if along_sequence else self.samples
        return [piece(start, size) for start, size in zip(starts, sizes, strict=True)]

    def shard(self, rank: int, size: int) -> Row:
        """The share of the tokens that ``rank`` of ``size`` holds under sequence parallelism."""
        tokens = self.length // size
        return self.token_range(rank * tokens, tokens)

    def _each(self, part: Any) -> Row:
        """The same cut of everything that is [s, b]."""
        return replace(
            self,
            tokens=part(self.tokens),
            labels=part(self.labels),
            loss_mask=part(self.loss_mask),
            loss_weight=part(self.loss_weight),
            position_ids=None if self.position_ids is None else part(self.position_ids),
        )


class Recorded(NamedTuple):
    """Input and output of a core, and autograd's graph between them."""

    leaf: Tensor
    out: Tensor


class RowContext:
    """One part's view of one row: the row, what the part saves from forward for backward, and what rows share.

    Rows cut along the sequence depend on earlier ones if a core calls `extend`. A shared tensor has two gradients: one from
    its own row's graph, and one from the leaves that later rows borrowed, which is kept here until the row goes back.
    """

    __slots__ = ("_borrowed", "_shared_grads", "earlier", "row", "saved", "shared", "shares", "x")

    def __init__(self, row: Row, earlier: Sequence[RowContext] = (), shares: bool = False) -> None:
        self.row = row
        self.earlier = earlier
        self.shares = shares  # whether later rows will borrow
        self.x: Tensor | None = None  # input of the first GEMM
        self.saved: object = None  # a state of the part; its file defines them
        self.shared: list[Tensor] = []
        self._borrowed: list[tuple[RowContext, int, Tensor]] = []
        self._shared_grads: dict[int, Tensor] = {}

    def state(self, kind: type[State]) -> State:
        """The part's saved state, which is a ``kind`` at this point of the plan."""
        assert isinstance(self.saved, kind), f"the part has saved a {type(self.saved).__name__}, not a {kind.__name__}"
        return self.saved

    def record(self, core: Callable[[Tensor, RowContext], Tensor], leaf: Tensor) -> Recorded:
        """Run ``core`` on ``leaf`` and keep its graph for `backward`."""
        leaf.requires_grad_()
        with torch.enable_grad():
            return Recorded(leaf, core(leaf, self))

    def extend(self, tensor: Tensor) -> list[Tensor]:
        """The same tensor of all earlier rows, then this row's ``tensor``."""
        if not self.shares:
            return [tensor]
        index = len(self.shared)
        self.shared.append(tensor)
        leaves = [ctx.shared[index].detach().requires_grad_() for ctx in self.earlier]
        self._borrowed += [(ctx, index, leaf) for ctx, leaf in zip(self.earlier, leaves, strict=True)]
        return [*leaves, tensor]

    def restart(self) -> None:
        """Before the core runs again: shared and borrowed tensors are registered again; gradients received so far stay."""
        self.shared, self._borrowed = [], []

    def forget_graph(self) -> None:
        """Keep shared tensors for later rows without the graph behind them."""
        self.shared = [tensor.detach() for tensor in self.shared]
        self._borrowed = []

    def backward(self, out: Tensor, d_out: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of ``inputs`` from ``out`` and from later rows' use of shared tensors; passes on those of earlier rows."""
        outputs = [out, *(self.shared[index] for index in self._shared_grads)]
        leaves = [leaf for _, _, leaf in self._borrowed]
        grads = torch.autograd.grad(outputs, [*inputs, *leaves], [d_out, *self._shared_grads.values()])
        for (owner, index, _), grad in zip(self._borrowed, grads[len(inputs) :], strict=True):
            owner._receive(index, grad)
        self.shared, self._borrowed, self._shared_grads, self.earlier = [], [], {}, ()
        return list(grads[: len(inputs)])

    def _receive(self, index: int, grad: Tensor) -> None:
        held = self._shared_grads.get(index)
        self._shared_grads[index] = grad if held is None else held + grad


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` of the host on ``device``; from pinned memory, since a copy from pageable memory would block the host."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
