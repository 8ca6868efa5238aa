"""Tensor parallelism with one device: the collectives of a rank whose peers are not there take the time that peers would.

On a GPU a collective is a copy of its buffer on a stream of its own, and then a kernel that waits, for as long together as
the links of ``domino_lm.simulate.links`` predict; on a CPU, where this is rehearsed, a thread that sleeps. Values are not
summed: what is trained so is nothing, but every kernel, buffer and order is that of the real rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from domino_lm.parallel.collectives import Communicator, Pending
from domino_lm.simulate.links import Fabric, Group

SPIN_CYCLES = 20_000_000
COPIED_BYTES = 64 * 2**20


class Link(Protocol):
    """What carries collectives, one after the other."""

    def send(self, tensor: Tensor, seconds: float, copy: Callable[[], None] | None = None) -> Any:
        """Occupy the link with ``tensor`` for ``seconds``, beside ``copy``; the result is what `Pending` takes for its work."""


class FreeLink:
    """A link without length."""

    def send(self, tensor: Tensor, seconds: float, copy: Callable[[], None] | None = None) -> None:
        """Done at once."""
        if copy is not None:
            copy()


class _EventWork:
    """Work on a stream; waiting for it orders the current stream behind it."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        """Order the current stream after the collective."""
        torch.cuda.current_stream().wait_event(self._event)


class StreamLink:
    """A link on a GPU's stream: a copy of the buffer, then waiting, for the collective's time together."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.stream = torch.cuda.Stream(device, priority=priority)
        self._scratch = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
        self.cycles_per_s = SPIN_CYCLES / self._seconds(lambda: torch.cuda._sleep(SPIN_CYCLES))
        source = torch.empty_like(self._scratch)
        self.copied_bytes_per_s = COPIED_BYTES / self._seconds(lambda: self._scratch.copy_(source))

    def _seconds(self, run: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            run()
            start.record()
            for _ in range(4):
                run()
            end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / 4

    def send(self, tensor: Tensor, seconds: float, copy: Callable[[], None] | None = None) -> _EventWork:
        """Begin when the current stream has made ``tensor`` and the link is free."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if copy is not None:
                copy()
            moved = tensor.view(torch.uint8).flatten()[:COPIED_BYTES] if tensor.is_contiguous() else self._scratch[: tensor.nbytes]
            self._scratch[: moved.numel()].copy_(moved)
            rest_s = seconds - moved.numel() / self.copied_bytes_per_s
            if rest_s > 0:
                torch.cuda._sleep(int(rest_s * self.cycles_per_s))
            event = torch.cuda.Event()
            event.record(self.stream)
        return _EventWork(event)


class _FutureWork:
    """Work in a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Block until the link has carried it."""
        self._future.result()

    def get_future(self) -> Future[None]:
        """What calls back when it is done."""
        return self._future


class ThreadLink:
    """A link of a CPU: one thread that sleeps as long as each collective takes."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)

    def send(self, tensor: Tensor, seconds: float, copy: Callable[[], None] | None = None) -> _FutureWork:
        """Begin when the link is free."""
        if copy is not None:
            copy()
        return _FutureWork(self._pool.submit(time.sleep, seconds))


class EmulatedCommunicator(Communicator):
    """Rank 0 of ``size`` ranks of which the others are missing."""

    def __init__(self, size: int, link: Link, fabric: Fabric) -> None:
        self.rank, self.size, self.group = 0, size, None
        self.link, self._fabric = link, fabric
        self._on_fabric = Group(size, min(size, fabric.node_size))

    def seconds(self, collective: str, size_bytes: int) -> float:
        """What the collective takes alone, by the predicted links."""
        return self._fabric.transfer(collective, size_bytes, self._on_fabric).seconds

    def all_reduce_start(self, tensor: Tensor) -> Pending:
        """The tensor as it is, after the time of an all-reduce."""
        assert tensor.is_contiguous(), f"a collective needs a contiguous buffer, not strides {tensor.stride()}"
        return Pending(tensor, self.link.send(tensor, self.seconds("all_reduce", tensor.nbytes)))

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """The same, waited for."""
        return self.all_reduce_start(tensor).wait()

    def all_gather_start(self, tensor: Tensor) -> Pending:
        """The own tensor in every rank's place."""
        gathered = tensor.new_empty((self.size, *tensor.shape))

        def copy() -> None:
            gathered.copy_(tensor.expand_as(gathered))

        work = self.link.send(tensor, self.seconds("all_gather", gathered.nbytes), copy)
        return Pending(gathered, work, source=tensor)

    def reduce_scatter_start(self, tensor: Tensor) -> Pending:
        """The own share, not summed."""
        share = tensor.view(self.size, tensor.shape[0] // self.size, *tensor.shape[1:])[0]
        return Pending(share, self.link.send(tensor, self.seconds("reduce_scatter", tensor.nbytes)), source=tensor)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Every rank would have this one's."""
        return value

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank would have this one's."""
        return [value] * self.size

    def barrier(self) -> None:
        """Nobody is waited for."""
