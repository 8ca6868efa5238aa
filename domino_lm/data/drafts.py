"""Files in the making: they stand beside their final name, under a temporary one, until they are whole.

The writer of a draft holds a lock on it, which the system frees when its process ends, however it ends. So a second
writer of the same file is refused, and the remains of a killed writer are recognised and removed.
"""

import fcntl
import glob
import os
import platform
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

ABANDONED_AFTER_S = 600.0
"""Without a common lock the writer may live on another machine, where its files grow."""


class BusyError(ValueError):
    """Another process is writing the same file."""


class Draft:
    """A file that appears under its final name by `publish`, whole, or not at all.

    Raises BusyError when a process that is alive has a draft of the same file.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self._path = target.with_name(f"{target.name}{draft_suffix()}")
        self.file: IO[bytes] = self._open_locked()
        try:
            for other in target.parent.glob(f"{glob.escape(target.name)}.tmp-*-*"):
                if other != self._path and _is_abandoned(other):
                    other.unlink(missing_ok=True)
        except BaseException:
            self.discard()
            raise

    def publish(self) -> None:
        """Give the written and synced file its final name; `discard` stays due."""
        os.replace(self._path, self._target)

    def discard(self) -> None:
        """Close the file, and remove it unless it was published."""
        self._path.unlink(missing_ok=True)
        # On a full disk, closing fails again on what is still buffered.
        with suppress(OSError):
            self.file.close()

    def _open_locked(self) -> IO[bytes]:
        while True:
            file = open(self._path, "ab")  # noqa: SIM115  discard closes it
            _lock(file, self._path)
            # Another writer may have met the file before it was locked, and removed it as abandoned.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), os.stat(self._path)):
                    file.truncate(0)
                    file.seek(0)
                    return file
            file.close()


def draft_suffix() -> str:
    """Ends the name of this process's drafts: no other process on any machine has the same."""
    return f".tmp-{_node()}-{os.getpid()}"


def is_of_this_node(path: Path) -> bool:
    """Whether a process on this machine made the draft."""
    return f".tmp-{_node()}-" in path.name


def is_old(path: Path) -> bool:
    """Whether nothing was written to it for a while."""
    return time.time() - path.stat().st_mtime > ABANDONED_AFTER_S


def _node() -> str:
    return re.sub(r"[^\w.]", "_", platform.node()) or "node"


def _is_abandoned(path: Path) -> bool:
    """Whether the writer of a draft is gone. Raises BusyError if it is at work."""
    try:
        with open(path, "ab") as file:
            locks_work = _lock(file, path)
        return (locks_work and is_of_this_node(path)) or is_old(path)
    except FileNotFoundError:
        return False


def _lock(file: IO[bytes], path: Path) -> bool:
    """Take the lock of a draft; False if the file system knows none. Raises BusyError when somebody holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise BusyError(f"{path} is being written by another process; wait for it, end it, or choose another prefix.") from None
    except OSError:
        return False
    return True
