"""What may go from a folder of checkpoints: leftovers of interrupted saves, and checkpoints that newer whole ones replace."""

import errno
import fcntl
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from domino_lm.checkpoint.folder import TRACKER_FILE, incomplete, iteration_folder, iterations_in, kind_of

_LEFTOVER = re.compile(rf"(iter_[0-9]{{7,18}})\.tmp-[0-9a-f]{{8}}(-old)?|{re.escape(TRACKER_FILE)}\.[0-9a-f]{{8}}")
_ABANDONED_S = 3600.0
"""Age of a leftover that is removed where the folder cannot be locked, as on some network file systems."""


class Retention(NamedTuple):
    """Which checkpoints of a folder stay when a newer one is whole; without a number in either field all do."""

    keep_last: int | None = None
    retain_interval: int | None = None
    """Multiples of it stay; alone, it goes with the last one."""

    in_use: Path | None = None
    """The one that the run was loaded from stays too."""

    @property
    def removes(self) -> bool:
        """Whether any may go."""
        return bool(self.keep_last or self.retain_interval)


@contextmanager
def saving_in(folder: Path) -> Iterator[None]:
    """Hold ``folder`` while a save is under way in it, so that no other run takes it for a leftover; remove those that are.

    What cannot be locked or removed is left alone.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_leftovers(folder, older_than_s=0)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:  # no other run, but a file system without locks
                _remove_leftovers(folder, older_than_s=_ABANDONED_S)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor too
        os.close(descriptor)


def remove_leftovers(folder: Path) -> None:
    """Remove what interrupted saves left in ``folder``, unless a run is saving there."""
    with saving_in(folder):
        pass


def _remove_leftovers(folder: Path, older_than_s: float) -> None:
    for entry in sorted(folder.iterdir()):
        match = _LEFTOVER.fullmatch(entry.name)
        with suppress(OSError):
            if match is None or time.time() - entry.stat().st_mtime < older_than_s:
                continue
            if match[2] and not (folder / match[1]).exists():  # moved aside for another of its name, which never came
                entry.rename(folder / match[1])
            elif entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()


def remove_replaced(folder: Path, newest: int, retention: Retention) -> None:
    """Remove the checkpoints of this program before ``newest``, which is whole and verified, that ``retention`` does not keep.

    Those that are not whole count as none of the last. Each disappears at once; a warning if one cannot.
    """
    older = [iteration for iteration in iterations_in(folder) if iteration < newest]
    whole = [iteration for iteration in older if incomplete(iteration_folder(folder, iteration)) is None]
    kept = whole[: (retention.keep_last or 1) - 1]
    for iteration in older:
        path = iteration_folder(folder, iteration)
        retained = retention.retain_interval is not None and iteration % retention.retain_interval == 0
        in_use = retention.in_use is not None and path.resolve() == retention.in_use.resolve()
        if iteration not in kept and not retained and not in_use and kind_of(path) == "native":
            aside = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
            try:
                path.rename(aside)
                shutil.rmtree(aside)
            except OSError as error:
                warnings.warn(f"{path} could not be removed ({error.strerror})", stacklevel=2)
