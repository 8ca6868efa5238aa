"""The slowest rank of a log interval: by the time that a rank takes of its own, its waits for others left out."""

from __future__ import annotations

import statistics

from domino_lm.parallel.collectives import Communicator
from domino_lm.schedule.ops import COMPUTE, Kind
from domino_lm.schedule.recorder import Observer, WaitClock
from domino_lm.schedule.timeline import Span


class Straggler:
    """Own time of this rank in the steps of an interval. Every rank of ``world`` has one."""

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self._steps_s: list[float] = []

    def step(self, computed_s: float, recorder: Observer | None) -> None:
        """A step took ``computed_s`` up to its end, where ranks meet, with the waits that ``recorder`` measured; none counts nothing."""
        if isinstance(recorder, WaitClock):
            self._steps_s.append(computed_s - recorder.waited_s)
        elif recorder is not None:
            self._steps_s.append(own_s(recorder.spans))

    def line(self) -> str:
        """What is said of the interval, which ends; all ranks call this. Empty if no step was measured."""
        mine = statistics.fmean(self._steps_s) if self._steps_s else 0.0
        self._steps_s.clear()
        return slowest_line(self._world.all_gather_object(mine))


def own_s(spans: list[Span]) -> float:
    """Time of a recorded step's compute, waits left out."""
    return sum(span.end_s - span.start_s for span in spans if span.lane == COMPUTE and span.op.kind is not Kind.WAIT)


def slowest_line(own_s_by_rank: list[float]) -> str:
    """Which rank took longest of its own, and by how much; empty if nothing was measured."""
    slowest = max(range(len(own_s_by_rank)), key=own_s_by_rank.__getitem__)
    longest, middle = own_s_by_rank[slowest], statistics.median(own_s_by_rank)
    if longest <= 0:
        return ""
    more = f"{(longest - middle) * 1e3:.1f} ms ({longest / max(middle, 1e-9) - 1:.1%}) more than the median of {len(own_s_by_rank)} ranks"
    return f"   straggler: rank {slowest} takes {longest * 1e3:.1f} ms of its own in a step, {more}"
