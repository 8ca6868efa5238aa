"""How long training stands still for a save of 1 GiB, with --async-save and without, and what the next 20 steps take beside it.

    python benchmarks/checkpoint_save.py                     # about ten minutes on two quiet cores, 6 GB of memory, 2.2 GB of disk

One run on one rank and one on two, whose state is 1 GiB in all. A round trains 20 steps three times: after a save that is waited
for, after one that is written beside them, and after none; the order changes from round to round. Files are synced to the disk in
each case, and the next begins when the last is published. Times are those of the slowest rank. Writes OUTPUT.json and OUTPUT.md.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.on_ranks import run_on_ranks  # noqa: E402
from domino_lm.config.arguments import parse_arguments  # noqa: E402
from domino_lm.parallel.mesh import ParallelMesh  # noqa: E402
from domino_lm.pretrain import build_trainer  # noqa: E402
from domino_lm.training.saving import Saves  # noqa: E402
from domino_lm.training.trainer import Trainer  # noqa: E402

FLAGS = (
    "--num-layers 6 --hidden-size 1024 --num-attention-heads 16 --seq-length 32 --max-position-embeddings 512 --vocab-size 14336 "
    "--mock-data --micro-batch-size 1 --global-batch-size 1 --train-iters 100000 --lr 1e-5 --eval-interval 0 --async-save"
)
"""90 million parameters with two moments each, in fp32: 1.02 GiB."""

STEPS = 20
CASES = ("waited for", "beside training", "none")


def main() -> None:
    run_on_ranks(__file__, __doc__, 5, measure, markdown)


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds of each case and round: inside save, the next steps, and until the checkpoint was published."""
    size = int(os.environ["WORLD_SIZE"])
    run = parse_arguments(f"{FLAGS} --save {folder / 'saved'} --tensor-model-parallel-size {size}".split())
    with ParallelMesh.create(run.parallel, torch.device("cpu")) as mesh:
        trainer = build_trainer(run, mesh)
        trainer.console = lambda line: None
        beside = trainer.saves
        now = Saves(run.checkpoint, trainer.stack, trainer.optimizer, mesh, "benchmark", lambda line: None)
        batches = trainer.training_batches()
        found: dict[str, Any] = {case: {"save_s": [], "steps_s": [], "published_s": []} for case in CASES}
        for number in range(-1, rounds):
            for case in CASES[number % 3 :] + CASES[: number % 3]:
                trainer.saves = beside if case == "beside training" else now
                times = one_case(trainer, case, lambda: trainer.step(batches))
                for name, seconds in times.items() if number >= 0 else ():  # the first round warms up
                    found[case][name].append(seconds)
                written = [path.stat().st_size for path in (folder / "saved").glob("iter_*/*")]
                mesh.world.barrier()
                if mesh.world.rank == 0:
                    shutil.rmtree(folder / "saved", ignore_errors=True)
                    os.sync()
                found["bytes"] = sum(written) or found.get("bytes", 0)
        beside.close()
    return found


def one_case(trainer: Trainer, case: str, step: Callable[[], Any]) -> dict[str, float]:
    """A save of this case and the steps after it."""
    world = trainer.mesh.world
    step()  # another iteration than the last save's
    world.barrier()
    begin = time.perf_counter()
    if case != "none":
        trainer.save()
    saved = time.perf_counter()
    for _ in range(STEPS):
        step()
        trainer.saves.poll(trainer.iteration)
    stepped = time.perf_counter()
    trainer.saves.wait(trainer.iteration)
    ended = time.perf_counter()
    times = torch.tensor([saved - begin, stepped - saved, ended - begin], dtype=torch.float64)
    return dict(zip(("save_s", "steps_s", "published_s"), world.all_reduce(times, op="max").tolist(), strict=True))


def markdown(results: dict[str, Any]) -> str:
    """Medians, least and most; shares are formed within a round."""
    lines = [
        "# Saving beside training",
        "",
        "| ranks | GiB | save | inside save(), s | of the one waited for | next 20 steps, s | save and steps, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        waited = row[CASES[0]]["save_s"]
        for case in CASES:
            save_s, steps_s = row[case]["save_s"], row[case]["steps_s"]
            share = spread([one / other for one, other in zip(save_s, waited, strict=True)], 3) if case != "none" else ""
            total = spread([one + other for one, other in zip(save_s, steps_s, strict=True)], 1)
            inside = spread(save_s, 2) if case != "none" else ""
            lines.append(f"| {row['ranks']} | {row['bytes'] / 2**30:.2f} | {case} | {inside} | {share} | {spread(steps_s, 1)} | {total} |")
    about = results["machine"]
    lines += [
        "",
        f"Medians (least to most) of {results['rounds']} rounds, all cases in turn in each; {about['processor']}, {about['cores']} cores,",
    ]
    return "\n".join([*lines, f"load {about['load_before']:.1f} before; on top of commit {about['commit'][:12]}."]) + "\n"


def spread(values: list[float], digits: int) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
