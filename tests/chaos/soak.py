"""A long run of a small model on two ranks, with saves, evaluations and resumes: nothing grows, and no step becomes slower."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.pretrain import build_trainer
from domino_lm.training.trainer import Trainer
from tests.distributed.training_runs import configure, write_tokens
from tests.rank_pool import RankPool

ITERATIONS, LEGS = 2000, 8
LIMITS = {"open files": 0.0, "threads": 0.0, "resident memory": 0.02, "CPU time of a step": 0.05}
"""How much more the last quarter may take than the first, of the median."""


def soak(folder: Path, iterations: int = ITERATIONS) -> dict[str, Any]:
    """What the first and the last quarter of ``iterations`` took of each limited thing, and where that is too much."""
    work = folder / "soak"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    tokens, pool = write_tokens(work), RankPool(2)
    try:
        samples = pool.run(legs, str(tokens), str(work / "save"), iterations)
    finally:
        pool.close()
    ranks = [compare(one) for one in samples]
    faults = [f"rank {rank}: {name} {first:g} -> {last:g}" for rank, one in enumerate(ranks) for name, (first, last) in one.items()
              if last > first * (1 + LIMITS[name])]  # fmt: skip
    return {"iterations": iterations, "ranks": ranks, "faults": faults}


def legs(mesh: ParallelMesh, tokens: str, save: str, iterations: int) -> list[dict[str, float]]:
    """Train in some legs, each resumed from the one before, and look at this process at every step."""
    samples: list[dict[str, float]] = []
    step = Trainer.step

    def watched(trainer: Trainer, *rest: Any) -> Any:
        begin_s = time.process_time()
        done = step(trainer, *rest)
        samples.append({"CPU time of a step": time.process_time() - begin_s, **look()})
        return done

    Trainer.step = watched  # type: ignore[method-assign]
    try:
        for leg in range(LEGS):
            end = iterations * (leg + 1) // LEGS
            flags = f"--save {save} --load {save} --keep-last 2 --save-interval 25 --eval-interval 25 --log-interval 50 --train-iters {iterations}"
            trainer = build_trainer(configure(Path(tokens), f"{flags} --exit-interval {end} --tensor-model-parallel-size 2"), mesh)
            trainer.console = lambda line: None
            trainer.fit()
            assert trainer.iteration == end, f"a leg ended at {trainer.iteration} of {end}"
            del trainer
            gc.collect()
    finally:
        Trainer.step = step  # type: ignore[method-assign]
    return samples


def look() -> dict[str, float]:
    """What this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": max(len(os.listdir("/proc/self/task")), threading.active_count()),
        "resident memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def compare(samples: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Medians of the first and the last quarter."""
    quarter = len(samples) // 4
    return {
        name: tuple(statistics.median(one[name] for one in part) for part in (samples[:quarter], samples[-quarter:])) for name in LIMITS
    }  # type: ignore[misc]


def soak_table(found: dict[str, Any]) -> str:
    """Rows of what was looked at, first quarter, last quarter, and what is allowed; the worse rank of each."""
    shown = {"resident memory": lambda value: f"{value / 2**20:.1f} MiB", "CPU time of a step": lambda value: f"{value * 1e3:.2f} ms"}
    lines = [f"| {found['iterations']:,} iterations, median of | first quarter | last quarter | allowed |", "|---|---|---|---|"]
    for name, share in LIMITS.items():
        first, last = max((one[name] for one in found["ranks"]), key=lambda pair: pair[1] / max(pair[0], 1e-9))
        form = shown.get(name, lambda value: f"{value:.0f}")
        lines.append(f"| {name} | {form(first)} | {form(last)} | {f'{share:.0%} more' if share else 'the same'} |")
    return "\n".join(lines)
