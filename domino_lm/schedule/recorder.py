"""Collects when the ops of one step ran: by the host's clock if ops block it, by events of the GPU if they do not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from domino_lm.parallel.collectives import Pending
from domino_lm.schedule.ops import COMPUTE, Kind, Op
from domino_lm.schedule.timeline import Span


@dataclass
class Recorder:
    """Collects the spans of one step: ops by host time, collectives from start to completion."""

    spans: list[Span] = field(default_factory=list)

    @staticmethod
    def on(device: torch.device) -> Recorder | DeviceRecorder:
        """The recorder of a device: host time on CPUs, events on GPUs."""
        return DeviceRecorder(device) if device.type == "cuda" else Recorder()

    @contextmanager
    def watch(self, op: Op) -> Iterator[None]:
        """Time one op on the compute lane."""
        start_s = time.perf_counter()
        yield
        self.spans.append(Span(str(op), COMPUTE, start_s, time.perf_counter()))

    def follow(self, op: Op, pending: Pending) -> None:
        """Note when a started collective completes, on its link's lane."""
        start_s, size_bytes = time.perf_counter(), pending.size_bytes
        pending.on_completion(lambda: self.spans.append(Span(str(op), op.lane, start_s, time.perf_counter(), size_bytes)))


class _Mark(NamedTuple):
    """A span whose times are still events."""

    op: Op
    lane: str
    start: Any
    end: Any
    size_bytes: int = 0


class DeviceRecorder:
    """Collects the spans of one step by events on the GPU's streams, so that they are device time and the host waits for nothing.

    A WAIT is the time that the compute stream stood still. A collective begins when its inputs are ready and the one before
    it on its lane has ended, and ends when a stream of ours that waits for nothing else passes its wait. ``accelerator`` is
    `torch.cuda` or a stand-in of the tests.
    """

    def __init__(self, device: torch.device, accelerator: Any = torch.cuda) -> None:
        self._device, self._cuda = device, accelerator
        self._marks: list[_Mark] = []
        self._watchers: dict[str, Any] = {}
        self._first: Any = None

    @contextmanager
    def watch(self, op: Op) -> Iterator[None]:
        """Time one op on the compute lane."""
        start = self._event(self._cuda.current_stream(self._device))
        self._first = self._first or start
        yield
        self._marks.append(_Mark(op, COMPUTE, start, self._event(self._cuda.current_stream(self._device))))

    def follow(self, op: Op, pending: Pending) -> None:
        """Note when a started collective begins and completes, on its link's lane."""
        ready, size_bytes = self._event(self._cuda.current_stream(self._device)), pending.size_bytes
        if op.lane not in self._watchers:
            self._watchers[op.lane] = self._cuda.Stream(self._device)
        watcher = self._watchers[op.lane]
        with self._cuda.stream(watcher):
            pending.block_current_stream()
        self._marks.append(_Mark(op, op.lane, ready, self._event(watcher), size_bytes))

    @property
    def spans(self) -> list[Span]:
        """Everything recorded; waits for the device."""
        self._cuda.synchronize(self._device)
        found, lane_end_s = [], dict.fromkeys(self._watchers, 0.0)
        for op, lane, start, end, size_bytes in self._marks:
            start_s, end_s = (self._first.elapsed_time(event) / 1e3 for event in (start, end))
            if lane != COMPUTE:
                start_s = min(max(start_s, lane_end_s[lane]), end_s)
                lane_end_s[lane] = end_s
            found.append(Span(str(op), lane, start_s, end_s, size_bytes))
        return found

    def _event(self, stream: Any) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(stream)
        return event


class WaitClock:
    """Takes the place of a recorder, and measures only how long the host stands in waits."""

    def __init__(self) -> None:
        self.waited_s = 0.0

    def watch(self, op: Op) -> AbstractContextManager[None]:
        """Time one op if it is a wait."""
        return self._timed() if op.kind is Kind.WAIT else nullcontext()

    def follow(self, op: Op, pending: Pending) -> None:
        """A collective has started."""

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - start_s


AnyRecorder = Recorder | DeviceRecorder
Observer = AnyRecorder | WaitClock
