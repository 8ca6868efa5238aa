"""What signals ask of a run: to end at the edge of a step, on all ranks alike, to save and go on, or to leave at once."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

from domino_lm.launch.exit_code import EXIT_NOT_SAVED, leave_exit_code
from domino_lm.launch.signal_watch import SignalWatch

STOPS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
STOP_NAMES = tuple(number.name for number in STOPS)
AT_ONCE_S = 0.1
"""Signals that come so close to each other waited for the process together."""

ECHO_S = 0.5
"""Under a launcher one Ctrl-C may arrive twice, from the terminal or Slurm and from the launcher, within this time."""

FLUSH_S = 1.0


class Asked(NamedTuple):
    """Requests at a step's edge: of one rank, or after reduction of any rank."""

    interrupt: bool = False
    hangup: bool = False
    terminate: bool = False
    time_over: bool = False
    """The run's time is over."""

    save: bool = False
    """A checkpoint, after which the run goes on."""

    @property
    def stop_signal(self) -> str:
        """The signal that ends the run, by name; empty if none came."""
        return next((number.name for number, came in zip(STOPS, self, strict=False) if came), "")


class Standing(NamedTuple):
    """What would be left if a run ended now."""

    iteration: int
    kept_at: int
    """The iteration of the last state that is on disk, or that the run began with."""

    whole: Path | None
    """The last whole checkpoint."""

    saves: bool
    """Whether the run has a folder to save in."""

    @property
    def is_kept(self) -> bool:
        """Whether everything trained so far is on disk."""
        return self.saves and self.iteration == self.kept_at and self.whole is not None

    def __str__(self) -> str:
        if self.is_kept:
            return f"nothing is lost: {self.whole} is whole"
        whole = f"the last whole checkpoint is {self.whole}" if self.whole is not None else "this run has no whole checkpoint"
        lost = self.iteration - self.kept_at
        steps = f"iteration {self.iteration} is" if lost == 1 else f"iterations {self.kept_at + 1} to {self.iteration} are"
        return f"{steps} lost; {whole}" if lost else f"nothing was trained since; {whole}"


class RunSignals:
    """While entered, signals ask instead of killing.

    SIGINT, SIGHUP and SIGTERM ask for a stop at the step's edge, unless they were ignored before; SIGUSR1 asks for a save. Ranks
    get their signals at different moments, or one rank alone gets one: the trainer reduces what `take` gives over the world at
    each step's edge, so that all of them save and leave together.

    Ctrl-C again ends this process at once, even inside a collective or a write, with exit code 3, or 0 if nothing is lost. torchrun and
    `domino_lm.launch.torchrun` pass the second one on as SIGTERM. ``standing`` says what is left then; ``speaks`` is whether this
    rank prints.
    """

    def __init__(self, standing: Callable[[], Standing], speaks: bool = True, launched: bool | None = None) -> None:
        self._standing, self._speaks = standing, speaks
        self._launched = "TORCHELASTIC_RUN_ID" in os.environ if launched is None else launched
        self._stops: dict[int, float] = {}
        self._save = threading.Event()
        self._watch = SignalWatch((*STOPS, signal.SIGUSR1), self._received, always=(signal.SIGUSR1,))

    def __enter__(self) -> Self:
        self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.__exit__()

    def take(self, time_over: bool = False) -> Asked:
        """What has been asked of this rank; a save is asked for once."""
        save = self._save.is_set()
        if save:
            self._save.clear()
        interrupt, hangup, terminate = (number in self._stops for number in STOPS)
        return Asked(interrupt, hangup, terminate, time_over, save)

    def _received(self, number: int) -> None:
        if number == signal.SIGUSR1:
            self._save.set()
            if self._speaks and not self._standing().saves:
                write_line("SIGUSR1: nothing is saved, since there is no --save.")
            return
        if self._is_second(number):
            leave(f"Ctrl-C again: left at once; {self._standing()}.", self._standing().is_kept, self._speaks)
        first = not self._stops
        self._stops.setdefault(number, time.monotonic())
        if first and self._speaks:
            write_line(self._answer(signal.Signals(number).name))

    def _is_second(self, number: int) -> bool:
        """Whether Ctrl-C came again; under a launcher it may come twice for one, or as SIGTERM after SIGINT.

        Of two signals that reach a process while it does not run, the system may hand over the second one first.
        """
        interrupted_s = self._stops.get(signal.SIGINT)
        if number == signal.SIGINT and interrupted_s is not None:
            return not self._launched or time.monotonic() - interrupted_s > ECHO_S
        if number == signal.SIGINT:
            terminated_s = self._stops.get(signal.SIGTERM)
            at_once = terminated_s is not None and time.monotonic() - terminated_s < AT_ONCE_S
            return at_once if self._launched else bool(self._stops)
        return number == signal.SIGTERM and interrupted_s is not None and self._launched

    def _answer(self, name: str) -> str:
        standing = self._standing()
        if standing.saves:
            return f"{name}: the run saves at the end of this step and ends; Ctrl-C again leaves at once."
        return f"{name}: the run ends after this step, and keeps nothing, since there is no --save."


class BeforeTraining:
    """While entered, Ctrl-C ends this process with one line, and SIGUSR1 does nothing: there is no state to save yet.

    After `over` both are ignored outside `RunSignals`: the run is ending by itself.
    """

    def __init__(self) -> None:
        self._over = False
        self._watch = SignalWatch((signal.SIGINT, signal.SIGUSR1), self._received, always=(signal.SIGUSR1,))

    def __enter__(self) -> Self:
        self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.__exit__()

    def over(self) -> None:
        """Training begins."""
        self._over = True

    def _received(self, number: int) -> None:
        if number == signal.SIGINT and not self._over:
            leave("SIGINT: left before the first step; nothing is lost.", kept=False, speaks=os.environ.get("RANK", "0") == "0")


def leave(line: str, kept: bool, speaks: bool) -> None:
    """End this process from any thread, with code 0 if everything is ``kept``, else 3; ``line`` is the last that it prints."""
    try:
        if speaks:
            flush = threading.Thread(target=sys.stdout.flush, daemon=True)
            flush.start()
            flush.join(FLUSH_S)  # the main thread may hold the stream while its reader stands still
            write_line(line)
    finally:
        os._exit(leave_exit_code(0 if kept else EXIT_NOT_SAVED))


def write_line(line: str) -> None:
    """A line to the standard error, past the streams that the main thread may hold."""
    os.write(2, f"{line}\n".encode())
