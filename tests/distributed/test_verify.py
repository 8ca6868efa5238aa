"""`tools/verify.py` calls right what is right, and a forgotten collective wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from domino_lm.config.settings import OptimizerConfig, RunConfig, ScheduleConfig, TrainingConfig
from domino_lm.model.batch import MicroBatch
from domino_lm.parallel.collectives import Communicator, Pending
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.tools.comparison import cut_down, verify
from tests.distributed.models import GPT, LLAMA, MICRO_BATCH, MICRO_BATCHES, micro_batches
from tests.distributed.test_schedules import COMBINATIONS
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
ROOT = Path(__file__).parents[2]


class Forgetful(Communicator):
    """Leaves out every all-reduce of the plan."""

    def all_reduce_start(self, tensor: Tensor) -> Pending:
        return Pending(tensor, None)


def batches(mesh: ParallelMesh, step: int) -> Sequence[MicroBatch]:
    return micro_batches(mesh.dp)


def verified(mesh: ParallelMesh, schedule: ScheduleConfig, forgetful: str | None = None) -> tuple[str, bool]:
    run = RunConfig(
        model=replace(LLAMA, hidden_dropout=0.1),
        schedule=schedule,
        optimizer=OptimizerConfig(lr=1e-3),
        training=TrainingConfig(micro_batch_size=MICRO_BATCH, global_batch_size=MICRO_BATCH * MICRO_BATCHES, train_iters=1),
    )
    if forgetful is not None:
        group: Communicator = getattr(mesh, forgetful)
        mesh = replace(mesh, **{forgetful: Forgetful(group.rank, group.size, group.group)})
    return verify(run, mesh, batches, 2, torch.float64)


@pytest.mark.parametrize("name", ["rows2-tp-keep", "sequence2-sp-full"])
def test_a_right_run_is_called_normal_on_every_rank(ranks: Ranks, name: str) -> None:
    reports = ranks(4).run(verified, COMBINATIONS[name], tp=2)
    assert [normal for _, normal in reports] == [True] * 4
    assert reports[0][0].endswith("all is normal")


@pytest.mark.parametrize("group", ["tp", "dp"])
def test_a_forgotten_all_reduce_is_called_not_normal_and_the_tensors_are_named(ranks: Ranks, group: str) -> None:
    reports = ranks(4).run(verified, COMBINATIONS["rows2-tp-keep"], group, tp=2)
    assert [normal for _, normal in reports] == [False] * 4
    assert "NOT NORMAL" in reports[0][0]
    assert "decoder.layers." in reports[0][0]


def test_a_model_too_large_for_one_rank_loses_layers() -> None:
    model = replace(GPT, num_layers=48, hidden_size=1024, vocab_size=50257)
    assert cut_down(model, 200_000_000).num_layers == 11
    assert cut_down(model, 1).num_layers == 1
    assert cut_down(GPT, 200_000_000) == GPT


@pytest.mark.long
def test_the_tool_compares_on_real_data_under_torchrun(tmp_path: Path) -> None:
    python = [sys.executable]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    tokenizer = ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", str(ROOT / "examples/data/sp4096.model")]
    prefix = str(tmp_path / "corpus")
    preprocess = ["tools/preprocess_data.py", "--input", "examples/data/corpus.jsonl", "--output-prefix", prefix, "--workers", "1"]
    subprocess.run([*python, *preprocess, *tokenizer], cwd=ROOT, check=True, env=environment, capture_output=True)
    flags = (
        "--preset debug-llama --tensor-model-parallel-size 2 --num-layers 1 --seq-length 32 --micro-batch-size 2 --global-batch-size 4 "
        f"--sequence-parallel --data-path {prefix}_text_document --verify-steps 1"
    ).split()
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "tools/verify.py"]
    done = subprocess.run([*python, *launch, *flags, *tokenizer], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all is normal") == 1
