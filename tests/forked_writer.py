"""The process that writes checkpoints beside a rank, as a quick fork that dies, fails or waits where a test says."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

from domino_lm.checkpoint.background_writing import serve
from domino_lm.checkpoint.writer_process import shield

STAGES = {
    "files": "domino_lm.checkpoint.writing._write_content",
    "mark": "domino_lm.checkpoint.background_writing._leave_mark",
    "index": "domino_lm.checkpoint.background_writing.write_index",
    "name": "domino_lm.checkpoint.save_load.publish",
    "tracker": "domino_lm.checkpoint.publish.os.replace",
}
"""What is about to be done when something happens; ranks above 0 leave marks, rank 0 does all else."""

PATIENCE_S = 60.0


class ForkedWriter:
    """Stands for `WriterProcess`; ``happens`` takes place at a ``stage`` of its first save."""

    def __init__(self, memory: int, stage: str = "", happens: Callable[[], object] | None = None) -> None:
        self.connection, theirs = Pipe()
        self._code: int | None = None
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.connection.close()
                shield(parent)
                with once(stage, happens) if happens else nullcontext():
                    serve(theirs, memory)  # type: ignore[arg-type]
            finally:
                os._exit(0)
        theirs.close()

    def end(self, timeout_s: float) -> int | None:
        """As `WriterProcess.end`."""
        until_s = time.monotonic() + timeout_s
        while self._code is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until_s:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.005)
        return self._code


def once(stage: str, happens: Callable[[], object]) -> Any:
    """Let something happen before the first call of a stage."""
    module, _, name = STAGES[stage].rpartition(".")
    target = resolve_name(module)
    done, real = [], getattr(target, name)

    def call(*arguments: Any, **named: Any) -> Any:
        if not done:
            done.append(True)
            happens()
        return real(*arguments, **named)

    return mock.patch.object(target, name, call)


def die() -> None:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk() -> None:
    """Have no room."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def wait_for(path: Path) -> None:
    """Stand still until ``path`` exists."""
    until_s = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < until_s, f"{path} never came"
        time.sleep(0.005)


def held(path: Path) -> Callable[[], None]:
    """What waits for ``path``."""
    return partial(wait_for, path)
