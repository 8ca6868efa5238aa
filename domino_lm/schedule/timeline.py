"""What ran when in one step, predicted or measured: spans on lanes, and their Chrome trace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from domino_lm.config.foreign_text import parse_json
from domino_lm.schedule.ops import COMPUTE, DP_LINK, TP_LINK, Kind, Op, is_gather

LANE_NAMES = {COMPUTE: "compute", TP_LINK: "TP link", DP_LINK: "DP link"}
MICROSECONDS = 1e6
# Tracks of a lane are numbered from lane number x this.
_TRACKS_PER_LANE = 100


class TimelineError(ValueError):
    """A file that is no timeline of ours; the message names it and what is wrong."""


@dataclass(frozen=True)
class Span:
    """One op on one lane, from ``start_s`` to ``end_s`` on any common clock; a collective's span knows its buffer's bytes."""

    name: str
    lane: str
    start_s: float
    end_s: float
    size_bytes: int = 0

    @cached_property
    def op(self) -> Op:
        """The op that the name prints; raises ValueError for any other name."""
        return Op.parse(self.name)

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """The spans of one step. ``meta`` is shown beside them: schedule, parallel sizes, machine."""

    spans: tuple[Span, ...]
    title: str = ""
    meta: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, spans: Iterable[Span], title: str = "", meta: Mapping[str, str] | None = None) -> Timeline:
        """Spans sorted by start and moved so that the first one starts at 0."""
        ordered = sorted(spans, key=lambda span: (span.start_s, span.end_s))
        zero_s = ordered[0].start_s if ordered else 0.0
        moved = (replace(span, start_s=span.start_s - zero_s, end_s=span.end_s - zero_s) for span in ordered)
        return cls(tuple(moved), title, dict(meta or {}))

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        if not self.spans:
            return 0.0
        return max(span.end_s for span in self.spans) - min(span.start_s for span in self.spans)

    def exposed_s(self, phase: str) -> float:
        """Time that compute stood waiting for a link: in ``phase`` "F" forward, "B" backward, or "S" the step's end.

        If waiting does not block the host (NCCL), a measured timeline shows only what the host saw.
        """
        return sum(span.duration_s for span in self.on(COMPUTE) if span.op.kind is Kind.WAIT and span.op.phase == phase)

    def on(self, lane: str) -> list[Span]:
        """The spans of one lane, by start."""
        return [span for span in self.spans if span.lane == lane]

    def tracks(self, lane: str) -> list[list[Span]]:
        """The spans of one lane on as few tracks as keep those of a track from overlapping.

        Collectives in flight together take a track each; compute needs one.
        """
        tracks: list[list[Span]] = []
        for span in self.on(lane):
            free = next((track for track in tracks if track[-1].end_s <= span.start_s), None)
            if free is None:
                tracks.append([span])
            else:
                free.append(span)
        return tracks

    def micro_batches(self) -> list[list[Span]]:
        """Compute spans of each pass over the plan: one begins wherever the first op of all is seen again.

        Gathers of parameters are left out: they belong to no micro-batch.
        """
        passes: list[list[Span]] = []
        for span in (span for span in self.on(COMPUTE) if not is_gather(span.op)):
            if not passes or span.name == passes[0][0].name:
                passes.append([])
            passes[-1].append(span)
        return passes

    def write_trace(self, path: Path | str) -> None:
        """Write a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open. The file appears whole or not at all."""
        with whole_file(path) as unfinished:
            unfinished.write_text(json.dumps(self._trace()), encoding="utf-8")

    def _trace(self) -> dict[str, Any]:
        return {
            "displayTimeUnit": "ms",
            "otherData": {"title": self.title, **self.meta},
            "traceEvents": [event for number, lane in enumerate(LANE_NAMES) for event in self._lane_events(number, lane)],
        }

    def _lane_events(self, number: int, lane: str) -> Iterator[dict[str, Any]]:
        for index, track in enumerate(self.tracks(lane)):
            thread = number * _TRACKS_PER_LANE + index
            name = LANE_NAMES[lane] + (f" ({index + 1})" if index else "")
            yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": thread, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": thread, "args": {"sort_index": thread}}
            for span in track:
                times = {"ts": span.start_s * MICROSECONDS, "dur": span.duration_s * MICROSECONDS}
                about = {"args": {"bytes": span.size_bytes}} if span.size_bytes else {}
                yield {"ph": "X", "name": span.name, "cat": lane, "pid": 0, "tid": thread, **times, **about}


@contextmanager
def whole_file(path: Path | str) -> Iterator[Path]:
    """A file to write beside ``path``, which takes its place once the block ends; if the block fails, nothing has changed."""
    path = Path(path)
    unfinished = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_trace(path: Path | str) -> Timeline:
    """Read what `Timeline.write_trace` wrote. Raises TimelineError if the file is something else."""
    try:
        trace = parse_json(Path(path).read_text(encoding="utf-8"))
        about = {str(key): str(value) for key, value in trace["otherData"].items()}
        spans = [_read_span(event) for event in trace["traceEvents"] if event["ph"] == "X"]
    except OSError as error:
        raise TimelineError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TimelineError(f"{path}: not a trace that --timeline wrote ({type(error).__name__}: {error})") from error
    if not spans:
        raise TimelineError(f"{path}: the trace holds no spans; record a step that ran")
    return Timeline.of(spans, about.pop("title", ""), about)


def _read_span(event: Mapping[str, Any]) -> Span:
    start_s, duration_s = float(event["ts"]) / MICROSECONDS, float(event["dur"]) / MICROSECONDS
    if event["cat"] not in LANE_NAMES or duration_s < 0:
        raise ValueError(f"lane {event['cat']!r}, duration {duration_s} s")
    op = Op.parse(str(event["name"]))
    return Span(str(op), event["cat"], start_s, start_s + duration_s, int(event.get("args", {}).get("bytes", 0)))
