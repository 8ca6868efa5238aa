"""Timelines: what was exposed, the Chrome trace, and the picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from domino_lm.schedule import render
from domino_lm.schedule.render import MissingMatplotlibError, draw
from domino_lm.schedule.timeline import Span, Timeline, TimelineError, read_trace
from domino_lm.tools import plot_timeline

SPANS = (
    Span("m0 bodyF2.0", "compute", 10.0, 10.4),
    Span("m0 startF2.0", "tp", 10.4, 10.9),
    Span("m0 bodyF2.1", "compute", 10.4, 10.7),
    Span("m0 startF2.1", "tp", 10.7, 11.2),
    Span("m0 waitF2.0", "compute", 10.7, 10.9),
    Span("m0 waitF2.1", "compute", 10.9, 11.2),
    Span("m0 bodyB2.0", "compute", 11.2, 12.0),
    Span("m0 waitB2.0", "compute", 12.0, 12.1),
    Span("m0 startS0.*", "dp", 12.1, 12.5),
    Span("m0 waitS0.*", "compute", 12.1, 12.5),
    Span("m0 stepS0.*", "compute", 12.5, 12.6),
)
TIMELINE = Timeline.of(reversed(SPANS), "a step", {"rows": "2"})


@pytest.mark.parametrize(("phase", "exposed_s"), [("F", 0.5), ("B", 0.1), ("S", 0.4)])
def test_exposed_time_is_that_of_the_waits_of_a_phase(phase: str, exposed_s: float) -> None:
    assert TIMELINE.exposed_s(phase) == pytest.approx(exposed_s)


def test_spans_are_sorted_and_start_at_0() -> None:
    assert [span.start_s for span in TIMELINE.spans] == pytest.approx(sorted(span.start_s - 10 for span in SPANS))


def test_makespan_reaches_from_the_first_start_to_the_last_end() -> None:
    assert TIMELINE.makespan_s == pytest.approx(2.6)


def test_collectives_in_flight_together_take_a_track_each() -> None:
    names = [[span.name for span in track] for track in TIMELINE.tracks("tp")]
    assert names == [["m0 startF2.0"], ["m0 startF2.1"]]


def test_a_new_micro_batch_begins_where_the_first_op_is_seen_again() -> None:
    again = [Span(span.name, span.lane, span.start_s + 5, span.end_s + 5) for span in SPANS]
    passes = Timeline.of([*SPANS, *again]).micro_batches()
    assert [len(spans) for spans in passes] == [8, 8]


def test_a_trace_reads_back_as_it_was_written(tmp_path: Path) -> None:
    TIMELINE.write_trace(tmp_path / "step.json")
    found = read_trace(tmp_path / "step.json")
    assert (found.title, found.meta) == (TIMELINE.title, TIMELINE.meta)
    for span, written in zip(found.spans, TIMELINE.spans, strict=True):
        assert (span.name, span.lane) == (written.name, written.lane)
        assert (span.start_s, span.end_s) == pytest.approx((written.start_s, written.end_s), abs=1e-9)


def test_trace_events_of_a_thread_never_overlap(tmp_path: Path) -> None:
    TIMELINE.write_trace(tmp_path / "step.json")
    ends: dict[int, float] = {}
    for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"]:
        if event["ph"] == "X":
            assert event["ts"] >= ends.get(event["tid"], 0.0) - 1e-6
            ends[event["tid"]] = event["ts"] + event["dur"]


FOREIGN_EVENT = {"ph": "X", "name": "cudaLaunchKernel", "cat": "compute", "ts": 0, "dur": 1}
FOREIGN_TRACE = json.dumps({"otherData": {}, "traceEvents": [FOREIGN_EVENT]})


@pytest.mark.parametrize("text", ["not json", "[]", '{"traceEvents": []}', '{"otherData": {}, "traceEvents": []}', FOREIGN_TRACE])
def test_a_file_that_is_no_trace_of_ours_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "step.json").write_text(text)
    with pytest.raises(TimelineError, match=r"step\.json"):
        read_trace(tmp_path / "step.json")


def test_a_trace_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space"):
        TIMELINE.write_trace(tmp_path / "step.json")
    assert list(tmp_path.iterdir()) == []


def test_the_tool_draws_a_picture_beside_the_trace(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    TIMELINE.write_trace(tmp_path / "step.json")
    assert plot_timeline.main([str(tmp_path / "step.json")]) == 0
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_the_tool_says_what_is_wrong_with_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_timeline.main([str(tmp_path / "missing.json")]) == 1
    assert "missing.json: cannot be read: No such file" in capsys.readouterr().err


def test_without_matplotlib_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingMatplotlibError, match=r"pip install 'domino-lm\[plot\]'"):
        draw(TIMELINE, tmp_path / "step.png")


def test_timelines_are_read_without_torch() -> None:
    code = "import sys, domino_lm.schedule.render; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_picture_labels_each_track_leaves_empty_ones_out_and_explains_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(render, "write_png", lambda figure, _: drawn.append(figure))
    instant = [Span("m0 startS0.*", "dp", 12.6, 12.6 + 1e-6), Span("m0 localB1.0", "compute", 12.6, 12.7)]
    draw(Timeline.of([span for span in SPANS if span.lane != "dp"] + instant), tmp_path / "step.png")
    assert [text.get_text() for text in drawn[0].axes[0].get_yticklabels()] == ["compute", "TP link", "TP link (2)"]
    explained = drawn[0].legends[0].get_title().get_text()
    assert all(f"{kind}: " in explained for kind in ("body", "local", "start", "wait", "step"))
    assert "tail: " not in explained  # no such op is shown


def test_the_enlarged_parts_show_the_tracks_that_are_busy_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(render, "write_png", lambda figure, _: drawn.append(figure))
    chain = [Span(f"m0 bodyF{part}.0", "compute", part, part + 1.0) for part in range(1, 13)]
    draw(Timeline.of([*chain, Span("m0 startF1.0", "tp", 1.5, 2.5)]), tmp_path / "step.png")
    assert [text.get_text() for text in drawn[0].axes[1].get_yticklabels()] == ["compute"]
