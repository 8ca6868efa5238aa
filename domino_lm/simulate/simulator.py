"""Runs a plan over a cost model: when every op would start and end, on the compute lane and on the links.

The same `Plan` that the executor runs, in its order of issue. A START puts its collective behind those that its link
still carries, a WAIT holds compute until the collective has ended, everything else computes. Collectives in flight slow
down compute by the share of the device that they occupy (on a host, those that are waited for too, after the wait), and by
nothing else: links do not slow each other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from domino_lm.schedule.ops import COMPUTE, DP_LINK, TP_LINK, Kind, Op
from domino_lm.schedule.plan import Plan
from domino_lm.schedule.timeline import Span, Timeline
from domino_lm.simulate.costs import Shapes, cost
from domino_lm.simulate.hardware import Hardware
from domino_lm.simulate.links import Group

LINKS = (TP_LINK, DP_LINK)


class OpTime(NamedTuple):
    """Times of one op on one machine, alone."""

    compute_s: float
    transfer_s: float  # 0 for ops that start no collective
    compute_share: float  # what the collective takes of the device while it runs
    host_s: float  # to enqueue it
    wait_share: float = 0.0  # what a wait for it costs once more, after it
    size_bytes: float = 0.0  # buffer of the collective


class Interval(NamedTuple):
    """From when to when something ran."""

    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """One pass over a plan, predicted. Intervals of ops that have none are None."""

    plan: Plan
    times: Sequence[OpTime]
    compute: Sequence[Interval]
    transfers: Sequence[Interval | None]

    @property
    def makespan_s(self) -> float:
        """Until the last op and the last collective have ended."""
        ends = [interval.end_s for interval in self.compute[-1:]]
        return max(ends + [item.end_s for item in self.transfers if item is not None], default=0.0)

    def exposed_s(self, phase: str) -> float:
        """Time that compute stood waiting for a link in ``phase``: "F", "B", or "S" for the step's end."""
        waits = [i for i, op in enumerate(self.plan.ops) if op.kind is Kind.WAIT and op.phase == phase]
        return sum(self.compute[i].end_s - self.compute[i].start_s for i in waits)

    def busy_s(self, lane: str, phase: str | None = None) -> float:
        """Time that a lane works, waiting not counted; in one phase, or in all."""
        if lane == COMPUTE:
            working = [i for i, op in enumerate(self.plan.ops) if op.kind is not Kind.WAIT and phase in (None, op.phase)]
            return sum(self.compute[i].end_s - self.compute[i].start_s for i in working)
        pairs = zip(self.plan.ops, self.transfers, strict=True)
        return sum(item.end_s - item.start_s for op, item in pairs if item is not None and op.lane == lane and phase in (None, op.phase))

    def phase_s(self, phase: str) -> float:
        """Time that the compute lane spends in ops of ``phase``, their waits included."""
        return sum(item.end_s - item.start_s for op, item in zip(self.plan.ops, self.compute, strict=True) if op.phase == phase)

    @property
    def limit_s(self) -> float:
        """Lower bound for every order of these ops: per phase the longer of compute, slowed by TP collectives, and TP link.

        Phases that run beside each other (pairs, row groups) count as one.
        """
        work = {"F": [0.0, 0.0], "B": [0.0, 0.0], "S": [0.0, 0.0]}
        for op, time in zip(self.plan.ops, self.times, strict=True):
            on_link = op.lane == TP_LINK
            work[op.phase][0] += time.compute_s + (time.transfer_s * time.compute_share if on_link else 0.0)
            work[op.phase][1] += time.transfer_s if on_link else 0.0
        if self._phases_mix():
            work = {"FB": [sum(sums) for sums in zip(work["F"], work["B"], strict=True)], "S": work["S"]}
        return sum(max(sums) for sums in work.values())

    def _phases_mix(self) -> bool:
        """Whether some forward still computes when a backward has begun: phases then change more than once per micro-batch and once between."""
        bodies = [op for op in self.plan.ops if op.kind is Kind.BODY]
        micro_batches = sum(op.phase == "F" and op.part == op.row == 0 for op in bodies)
        return sum(before.phase != after.phase for before, after in pairwise(bodies)) > 2 * micro_batches - 1

    def timeline(self, title: str = "", meta: dict[str, str] | None = None) -> Timeline:
        """Spans to draw: collectives on their links, everything else on the compute lane."""
        spans = []
        for op, time, on_compute, transfer in zip(self.plan.ops, self.times, self.compute, self.transfers, strict=True):
            name = str(op)
            if transfer is not None:
                spans.append(Span(name, op.lane, *transfer, int(time.size_bytes)))
            if op.kind is not Kind.START or on_compute.end_s > on_compute.start_s:
                spans.append(Span(name, COMPUTE, *on_compute))
        return Timeline.of(spans, title, meta)


def op_times(plan: Plan, shapes: Shapes, hardware: Hardware, data_parallel: int = 1, free: Collection[str] = ()) -> list[OpTime]:
    """Times of each op alone; collectives on the links named in ``free`` take none.

    Layers repeat: an op is priced once for each shape of part, row and column block.
    """
    groups = hardware.fabric.groups(shapes.tensor_parallel, data_parallel)
    first_alike: dict[object, int] = {}
    alike = [first_alike.setdefault(part, index) for index, part in enumerate(shapes.parts)]
    known: dict[object, OpTime] = {}
    core = shapes.slicing.recompute_core
    times = []
    for op in plan.ops:
        key = (op.kind, op.phase, op.part if op.phase == "S" else alike[op.part], op.row, op.collective, op.part in core)
        if key not in known:
            known[key] = _op_time(op, shapes, hardware, groups, free)
        times.append(known[key])
    return times


def _op_time(op: Op, shapes: Shapes, hardware: Hardware, groups: tuple[Group, Group], free: Collection[str]) -> OpTime:
    work = cost(op, shapes)
    host_s = work.launches * hardware.device.launch_s
    if not work.traffic or op.lane in free:
        return OpTime(work.seconds(hardware) + hardware.op_s, 0.0, 0.0, host_s)
    transfer = work.transfer(hardware, *groups)
    return OpTime(
        work.seconds(hardware) + hardware.op_s, transfer.seconds, transfer.compute_share, host_s, transfer.wait_share, work.transfer_bytes
    )


def simulate(plan: Plan, shapes: Shapes, hardware: Hardware, data_parallel: int = 1, free: Collection[str] = ()) -> Simulation:
    """Predict one pass over ``plan`` on ``hardware``; collectives on the links named in ``free`` take no time."""
    return replay(plan, op_times(plan, shapes, hardware, data_parallel, free))


def replay(plan: Plan, times: Sequence[OpTime]) -> Simulation:
    """Issue the ops in order, each with its ``times``."""
    now_s = host_s = 0.0
    link_free_s = dict.fromkeys(LINKS, 0.0)
    in_flight: dict[Op, tuple[Interval, float]] = {}
    shares = {link: _Occupation() for link in LINKS}
    compute: list[Interval] = []
    transfers: list[Interval | None] = []
    for op, time in zip(plan.ops, times, strict=True):
        host_s += time.host_s
        start_s = max(now_s, host_s)
        transfer = None
        if op.kind is Kind.WAIT:
            awaited, wait_share = in_flight.pop(op._replace(kind=Kind.START))
            exposed_s = max(0.0, awaited.end_s - start_s)
            start_s, end_s = now_s, start_s + exposed_s * (1.0 + wait_share)
        else:
            end_s = _slowed_end(start_s, time.compute_s, shares)
        if op.kind is Kind.START:
            begin_s = max(end_s, link_free_s[op.lane])
            transfer = Interval(begin_s, begin_s + time.transfer_s)
            in_flight[op] = transfer, time.wait_share
            link_free_s[op.lane] = transfer.end_s
            shares[op.lane].add(transfer, time.compute_share)
        compute.append(Interval(start_s, end_s))
        transfers.append(transfer)
        now_s = end_s
    return Simulation(plan, times, compute, transfers)


class _Occupation:
    """Collectives of one link in order of time, and what each takes of the device."""

    __slots__ = ("busy", "position")

    def __init__(self) -> None:
        self.busy: list[tuple[float, float, float]] = []
        self.position = 0

    def add(self, transfer: Interval, share: float) -> None:
        """Note a collective; it begins where the one before ended, or later."""
        if share > 0.0 and transfer.end_s > transfer.start_s:
            self.busy.append((transfer.start_s, transfer.end_s, share))

    def at(self, time_s: float) -> tuple[float, float]:
        """The share taken at ``time_s``, and until when that holds. Times asked for must not go back."""
        while self.position < len(self.busy) and self.busy[self.position][1] <= time_s:
            self.position += 1
        if self.position == len(self.busy):
            return 0.0, float("inf")
        start_s, end_s, share = self.busy[self.position]
        return (share, end_s) if start_s <= time_s else (0.0, start_s)


def _slowed_end(start_s: float, seconds: float, shares: dict[str, _Occupation]) -> float:
    """When compute that takes ``seconds`` alone ends, at the speed that collectives leave it."""
    now_s = start_s
    while seconds > 0.0:
        (tp_share, tp_until_s), (dp_share, dp_until_s) = (occupation.at(now_s) for occupation in shares.values())
        until_s = min(tp_until_s, dp_until_s)
        speed = 1.0 - max(tp_share, dp_share) if tp_share == 0.0 or dp_share == 0.0 else max(1.0 - tp_share - dp_share, 0.05)
        if until_s == float("inf") or (until_s - now_s) * speed >= seconds:
            return now_s + seconds / speed
        seconds -= (until_s - now_s) * speed
        now_s = until_s
    return now_s
