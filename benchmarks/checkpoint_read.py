"""Time to load a checkpoint of 1 GiB with and without verification, in turn, on one rank and on two.

    python benchmarks/checkpoint_read.py                     # about two minutes on two quiet cores, 5 GB of memory, 1.1 GB of disk

The files are in the page cache, where hashing costs most beside reading. Both ways are timed in each round, in an order
that changes; ratios are formed within a round. On a busy machine those by CPU time say more. Writes OUTPUT.json and OUTPUT.md.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.on_ranks import run_on_ranks  # noqa: E402
from domino_lm.checkpoint.save_load import load_checkpoint, save_checkpoint  # noqa: E402
from domino_lm.config.settings import ModelConfig, OptimizerConfig, ParallelConfig  # noqa: E402
from domino_lm.model.build import build_stack  # noqa: E402
from domino_lm.parallel.mesh import ParallelMesh  # noqa: E402
from domino_lm.training.optimizer import Optimizer  # noqa: E402

MODEL = ModelConfig(num_layers=6, hidden_size=1024, num_attention_heads=16, seq_length=512, max_position_embeddings=512, vocab_size=14336)
"""90 million parameters with two moments each, in fp32: 1.02 GiB."""


def main() -> None:
    run_on_ranks(__file__, __doc__, 9, measure, markdown)


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds of each load of this rank's gang, the slowest rank's; the checkpoint is saved first if it is not there."""
    with ParallelMesh.create(ParallelConfig(tensor_model_parallel_size=int(os.environ["WORLD_SIZE"])), torch.device("cpu")) as mesh:
        stack = build_stack(MODEL, mesh.tp, seed=1)
        optimizer = Optimizer(stack.parameters(), OptimizerConfig(lr=0.01), mesh.tp)
        path = folder / "iter_0000001"
        if not path.exists():
            save_checkpoint(folder, 1, stack, optimizer, {}, mesh)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        busy: dict[bool, list[float]] = {True: [], False: []}
        for number in range(-1, rounds):
            for verify in (number % 2 == 0, number % 2 != 0):
                mesh.world.barrier()
                begin, busy_before = time.perf_counter(), time.process_time()
                load_checkpoint(folder, stack, optimizer, mesh, verify=verify)
                busy_s = time.process_time() - busy_before
                mesh.world.barrier()
                if number >= 0:  # the first round fills the page cache
                    seconds[verify].append(time.perf_counter() - begin)
                    busy[verify].append(busy_s)
    size = sum(file.stat().st_size for file in path.iterdir())
    times = {"verified_s": seconds[True], "unverified_s": seconds[False]}
    return {"bytes": size, **times, "verified_cpu_s": busy[True], "unverified_cpu_s": busy[False]}


def markdown(results: dict[str, Any]) -> str:
    """Medians, and the ratio within a round with its quartiles."""
    lines = [
        "# Loading with verification",
        "",
        "| ranks | GiB | measure | without | with | ratio (quartiles) |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        for measure_, key in (("time", "s"), ("CPU of rank 0", "cpu_s")):
            verified, plain = row[f"verified_{key}"], row[f"unverified_{key}"]
            low, middle, high = statistics.quantiles([one / other for one, other in zip(verified, plain, strict=True)], n=4)
            times = f"{statistics.median(plain):.2f} s | {statistics.median(verified):.2f} s"
            lines.append(f"| {row['ranks']} | {row['bytes'] / 2**30:.2f} | {measure_} | {times} | {middle:.2f} ({low:.2f} to {high:.2f}) |")
    about = results["machine"]
    end = f"Warm page cache, {results['rounds']} rounds; {about['processor']}, {about['cores']} cores, load {about['load_before']:.1f} before."
    return "\n".join([*lines, "", end]) + "\n"


if __name__ == "__main__":
    main()
