#!/usr/bin/env python3
"""Predict the shaped-network benchmark from single kernels and all-reduces on the same links, and compare.

    python benchmarks/predict_shaped.py                                          # calibrate each link and predict
    python benchmarks/predict_shaped.py --measured benchmarks/results/FILE.json  # compare with a benchmark's results

A calibration (domino_lm.simulate.calibrate) never runs a model, and knows neither the benchmark's sizes nor its results. Other
programs change a machine's speed from minute to minute, so results are compared with predictions from the calibrations that
`head_to_head.py --calibrate` made before each of their rounds; both are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.case import OUR_VARIANTS, OURS, Case, Variant, model_of, variants_of
from benchmarks.shaped_network import Link, NetworkError, ShapedNetwork
from domino_lm.model.families.lookup import family_of
from domino_lm.schedule.cuts import resolve_cut
from domino_lm.schedule.ops import DP_LINK, TP_LINK
from domino_lm.schedule.passes import serialize, step_templates
from domino_lm.schedule.step import compute_plan
from domino_lm.simulate.costs import shapes_of
from domino_lm.simulate.hardware import Hardware, read_hardware
from domino_lm.simulate.predict import Setting
from domino_lm.simulate.simulator import simulate

ROOT = Path(__file__).resolve().parent.parent
BAR = 0.10


class Predicted(NamedTuple):
    """One variant of one case on one link."""

    forward_s: float
    backward_s: float

    @property
    def step_s(self) -> float:
        """Both phases."""
        return self.forward_s + self.backward_s


def predict_variant(case: Case, variant: Variant, hardware: Hardware) -> Predicted:
    """Seconds of all micro-batches; there is no optimizer in the benchmark."""
    assert variant.schedule is not None
    setting = Setting(
        model=case.model,
        hardware=hardware,
        tensor_parallel=case.tensor_parallel,
        micro_batch_size=case.micro_batch_size,
        micro_batches=case.micro_batches,
    )
    plan = compute_plan(family_of(case.model).chain, variant.schedule, resolve_cut(variant.schedule, setting.uncut))
    plan = serialize(plan) if variant.serial else plan
    free: Collection[str] = () if variant.communicates else (TP_LINK, DP_LINK)
    shapes = shapes_of(case.model, plan, case.tensor_parallel, hardware, case.micro_batch_size)
    whole = plan.with_ops(chain.from_iterable(step_templates(plan, case.micro_batches)))
    step = simulate(whole, shapes, hardware, free=free)
    return Predicted(step.phase_s("F"), step.phase_s("B"))


def predict_case(case: Case, hardware: Hardware) -> dict[str, Predicted]:
    """Every variant of ours that runs a plan."""
    found = {name: variant for name, variant in variants_of(OURS, case).items() if variant.schedule is not None}
    return {name: predict_variant(case, variant, hardware) for name, variant in found.items()}


def calibrate_link(network: ShapedNetwork, output: Path) -> Hardware:
    """Run tools/calibrate.py on every rank of the network; raises NetworkError."""
    command = [sys.executable, str(ROOT / "tools" / "calibrate.py"), "--output", str(output), "--name", str(network.link)]
    ranks = [network.start(rank, command, {**network.environment(rank), "TORCH_CPP_LOG_LEVEL": "ERROR"}) for rank in range(network.ranks)]
    statuses = [rank.wait() for rank in ranks]
    if any(statuses):
        raise NetworkError("the calibration failed; see the rank's message above")
    return read_hardware(output)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown: predicted and, where known, measured fractions of the program without communication."""
    lines = ["| case | link | variant | predicted no_comm / ours | measured | error | fastest steps | error |", "|---" * 8 + "|"]
    for row in rows:
        cells = [row["case"], row["link"], row["variant"], f"{row['predicted']:.3f}"]
        for name in ("measured", "measured_fastest"):
            cells += [f"{row[name]:.3f}", f"{row['predicted'] / row[name] - 1:+.1%}"] if name in row else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Calibrate each link, predict each variant, print and write; 1 where a known ratio is missed by more than the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=float, nargs="+", default=[2.0, 1.0, 0.5], help="link rates")
    parser.add_argument("--family", default="gpt", choices=["gpt", "llama"])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--measured", type=Path, help="results of benchmarks/head_to_head.py, whose case and links are then taken")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "predicted_shaped", help="path without extension")
    chosen = parser.parse_args()
    try:
        case, found = _measured(chosen.measured) if chosen.measured else (_case_of(chosen), None)
        if case.data_parallel > 1:
            raise ValueError("replicas share cores and links here in ways that a calibration of one group does not see; use --dp 1")
        rows = _compare(case, found) if found is not None else _predict(case, [Link(gbit) for gbit in chosen.gbit])
    except (NetworkError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    report = {"command": sys.argv, "case": asdict(case), "rows": rows}
    chosen.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    chosen.output.with_suffix(".md").write_text(table(rows))
    print(table(rows))
    return int(any("measured" in row and abs(row["predicted"] / row["measured"] - 1) > BAR for row in rows))


def _measured(path: Path) -> tuple[Case, list[dict[str, Any]]]:
    """Case and links of a benchmark's results; raises ValueError where they hold no calibrations."""
    results = json.loads(path.read_text())
    if not all("calibration" in each for link in results["links"] for each in link["rounds"]):
        raise ValueError(f"--measured {path}: holds no calibrations; measure with head_to_head.py --calibrate")
    return Case.from_json(json.dumps(results["case"])), results["links"]


def _compare(case: Case, links: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each variant that was measured."""
    rows = []
    for item in links:
        hardware = [Hardware.from_json(json.dumps(each["calibration"])) for each in item["rounds"]]
        fractions = _measured_fractions(item)
        rows += [row | fractions[row["variant"]] for row in _rows(case, _link(item), hardware) if row["variant"] in fractions]
    return rows


def _predict(case: Case, links: Sequence[Link]) -> list[dict[str, Any]]:
    """A row for each variant that can run, from a calibration of each link."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, ShapedNetwork(case.ranks, links[0]) as network:
        for link in links:
            network.shape(link)
            rows += _rows(case, link, [calibrate_link(network, Path(folder) / "calibration.json")])
    return rows


def _link(item: dict[str, Any]) -> Link:
    return Link(item["gbit_per_s"], item["mtu"], item["delay_ms"])


def _case_of(chosen: argparse.Namespace) -> Case:
    model = model_of(chosen.family, hidden=chosen.hidden, layers=chosen.layers, seq=chosen.seq, vocab=chosen.vocab)
    return Case(chosen.family, model, 2, 1, chosen.micro_batch_size, chosen.micro_batches)


def _rows(case: Case, link: Link, calibrations: Sequence[Hardware]) -> list[dict[str, Any]]:
    """One row a variant that sends what was calibrated: medians over the calibrations."""
    predicted = [predict_case(case, hardware) for hardware in calibrations]
    rows = []
    for name, about in OUR_VARIANTS.items():
        if name in predicted[0] and about.communicates and about.one_way:
            both = [(each[about.optimum], each[name]) for each in predicted]
            row = {"case": case.family, "link": str(link), "variant": name, "predicted": median(a.step_s / b.step_s for a, b in both)}
            rows.append(row | {"forward_s": median(b.forward_s for _, b in both), "backward_s": median(b.backward_s for _, b in both)})
    return rows


def _measured_fractions(item: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Shares of the optimum that our variants reached on a link: the median within a round, and fastest step by fastest step.

    The second says less about a typical step, but other programs on the machine disturb it least.
    """
    summary, fastest = item["summary"]["variants"], _fastest_steps(item["rounds"])
    return {
        name: {
            "measured": summary[f"{OURS}/{name}"]["fraction_of_optimum"]["step"][0],
            "measured_fastest": fastest[f"{OURS}/{OUR_VARIANTS[name].optimum}"] / fastest[f"{OURS}/{name}"],
        }
        for name in OUR_VARIANTS
        if "fraction_of_optimum" in summary.get(f"{OURS}/{name}", {})
    }


def _fastest_steps(rounds: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each variant's fastest step, which ends when its slowest rank does."""
    fastest: dict[str, float] = {}
    for item in rounds:
        for name, ranks in item["turns"].items():
            for step in range(len(ranks[0]["forward_s"])):
                seconds = max(rank["forward_s"][step] + rank["backward_s"][step] for rank in ranks)
                fastest[name] = min(seconds, fastest.get(name, seconds))
    return fastest


if __name__ == "__main__":
    sys.exit(main())
