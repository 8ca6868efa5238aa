"""The launcher of this rank: a rank that torchrun started ends when torchrun is gone, since a new job may begin beside it."""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

LOOK_EVERY_S = 1.0
_MARK = "TORCHELASTIC_RUN_ID"


class Launcher:
    """The process that started this rank, and what stands between the two.

    While entered, a thread looks every second whether all of them still run, and calls ``gone`` once if not. Without torchrun, or
    where processes cannot be looked at, nothing happens.
    """

    def __init__(self, gone: Callable[[], None], environment: Mapping[str, str] = os.environ, every_s: float = LOOK_EVERY_S) -> None:
        self._gone, self._every_s = gone, every_s
        self._chain = chain_of(environment.get(_MARK))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="launcher", daemon=True)

    def __enter__(self) -> Self:
        if self._chain:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        if self._chain:
            self._thread.join()

    @property
    def is_gone(self) -> bool:
        """Whether the launcher, or a process between it and this rank, has ended."""
        return any(parent_of(pid) != parent for pid, parent in self._chain)

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            if self.is_gone:
                self._gone()
                return


def chain_of(run_id: str | None) -> list[tuple[int, int]]:
    """Each process and its parent, from this one up to the child of the launcher, which is the first that is not of run ``run_id``.

    A wrapper (a shell, numactl) may stand between.
    """
    chain: list[tuple[int, int]] = []
    pid = os.getpid()
    while run_id is not None and (parent := parent_of(pid)):
        chain.append((pid, parent))
        if not _is_of(parent, run_id):
            break
        pid = parent
    return chain


def parent_of(pid: int) -> int:
    """The parent of a process; 0 if there is none, or no way to tell."""
    if pid == os.getpid():
        return os.getppid()
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _is_of(pid: int, run_id: str) -> bool:
    """Whether a process has the mark of a run in its environment."""
    try:
        return f"{_MARK}={run_id}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
