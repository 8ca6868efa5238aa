"""Who saves in a folder: a record that a run takes, keeps fresh and gives back, so that no two runs save in one folder.

::

    save/.domino_owner.<n>    {"run_id", "host", "boot_id", "pid_namespace", "pid", "started"}

A number is made once, by whoever is first, and the highest counts: of several starts one gets the folder, and a run whose record
has been replaced while it stood still knows it by looking. Keeping fresh is touching the file. How old a record is the clock of
the file system says, since the clocks of hosts differ.
"""

import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from domino_lm.checkpoint.index import CheckpointError, open_regular
from domino_lm.config.foreign_text import parse_json
from domino_lm.config.settings import ConfigError

REFRESH_S = 10.0
STALE_S = 60.0
"""Age of a record whose run may be elsewhere, or hang, at which another run takes the folder."""

_NAME = re.compile(r"\.domino_owner\.([0-9]{1,9})")


class TakenError(CheckpointError):
    """A folder that another run has taken, where nothing may be saved any more."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process, told from all others, those of its number before and after it included."""

    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    started: str
    """Clock ticks from boot to its start."""

    @classmethod
    def own(cls) -> Self:
        """This one."""
        pid = os.getpid()
        return cls(host=os.uname().nodename, boot_id=_boot_id(), pid_namespace=_namespace(), pid=pid, started=start_of(pid) or "")

    @property
    def is_gone(self) -> bool:
        """Whether it provably runs no more: it was one of this host since its start, and no process of its number began when it did."""
        here = self.boot_id and (self.boot_id, self.pid_namespace) == (_boot_id(), _namespace())
        return bool(here) and start_of(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def start_of(pid: int) -> str | None:
    """When process ``pid`` of this host began, in clock ticks since boot; None if there is none, or only what is left of it."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else rest[18]


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


class Record(NamedTuple):
    """What a folder says of its owner, and when that was last touched."""

    number: int
    content: bytes
    touched_ns: int

    @property
    def process(self) -> Process | None:
        """The owner; None if the record does not say."""
        return None if self._said is None else self._said[1]

    def __str__(self) -> str:
        """Run and process, for messages."""
        return "a run that does not say its name" if self._said is None else f"run {self._said[0][:8]}, {self._said[1]}"

    @property
    def _said(self) -> tuple[str, Process] | None:
        """Run id and process, as anybody who can write to the folder may have written them."""
        try:
            values = parse_json(self.content.decode())
            process = Process(**{name: values[name] for name in Process.__dataclass_fields__})
            texts = (values["run_id"], process.host, process.boot_id, process.pid_namespace, process.started)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        sound = all(isinstance(text, str) for text in texts) and type(process.pid) is int
        return (values["run_id"], process) if sound else None


def newest_record(folder: Path) -> Record | None:
    """The record that counts in ``folder``."""
    for number in sorted(_numbers(folder), reverse=True):
        try:
            with open_regular(_path(folder, number)) as file:  # opening makes a network file system ask its server
                return Record(number, file.read(4096), os.fstat(file.fileno()).st_mtime_ns)
        except FileNotFoundError:
            continue  # given back meanwhile
        except OSError:
            return Record(number, b"", _path(folder, number).lstat().st_mtime_ns)
    return None


def _path(folder: Path, number: int) -> Path:
    return folder / f".domino_owner.{number}"


def _numbers(folder: Path) -> list[int]:
    try:
        matches = map(_NAME.fullmatch, os.listdir(folder))
    except FileNotFoundError:
        return []
    return [int(match[1]) for match in matches if match]


class Claim:
    """A folder that this process has taken."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self.folder, self.run_id, self._process = folder, run_id, Process.own()
        self._content = json.dumps({"run_id": run_id, **asdict(self._process)}).encode()
        self._number = 0

    def take(self, number: int) -> bool:
        """Write the record ``number``; False if another run was quicker. Raises OSError if the folder cannot be written."""
        path = _path(self.folder, number)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        try:
            with open(descriptor, "wb") as file:
                file.write(self._content)
                file.flush()
                os.fsync(descriptor)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        numbers = _numbers(self.folder)
        if max(numbers, default=number) > number:
            path.unlink(missing_ok=True)
            return False
        for older in numbers:
            with suppress(OSError):
                if older < number:
                    _path(self.folder, older).unlink()
        self._number = number
        return True

    def refresh(self) -> None:
        """Say that this run still owns the folder; needs no room on the disk."""
        with suppress(OSError):  # of a file system that is away for a while, from others too
            os.utime(_path(self.folder, self._number))

    def successor(self) -> Record | None:
        """The record of the run that has the folder now; None if it is still this one. A record that somebody removed is written again."""
        newest = newest_record(self.folder)
        if newest is None and self.folder.is_dir():
            with suppress(OSError):
                self.take(self._number)
            newest = newest_record(self.folder)
        if newest is None or newest.process == self._process or (newest.process is None and newest.number == self._number):
            return None
        return newest

    def require(self) -> None:
        """Raise TakenError if another run has the folder now."""
        successor = self.successor()
        if successor is not None:
            raise TakenError(f"{self.folder} has been taken by {successor}, while this run did not refresh its record for {STALE_S:.0f} s")

    def give_back(self) -> None:
        """The run has ended."""
        if self.successor() is None:
            with suppress(OSError):
                _path(self.folder, self._number).unlink(missing_ok=True)


class Applicant:
    """A start that is to save in ``folder``; `attempt` is called every second or so until it returns a claim."""

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder, self._claim = folder, Claim(folder, run_id)
        self._seen: Record | None = None
        self._since_s = 0.0

    def attempt(self) -> Claim | str:
        """The claim, or for what to wait.

        Raises ConfigError if the folder cannot be written, or if its owner has refreshed the record since the first attempt.
        """
        try:
            found = newest_record(self._folder)
            if found is None or self._is_free(found):
                return self._claim if self._claim.take(found.number + 1 if found else 1) else "another start was quicker"
            age_s = self._age_s(found)
            if age_s >= STALE_S:
                self._seen = None
                return self._claim if self._claim.take(found.number + 1) else "another start was quicker"
        except OSError as error:
            raise ConfigError(f"--save {self._folder} cannot be written: {error.strerror}; give a folder that can.") from error
        if self._seen is not None and self._seen.number == found.number and self._seen.touched_ns != found.touched_ns:
            raise ConfigError(
                f"--save {self._folder} belongs to {found}, which is running: it has just refreshed its record there. "
                "Give another folder, or end that run first."
            )
        if self._seen is None or self._seen.number != found.number:
            self._seen, self._since_s = found, time.monotonic()
        return (
            f"--save {self._folder} is held by {found}, which refreshed its record there {age_s:.0f} s ago: "
            f"waiting {STALE_S - age_s:.0f} s for it to do so again, or to be known as ended"
        )

    def _is_free(self, found: Record) -> bool:
        process = found.process
        return process is not None and (process == Process.own() or process.is_gone)

    def _age_s(self, found: Record) -> float:
        """How long the record has stood still: by the clock of the file system, or as long as it has been looked at."""
        with tempfile.TemporaryFile(dir=self._folder) as file:
            now_ns = os.fstat(file.fileno()).st_mtime_ns
        same = self._seen is not None and self._seen[::2] == found[::2]
        return max((now_ns - found.touched_ns) / 1e9, time.monotonic() - self._since_s if same else 0.0)


class Refresher:
    """While entered, a thread keeps a claim fresh; if another run has taken the folder nevertheless, it calls ``lost`` once, and ends."""

    def __init__(self, claim: Claim, lost: Callable[[TakenError], None], every_s: float = REFRESH_S) -> None:
        self._claim, self._lost, self._every_s = claim, lost, every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="owner record", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self._claim.require()
            except TakenError as error:
                self._lost(error)
                return
            except OSError:
                continue  # as in `Claim.refresh`
            self._claim.refresh()
