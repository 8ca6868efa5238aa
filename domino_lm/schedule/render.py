"""Draws a timeline, predicted or measured, as a picture. Needs matplotlib, which nothing else in the package does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from domino_lm.schedule.ops import ALL_ROWS, COMPUTE, DP_LINK, TP_LINK, Kind, Op, is_gather
from domino_lm.schedule.timeline import LANE_NAMES, Span, Timeline, whole_file

MILLISECONDS = 1e3
LANES = (COMPUTE, TP_LINK, DP_LINK)
ENLARGED_PARTS = 4
PHASE_NAMES = {"F": "forward", "B": "backward", "S": "step"}
PHASE_SHADES = {"F": "#eef4fb", "B": "#fdf3e7", "S": "#eeeeee"}
# For each row a dark colour (backward) and a light one (forward), told apart by the colour-blind too.
ROW_COLOURS = (("#1f5a99", "#7fb2e5"), ("#c05a00", "#f5ab66"), ("#1b7837", "#8fcf9b"), ("#762a83", "#c2a5cf"))
KINDS = {
    Kind.LOCAL: "residual and norm, without communication",
    Kind.BODY: "a sharded part's first GEMM and attention or activation",
    Kind.TAIL: "its last GEMM, whose results the ranks add up",
    Kind.WGRAD: "weight gradients",
    Kind.RECOMPUTE: "forward again, for backward",
    Kind.LOSS: "cross entropy",
    Kind.START: "a collective under way",
    Kind.WAIT: "compute waits for one",
    Kind.MOMENTUM: "momentum of matrices that are updated whole",
    Kind.ORTHOGONALIZE: "their update: Newton-Schulz",
    Kind.STEP: "optimizer",
}
STEP_COLOUR, EXPOSED_COLOUR = "#8c8c8c", "#d62728"
# Below this share of the panel's width a name does not fit into its bar.
_LABEL_WIDTH = 0.018
# A lane whose bars are all narrower than this share looks empty, as the link of a single replica does.
_VISIBLE_WIDTH = 2e-4


class MissingMatplotlibError(ImportError):
    """The picture cannot be drawn here; the message says what to install."""


def draw(timeline: Timeline, path: Path | str) -> None:
    """Write the timeline as a PNG: the whole step above, forward and backward of a few parts enlarged below.

    The file appears whole or not at all. Raises MissingMatplotlibError.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingMatplotlibError("the timeline's picture needs matplotlib: pip install 'domino-lm[plot]'") from error
    figure = Figure(figsize=(16, 9), dpi=110, layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 1.15))
    whole, *zooms = figure.add_subplot(grid[0, :]), figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    _panel(whole, timeline, 0.0, timeline.makespan_s, "whole step")
    for axes, (phase, start_s, end_s, title) in zip(zooms, _zooms(timeline), strict=False):
        _panel(axes, timeline, start_s, end_s, title, labels=True)
        whole.axvspan(start_s * MILLISECONDS, end_s * MILLISECONDS, fill=False, edgecolor="black", linewidth=1.2, zorder=5)
        whole.text(start_s * MILLISECONDS, 0.99, f" {phase}", fontsize=8, va="top", transform=whole.get_xaxis_transform())
    for axes in [axes for axes in zooms if not axes.has_data()]:
        axes.set_axis_off()
    figure.suptitle(_heading(timeline), fontsize=11)
    handles = _legend(timeline)
    legend = {"handles": handles, "title": _names_explained(timeline), "title_fontsize": 8, "ncols": min(len(handles), 8)}
    figure.legend(loc="outside lower center", frameon=False, fontsize=9, **legend)
    write_png(figure, Path(path))


def write_png(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib's; the file appears whole or not at all."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with whole_file(path) as unfinished, unfinished.open("wb") as file:
        FigureCanvasAgg(figure).print_png(file)


def _heading(timeline: Timeline) -> str:
    """Title and settings, then how long the step took and how long compute waited in it."""
    exposed = ", ".join(f"{name} {timeline.exposed_s(phase) * MILLISECONDS:.2f} ms" for phase, name in PHASE_NAMES.items())
    about = "   ".join([timeline.title or "timeline of one step", *(f"{key} {value}" for key, value in timeline.meta.items())])
    return f"{about}\n{timeline.makespan_s * MILLISECONDS:.2f} ms in all; compute waits for communication: {exposed}"


def _zooms(timeline: Timeline) -> Iterable[tuple[str, float, float, str]]:
    """Phase, start, end and title of two norms and two sharded parts amid the chain in the last micro-batch, forward and backward."""
    last = timeline.micro_batches()[-1] if timeline.spans else []
    windows = max((span.op.part for span in last if span.op.phase != "S"), default=0) // ENLARGED_PARTS
    first = windows // 2 * ENLARGED_PARTS + 1
    for phase in "FB":
        inside = [span for span in last if span.op.phase == phase and first <= span.op.part < first + ENLARGED_PARTS]
        if windows and inside:
            yield phase, inside[0].start_s, inside[-1].end_s, f"{PHASE_NAMES[phase]} of parts {first} to {first + ENLARGED_PARTS - 1}"


def _panel(axes: Any, timeline: Timeline, start_s: float, end_s: float, title: str, labels: bool = False) -> None:
    """Lanes in which something happens from top to bottom, time in ms; ``labels`` writes ops into the bars that they fit."""
    tracks = list(_tracks(timeline, start_s, end_s))
    for phase, band_start_s, band_end_s in _bands(timeline.on(COMPUTE)):
        axes.axvspan(band_start_s * MILLISECONDS, band_end_s * MILLISECONDS, color=PHASE_SHADES[phase], zorder=0, linewidth=0)
    for height, (_, track) in enumerate(tracks):
        for span in track:
            _bar(axes, span, height)
            first_s, last_s = max(span.start_s, start_s), min(span.end_s, end_s)
            if labels and last_s - first_s > _LABEL_WIDTH * (end_s - start_s):
                _write_name(axes, span, (first_s + last_s) / 2, height)
    axes.set_yticks(range(len(tracks)), [name for name, _ in tracks])
    axes.set_ylim(len(tracks) - 0.4, -0.6)
    axes.set_xlim(start_s * MILLISECONDS, end_s * MILLISECONDS)
    axes.set_xlabel("ms", fontsize=9)
    axes.set_title(title, fontsize=10, loc="left")
    axes.tick_params(labelsize=9)


def _tracks(timeline: Timeline, start_s: float, end_s: float) -> Iterable[tuple[str, list[Span]]]:
    """Name and spans of each track on which something can be seen between two times."""
    for lane in LANES:
        for index, track in enumerate(timeline.tracks(lane)):
            seen = [span for span in track if span.end_s > start_s and span.start_s < end_s]
            if any(span.duration_s > _VISIBLE_WIDTH * (end_s - start_s) for span in seen):
                yield LANE_NAMES[lane] + (f" ({index + 1})" if index else ""), seen


def _bands(compute: Sequence[Span]) -> Iterable[tuple[str, float, float]]:
    """Stretches of one phase on the compute lane; reductions that start in backward, or gathers that arrive in forward, do not split one."""
    band: list[Any] = []
    for span in compute:
        phase = span.op.phase if span.op.kind is not Kind.START and not is_gather(span.op) else None
        if band and phase in (None, band[0]):
            band[2] = span.end_s
        else:
            if band:
                yield band[0], band[1], band[2]
            band = [phase or span.op.phase, span.start_s, span.end_s]
    if band:
        yield band[0], band[1], band[2]


def _bar(axes: Any, span: Span, height: int) -> None:
    start, width = span.start_s * MILLISECONDS, span.duration_s * MILLISECONDS
    if span.lane == COMPUTE and span.op.kind is Kind.WAIT:
        axes.barh(height, width, left=start, height=0.8, color="white", edgecolor=EXPOSED_COLOUR, hatch="////", linewidth=0.5, zorder=2)
    else:
        axes.barh(height, width, left=start, height=0.8, color=_colour(span.op), edgecolor="white", linewidth=0.3, zorder=2)


def _write_name(axes: Any, span: Span, middle_s: float, height: int) -> None:
    """The op without its micro-batch, since the panel shows only one; dark bars take white letters, hatched ones a white ground."""
    waits = span.lane == COMPUTE and span.op.kind is Kind.WAIT
    ground = {"facecolor": "white", "edgecolor": "none", "pad": 1.0} if waits else None
    ink = "black" if span.op.phase == "F" or waits else "white"
    name = str(span.op).partition(" ")[2]
    middle = middle_s * MILLISECONDS
    axes.text(middle, height, name, ha="center", va="center", fontsize=7, rotation=90, color=ink, bbox=ground, clip_on=True)


def _colour(op: Op) -> str:
    if op.phase == "S":
        return STEP_COLOUR
    dark, light = ROW_COLOURS[op.row % len(ROW_COLOURS)]
    return light if op.phase == "F" else dark


def _names_explained(timeline: Timeline) -> str:
    """What each kind of op is that occurs, and how to read a name."""
    kinds = {span.op.kind for span in timeline.spans}
    texts = [f"{kind}: {text}" for kind, text in KINDS.items() if kind in kinds]
    name = "tailF4.1c2: tail, forward (B backward, S step), part 4, row 1, column block 2"
    half = (len(texts) + 1) // 2
    return "\n".join("  |  ".join(line) for line in (texts[:half], [*texts[half:], name]))


def _legend(timeline: Timeline) -> list[Any]:
    from matplotlib.patches import Patch

    ops = [span.op for span in timeline.spans]
    handles = []
    for row in sorted({op.row for op in ops if op.phase != "S"}):
        dark, light = ROW_COLOURS[row % len(ROW_COLOURS)]
        name = "all rows" if row == ALL_ROWS else f"row {row}"
        handles += [Patch(color=light, label=f"{name} forward"), Patch(color=dark, label=f"{name} backward")]
    if any(op.phase == "S" for op in ops):
        handles.append(Patch(color=STEP_COLOUR, label="gradient reduction, step"))
    handles.append(Patch(facecolor="white", edgecolor=EXPOSED_COLOUR, hatch="////", label="exposed: compute waits"))
    return handles
