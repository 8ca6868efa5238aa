"""The HTML report: what it holds, and that a browser draws it, pans, zooms and reads an op."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from domino_lm.schedule.timeline import Span, Timeline, read_trace
from domino_lm.tools import plot_timeline
from domino_lm.watch.report import write_report

SPANS = (
    Span("m0 bodyF2.0", "compute", 0.0, 0.004),
    Span("m0 startF2.0", "tp", 0.004, 0.009, 2 << 20),
    Span("m0 waitF2.0", "compute", 0.006, 0.009),
    Span("m0 bodyB2.*", "compute", 0.009, 0.010),
)
TIMELINE = Timeline.of(SPANS, "a <step>", {"rows": "2"})
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")


def dump(page: Path, fragment: str = "", script: str = "") -> str:
    """The page's document after its script, and then ``script``, have run in a headless browser."""
    assert BROWSER is not None
    tried = page.with_name("tried.html")
    tried.write_text(page.read_text().replace("</html>", f"<script>{script}</script></html>"))
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={page.parent / 'profile'}",
        "--window-size=1280,900",
        "--virtual-time-budget=1000",
        "--dump-dom",
    ]
    done = subprocess.run([*command, f"{tried.as_uri()}{fragment}"], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout


def details(document: str) -> dict[str, str]:
    """The list that describes the selected op."""
    listed = re.search(r'<dl id="details">(.*?)</dl>', document, re.DOTALL)
    assert listed is not None
    return {name: html.unescape(value) for name, value in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", listed[1])}


def view(document: str) -> tuple[float, float]:
    """What is visible, in microseconds."""
    found = re.search(r'data-view="([\d.]+) ([\d.]+)"', document)
    assert found is not None
    return float(found[1]), float(found[2])


@pytest.fixture
def page(tmp_path: Path) -> Path:
    write_report([TIMELINE], tmp_path / "step.html")
    return tmp_path / "step.html"


def test_the_page_loads_nothing(page: Path) -> None:
    assert re.findall(r"(?:src|href)=|https?:|@import|url\(", page.read_text()) == []


def test_titles_cannot_break_the_page(page: Path) -> None:
    assert "<step>" not in page.read_text()


def test_nothing_unfinished_is_left(page: Path) -> None:
    assert os.listdir(page.parent) == ["step.html"]


def test_the_tool_writes_the_page_beside_the_trace(tmp_path: Path) -> None:
    TIMELINE.write_trace(tmp_path / "step.json")
    assert plot_timeline.main([str(tmp_path / "step.json"), "--html"]) == 0
    assert "m0 waitF2.0" in (tmp_path / "step.html").read_text()


@needs_browser
def test_a_collective_shows_its_bytes_and_how_long_compute_waited_for_it(page: Path) -> None:
    shown = details(dump(page, "#op=3"))
    assert (shown["op"], shown["lane"], shown["bytes"], shown["exposed"]) == ("m0 startF2.0", "TP link", "2.00 MiB", "3.000 ms")
    assert shown["duration"] == "5.000 ms"


@needs_browser
def test_the_whole_step_is_visible_at_first(page: Path) -> None:
    document = dump(page)
    assert view(document) == (0.0, 10000.0)
    assert f'data-spans="{len(SPANS)}"' in document


@needs_browser
def test_the_wheel_zooms_around_the_pointer_and_dragging_pans(page: Path) -> None:
    wheel = "const c = charts[0].canvas, box = c.getBoundingClientRect(); c.dispatchEvent(new WheelEvent('wheel', {deltaY: -1, clientX: box.right, cancelable: true}));"
    assert view(dump(page, script=wheel)) == (2000.0, 10000.0)
    drag = "c.dispatchEvent(new PointerEvent('pointerdown', {clientX: 300})); window.dispatchEvent(new PointerEvent('pointermove', {clientX: 400}));"
    first, last = view(dump(page, script=wheel + drag))
    assert 1000 < first < 1900
    assert last - first == pytest.approx(8000, abs=1)


@needs_browser
def test_a_click_on_an_op_reads_it(page: Path) -> None:
    click = """
        const c = charts[0].canvas, box = c.getBoundingClientRect(), there = {clientX: x(c, 7000) + box.left, clientY: box.top + 10};
        c.dispatchEvent(new PointerEvent('pointerdown', there)); window.dispatchEvent(new PointerEvent('pointerup', there));
    """
    shown = details(dump(page, script=click))
    assert (shown["op"], shown["exposed"]) == ("m0 waitF2.0", "3.000 ms")


@needs_browser
def test_keys_zoom_and_show_everything_again(page: Path) -> None:
    press = "window.dispatchEvent(new KeyboardEvent('keydown', {key: '+'}));"
    assert view(dump(page, script=press)) == (2500.0, 7500.0)
    assert view(dump(page, script=press + press.replace("+", "0"))) == (0.0, 10000.0)


def test_traces_share_a_page_but_not_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = [str(tmp_path / f"{name}.json") for name in ("measured", "predicted")]
    for trace in traces:
        Timeline.of(SPANS, Path(trace).stem).write_trace(trace)
    assert plot_timeline.main([*traces, "--html", "--output", str(tmp_path / "both.html")]) == 0
    assert "measured and predicted" in (tmp_path / "both.html").read_text()
    with pytest.raises(SystemExit):
        plot_timeline.main(traces)
    assert "add --html" in capsys.readouterr().err


def test_a_trace_keeps_the_bytes_of_its_collectives(tmp_path: Path) -> None:
    TIMELINE.write_trace(tmp_path / "step.json")
    assert [span.size_bytes for span in read_trace(tmp_path / "step.json").on("tp")] == [2 << 20]
