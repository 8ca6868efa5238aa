"""A timeline as one self-contained HTML page: pan, zoom, and read every op. It opens from disk and loads nothing else."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from domino_lm.schedule.ops import COMPUTE, DP_LINK, TP_LINK, Kind, Op, is_gather
from domino_lm.schedule.timeline import LANE_NAMES, Span, Timeline

LANES = (COMPUTE, TP_LINK, DP_LINK)
PHASE_NAMES = {"F": "forward", "B": "backward", "S": "step"}
MICROSECONDS = 1e6


def write_report(timelines: Iterable[Timeline], path: Path | str) -> None:
    """Write a page that shows the timelines under each other on one time axis, measured and predicted say.

    A click on an op, or its number after ``#op=`` in the address, shows its name, lane, start, duration, bytes and how
    long compute waited for it. The file appears whole or not at all.
    """
    path = Path(path)
    shown = [_page_data(timeline) for timeline in timelines]
    title = " and ".join(dict.fromkeys(each["title"] for each in shown))
    data = json.dumps(shown, separators=(",", ":")).replace("<", "\\u003c")
    unfinished = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        unfinished.write_text(PAGE.replace("@TITLE@", html.escape(title)).replace("@DATA@", data), encoding="utf-8")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _page_data(timeline: Timeline) -> dict[str, Any]:
    """What the page's script draws; times in microseconds."""
    exposed = {name: timeline.exposed_s(phase) * MICROSECONDS for phase, name in PHASE_NAMES.items()}
    tracks = [(lane, track) for lane in LANES for track in timeline.tracks(lane)]
    return {
        "title": timeline.title or "timeline of one step",
        "meta": dict(timeline.meta),
        "makespan": timeline.makespan_s * MICROSECONDS,
        "exposed": exposed,
        "tracks": [{"name": LANE_NAMES[lane], "spans": _track_data(timeline, track)} for lane, track in tracks],
    }


def _track_data(timeline: Timeline, track: Iterable[Span]) -> list[dict[str, Any]]:
    waits = _waits(timeline)
    return [_span_data(span, waits) for span in track]


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
    if op.phase == "S":
        what = "updated parameters" if is_gather(op) else "gradients"
        return f"{op.kind}, {op.collective}, {what} of bucket {op.part}" if op.kind is not Kind.STEP else "optimizer step"
    collective = f", {op.collective}" if op.kind in (Kind.START, Kind.WAIT) else ""
    return f"{op.kind}{collective}, {PHASE_NAMES[op.phase]} of part {op.part}, row {op.row}, column {op.col}, micro-batch {op.micro}"


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>@TITLE@</title>
<style>
  body { font: 14px system-ui, sans-serif; margin: 1rem; color: #222; background: #fff; }
  h1 { font-size: 1.2rem; }
  h2 { font-size: 1rem; margin: 1rem 0 .2rem; }
  canvas { width: 100%; display: block; border: 1px solid #ccc; cursor: grab; touch-action: none; }
  canvas:focus { outline: 2px solid #1f5a99; }
  #details { display: grid; grid-template-columns: max-content auto; gap: .1rem 1rem; min-height: 9rem; margin: .5rem 0; }
  #details dt { color: #666; } #details dd { margin: 0; font-family: ui-monospace, monospace; }
  .legend span { display: inline-block; margin-right: 1rem; } .legend i { display: inline-block; width: 1em; height: 1em; vertical-align: -2px; margin-right: .3em; }
  button { font: inherit; }
</style>
<h1>@TITLE@</h1>
<p>Drag to pan, turn the wheel or press + and - to zoom, click an op to read it, 0 shows everything.
  <button id="in">zoom in</button> <button id="out">zoom out</button> <button id="all">whole step</button></p>
<div id="charts"></div>
<dl id="details"><dt>op</dt><dd>none selected</dd></dl>
<p class="legend" id="legend"></p>
<script>
"use strict";
const charts = @DATA@;
const ROWS = [["#1f5a99", "#7fb2e5"], ["#c05a00", "#f5ab66"], ["#1b7837", "#8fcf9b"], ["#762a83", "#c2a5cf"]];
const STEP = "#8c8c8c", WAIT = "#d62728", HEIGHT = 26, LEFT = 80, AXIS = 22;
const extent = Math.max(...charts.map(chart => chart.makespan), 1);
const spans = [];
let from = 0, to = extent, selected = -1;

const isWait = span => span.exposed !== undefined && span.bytes === undefined;
const colour = span => span.phase === "S" ? STEP : ROWS[span.row % ROWS.length][span.phase === "F" ? 1 : 0];
const time = us => us >= 1000 ? (us / 1000).toFixed(3) + " ms" : us.toFixed(1) + " us";
const size = bytes => !bytes ? "not recorded" : bytes >= 1048576 ? (bytes / 1048576).toFixed(2) + " MiB" : bytes >= 1024 ? (bytes / 1024).toFixed(1) + " KiB" : bytes + " B";

function node(tag, text, parent) {
  const made = document.createElement(tag);
  made.textContent = text;
  parent.append(made);
  return made;
}

for (const chart of charts) {
  const about = Object.entries(chart.meta).map(([name, value]) => `${name} ${value}`);
  const exposed = Object.entries(chart.exposed).map(([phase, us]) => `${phase} ${time(us)}`).join(", ");
  const box = document.getElementById("charts");
  node("h2", [chart.title, ...about].join(" | "), box);
  node("div", `${time(chart.makespan)} in all; compute waits for communication: ${exposed}`, box);
  chart.canvas = node("canvas", "", box);
  chart.canvas.tabIndex = 0;
  for (const [height, track] of chart.tracks.entries())
    for (const span of track.spans) spans.push(Object.assign(span, {chart, track, height, number: spans.length}));
  listen(chart.canvas);
}

function x(canvas, us) { return LEFT + (us - from) / (to - from) * (canvas.clientWidth - LEFT); }
function at(canvas, pixel) { return from + (pixel - LEFT) / (canvas.clientWidth - LEFT) * (to - from); }

function draw() {
  for (const chart of charts) {
    const canvas = chart.canvas, ratio = window.devicePixelRatio || 1, height = chart.tracks.length * HEIGHT + AXIS;
    canvas.style.height = height + "px";
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "11px ui-monospace, monospace";
    pen.textBaseline = "middle";
    for (const span of spans) if (span.chart === chart) drawSpan(pen, canvas, span);
    pen.fillStyle = "#fff";
    pen.fillRect(0, 0, LEFT, height);
    pen.fillStyle = "#222";
    chart.tracks.forEach((track, row) => pen.fillText(row && chart.tracks[row - 1].name === track.name ? "" : track.name, 6, (row + .5) * HEIGHT));
    drawAxis(pen, canvas, chart.tracks.length * HEIGHT);
  }
  document.body.dataset.view = `${from.toFixed(1)} ${to.toFixed(1)}`;
}

function drawSpan(pen, canvas, span) {
  const left = x(canvas, span.start), width = Math.max(x(canvas, span.start + span.length) - left, .5), top = span.height * HEIGHT + 2;
  if (left > canvas.clientWidth || left + width < LEFT) return;
  const tall = HEIGHT - 4, visible = Math.max(left, LEFT);
  pen.save();
  pen.beginPath();
  pen.rect(left, top, width, tall);
  pen.clip();
  pen.fillStyle = isWait(span) ? "#fff" : colour(span);
  pen.fillRect(left, top, width - (width > 3 ? .7 : 0), tall);
  if (isWait(span)) {
    pen.strokeStyle = WAIT;
    for (let line = Math.floor((visible - tall) / 6) * 6; line < Math.min(left + width, canvas.clientWidth); line += 6) {
      pen.beginPath(); pen.moveTo(line, top + tall); pen.lineTo(line + tall, top); pen.stroke();
    }
  }
  const name = span.name.split(" ")[1];
  if (left + width - visible > pen.measureText(name).width + 8) {
    if (isWait(span)) { pen.fillStyle = "#fff"; pen.fillRect(visible + 2, top + 3, pen.measureText(name).width + 4, tall - 6); }
    pen.fillStyle = isWait(span) || span.phase === "F" ? "#000" : "#fff";
    pen.fillText(name, visible + 4, top + tall / 2);
  }
  pen.restore();
  if (span.number === selected) { pen.strokeStyle = "#000"; pen.lineWidth = 2; pen.strokeRect(left, top, width, tall); pen.lineWidth = 1; }
}

function drawAxis(pen, canvas, top) {
  const step = 10 ** Math.floor(Math.log10((to - from) / 4));
  for (let tick = Math.ceil(from / step) * step; tick < to; tick += step) {
    const left = x(canvas, tick);
    pen.fillRect(left, top, 1, 4);
    pen.fillText((tick / 1000).toFixed(step < 100 ? 3 : 1) + " ms", left + 2, top + 12);
  }
}

function show(first, last) {
  const width = Math.min(Math.max(last - first, 1), extent);
  from = Math.min(Math.max(first, 0), extent - width);
  to = from + width;
  draw();
}

function zoom(factor, centre = (from + to) / 2) { show(centre - (centre - from) * factor, centre + (to - centre) * factor); }

function select(number) {
  selected = number;
  const span = spans[number], list = document.getElementById("details");
  list.replaceChildren();
  const rows = !span ? {op: "none selected"} : {
    op: span.name, meaning: span.about, lane: span.track.name, start: time(span.start), duration: time(span.length),
    ...(span.bytes === undefined ? {} : {bytes: size(span.bytes)}),
    ...(span.exposed === undefined ? {} : {exposed: time(span.exposed)}),
  };
  for (const [name, value] of Object.entries(rows)) { node("dt", name, list); node("dd", value, list); }
  draw();
}

function hit(canvas, event) {
  const box = canvas.getBoundingClientRect(), us = at(canvas, event.clientX - box.left), row = Math.floor((event.clientY - box.top) / HEIGHT);
  return spans.findIndex(span => span.chart.canvas === canvas && span.height === row && span.start <= us && us <= span.start + span.length);
}

function listen(canvas) {
  let grabbed = null;
  canvas.addEventListener("wheel", event => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : .8, at(canvas, event.clientX - canvas.getBoundingClientRect().left));
  }, {passive: false});
  canvas.addEventListener("pointerdown", event => { grabbed = {pixel: event.clientX, from, to, moved: false}; });
  window.addEventListener("pointermove", event => {
    if (!grabbed) return;
    grabbed.moved ||= Math.abs(event.clientX - grabbed.pixel) > 3;
    const moved = (grabbed.pixel - event.clientX) / (canvas.clientWidth - LEFT) * (grabbed.to - grabbed.from);
    if (grabbed.moved) show(grabbed.from + moved, grabbed.to + moved);
  });
  window.addEventListener("pointerup", event => {
    if (grabbed && !grabbed.moved) { select(hit(canvas, event)); history.replaceState(null, "", "#op=" + selected); }
    grabbed = null;
  });
}

window.addEventListener("keydown", event => {
  const width = to - from;
  ({"+": () => zoom(.5), "=": () => zoom(.5), "-": () => zoom(2), "0": () => show(0, extent),
    ArrowLeft: () => show(from - width / 10, to - width / 10), ArrowRight: () => show(from + width / 10, to + width / 10)})[event.key]?.();
});
window.addEventListener("resize", draw);
document.getElementById("in").onclick = () => zoom(.5);
document.getElementById("out").onclick = () => zoom(2);
document.getElementById("all").onclick = () => show(0, extent);
const legend = document.getElementById("legend"), rows = [...new Set(spans.filter(s => s.phase !== "S").map(s => s.row))].sort();
const entries = rows.flatMap(row => [[`row ${row} forward`, ROWS[row % ROWS.length][1]], [`row ${row} backward`, ROWS[row % ROWS.length][0]]]);
for (const [name, paint] of [...entries, ["gradient reduction, step", STEP], ["hatched: compute waits", WAIT]]) {
  const entry = node("span", name, legend), patch = document.createElement("i");
  patch.style.background = paint;
  entry.prepend(patch);
}
const asked = new URLSearchParams(location.hash.slice(1)).get("op");
document.body.dataset.spans = spans.length;
select(asked === null ? -1 : Number(asked));
</script>
</html>
"""
