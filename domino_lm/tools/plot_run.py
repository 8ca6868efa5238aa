"""Draw the curves of one or several runs: ``python tools/plot_run.py runs/a/metrics.jsonl runs/b --output curves.png``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from domino_lm.schedule.render import write_png
from domino_lm.tools.run_curves import PANELS, VALIDATION, RunCurves, RunCurvesError, read_run

MARKERS = "os^Dvp"
"""Markers of the validation sets, in turn."""


def main(arguments: list[str] | None = None) -> int:
    """Parse, read, draw, and return the exit status."""
    parser = argparse.ArgumentParser(description="Draw loss, learning rate, gradient norm and throughput of one or several runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="a --metrics-file, or a --tensorboard-dir")
    parser.add_argument("--output", type=Path, default=Path("run.png"), help="picture to write; default: run.png")
    parser.add_argument("--names", nargs="+", help="a name for each run in the legend; default: what tells their paths apart")
    parser.add_argument("--x", choices=["iteration", "samples"], default="iteration", help="what the curves run along")
    chosen = parser.parse_args(arguments)
    names = chosen.names or distinct_names(chosen.runs)
    if len(names) != len(chosen.runs):
        print(f"--names gives {len(names)} names for {len(chosen.runs)} runs; give one each.", file=sys.stderr)
        return 2
    try:
        draw([read_run(path) for path in chosen.runs], names, chosen.x, chosen.output)
    except RunCurvesError as error:
        print(error, file=sys.stderr)
        return 1
    except ImportError:
        print("the picture needs matplotlib: pip install 'domino-lm[plot]'", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{chosen.output}: cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(chosen.output)
    return 0


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path that differ from the others'."""
    parts = [path.with_suffix("").parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names) and "metrics" not in names:
            return [name.removesuffix("/metrics") for name in names]
    return [str(path) for path in paths]


def draw(runs: Sequence[RunCurves], names: Sequence[str], along: str, path: Path) -> None:
    """Write one picture with a panel for each quantity; the file appears whole or not at all."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8), dpi=110, layout="constrained")
    grid = figure.subplots(2, 2)
    for axes, (quantity, label) in zip(grid.flat, PANELS.items(), strict=True):
        for number, (run, name) in enumerate(zip(runs, names, strict=True)):
            _panel(axes, run, name, quantity, along, f"C{number}")
        axes.set_xlabel(along if along == "iteration" else "samples consumed", fontsize=9)
        axes.set_ylabel(label, fontsize=9)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=9)
        axes.margins(x=0.01)
        if quantity == "tokens_per_s":
            axes.set_ylim(bottom=0)  # once all runs are drawn, since it fixes the upper end too
    grid[0, 0].legend(fontsize=9)
    write_png(figure, path)


def _panel(axes: Any, run: RunCurves, name: str, quantity: str, along: str, colour: str) -> None:
    """One quantity of one run of ``colour`` (C0, C1, ...); the loss with each validation set as dots, throughput with its noise behind a running median."""
    points = run.points(quantity, along)
    x, y = [x for x, _ in points], [y for _, y in points]
    if quantity == "tokens_per_s" and len(y) > 20:
        axes.plot(x, y, color=colour, alpha=0.2, linewidth=0.8)
        axes.plot(x, running_median(y), color=colour, label=name)
    else:
        axes.plot(x, y, color=colour, label=name, linewidth=1.2)
    if quantity == "lm_loss":
        for evaluated, marker in zip(run.evaluations, cycle(MARKERS)):
            label = f"{name}, validation{evaluated.removeprefix(VALIDATION).replace('-', ' set ')}"
            dots = zip(*run.points(evaluated, along), strict=True)
            axes.plot(*dots, marker, color=colour, markersize=5, markeredgecolor="black", label=label)
    for number, at in enumerate(run.resumed_at(along)):
        axes.axvline(
            at, color=colour, linestyle=(2 * int(colour[1:]), (2, 2)), linewidth=1.2, label=None if number else f"{name}, started again"
        )


def running_median(values: Sequence[float], width: int = 11) -> list[float]:
    """Median of each value and its neighbours."""
    half = width // 2
    windows = [sorted(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
    return [window[len(window) // 2] for window in windows]
