"""A timeline as one self-contained HTML page, ``report.html`` with data: pan, zoom, and read every op. It loads nothing else."""

import html
import json
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any

from domino_lm.schedule.ops import COMPUTE, DP_LINK, TP_LINK, Kind, Op, concerns_matrices, is_gather
from domino_lm.schedule.timeline import LANE_NAMES, Span, Timeline, whole_file

LANES = (COMPUTE, TP_LINK, DP_LINK)
PHASE_NAMES = {"F": "forward", "B": "backward", "S": "step"}
MICROSECONDS = 1e6


def write_report(timelines: Iterable[Timeline], path: Path | str) -> None:
    """Write a page that shows the timelines under each other on one time axis, measured and predicted say.

    A click on an op, or its number after ``#op=`` in the address, shows its name, lane, start, duration, bytes and how
    long compute waited for it. The file appears whole or not at all.
    """
    shown = [_page_data(timeline) for timeline in timelines]
    title = " and ".join(dict.fromkeys(each["title"] for each in shown))
    data = json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")
    page = files("domino_lm.watch").joinpath("report.html").read_text(encoding="utf-8")
    with whole_file(path) as unfinished:
        unfinished.write_text(page.replace("@TITLE@", html.escape(title)).replace("@DATA@", data), encoding="utf-8")


def _page_data(timeline: Timeline) -> dict[str, Any]:
    """What the page's script draws; times in microseconds."""
    exposed = {name: timeline.exposed_s(phase) * MICROSECONDS for phase, name in PHASE_NAMES.items()}
    tracks = [
        (LANE_NAMES[lane] + (f" ({index + 1})" if index else ""), track)
        for lane in LANES
        for index, track in enumerate(timeline.tracks(lane))
    ]
    waits = _waits(timeline)
    return {
        "title": timeline.title or "timeline of one step",
        "meta": dict(timeline.meta),
        "makespan": timeline.makespan_s * MICROSECONDS,
        "exposed": exposed,
        "tracks": [{"name": name, "spans": [_span_data(span, waits) for span in track]} for name, track in tracks],
    }


def _waits(timeline: Timeline) -> dict[Op, list[Span]]:
    """Compute's waits, by the START that each one redeems, in time order."""
    found: dict[Op, list[Span]] = {}
    for span in timeline.on(COMPUTE):
        if span.op.kind is Kind.WAIT:
            found.setdefault(span.op._replace(kind=Kind.START), []).append(span)
    return found


def _span_data(span: Span, waits: dict[Op, list[Span]]) -> dict[str, Any]:
    op = span.op
    data: dict[str, Any] = {
        "name": span.name,
        "about": _about(op),
        "start": span.start_s * MICROSECONDS,
        "length": span.duration_s * MICROSECONDS,
        "row": op.row,
        "phase": op.phase,
    }
    if span.lane == COMPUTE and op.kind is Kind.WAIT:
        data["exposed"] = data["length"]
    elif span.lane != COMPUTE:
        # The first wait that ends after the collective began is its own; the same op may run once per micro-batch.
        wait = next((wait for wait in waits.get(op, []) if wait.end_s >= span.start_s), None)
        data["exposed"] = wait.duration_s * MICROSECONDS if wait is not None else 0.0
        data["bytes"] = span.size_bytes
    return data


def _about(op: Op) -> str:
    """An op's name spelled out."""
    if concerns_matrices(op):
        return f"{op.kind}, momentum of matrices{f' of part {op.part}' if op.kind is not Kind.MOMENTUM else ''}"
    if op.phase == "S":
        what = "updated parameters" if is_gather(op) else "gradients"
        return f"{op.kind}, {op.collective}, {what} of bucket {op.part}" if op.kind is not Kind.STEP else "optimizer step"
    collective = f", {op.collective}" if op.kind in (Kind.START, Kind.WAIT) else ""
    return f"{op.kind}{collective}, {PHASE_NAMES[op.phase]} of part {op.part}, row {op.row}, column {op.col}, micro-batch {op.micro}"
