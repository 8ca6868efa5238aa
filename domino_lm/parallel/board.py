"""The numbers of all ranks: those of one node in shared memory, those of other nodes in the store."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import uuid
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, cast

from domino_lm.parallel.progress import CELL_BYTES, CELLS, Cell, Cells
from domino_lm.parallel.rendezvous import Rendezvous

STORE_PATIENCE_S = 2.0
"""The store may be held by a rank that stands still."""

SHARED_MEMORY = Path("/dev/shm")


class Board:
    """Cells of this rank and of others. All ranks of a job join one together.

    ``local`` holds the ranks whose memory this one sees, itself among them, and ``descriptors`` the files of that memory; other
    ranks are known by what they publish.
    """

    def __init__(
        self, rank: int, size: int, local: dict[int, Cells], claim: Path, store: Any = None, descriptors: Sequence[int] = ()
    ) -> None:
        self.rank, self.size, self.local, self.descriptors = rank, size, local, descriptors
        self._claim, self._store = claim, store
        self._remote: dict[int, Cells] = {}
        self.over_elsewhere = False

    @classmethod
    def join(cls, rendezvous: Rendezvous, folder: Path | None = None) -> Self:
        """Make this rank's cells in ``folder``, and open those of the ranks of this node; nothing of them stays there."""
        folder = folder or (SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir()))
        token = rendezvous.all_gather_text(uuid.uuid4().hex)[0]
        paths = [folder / f"domino-lm-{token}-{rank}" for rank in range(rendezvous.size)]
        own, path = _own_cells(), paths[rendezvous.rank]
        with contextlib.suppress(OSError):  # others then know this rank by the store
            path.write_bytes(bytes(own))
        rendezvous.all_gather_text("made")
        opened = {rank: descriptor for rank, each in enumerate(paths) if (descriptor := _open(each)) is not None}
        local = {rendezvous.rank: own} | {rank: mapped(descriptor) for rank, descriptor in opened.items()}
        seen = rendezvous.all_gather_text(str(len(local)))
        with contextlib.suppress(OSError):
            path.unlink()
        apart = any(int(text) < rendezvous.size for text in seen)
        store = rendezvous.part("board").clone() if apart else None
        return cls(rendezvous.rank, rendezvous.size, local, folder / f"domino-lm-{token}-over", store, tuple(opened.values()))

    def close(self) -> None:
        """Give the descriptors back; memory that is mapped stays."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()

    @property
    def own(self) -> Cells:
        """This rank's cells."""
        return self.local[self.rank]

    @property
    def apart(self) -> bool:
        """Whether some ranks are known by the store alone."""
        return self._store is not None

    def publish(self) -> None:
        """Leave this rank's cells where other nodes read them, and learn whether the job is over there; blocks while the store does."""
        self._store.set(f"rank {self.rank}", bytes(array("q", self.own)))
        self.over_elsewhere = self.over_elsewhere or self._store.check(["over"])

    def read(self) -> None:
        """Take what ranks of other nodes have published; blocks while the store does."""
        names = {rank: f"rank {rank}" for rank in range(self.size) if rank not in self.local}
        there = {rank: name for rank, name in names.items() if self._store.check([name])}
        found = zip(there, self._store.multi_get(list(there.values())), strict=True)
        self._remote = {rank: array("q", text) for rank, text in found}

    def known(self) -> dict[int, Cells]:
        """The cells of this node's ranks as they are, of others as they were last read; in rank order."""
        return dict(sorted((self._remote | self.local).items()))

    def is_over(self) -> bool:
        """Whether some rank has said why the job ends."""
        return self.over_elsewhere or any(cells[Cell.OVER] for cells in self.local.values())

    def claim(self) -> bool:
        """Whether this rank is the one of the job that says why it ends; at most one is, as long as the store answers."""
        if self.is_over():
            return False
        try:
            self._claim.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            pass
        first = within(STORE_PATIENCE_S, lambda: self._store.add("claims", 1) == 1) if self.apart else True
        return first is not False and not self.is_over()

    def declare_over(self) -> None:
        """All ranks leave."""
        if self.apart:
            within(STORE_PATIENCE_S, lambda: self._store.set("over", "1"))
        self.own[Cell.OVER] = 1
        with contextlib.suppress(OSError):
            self._claim.unlink()


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What ``call`` returns, or None if it takes longer or fails; it then goes on in a thread of its own."""
    answers: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            answers.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def started_ticks(pid: int) -> int | None:
    """When process ``pid`` started, in the kernel's ticks since boot; None if there is none, or one that has ended."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else None


def process_of(cells: Cells) -> str:
    """The kernel's letter for what a rank's process does, if it is of this node; empty if it has ended."""
    pid = cells[Cell.PID]
    return process_state(pid) if started_ticks(pid) == cells[Cell.STARTED] else ""


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does: R runs, S sleeps, D waits for a device, T is stopped; empty if it has ended."""
    fields = _stat(pid)
    return fields[0] if fields and fields[0] != "Z" else ""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat behind the name, which may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _own_cells() -> Cells:
    cells = array("q", bytes(CELLS * CELL_BYTES))
    cells[Cell.PID], cells[Cell.STARTED] = os.getpid(), started_ticks(os.getpid()) or 0
    return cells


def _open(path: Path) -> int | None:
    """A descriptor of a file of cells; None if it is not of this node."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None


def mapped(descriptor: int) -> Cells:
    """The cells in a file, shared with all who map it."""
    return cast("Cells", memoryview(mmap.mmap(descriptor, CELLS * CELL_BYTES)).cast("q"))
