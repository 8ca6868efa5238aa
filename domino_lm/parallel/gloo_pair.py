"""Collectives of two CPU ranks, as one message each way on connections that carry one direction only."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from domino_lm.parallel.collectives import Communicator, Pending


class PairCommunicator(Communicator):
    """Two ranks on gloo that exchange messages; results equal those of gloo's collectives bit for bit.

    gloo guards a connection with one lock. Its I/O thread does not wait for it but polls, and on a core that also computes
    that is expensive: an arrival suspends a sender that holds the lock, and the I/O thread polls until its time slice is up.
    So each direction has a group, hence a connection, of its own. The bytes are those of a ring, and a sum of two has no order.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup, ways: tuple[dist.ProcessGroup, dist.ProcessGroup]) -> None:
        """``ways[r]``, a group of both ranks, carries what rank r sends."""
        super().__init__(rank, 2, group)
        self._peer = 1 - rank
        self._ways: tuple[dist.ProcessGroup, ...] = ways
        self._spares: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}  # fresh memory costs a page fault every 4 KiB

    def all_reduce_start(self, tensor: Tensor) -> Pending:
        received = self._spare(tensor)

        def add(tensor: Tensor) -> Tensor:
            tensor.add_(received)
            self._return(received)
            return tensor

        return Pending(tensor, self._exchange(tensor, received), add)

    def all_gather_start(self, tensor: Tensor) -> Pending:
        gathered = tensor.new_empty((2, *tensor.shape))
        work = self._exchange(tensor, gathered[self._peer])
        gathered[self.rank].copy_(tensor)
        return Pending(gathered, work)

    def reduce_scatter_start(self, tensor: Tensor, out: Tensor | None = None) -> Pending:
        shares = tensor.view(2, tensor.shape[0] // 2, *tensor.shape[1:])
        received = self._spare(shares[0])

        def add(share: Tensor) -> Tensor:
            total = torch.add(share, received, out=out)
            self._return(received)
            return total

        return Pending(shares[self.rank], self._exchange(shares[self._peer], received), add)

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        for way in self._ways:
            dist.distributed_c10d._set_pg_timeout(timeout, way)

    def leave(self) -> None:
        super().leave()
        self._ways = ()

    def _exchange(self, sent: Tensor, received: Tensor) -> "_Exchange":
        """Begin to send ``sent`` and to fill ``received``, both contiguous."""
        assert sent.is_contiguous(), f"a collective needs a contiguous buffer, not strides {sent.stride()}"
        messages = [(self._peer, received), (self.rank, sent)]
        return _Exchange([dist.broadcast(t, group=self._ways[source], group_src=source, async_op=True) for source, t in messages])

    def _spare(self, like: Tensor) -> Tensor:
        spares = self._spares.get((like.shape, like.dtype))
        return spares.pop() if spares else torch.empty_like(like)

    def _return(self, buffer: Tensor) -> None:
        self._spares.setdefault((buffer.shape, buffer.dtype), []).append(buffer)


class _Exchange:
    """Two messages as one piece of work."""

    def __init__(self, messages: list[dist.Work]) -> None:
        self._messages = messages

    def is_completed(self) -> bool:
        return all(message.is_completed() for message in self._messages)

    def wait(self) -> None:
        for message in self._messages:
            message.wait()

    def get_future(self) -> Any:
        return torch.futures.collect_all([message.get_future() for message in self._messages])
