"""Step time and memory of this checkout against another one of the same repository, in turn, in one run.

    git worktree add --detach ../before 27ce0da
    python benchmarks/against_checkout.py ../before --rounds 15 --output benchmarks/results/against_before.json

Both run the program itself (``domino_lm.pretrain`` on mock data) with the same flags. On one rank they run at the same time, on a
core each, which they exchange within a round, so that both meet the same noise of the machine; on two ranks, which share a
tensor-parallel model and need both cores, in turn, the order changing every round. A ratio is formed within a round, between medians of
its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
FLAGS = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --micro-batch-size 4 --vocab-size 512 --mock-data "
    "--attention-dropout 0 --hidden-dropout 0 --lr 1e-3 --log-interval 1 --eval-interval 0"
).split()
WARM_UP = 2


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write OUTPUT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="root of the other checkout")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=8, help=f"steps of a turn; the first {WARM_UP} are not counted")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="tensor-parallel sizes")
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    found: dict[str, dict[str, object]] = {}
    for ranks in chosen.ranks:
        rounds = []
        for turn in range(chosen.rounds):
            roots = {"this": HERE, "other": chosen.other.resolve()}
            if ranks == 1:
                rounds.append(side_by_side(roots, chosen.steps))
            else:
                rounds.append({name: one_turn(roots[name], ranks, chosen.steps) for name in sorted(roots, reverse=bool(turn % 2))})
        found[f"TP {ranks}"] = summary(rounds)
        print(
            f"TP {ranks}: " + ", ".join(f"{name} {value}" for name, value in found[f"TP {ranks}"].items() if name != "rounds"), flush=True
        )
    if chosen.output:
        chosen.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def side_by_side(roots: Mapping[str, Path], steps: int) -> dict[str, dict[str, float]]:
    """Both programs at once, first on one core each and then on the other's; means of the two."""
    cores, found = sorted(os.sched_getaffinity(0))[:2], defaultdict[str, list[dict[str, float]]](list)
    for places in (cores, cores[::-1]):
        with ThreadPoolExecutor() as pool:
            turns = {name: pool.submit(one_turn, root, 1, steps, place) for (name, root), place in zip(roots.items(), places, strict=True)}
        for name, turn in turns.items():
            found[name].append(turn.result())
    return {name: {key: statistics.mean(one[key] for one in both) for key in both[0]} for name, both in found.items()}


def one_turn(root: Path, ranks: int, steps: int, core: int | None = None) -> dict[str, float]:
    """Median step time and largest memory of a rank over one start of the program in ``root``, on one ``core`` or on all."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        flags = [*FLAGS, "--tensor-model-parallel-size", str(ranks), "--train-iters", str(steps), "--metrics-file", str(metrics)]
        place = [] if core is None else ["taskset", "--cpu-list", str(core)]
        subprocess.run(
            [*place, sys.executable, *launch, "-m", "domino_lm.pretrain", *flags],
            check=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            capture_output=True,
        )
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "step_ms": 1e3 * statistics.median(line["seconds"] for line in lines[WARM_UP:]),
        "memory_mib": max(line["memory_bytes"] for line in lines) / 2**20,
    }


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, object]:
    """Medians over rounds, and of this checkout's share of the other's time and memory within a round, with its quartiles."""
    told: dict[str, object] = {}
    for name in ("step_ms", "memory_mib"):
        ratios = [one["this"][name] / one["other"][name] for one in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        told |= {f"{name}_{side}": round(statistics.median(one[side][name] for one in rounds), 2) for side in ("this", "other")}
        told[f"{name}_ratio"] = {"median": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}
    return {**told, "rounds": rounds}


if __name__ == "__main__":
    sys.exit(main())
