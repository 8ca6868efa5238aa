"""Where the ranks of a job meet before they have a process group: PyTorch's key-value store."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any, Self

import torch.distributed as dist

from domino_lm.parallel.store_file import STORE_FILE

POLL_S = 0.01


class Rendezvous:
    """The store that all ranks have joined, and this rank's place among them."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self._gathered = 0

    @classmethod
    def join(cls, timeout: timedelta) -> Self:
        """Meet the other ranks at ``MASTER_ADDR`` and ``MASTER_PORT``, or in the file of `STORE_FILE`, where nothing listens.

        After torchrun has restarted the ranks of a single node they meet apart from the addresses of those that died: it keeps
        one store over all restarts, in which gloo would find them. With several nodes the count of restarts differs between
        nodes, so the store is used as it is. Raises ValueError if the environment does not say where to meet, DistError if
        nobody is there in time.
        """
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        path = os.environ.get(STORE_FILE)
        if path is not None:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store: Any = dist.FileStore(f"{path}-{restarts}", size)  # type: ignore[attr-defined]
            store.set_timeout(timeout)
            return cls(store, rank, size, timeout)
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        if restarts != "0" and os.environ.get("GROUP_WORLD_SIZE") == "1":
            store = dist.PrefixStore(f"restart {restarts}", store)  # type: ignore[attr-defined]
        return cls(store, rank, size, timeout)

    def part(self, name: str) -> Any:
        """A part of the store with keys of its own."""
        return dist.PrefixStore(name, self.store)  # type: ignore[attr-defined]

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's ``text``, in rank order. Raises DistError if one is missing after the timeout."""
        self._gathered += 1
        part = self.part(f"gathered {self._gathered}")
        keys = [str(rank) for rank in range(self.size)]
        part.set(keys[self.rank], text)
        part.wait(keys, self.timeout)
        texts = [value.decode() for value in part.multi_get(keys)]
        part.add("read", 1)
        self._outlast_readers(part)
        return texts

    def _outlast_readers(self, part: Any) -> None:
        """Rank 0, which may hold the store, goes on when all have read: it could leave, and take what they read along."""
        until_s = time.monotonic() + self.timeout.total_seconds()
        while self.rank == 0 and part.add("read", 0) < self.size and time.monotonic() < until_s:
            time.sleep(POLL_S)
