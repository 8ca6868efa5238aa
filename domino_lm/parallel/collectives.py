"""Collectives over one group of ranks; PyTorch's differences between backends stay in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """The methods of `torch.distributed.Work` that are used."""

    def is_completed(self) -> bool: ...

    def wait(self) -> Any: ...

    def get_future(self) -> Any: ...


class Pending:
    """A collective in flight. Owns its buffer until `wait`, which may be called once."""

    __slots__ = ("_buffer", "_finish", "_source", "_work")

    def __init__(
        self, buffer: Tensor, work: Work | None, finish: Callable[[Tensor], Tensor] | None = None, source: Tensor | None = None
    ) -> None:
        """``source`` is what a GPU still reads while the collective travels, if that is not the buffer."""
        self._buffer: Tensor | None = buffer
        self._work = work
        self._finish = finish
        self._source = source if source is not None and source.is_cuda else None  # gloo holds its own reference

    @property
    def size_bytes(self) -> int:
        """Bytes of the buffer, which must still be in flight."""
        assert self._buffer is not None, "a redeemed collective has no buffer"
        return self._buffer.nbytes

    @property
    def done(self) -> bool:
        """Whether the transfer has ended, so that `wait` will not block."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> Tensor:
        """Order the current stream (gloo: the host) after the collective and hand the buffer over."""
        assert self._buffer is not None, "a collective is redeemed once"
        if self._work is not None:
            self._work.wait()
        buffer, self._buffer, self._work, self._source = self._buffer, None, None, None
        return buffer if self._finish is None else self._finish(buffer)

    def then(self, finish: Callable[[Tensor], Tensor]) -> None:
        """Make `wait` return ``finish`` of what it would have returned: a free view, or work that belongs to the collective."""
        before = self._finish
        self._finish = finish if before is None else lambda buffer: finish(before(buffer))

    def block_current_stream(self) -> None:
        """Make the current stream wait for the collective without redeeming it, as a stream that only measures does."""
        if self._work is not None:
            self._work.wait()

    def on_completion(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` from gloo's thread when the transfer has ended, or now if there is none."""
        if self._work is None:
            callback()
        else:
            self._work.get_future().add_done_callback(lambda _: callback())


class Communicator:
    """One group of ranks. With a single rank every collective is a no-op that returns its input."""

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        assert group is not None or size == 1, f"{size} ranks need a process group"
        self.rank = rank
        self.size = size
        self.group = group

    @classmethod
    def single(cls) -> Communicator:
        """A group of this process alone; needs no torch.distributed."""
        return cls(0, 1, None)

    def all_reduce_start(self, tensor: Tensor) -> Pending:
        """Begin to sum ``tensor`` over the group, in place.

        The tensor must be contiguous: gloo corrupts strided buffers without an error.
        """
        if self.size == 1:
            return Pending(tensor, None)
        assert tensor.is_contiguous(), f"a collective needs a contiguous buffer, not strides {tensor.stride()}"
        return Pending(tensor, dist.all_reduce(tensor, group=self.group, async_op=True))

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Sum, or with ``op="max"`` take the maximum of, ``tensor`` over the group in place; blocks."""
        if self.size > 1:
            assert tensor.is_contiguous(), f"a collective needs a contiguous buffer, not strides {tensor.stride()}"
            dist.all_reduce(tensor, op={"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], group=self.group)
        return tensor

    def all_gather_start(self, tensor: Tensor) -> Pending:
        """Begin to gather ``tensor`` [...] of every rank into [size, ...], in rank order."""
        if self.size == 1:
            return Pending(tensor.unsqueeze(0), None)
        assert tensor.is_contiguous(), f"a collective needs a contiguous buffer, not strides {tensor.stride()}"
        gathered = tensor.new_empty((self.size * tensor.numel(),))
        gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor  # renamed in 2.13
        work = gather(gathered, tensor.view(-1), group=self.group, async_op=True)
        return Pending(gathered.view(self.size, *tensor.shape), work, source=tensor)

    def all_gather_tokens_start(self, tensor: Tensor) -> Pending:
        """Begin to gather every rank's share [s / size, ...] of the tokens into [s, ...]."""
        pending = self.all_gather_start(tensor)
        pending.then(lambda gathered: gathered.flatten(0, 1))
        return pending

    def all_gather_in_place_start(self, tensor: Tensor) -> Pending:
        """Begin to replace each share of ``tensor`` [n], n a multiple of the size, by that of the rank whose number it has."""
        if self.size == 1:
            return Pending(tensor, None)
        assert tensor.is_contiguous(), f"a collective needs a contiguous buffer, not strides {tensor.stride()}"
        gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor  # renamed in 2.13
        return Pending(tensor, gather(tensor, tensor.view(self.size, -1)[self.rank], group=self.group, async_op=True))

    def reduce_scatter_start(self, tensor: Tensor, out: Tensor | None = None) -> Pending:
        """Begin to sum ``tensor`` [n, ...] over the group; rank r receives its r-th share [n / size, ...] of the sum.

        ``out`` takes the share if it is given; it may be the share's own place in ``tensor``.

        gloo's own reduce-scatter moves the bytes of an all-reduce, so there the shares are exchanged and summed at the wait.
        """
        if self.size == 1:
            return Pending(tensor, None)
        assert tensor.is_contiguous(), f"a collective needs a contiguous buffer, not strides {tensor.stride()}"
        shares = tensor.view(self.size, tensor.shape[0] // self.size, *tensor.shape[1:])
        if dist.get_backend(self.group) == "gloo":
            received = torch.empty_like(shares)
            work = dist.all_to_all_single(received, shares, group=self.group, async_op=True)
            return Pending(received, work, lambda pieces: torch.sum(pieces, 0, out=out))
        scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor  # renamed in 2.13
        share = torch.empty_like(shares[0]) if out is None else out
        return Pending(share, scatter(share, tensor, group=self.group, async_op=True), source=tensor)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """The value that rank ``source`` of the group holds."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=source)
        return box[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_object(self, value: Any) -> list[Any] | None:
        """On rank 0 every rank's value, in rank order; None elsewhere."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values

    def barrier(self) -> None:
        """Return when every rank of the group has called."""
        if self.size > 1:
            dist.barrier(group=self.group)

    def set_timeout(self, timeout: timedelta) -> None:
        """Let collectives that begin from now on take so long."""
        if self.group is not None:
            dist.distributed_c10d._set_pg_timeout(timeout, self.group)

    def leave(self) -> None:
        """Let go of the process group; the communicator must not be used afterwards."""
        self.group = None


Launcher = Callable[[Communicator, Tensor], Pending]
"""Starts a collective of a plan on its tensor."""

LAUNCHERS: Mapping[str, Launcher] = MappingProxyType(
    {
        "all_reduce": lambda group, tensor: group.all_reduce_start(tensor),
        "reduce_scatter": lambda group, tensor: group.reduce_scatter_start(tensor),
        "all_gather": lambda group, tensor: group.all_gather_tokens_start(tensor),
        "gather_input": lambda group, tensor: group.all_gather_tokens_start(tensor),
        "statistics": lambda group, tensor: group.all_gather_start(tensor),
    }
)
"""How tensor-parallel collectives start, by their names in the plan's table."""


class CopyToShards(torch.autograd.Function):
    """Where a replicated tensor enters a sharded part: identity forward, sum of the gradients over the group backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Communicator) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class ReduceFromShards(torch.autograd.Function):
    """Where partial sums leave a sharded part: sum over the group forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Communicator) -> Tensor:
        return group.all_reduce(partial.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
