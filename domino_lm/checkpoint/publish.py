"""Bringing a finished folder under its final name: on disk first, then renamed, then named by the tracker."""

import errno
import os
import shutil
from pathlib import Path

from domino_lm.checkpoint.folder import TRACKER_FILE


def publish(unfinished: Path, final: Path, tracked_as: str | None) -> None:
    """Give ``unfinished`` the name ``final``, and write ``tracked_as``, if given, into the tracker beside it.

    Every step is complete on disk before the next one; OSError anywhere leaves an older ``final`` and the tracker as they were.
    """
    sync_folder(unfinished)
    tracker = final.with_name(TRACKER_FILE)
    new_tracker = tracker.with_name(f"{TRACKER_FILE}.{unfinished.name.rpartition('-')[2]}")
    try:
        if tracked_as is not None:
            write_synced(new_tracker, tracked_as.encode())
        _replace_folder(unfinished, final)
        if tracked_as is not None:
            os.replace(new_tracker, tracker)
    finally:
        new_tracker.unlink(missing_ok=True)
    sync_folder(final.parent)


def _replace_folder(unfinished: Path, final: Path) -> None:
    """Rename ``unfinished`` to ``final``; a checkpoint of that name is moved aside, and moved back if the renaming fails."""
    if not final.exists():
        unfinished.rename(final)
        return
    old = unfinished.with_name(f"{unfinished.name}-old")
    final.rename(old)
    try:
        unfinished.rename(final)
    except OSError:
        old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, and return once it is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_file(path: Path) -> None:
    """Return once what was written to ``path`` is on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Sync a folder's list of names to disk, if the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(descriptor)
