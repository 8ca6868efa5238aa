#!/usr/bin/env python3
"""Predict the published figures of Domino on DGX-H100 and say how far off the predictions are.

    python benchmarks/paper_figures.py          # writes benchmarks/results/paper_figures.{json,md,png}

The figures (tests/golden/paper/, read off the authors' plots to about 0.01) do not state batch sizes, so every result is
given for several. Constants come from datasheets; for each family two are fitted: one factor on the rate of all links, and
the fixed cost of a collective. "Left out" predicts each model with constants fitted to the family's other model alone.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from domino_lm.schedule.render import write_png
from domino_lm.simulate.hardware import HARDWARE, Hardware
from domino_lm.simulate.links import Fabric
from domino_lm.simulate.predict import BASELINE, Setting, named_model, optimum, predict, sliced

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "tests" / "golden" / "paper"
RESULTS = Path(__file__).resolve().parent / "results"
FAMILIES = {"gpt": ("gpt3-6.7b", "gpt3-13b"), "llama": ("llama2-7b", "llama2-13b")}
BATCHES = (4, 8, 16, 32)
SHOWN_BATCH = 16
LINK_FACTORS = (0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2)
OVERHEADS_S = (0.0, 10e-6, 20e-6, 40e-6, 80e-6, 160e-6)
DOMINO = sliced(2)


class Figure(NamedTuple):
    """One published number."""

    model: str
    gpus: int
    seq_length: int
    quantity: str  # speedup, domino_fraction or megatron_fraction
    value: float


class Constants(NamedTuple):
    """What is fitted: a factor on the rates of NVLink, its switch and InfiniBand, and the fixed cost of a collective."""

    link_factor: float
    overhead_s: float


@dataclass(frozen=True)
class Fit:
    """Constants fitted to some models, and the errors they leave on others."""

    constants: Constants
    errors: tuple[float, ...]

    @property
    def mean_absolute_error(self) -> float:
        """Over the figures that were predicted."""
        return mean(map(abs, self.errors))


def published() -> list[Figure]:
    """All 36 numbers that are not shares."""
    figures = []
    for name, quantities in (("gpt_speedup", ["speedup_over_megatron"]), ("llama_fraction", ["domino_fraction", "megatron_fraction"])):
        with (PUBLISHED / f"{name}.csv").open() as file:
            for row in csv.DictReader(file):
                place = row["model"], int(row["gpus"]), int(row["seq_length"])
                figures += [Figure(*place, quantity.removesuffix("_over_megatron"), float(row[quantity])) for quantity in quantities]
    return figures


def published_shares() -> list[tuple[str, str, float]]:
    """Model, GPUs (or "worst") and communication share of a Megatron step."""
    with (PUBLISHED / "comm_share.csv").open() as file:
        return [(row["model"], row["gpus"], float(row["comm_share"])) for row in csv.DictReader(file)]


def machine(constants: Constants | None) -> Hardware:
    """DGX-H100 by its datasheet, or with fitted links."""
    hardware = HARDWARE["dgx-h100"]
    if constants is None:
        return hardware
    fabric, factor = hardware.fabric, constants.link_factor
    assert isinstance(fabric, Fabric)
    assert fabric.switch_bytes_per_s is not None
    local = replace(fabric.local, efficiency=fabric.local.efficiency * factor)
    network = replace(fabric.network, efficiency=fabric.network.efficiency * factor)
    switch = fabric.switch_bytes_per_s * factor
    fitted = replace(fabric, local=local, network=network, switch_bytes_per_s=switch, overhead_s=constants.overhead_s)
    return replace(hardware, fabric=fitted)


def predict_figure(model: str, gpus: int, seq_length: int, batch: int, constants: Constants | None) -> dict[str, float]:
    """Every quantity at one point: one micro-batch of ``batch`` sequences, tensor-parallel over all GPUs."""
    config = named_model(model, seq_length=seq_length)
    setting = Setting(model=config, hardware=machine(constants), tensor_parallel=gpus, micro_batch_size=batch)
    best, megatron, domino = optimum(setting).step_s, predict(setting, BASELINE), predict(setting, DOMINO).step_s
    return {
        "speedup": megatron.step_s / domino,
        "domino_fraction": best / domino,
        "megatron_fraction": best / megatron.step_s,
        "comm_share": 1 - best / megatron.step_s,
    }


def predict_all(task: tuple[int, Constants | None]) -> dict[tuple[str, int, int], dict[str, float]]:
    """Every published point with one batch and one set of constants."""
    batch, constants = task
    points = dict.fromkeys((figure.model, figure.gpus, figure.seq_length) for figure in published())
    return {point: predict_figure(*point, batch, constants) for point in points}


def errors(figures: Iterable[Figure], predicted: dict[tuple[str, int, int], dict[str, float]]) -> tuple[float, ...]:
    """Predicted less published."""
    return tuple(predicted[figure[:3]][figure.quantity] - figure.value for figure in figures)


def fit(grid: dict[Constants, Any], fitted_on: Sequence[Figure], predicted_for: Sequence[Figure]) -> Fit:
    """The constants with the least mean absolute error on ``fitted_on``, judged on ``predicted_for``."""
    best = min(grid, key=lambda constants: mean(map(abs, errors(fitted_on, grid[constants]))))
    return Fit(best, errors(predicted_for, grid[best]))


def study(processes: int, batches: Sequence[int]) -> dict[str, Any]:
    """Fits of both families and of all figures together, for each batch."""
    figures = published()
    constants = [Constants(factor, overhead_s) for factor in LINK_FACTORS for overhead_s in OVERHEADS_S]
    tasks: list[tuple[int, Constants | None]] = [(batch, item) for batch in batches for item in (None, *constants)]
    with multiprocessing.Pool(processes) as pool:
        results = dict(zip(tasks, pool.map(predict_all, tasks, chunksize=4), strict=True))
    report: dict[str, Any] = {"figures": [figure._asdict() for figure in figures], "batches": {}, "shown_batch": SHOWN_BATCH}
    for batch in batches:
        grid = {item: results[batch, item] for item in constants}
        report["batches"][batch] = _study_batch(figures, grid, results[batch, None])
    return report


def _study_batch(figures: Sequence[Figure], grid: dict[Constants, Any], unfitted: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"unfitted": {}, "family": {}, "left_out": {}, "predictions": []}
    for family, models in FAMILIES.items():
        own = [figure for figure in figures if figure.model in models]
        entry["unfitted"][family] = mean(map(abs, errors(own, unfitted)))
        together = fit(grid, own, own)
        entry["family"][family] = {**together.constants._asdict(), "error": together.mean_absolute_error}
        rest = [(model, [f for f in own if f.model == model], [f for f in own if f.model != model]) for model in models]
        apart = {model: fit(grid, others, wanted) for model, wanted, others in rest}
        worst = mean(abs(error) for item in apart.values() for error in item.errors)
        entry["left_out"][family] = {
            "error": worst,
            "models": {model: {**item.constants._asdict(), "error": item.mean_absolute_error} for model, item in apart.items()},
        }
        for model, wanted, _ in rest:
            for figure in wanted:
                row = {"unfitted": unfitted, "left_out": grid[apart[model].constants], "family": grid[together.constants]}
                entry["predictions"].append(
                    {**figure._asdict(), **{name: predicted[figure[:3]][figure.quantity] for name, predicted in row.items()}}
                )
    joint = fit(grid, figures, figures)
    entry["joint"] = {**joint.constants._asdict(), "error": joint.mean_absolute_error}
    return entry


def shares(batch: int, constants: dict[str, Constants]) -> list[dict[str, Any]]:
    """Communication shares of a Megatron step, by datasheet and with the family's constants; "worst" over GPUs and sequences."""
    rows = []
    for model, gpus, value in published_shares():
        counts = (8, 16, 32) if gpus == "worst" else (int(gpus),)
        row: dict[str, Any] = {"model": model, "gpus": gpus, "published": value}
        family = next(name for name in FAMILIES if model.startswith(name))
        for name, item in (("unfitted", None), ("family", constants[family])):
            row[name] = max(predict_figure(model, count, seq, batch, item)["comm_share"] for count in counts for seq in (512, 1024))
        rows.append(row)
    return rows


def table(report: dict[str, Any]) -> str:
    """The results in Markdown."""
    lines = [
        "# Published figures of Domino on DGX-H100, predicted",
        "",
        "Made by `python benchmarks/paper_figures.py`. One micro-batch, tensor parallelism over all GPUs, bf16, two batch rows with a",
        "weight gradient for each; Megatron's order as the baseline (its backward all-reduce behind the weight gradient).",
        "",
        "Mean absolute error by the micro-batch that is assumed (the source states none):",
        "",
        "| micro-batch | family | datasheets alone | left-one-model-out | both models fitted | link factor | overhead a collective |",
        "|---|---|---|---|---|---|---|",
    ]
    for batch, entry in report["batches"].items():
        for family in FAMILIES:
            own = entry["family"][family]
            lines.append(
                f"| {batch} | {family} | {entry['unfitted'][family]:.3f} | {entry['left_out'][family]['error']:.3f} | {own['error']:.3f} "
                f"| {own['link_factor']:g} | {own['overhead_s'] * 1e6:.0f} us |"
            )
        joint = entry["joint"]
        lines.append(
            f"| {batch} | both families at once | | | {joint['error']:.3f} | {joint['link_factor']:g} | {joint['overhead_s'] * 1e6:.0f} us |"
        )
    lines += ["", f"Each figure at micro-batch {report['shown_batch']}:", ""]
    lines += [
        "| model | GPUs | sequence | quantity | published | datasheets | left out | error left out |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["batches"][report["shown_batch"]]["predictions"]:
        lines.append(
            f"| {row['model']} | {row['gpus']} | {row['seq_length']} | {row['quantity']} | {row['value']:.3f} | {row['unfitted']:.3f} "
            f"| {row['left_out']:.3f} | {row['left_out'] - row['value']:+.3f} |"
        )
    lines += ["", "Communication as a share of a Megatron step (never fitted to):", ""]
    lines += ["| model | GPUs | published | datasheets | with the family's constants |", "|---|---|---|---|---|"]
    for row in report["shares"]:
        lines.append(f"| {row['model']} | {row['gpus']} | {row['published']:.2f} | {row['unfitted']:.2f} | {row['family']:.2f} |")
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """Published against predicted, by family; errors by batch."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(15, 5), dpi=110, layout="constrained")
    panels = picture.subplots(1, 3)
    rows = report["batches"][report["shown_batch"]]["predictions"]
    marks = {"speedup": "o", "domino_fraction": "s", "megatron_fraction": "^"}
    colours = {8: "#1f5a99", 16: "#c05a00", 32: "#1b7837"}
    for axes, family in zip(panels, FAMILIES, strict=False):
        own = [row for row in rows if row["model"] in FAMILIES[family]]
        for row in own:
            axes.plot(row["value"], row["left_out"], marks[row["quantity"]], color=colours[row["gpus"]], alpha=0.8)
            axes.plot(row["value"], row["unfitted"], marks[row["quantity"]], color=colours[row["gpus"]], alpha=0.35, fillstyle="none")
        values = [row[name] for row in own for name in ("value", "left_out", "unfitted")]
        ends = min(values) - 0.02, max(values) + 0.02
        axes.plot(ends, ends, color="black", linewidth=0.8)
        axes.set(xlim=ends, ylim=ends, xlabel="published", ylabel="predicted", title=f"{family}, micro-batch {report['shown_batch']}")
        handles = [axes.plot([], [], "o", color=colour, label=f"{gpus} GPUs")[0] for gpus, colour in colours.items()]
        kinds = {row["quantity"] for row in own}
        handles += [axes.plot([], [], mark, color="grey", label=name.replace("_", " "))[0] for name, mark in marks.items() if name in kinds]
        handles.append(axes.plot([], [], "o", color="grey", fillstyle="none", label="datasheets alone")[0])
        axes.legend(handles=handles, frameon=False, fontsize=8)
    for family, colour in zip(FAMILIES, ("#1f5a99", "#c05a00"), strict=True):
        for kind, style in (("left_out", "-o"), ("unfitted", "--o")):
            found = [entry[kind][family] for entry in report["batches"].values()]
            ys = [item["error"] if isinstance(item, dict) else item for item in found]
            panels[2].plot(
                list(report["batches"]), ys, style, color=colour, label=f"{family}, {'left out' if kind == 'left_out' else 'datasheets'}"
            )
    panels[2].axhline(0.06, color="grey", linewidth=0.8)
    panels[2].set(xscale="log", xlabel="micro-batch that is assumed", ylabel="mean absolute error", title="error by batch", ylim=(0, None))
    panels[2].set_xticks(list(report["batches"]), [str(batch) for batch in report["batches"]])
    panels[2].minorticks_off()
    panels[2].legend(loc=(0.55, 0.58), frameon=False, fontsize=8, handlelength=4, markerscale=0.7)  # long enough to tell dashed from solid
    write_png(picture, path)


def main() -> int:
    """Study, write, and return 1 where a left-out error misses the bar at the shown batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="processes that simulate")
    parser.add_argument("--batches", type=int, nargs="+", choices=BATCHES, default=BATCHES, help=f"to assume; {SHOWN_BATCH} always is")
    parser.add_argument("--output", type=Path, default=RESULTS / "paper_figures", help="path of the results without extension")
    chosen = parser.parse_args()
    report = study(chosen.processes, [batch for batch in BATCHES if batch in {*chosen.batches, SHOWN_BATCH}])
    own = report["batches"][SHOWN_BATCH]["family"]
    report["shares"] = shares(SHOWN_BATCH, {name: Constants(own[name]["link_factor"], own[name]["overhead_s"]) for name in FAMILIES})
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    chosen.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    chosen.output.with_suffix(".md").write_text(table(report))
    plot(report, chosen.output.with_suffix(".png"))
    print(table(report))
    return int(any(report["batches"][SHOWN_BATCH]["left_out"][family]["error"] >= 0.06 for family in FAMILIES))


if __name__ == "__main__":
    sys.exit(main())
