"""torchrun restarts a run that lost a rank, and the run goes on from its last checkpoint as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from domino_lm.parallel.mesh import ParallelMesh
from tests.distributed.training_runs import REPOSITORY, TINY, built, steps, write_tokens
from tests.rank_pool import RankPool

STEPS = 60
FLAGS = f"--train-iters {STEPS} --eval-interval 0 --use-distributed-optimizer --overlap-param-gather"


def last_loss(mesh: ParallelMesh, tokens: Path) -> float:
    return steps(built(mesh, tokens, FLAGS), STEPS)[-1].loss


@pytest.mark.long
def test_a_run_that_loses_a_rank_ends_as_the_unbroken_one(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    tokens, saved = write_tokens(tmp_path), tmp_path / "saved"
    launcher = "-m torch.distributed.run --standalone --nproc-per-node=2 --max-restarts=1 -m domino_lm.pretrain"
    resume = f"--save {saved} --load {saved} --save-interval 10"
    command = [sys.executable, *f"{launcher} {TINY} --data-path {tokens} {FLAGS} {resume}".split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if f"iteration       25/ {STEPS:7d}" in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        rest, _ = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            process.kill()
    text = "".join(lines) + rest
    assert process.returncode == 0, text
    (resumed,) = re.findall(r"resumed from \S+ at iteration (\d+)", text)
    assert int(resumed) in (20, 30)  # the ranks may be some steps further than what has been read
    (loss,) = re.findall(rf"iteration +{STEPS}/ +{STEPS} \|.* lm loss: (\S+) \|", text)
    assert float(loss) == pytest.approx(ranks(2).run(last_loss, tokens, tp=1)[0], rel=1e-6)
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
