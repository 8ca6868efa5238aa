"""What a trained model says next: logits of a sequence that grows, tokens drawn from them, and how likely given tokens are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from domino_lm.model.batch import MicroBatch, Row, RowContext
from domino_lm.model.part import ShardedPart
from domino_lm.model.stack import Stack


class NotFiniteError(RuntimeError):
    """Logits that are not numbers, so that no token can be drawn or judged by them."""


class SharedSoFar:
    """What a part's core has shared of all tokens so far, as `RowContext.extend` is given it: keys and values, say.

    ``dimensions`` says along which dimension each shared tensor holds its tokens; there is room for ``capacity`` of them.
    """

    def __init__(self, dimensions: Sequence[int], capacity: int) -> None:
        self.dimensions = dimensions
        self.capacity = capacity
        self._buffers: list[Tensor] = []

    def keep(self, index: int, tensor: Tensor, start: int) -> list[Tensor]:
        """Put shared tensor ``index`` of tokens from ``start`` behind what is there; returns what was there, if anything, and ``tensor``."""
        dimension = self.dimensions[index]
        if index == len(self._buffers):
            shape = [*tensor.shape]
            shape[dimension] = self.capacity
            self._buffers.append(tensor.new_empty(shape))
        buffer = self._buffers[index]
        buffer.narrow(dimension, start, tensor.shape[dimension]).copy_(tensor)
        return [buffer.narrow(dimension, 0, start), tensor] if start else [tensor]


class ContinuingContext(RowContext):
    """A part's view of a row that continues earlier ones, whose shared tensors are kept."""

    __slots__ = ("so_far",)

    def __init__(self, row: Row, so_far: SharedSoFar) -> None:
        super().__init__(row)
        self.so_far = so_far

    def extend(self, tensor: Tensor) -> list[Tensor]:
        self.shared.append(tensor)
        return self.so_far.keep(len(self.shared) - 1, tensor, self.row.start)


class Decoder:
    """Feeds ``stack`` sequences of one length that grow, [s, b] tokens at a time, up to ``capacity`` tokens in all.

    What cores share of earlier tokens is kept, so that each token is computed once. Without ``keep``, and for a model with a core
    that does not go by `RowContext.extend`, the whole sequence is computed each time: the same logits, more slowly.
    """

    def __init__(self, stack: Stack, capacity: int, keep: bool = True) -> None:
        self.stack = stack
        self.capacity = capacity
        self._tokens: Tensor | None = None  # [tokens so far, b]
        dimensions = token_dimensions(stack) if keep and capacity > 1 else None
        self._so_far = None if dimensions is None else [SharedSoFar(each, capacity) for each in dimensions]

    @property
    def keeps(self) -> bool:
        """Whether each token is computed once."""
        return self._so_far is not None

    @property
    def length(self) -> int:
        """Tokens of each sequence so far."""
        return 0 if self._tokens is None else self._tokens.shape[0]

    @torch.no_grad()
    def feed(self, tokens: Tensor) -> Tensor:
        """Append ``tokens`` [s, b] and return the logits [b, v] of what follows the last one, padded columns included, on every rank."""
        start = self.length
        assert start + tokens.shape[0] <= self.capacity, f"{start + tokens.shape[0]} tokens, room for {self.capacity}"
        self._tokens = tokens if self._tokens is None else torch.cat((self._tokens, tokens))
        if self._so_far is None:
            row = row_of(self._tokens)
            hidden = self.stack.hidden_states(row)
        else:
            row = row_of(tokens, start)
            hidden = self.stack.hidden_states(row, [ContinuingContext(row, each) for each in self._so_far])
        head = self.stack.head
        local = head.logits(hidden[-1:], row.token_range(row.length - 1, 1))[0].contiguous()  # [b, v/t]
        return head.tp.all_gather_start(local).wait().transpose(0, 1).flatten(1)


@dataclass(frozen=True)
class Draw:
    """How a token is chosen. Equal logits give equal tokens on all ranks if their ``generator`` have equal seeds."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the likeliest token."""

    top_p: float = 1.0
    """Leaves the likeliest tokens whose probabilities sum to this, the one that reaches it included, and no others."""

    generator: torch.Generator | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Ids [b] drawn from ``logits`` [b, v], which must be finite or minus infinity, and finite somewhere."""
        if self.temperature == 0:
            return logits.argmax(-1)
        exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
        shares = ((exact - exact.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_p == 1:
            return torch.multinomial(shares, 1, generator=self.generator).squeeze(-1)
        shares, order = shares.sort(dim=-1, descending=True, stable=True)
        before = shares.cumsum(-1) - shares
        kept = shares.masked_fill(before >= self.top_p, 0)
        kept[:, 0] = shares[:, 0]  # whatever rounding makes of a tiny top_p
        return order.gather(-1, torch.multinomial(kept, 1, generator=self.generator)).squeeze(-1)


def generate(decoder: Decoder, prompt: Sequence[int], draw: Draw, vocab_size: int) -> Iterator[int]:
    """Token ids that follow ``prompt``, one at a time, until ``decoder`` is full. No id reaches ``vocab_size``.

    Raises NotFiniteError if logits are not numbers. The host reads two numbers per token, and writes none.
    """
    tokens = torch.tensor(prompt, device=decoder.stack.embedding.weight.device)[:, None]  # [s, 1]
    while True:
        logits = decoder.feed(tokens)[:, :vocab_size]  # [1, v]
        sound = logits.amax(-1).isfinite().all()  # a NaN is larger than any number
        tokens = draw(torch.where(sound, logits, 0))[None]  # [1, 1]
        found, is_sound = torch.stack((tokens.view(()), sound.to(tokens.dtype))).tolist()
        if not is_sound:
            raise NotFiniteError(f"the logits of token {decoder.length} are not finite")
        yield int(found)
        if decoder.length == decoder.capacity:
            return


@torch.no_grad()
def judge(stack: Stack, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss in nats of each of ``labels`` [s, b] after ``tokens`` [s, b], and whether it is the likeliest token: 2 x [s, b]."""
    row = row_of(tokens, labels=labels)
    maximum, total, target = stack.head.statistics(stack.hidden_states(row), row)  # 3 x [s, b, 1]
    return (total.log() + maximum - target).squeeze(-1), (target >= maximum).squeeze(-1)


def row_of(tokens: Tensor, start: int = 0, labels: Tensor | None = None) -> Row:
    """A row of ``tokens`` [s, b] that stand from ``start`` in their sequences; nothing is dropped."""
    batch = MicroBatch(tokens, tokens if labels is None else labels, torch.ones(tokens.shape, device=tokens.device))
    return replace(batch.whole(), start=start)


@torch.no_grad()
def token_dimensions(stack: Stack) -> list[list[int]] | None:
    """Along which dimension each tensor that a block's core shares holds its tokens; None if some core does not share what it needs.

    Found by two rows of different lengths, so that a core may share what it likes.
    """
    parts = [sharded for _, sharded in stack.blocks]
    plain = type(stack).hidden_states is Stack.hidden_states and all(type(part).forward is ShardedPart.forward for part in parts)
    if not plain:
        return None
    device, shapes = stack.embedding.weight.device, []
    for length in (1, 2):
        row = row_of(torch.zeros(length, 1, dtype=torch.int64, device=device))
        contexts = [RowContext(row, shares=True) for _ in parts]
        stack.hidden_states(row, contexts)
        shapes.append([[tensor.shape for tensor in ctx.shared] for ctx in contexts])
    dimensions = [[_growing(*pair) for pair in zip(*shared, strict=True)] for shared in zip(*shapes, strict=True)]
    unshared = any(part.couples_tokens and not found for part, found in zip(parts, dimensions, strict=True))
    known = [[dimension for dimension in found if dimension is not None] for found in dimensions]
    return None if unshared or known != dimensions else known


def _growing(of_one: torch.Size, of_two: torch.Size) -> int | None:
    """The dimension that holds tokens in a tensor of one token and of two; None for what sums tokens up."""
    return next((i for i, sizes in enumerate(zip(of_one, of_two, strict=True)) if sizes == (1, 2)), None)
