"""Gradient memory: flat buckets that parameters' ``main_grad`` are views of, and what each data-parallel rank owns of them."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from domino_lm.config.settings import Sharding
from domino_lm.parallel.collectives import Communicator, Pending


class Accumulates(Protocol):
    """A parameter that gradients are accumulated for."""

    main_grad: Tensor
    data: Tensor


Owned = tuple[Accumulates, int, int, Tensor]
"""Elements of one parameter that this rank updates: ``start`` to ``stop`` of its flattened weights, and their gradient [stop - start]."""


class Bucket:
    """Parameters whose gradients are reduced over data-parallel ranks together.

    Their gradients lie one behind the other in ``flat`` [elements], padded to a multiple of the data-parallel size. Under
    the distributed optimizer their weights lie in ``weights`` in the same order, and rank r of n owns elements
    [r, r + 1) x elements / n: its ``shard`` is their reduced gradient. With ``optim`` that is a part of ``flat``; with
    ``optim_grads`` it is memory of its own that every micro-batch is added into, and ``flat`` has memory only from
    `acquire` until its reduction is redeemed.
    """

    def __init__(self, parameters: Sequence[Accumulates], dp: Communicator, sharding: Sharding, dtype: torch.dtype | None = None) -> None:
        self.parameters = tuple(parameters)
        self.sharding = sharding
        self._dp = dp
        main = {torch.promote_types(parameter.data.dtype, torch.float32) for parameter in parameters}
        assert len(main) == 1, f"one bucket holds gradients of one type, not {main}"
        self._offsets = [0]
        for parameter in parameters:
            self._offsets.append(self._offsets[-1] + parameter.data.numel())
        share = -(-self._offsets[-1] // dp.size)
        first = parameters[0].data
        self.flat = first.new_zeros(share * dp.size, dtype=dtype or next(iter(main)))
        self.weights: Tensor | None = None
        self._own = slice(share * dp.rank, share * (dp.rank + 1))
        self.shard = self.flat[self._own]
        for parameter, start, stop in self._spans():
            parameter.main_grad = self.flat[start:stop].view(parameter.data.shape)
        if self.sharding != "no_shard":
            self._join_weights()
        if self.sharding == "optim_grads":
            self.shard = first.new_zeros(share, dtype=next(iter(main)))
            self._release()

    @property
    def held_bytes(self) -> int:
        """Memory of gradients at this moment."""
        own = self.shard.nbytes if self.sharding == "optim_grads" else 0
        return self.flat.untyped_storage().nbytes() + own

    def owned(self) -> Iterator[Owned]:
        """This rank's elements under the distributed optimizer, parameter by parameter, without padding."""
        assert self.weights is not None, "without the distributed optimizer every rank updates all"
        begin = self._own.start
        for parameter, first, last in self._spans():
            start, stop = max(first, begin), min(last, self._own.stop)
            if start < stop:
                yield parameter, start - first, stop - first, self.shard[start - begin : stop - begin]

    def zero_(self) -> None:
        """Forget the gradients of the step."""
        (self.shard if self.sharding == "optim_grads" else self.flat).zero_()

    def acquire(self) -> None:
        """Before the first gradient of a micro-batch is written: allocate all of them, zeroed, unless they have memory."""
        if self.sharding == "optim_grads" and self.flat.untyped_storage().nbytes() == 0:
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
            self.flat.zero_()

    def reduce_start(self) -> Pending:
        """Begin to sum the gradients over data-parallel ranks; once redeemed, they stand in ``flat``, or this rank's in ``shard``."""
        if self.sharding == "no_shard":
            return self._dp.all_reduce_start(self.flat)
        if self.sharding == "optim":
            return self._dp.reduce_scatter_start(self.flat, out=self.shard)
        return self._dp.reduce_scatter_start(self.flat)

    def reduced(self, found: Tensor) -> None:
        """Take the result of the redeemed reduction."""
        if self.sharding == "optim_grads":
            self.shard.add_(found)
            self._release()

    def gather_start(self) -> Pending:
        """Begin to replace every rank's weights by those that their owners have updated."""
        assert self.weights is not None, "without the distributed optimizer every rank has updated all"
        return self._dp.all_gather_in_place_start(self.weights)

    def _spans(self) -> Iterator[tuple[Accumulates, int, int]]:
        """Each parameter with its first and last element in the bucket."""
        return zip(self.parameters, self._offsets, self._offsets[1:], strict=False)

    def _join_weights(self) -> None:
        """Move the weights into one buffer, which parameters are views of from now on."""
        first = self.parameters[0].data
        self.weights = first.new_zeros(self.flat.numel())
        for parameter, start, stop in self._spans():
            place = self.weights[start:stop].view(parameter.data.shape)
            place.copy_(parameter.data)
            parameter.data = place

    def _release(self) -> None:
        # Freed by its storage, so that the views which parameters hold stay good for the next micro-batch.
        self.flat.untyped_storage().resize_(0)


class GradientBuckets:
    """All buckets of a rank, and their gradients.

    Gradients accumulate in fp32, in float64 for float64 models, or in ``dtype``. ``groups`` holds the parameters of each
    bucket; the caller orders them by the op that writes their gradient last, so that buckets complete one after another
    in backward.
    """

    def __init__(
        self, groups: Sequence[Sequence[Accumulates]], dp: Communicator, sharding: Sharding = "no_shard", dtype: torch.dtype | None = None
    ) -> None:
        self.buckets = tuple(Bucket(group, dp, sharding, dtype) for group in groups)
        self.sharding = sharding
        self._dp = dp

    @property
    def zero(self) -> bool:
        """Whether each rank updates a share of the parameters alone."""
        return self.sharding != "no_shard"

    @property
    def held_bytes(self) -> int:
        """Memory of gradients at this moment."""
        return sum(bucket.held_bytes for bucket in self.buckets)

    def owned(self) -> list[Owned]:
        """What this rank updates under the distributed optimizer."""
        return [owned for bucket in self.buckets for owned in bucket.owned()]

    def whole(self, parameters: Sequence[Accumulates]) -> list[Tensor]:
        """Copies of all reduced gradients, of the parameters' shapes, to compare with; every rank calls at the step's end."""
        if not self.zero:
            return [parameter.main_grad.clone() for parameter in parameters]
        owned = {id(parameter): (start, stop, gradient) for parameter, start, stop, gradient in self.owned()}
        found = []
        for parameter in parameters:
            full = parameter.data.new_zeros(parameter.data.numel(), dtype=self.buckets[0].shard.dtype)
            if id(parameter) in owned:
                start, stop, gradient = owned[id(parameter)]
                full[start:stop] = gradient
            found.append(self._dp.all_reduce(full).view(parameter.data.shape))
        return found

    def zero_(self) -> None:
        """Forget all gradients."""
        for bucket in self.buckets:
            bucket.zero_()
