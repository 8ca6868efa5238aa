"""Draw the curves of one or several runs: ``domino-lm-plot runs/a/metrics.jsonl runs/b --output curves.png``."""

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from domino_lm.schedule.render import write_png
from domino_lm.watch.metrics_file import read_lines

MARKERS = "os^Dvp"
"""Markers of the validation sets, in turn."""


def flag_parser() -> argparse.ArgumentParser:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(description="Draw loss, learning rate, gradient norm and throughput of one or several runs.")
    parser.add_argument("runs", nargs="+", type=Path, help="a --metrics-file, a --tensorboard-dir, or a folder with a metrics.jsonl")
    parser.add_argument("--output", type=Path, default=Path("run.png"), help="picture to write; default: run.png")
    parser.add_argument("--names", nargs="+", help="a name for each run in the legend; default: what tells their paths apart")
    parser.add_argument("--x", choices=["iteration", "samples"], default="iteration", help="what the curves run along")
    parser.add_argument("--smoothing", type=float, default=0.0, help="0 to below 1: weight of earlier points in a running mean; default: 0")
    parser.add_argument(
        "--follow", type=float, nargs="?", const=10.0, metavar="SECONDS", help="draw again whenever a run has gone on, until Ctrl-C"
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Parse, read, draw, and return the exit status."""
    chosen = flag_parser().parse_args(arguments)
    names = chosen.names or distinct_names(chosen.runs)
    if len(names) != len(chosen.runs):
        print(f"--names gives {len(names)} names for {len(chosen.runs)} runs; give one each.", file=sys.stderr)
        return 2
    if not 0 <= chosen.smoothing < 1 or (chosen.follow is not None and chosen.follow <= 0):
        print("--smoothing is at least 0 and below 1, and --follow a number of seconds above 0.", file=sys.stderr)
        return 2
    try:
        if chosen.follow is None:
            _draw_once(chosen, names)
        else:
            _follow(chosen, names)
    except KeyboardInterrupt:
        return 0
    except RunCurvesError as error:
        print(error, file=sys.stderr)
        return 1
    except ImportError:
        print("the picture needs matplotlib: pip install 'domino-lm[plot]'", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{chosen.output}: cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _draw_once(chosen: argparse.Namespace, names: Sequence[str]) -> None:
    """Draw the runs that hold something, and say what the others, and these, do not. Raises RunCurvesError if none does."""
    found, faults = {}, []
    for path, name in zip(chosen.runs, names, strict=True):
        try:
            found[name] = read_run(path)
        except RunCurvesError as error:
            faults.append(str(error))
    if not found:
        raise RunCurvesError("\n".join(faults))
    draw(list(found.values()), list(found), chosen.x, chosen.output, chosen.smoothing)
    print(chosen.output)
    for line in [*faults, *missing(found, chosen.x)]:
        print(f"not drawn: {line}", file=sys.stderr)


def _follow(chosen: argparse.Namespace, names: Sequence[str]) -> None:
    """Draw again whenever a file of a run has changed; runs may begin later."""
    drawn: object = None
    while True:
        seen = [_last_change(path) for path in chosen.runs]
        if seen != drawn and any(seen):
            drawn = seen
            try:
                _draw_once(chosen, names)
            except RunCurvesError as error:  # it has only begun
                print(error, file=sys.stderr)
        time.sleep(chosen.follow)


def _last_change(path: Path) -> int:
    """Time of the last change of a file, or of any in a folder, in ns; 0 if there is none."""
    files = [path, *path.iterdir()] if path.is_dir() else [path]
    return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)


def missing(runs: Mapping[str, "RunCurves"], along: str) -> list[str]:
    """A line for each quantity that some of the runs, by name, do not hold."""
    absent = {label: [name for name, run in runs.items() if not run.points(quantity, along)] for quantity, label in PANELS.items()}
    absent["validation loss"] = [name for name, run in runs.items() if not run.evaluations]
    return [f"{label.partition(' (')[0]}, which is not in {', '.join(names)}" for label, names in absent.items() if names]


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path that differ from the others'."""
    parts = [path.with_suffix("").parts for path in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names) and "metrics" not in names:
            return [name.removesuffix("/metrics") for name in names]
    return [str(path) for path in paths]


def draw(runs: Sequence["RunCurves"], names: Sequence[str], along: str, path: Path, smoothing: float = 0.0) -> None:
    """Write one picture with a panel for each quantity that a run holds; the file appears whole or not at all."""
    from matplotlib.figure import Figure

    shown = [quantity for quantity in PANELS if any(run.points(quantity, along) for run in runs)]
    shown = shown or ["lm_loss"]  # evaluations alone
    columns = min(len(shown), 2)
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(6.5 * columns, 4 * rows + 0.5), dpi=110, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, quantity in zip(panels, shown, strict=False):
        for number, (run, name) in enumerate(zip(runs, names, strict=True)):
            _panel(axes, run, name, quantity, along, f"C{number}", smoothing)
        axes.set_xlabel(along if along == "iteration" else "samples consumed", fontsize=9)
        axes.set_ylabel(PANELS[quantity], fontsize=9)
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=9)
        axes.margins(x=0.01)
        if quantity == "tokens_per_s":
            axes.set_ylim(bottom=0)  # once all runs are drawn, since it fixes the upper end too
        without = [name for run, name in zip(runs, names, strict=True) if not run.points(quantity, along)]
        if without:
            axes.set_title(f"not in {', '.join(without)}", fontsize=9, color="grey", loc="right")
    for axes in panels[len(shown) :]:
        axes.set_axis_off()
    handles = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    title = f"smoothed by {smoothing:g}; faint: as logged" if smoothing else None
    figure.legend(
        handles.values(), handles, loc="outside lower center", ncols=min(len(handles), 4), frameon=False, fontsize=9, title=title
    ).get_title().set_fontsize(9)
    write_png(figure, path)


def _panel(axes: Any, run: "RunCurves", name: str, quantity: str, along: str, colour: str, smoothing: float) -> None:
    """One quantity of one run of ``colour`` (C0, C1, ...); the loss with each validation set as dots, noise behind a smooth curve."""
    points = run.points(quantity, along)
    x, y = [x for x, _ in points], [y for _, y in points]
    smooth = y
    if smoothing and quantity != "learning_rate":
        smooth = running_mean(y, smoothing)
    elif quantity == "tokens_per_s" and len(y) > 20:
        smooth = running_median(y)
    if smooth is not y:
        axes.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
    if y:
        axes.plot(x, smooth, color=colour, label=name, linewidth=1.2, marker="." if len(y) == 1 else None)
    if quantity == "lm_loss":
        for evaluated, marker in zip(run.evaluations, cycle(MARKERS)):
            label = f"{name}, validation{evaluated.removeprefix(VALIDATION).replace('-', ' set ')}"
            dots = run.points(evaluated, along)
            axes.plot([x for x, _ in dots], [y for _, y in dots], marker, color=colour, markersize=5, markeredgecolor="black", label=label)
    for at in run.resumed_at(along):
        axes.axvline(at, color=colour, linestyle=(2 * int(colour[1:]), (2, 2)), linewidth=1.2, label=f"{name}, started again")


def running_mean(values: Sequence[float], weight: float) -> list[float]:
    """Means in which each earlier value counts ``weight`` times the one after it, without a bias at the beginning."""
    means, total, count = [], 0.0, 0.0
    for value in values:
        total, count = weight * total + value, weight * count + 1
        means.append(total / count)
    return means


def running_median(values: Sequence[float], width: int = 11) -> list[float]:
    """Median of each value and its neighbours."""
    half = width // 2
    windows = [sorted(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]
    return [window[len(window) // 2] for window in windows]


PANELS = {
    "lm_loss": "loss (nats per token)",
    "learning_rate": "learning rate of the next step",
    "grad_norm": "gradient norm, before clipping",
    "tokens_per_s": "throughput (tokens/s over all ranks)",
}
TAGS = {
    "lm loss": "lm_loss",
    "learning-rate": "learning_rate",
    "grad-norm": "grad_norm",
    "speed/tokens-per-second": "tokens_per_s",
}
"""Their TensorBoard tags; Megatron itself writes no tokens per second."""

VALIDATION = "validation_loss"
"""Of several validation sets each has a number behind this name: ``validation_loss-0``."""

VALIDATION_TAG = re.compile(r"lm loss validation(-\d+)?")

Point = tuple[int, int | None, float]


class RunCurvesError(ValueError):
    """A file or folder that holds no curves; the message names it and what would."""


@dataclass(frozen=True)
class RunCurves:
    """Quantities of one run by name, each a list of iteration, samples and value."""

    values: Mapping[str, list[Point]]
    resumes: Sequence[tuple[int, int | None]] = ()
    """Iteration and samples after which the run was started again."""

    @property
    def evaluations(self) -> list[str]:
        """Quantities that are losses on validation sets."""
        return sorted(name for name in self.values if name.startswith(VALIDATION))

    def resumed_at(self, along: str) -> list[int]:
        """Where the run was started again, along ``iteration`` or ``samples``."""
        return [at for pair in self.resumes if (at := pair[along != "iteration"]) is not None]

    def points(self, quantity: str, along: str) -> list[tuple[int, float]]:
        """The values of one quantity along ``iteration`` or ``samples``; empty if the run has none."""
        number = 0 if along == "iteration" else 1
        return [(point[number], point[2]) for point in self.values.get(quantity, ()) if point[number] is not None]  # type: ignore[misc]


def read_run(path: Path) -> RunCurves:
    """Curves of a metrics file, or of a folder with TensorBoard events. Raises RunCurvesError if there are none."""
    metrics = path / "metrics.jsonl" if path.is_dir() else path
    run = _from_lines(metrics) if metrics.exists() or not path.is_dir() else _from_events(path)
    if not run.values:
        raise RunCurvesError(f"{path} holds no step of a run; give what --metrics-file or --tensorboard-dir wrote.")
    return run


def _from_lines(path: Path) -> RunCurves:
    found: dict[str, list[Point]] = {}
    resumes: list[tuple[int, int | None]] = []
    try:
        lines = read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RunCurvesError(f"{path} cannot be read: {error}.") from error
    for line in lines:
        if not isinstance(line, dict) or "iteration" not in line:
            continue
        iteration, samples, split = line["iteration"], line.get("consumed_samples"), str(line.get("split", ""))
        if "lm_loss" in line:
            values = {name: line.get(name) for name in PANELS}
        else:
            values = {VALIDATION + split.removeprefix("valid"): line.get(VALIDATION)} if split.startswith("valid") else {}
        if line.get("resumed"):
            resumes.append((iteration - 1, None if samples is None else samples - line.get("batch_size", 0)))
        for name, value in values.items():
            if value is not None:
                found.setdefault(name, []).append((iteration, samples, value))
    return RunCurves(found, resumes)


def _from_events(folder: Path) -> RunCurves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    present = set(events.Tags()["scalars"])
    names = {tag: name for tag, name in TAGS.items() if tag in present}
    names |= {tag: VALIDATION + (match[1] or "") for tag in present if (match := VALIDATION_TAG.fullmatch(tag))}
    found: dict[str, list[Point]] = {}
    both = [events.Scalars(tag) for tag in ("learning-rate", "learning-rate vs samples") if tag in present]
    samples_after = {at.step: after.step for at, after in zip(*both, strict=False)} if len(both) == 2 else {}
    for tag, name in names.items():
        samples = events.Scalars(f"{tag} vs samples") if f"{tag} vs samples" in present else []
        steps = [event.step for event in samples] or [samples_after.get(event.step) for event in events.Scalars(tag)]
        found[name] = [(event.step, at, event.value) for event, at in zip(events.Scalars(tag), steps, strict=False)]
    texts = [tag for tag in events.Tags()["tensors"] if tag.endswith("/text_summary")]  # every start writes its settings
    begins = {event.step for event in events.Tensors(texts[0])} if texts else set()
    return RunCurves(found, [(begin, samples_after.get(begin)) for begin in sorted(begins) if begin])


if __name__ == "__main__":
    sys.exit(main())
