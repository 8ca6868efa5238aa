"""Whether all ranks see one folder, found by writing there and looking."""

import os
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from domino_lm.parallel.collectives import Communicator

PATIENCE_S = 5.0
"""How long a network file system may take to show another node's file."""

_PREFIX = ".seen-"
_ABANDONED_S = 3600.0


def unshared(folder: str, world: Communicator, patience_s: float = PATIENCE_S) -> tuple[int, str, str] | None:
    """A rank, its host, and why ``folder`` is not the same for it as for the others; None if all of ``world`` share it.

    All ranks call this and get the same answer. Each writes a file; rank 0 must see all of them, and all must see rank 0's.
    """
    token = world.broadcast_object(uuid.uuid4().hex)
    mine, error = _file(folder, token, world.rank), None
    try:
        mine.write_text(token)
    except OSError as raised:
        error = f"cannot write there: {raised.strerror}"
    world.barrier()
    if error is None:
        unseen = _unseen(folder, token, range(world.size) if world.rank == 0 else (0,), patience_s)
        error = None if unseen is None else f"does not see the file of rank {unseen}"
    errors = world.all_gather_object((socket.gethostname(), error))
    _remove(mine, Path(folder) if world.rank == 0 else None)
    wrong = [(rank, host, text) for rank, (host, text) in enumerate(errors) if text]
    return min(wrong, key=lambda one: not one[2].startswith("cannot"), default=None)  # the cause before its consequences


def _file(folder: str, token: str, rank: int) -> Path:
    return Path(folder) / f"{_PREFIX}{token}-{rank}"


def _remove(mine: Path, folder: Path | None) -> None:
    """Remove this rank's file and, in ``folder``, those of checks that were killed."""
    abandoned = [] if folder is None else list(folder.glob(f"{_PREFIX}*"))
    for path in (mine, *abandoned):
        with suppress(OSError):
            if path == mine or time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()


def _unseen(folder: str, token: str, ranks: Sequence[int], patience_s: float) -> int | None:
    """The first of ``ranks`` whose file does not appear in time."""
    until_s = time.monotonic() + patience_s
    for rank in ranks:
        path = _file(folder, token, rank)
        while not path.exists():
            if time.monotonic() > until_s:
                return rank
            with suppress(OSError):
                os.listdir(folder)  # makes a network file system look again
            time.sleep(0.05)
    return None
