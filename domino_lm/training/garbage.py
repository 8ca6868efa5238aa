"""Garbage collection at the edge of a step, on all ranks alike."""

import gc
from typing import Self


class GarbageCollection:
    """While entered with ``manual``, Python collects garbage only in `step` and `collect`: every rank at the same step.

    A collection that comes due by itself on one rank makes all others wait for it in the next collective.
    """

    def __init__(self, manual: bool, interval: int) -> None:
        self._manual, self._interval = manual, interval
        self._was_on = True

    def __enter__(self) -> Self:
        if self._manual:
            self._was_on = gc.isenabled()
            gc.disable()
            gc.collect()
        return self

    def __exit__(self, *_: object) -> None:
        if self._manual and self._was_on:
            gc.enable()

    def step(self, iteration: int) -> None:
        """Collect if the interval says so."""
        if self._manual and self._interval and iteration % self._interval == 0:
            gc.collect()

    def collect(self) -> None:
        """Collect at a point where other work interrupts the steps anyway."""
        if self._manual:
            gc.collect()
