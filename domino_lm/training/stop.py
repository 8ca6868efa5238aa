"""Ending a run early, at the edge of a step, on all ranks alike."""

import signal
import threading
from typing import Any, NamedTuple, Self


class Asked(NamedTuple):
    """Requests to stop: of one rank, or after reduction of any rank."""

    signal: bool = False
    """A signal came."""

    time_over: bool = False
    """The run's time is over."""


class StopSignal:
    """While entered, SIGTERM asks for a stop instead of killing; ``asked`` says whether one came to this process.

    Ranks get their signals at different moments, or one rank alone gets it: the trainer reduces ``asked`` over the world
    at each step's edge, so that all of them stop, save and leave together.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, *_: object) -> None:
        self.asked = True
