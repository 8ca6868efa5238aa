"""A step that stands still, as it does while a link is cut: said while it lasts, since nothing else is printed then."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

LEAST_S = 10.0
TIMES_USUAL = 10
REMEMBERED = 101


class Standstill:
    """While entered, tells ``say`` of a step that takes more than ten times the usual, and ten seconds; then as often as its time doubles.

    ``patience_s`` is how long the ranks wait for each other at most. The first step is start-up and is not judged. ``say`` is
    called from a thread; None watches nothing.
    """

    def __init__(self, say: Callable[[str], None] | None, patience_s: float, least_s: float = LEAST_S) -> None:
        self._say, self._patience_s, self._least_s = say, patience_s, least_s
        self._usual: deque[float] = deque(maxlen=REMEMBERED)
        self._step: tuple[int, float] | None = None
        self._told_s = 0.0
        self._steps = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="standstill", daemon=True)

    def __enter__(self) -> Self:
        if self._say is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def step(self, iteration: int) -> Iterator[None]:
        """The step that leads to ``iteration`` runs."""
        begin_s = time.monotonic()
        self._step = (iteration, begin_s)
        yield
        self._step = None
        taken_s = time.monotonic() - begin_s
        self._steps += 1
        if self._steps > 1:
            self._usual.append(taken_s)
        if self._told_s and self._say is not None:
            self._say(f"iteration {iteration} went on after {taken_s:.0f} s")
            self._told_s = 0.0

    def _run(self) -> None:
        while not self._ended.wait(self._least_s / 10):
            step = self._step
            if step is None or not self._usual:
                continue
            stood_s, usual_s = time.monotonic() - step[1], statistics.median(self._usual)
            if stood_s > max(self._least_s, TIMES_USUAL * usual_s, 2 * self._told_s) and self._say is not None:
                self._told_s = stood_s
                self._say(
                    f"iteration {step[0]} stands still: {stood_s:.0f} s so far, where a step takes {usual_s:.2g} s. Ranks wait for each other, for up to "
                    f"{self._patience_s:.0f} s (--distributed-timeout-minutes): look at the links between nodes, and for a rank that is stopped or slow."
                )
