"""Timelines by events: what is recorded on which stream, and what a span's times are made of."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch

from domino_lm.parallel.collectives import Pending
from domino_lm.schedule.ops import COMPUTE, TP_LINK, Op
from domino_lm.schedule.recorder import DeviceRecorder, Recorder
from domino_lm.schedule.timeline import Span


class Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.time_ms = cuda, 0.0

    def record(self, stream: str) -> None:
        self.time_ms = self.cuda.now_ms[stream]
        self.cuda.log.append(f"event on {stream}")

    def elapsed_time(self, end: Event) -> float:
        assert self.cuda.log[-1] == "synchronize", "events are read once the device is done"
        return end.time_ms - self.time_ms


class FakeCuda:
    """Streams as clocks: work on a stream moves its own."""

    def __init__(self) -> None:
        self.now_ms = {"main": 100.0}
        self.current, self.log = "main", []

    def current_stream(self, device: Any) -> str:
        return self.current

    def Stream(self, device: Any) -> str:  # noqa: N802
        name = f"watcher {len(self.now_ms)}"
        self.now_ms[name] = 0.0
        return name

    @contextmanager
    def stream(self, stream: str):
        before, self.current = self.current, stream
        yield
        self.current = before

    def Event(self, enable_timing: bool) -> Event:  # noqa: N802
        assert enable_timing
        return Event(self)

    def synchronize(self, device: Any) -> None:
        self.log.append("synchronize")


class Work:
    """A collective that ends at a time; waiting moves the current stream there."""

    def __init__(self, cuda: FakeCuda, end_ms: float) -> None:
        self.cuda, self.end_ms = cuda, end_ms

    def wait(self) -> None:
        self.cuda.now_ms[self.cuda.current] = max(self.cuda.now_ms[self.cuda.current], self.end_ms)


def recorded() -> tuple[FakeCuda, list[Span]]:
    """Two GEMMs, each with a collective: the second one waits for the first on the link; compute waits for the second."""
    cuda = FakeCuda()
    recorder = DeviceRecorder(torch.device("cuda", 0), cuda)
    pendings = []
    for row, (ready_ms, end_ms) in enumerate(((110.0, 130.0), (120.0, 145.0))):
        with recorder.watch(Op.parse(f"m0 tailF2.{row}")):
            cuda.now_ms["main"] = ready_ms
        start = Op.parse(f"m0 startF2.{row}")
        with recorder.watch(start):
            pendings.append(Pending(torch.ones(4), Work(cuda, end_ms)))  # type: ignore[arg-type]
            recorder.follow(start, pendings[-1])
    for row, pending in enumerate(pendings):
        with recorder.watch(Op.parse(f"m0 waitF2.{row}")):
            pending.wait()
    return cuda, recorder.spans


def test_spans_are_device_time_on_their_lanes() -> None:
    _, spans = recorded()
    times = {(span.name, span.lane): (round(span.start_s * 1e3), round(span.end_s * 1e3)) for span in spans}
    assert times["m0 tailF2.0", COMPUTE] == (0, 10)
    assert times["m0 startF2.0", TP_LINK] == (10, 30)
    assert times["m0 startF2.1", TP_LINK] == (30, 45)  # ready at 20, but the link was taken
    assert times["m0 waitF2.0", COMPUTE] == (20, 30)
    assert times["m0 waitF2.1", COMPUTE] == (30, 45)


def test_nothing_waits_for_the_device_before_the_spans_are_read() -> None:
    cuda, _ = recorded()
    assert cuda.log.count("synchronize") == 1
    assert cuda.log[-1] == "synchronize"


def test_a_links_end_is_seen_by_a_stream_of_its_own() -> None:
    cuda, _ = recorded()
    assert cuda.log.count("event on watcher 1") == 2
    assert cuda.now_ms["watcher 1"] == 145.0


def test_collectives_know_their_bytes() -> None:
    _, spans = recorded()
    assert {span.size_bytes for span in spans if span.lane == TP_LINK} == {16}


def test_a_cpu_is_recorded_by_its_own_clock() -> None:
    assert isinstance(Recorder.on(torch.device("cpu")), Recorder)
