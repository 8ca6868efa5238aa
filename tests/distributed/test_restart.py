"""A rank that dies takes the job with it once: the nodes start all ranks again, and they go on from the last checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.training_runs import REPOSITORY, TINY, ranks_of, write_tokens

PATIENCE_S = 150


@pytest.mark.exhaustive
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_killed_rank_is_restarted_from_the_last_checkpoint(tmp_path: Path, nodes: int) -> None:
    tokens, saved = write_tokens(tmp_path), tmp_path / "checkpoints"
    flags = f"{TINY} --data-path {tokens} --tensor-model-parallel-size 2 --train-iters 24 --eval-interval 0 --save-interval 3"
    words = [str(REPOSITORY / "examples" / "launch.sh"), *flags.split(), "--save", str(saved), "--load", str(saved)]
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "MAX_RESTARTS": "1"}
    environment |= {"NNODES": str(nodes), "NPROC": str(2 // nodes), "PREFLIGHT": str(tmp_path), "PREFLIGHT_FREE_GIB": "0"}
    environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(20000 + os.getpid() % 9000)}
    outputs = [tmp_path / f"node {node}" for node in range(nodes)]
    launchers = [
        subprocess.Popen(words, env={**environment, "NODE_RANK": str(node)}, stdout=output.open("w"), stderr=subprocess.STDOUT)
        for node, output in enumerate(outputs)
    ]
    try:
        until_s = time.monotonic() + PATIENCE_S
        while not (saved / "latest_checkpointed_iteration.txt").exists():
            assert time.monotonic() < until_s, [output.read_text() for output in outputs]
            time.sleep(0.2)
        os.kill(ranks_of(launchers[-1].pid)[-1], signal.SIGKILL)
        codes = [launcher.wait(PATIENCE_S) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.terminate()
            launcher.wait()
    text = "".join(output.read_text() for output in outputs)
    assert codes == [0] * nodes, text
    assert "preflight: fit" in text
    assert text.count("resumed from") == 1
    assert "training ended: finished at iteration 24" in text
