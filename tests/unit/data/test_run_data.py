"""A run's data: what each rank reads in training and in evaluation, whatever names it."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from domino_lm.config.arguments import parse_arguments
from domino_lm.config.settings import RunConfig
from domino_lm.data.indexed import IndexedDatasetWriter
from domino_lm.data.indices import DatasetError
from domino_lm.training.run_data import MicroBatches, RunData, evaluation_batches

BASE = "--preset debug-gpt --seq-length 4 --lr 1e-3 --micro-batch-size 2 --train-iters 5 --eval-iters 1 --vocab-size 1000"


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """40 documents of 10 tokens, all tokens different."""
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        for i in range(40):
            writer.add_document(np.arange(10 * i, 10 * i + 10))
    return str(tmp_path / "data")


def mesh(rank: int = 0, size: int = 2) -> Any:
    """Data-parallel ranks alone."""
    return SimpleNamespace(dp=SimpleNamespace(rank=rank, size=size), world=SimpleNamespace(size=size), device=torch.device("cpu"))


def run(flags: str) -> RunConfig:
    return parse_arguments(f"{BASE} {flags}".split())


def first_tokens(batches: MicroBatches, count: int) -> list[int]:
    return [int(token) for batch in batches.take(count) for token in batch.tokens[0]]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_micro_batch_knows_where_its_first_sample_stands_in_the_step(prefix: str, rank: int) -> None:
    """Two ranks take two samples each in turn, and every step counts from 0 again."""
    train = RunData.build(run(f"--data-path {prefix} --split 1,0,0"), None, mesh()).train
    batches = MicroBatches(train, 0, 2, mesh(rank))
    assert [[batch.sample_offset for batch in batches.take(3)] for _ in range(2)] == [[2 * rank, 2 * rank + 4, 2 * rank + 8]] * 2


def test_a_full_validation_reads_every_sample_once_over_the_ranks(prefix: str) -> None:
    settings = run(f"--data-path {prefix} --split 1,1,0 --full-validation")
    data = RunData.build(settings, None, mesh())
    (valid,) = data.valid
    read = [int(token) for rank in range(2) for batch in evaluation_batches(valid, settings, mesh(rank)) for token in batch.tokens[0]]
    assert sorted(read) == sorted(int(valid[i]["tokens"][0]) for i in range(len(valid)))
    assert len(read) == (200 - 1) // 4


def test_several_validation_sets_are_evaluated_apart(prefix: str) -> None:
    data = RunData.build(run(f"--train-data-path {prefix} --valid-data-path {prefix} {prefix} --multiple-validation-sets"), None, mesh())
    assert len(data.evaluated("valid")) == 2
    assert data.evaluated("test") == ()


def test_without_evaluation_there_are_no_evaluation_sets(prefix: str) -> None:
    data = RunData.build(run(f"--data-path {prefix} --split 1,1,1 --eval-interval 0"), None, mesh())
    assert (data.valid, data.test) == ((), None)


@pytest.mark.parametrize("flags", ["", "--dataloader-type cyclic", "--dataloader-type cyclic --no-data-sharding", "--num-workers 0"])
def test_a_resumed_run_reads_on_where_it_stood(prefix: str, flags: str) -> None:
    settings = run(f"--data-path {prefix} --split 1,0,0 {flags}")
    train = RunData.build(settings, None, mesh()).train

    def read(consumed: int, steps: int) -> list[int]:
        return first_tokens(MicroBatches(train, consumed, 2, mesh(1), settings.data), steps)

    assert read(0, 3) + read(12, 10) == read(0, 13)


def test_the_shares_of_a_blend_are_described(prefix: str) -> None:
    data = RunData.build(run(f"--data-path 1 {prefix} 3 {prefix} --split 1,0,0"), None, mesh())
    assert data.describe().splitlines()[0] == "20 training samples:"
    assert [line.split(" (")[0].strip() for line in data.describe().splitlines()[1:3]] == ["5", "15"]


def test_of_many_sources_a_few_are_described(prefix: str) -> None:
    lines = RunData.build(run(f"--data-path {f'1 {prefix} ' * 40} --split 1,0,0 --train-iters 20"), None, mesh()).describe().splitlines()
    assert [len(lines), lines[0], lines[21].strip()] == [23, "80 training samples:", "40 from 20 more sources"]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--split 1,0,0", "the data has no such split"),
        ("--split 5,5,0 --eval-interval 0", "--eval-interval 0 turns it off"),
        ("--split 5,5,0 --eval-iters 0 --full-validation", "--eval-iters 0 turns it off"),
        ("--split 5,5,0", None),
    ],
)
def test_why_nothing_is_evaluated_is_described(prefix: str, flags: str, why: str | None) -> None:
    said = RunData.build(run(f"--data-path {prefix} {flags}"), None, mesh()).describe()
    assert said.count("no evaluation") == (why is not None)
    assert why is None or said.endswith(f"no evaluation: {why}")


def test_data_that_repeats_is_described(prefix: str) -> None:
    said = RunData.build(run(f"--data-path {prefix} --split 1,0,0 --train-iters 400"), None, mesh()).describe()
    assert re.search(r"^1,600 training samples \([0-9.]+ epochs\) from .*, which repeats", said)


def test_a_split_that_leaves_nothing_to_train_on_is_refused(prefix: str) -> None:
    with pytest.raises(DatasetError, match="leaves nothing to train on"):
        RunData.build(run(f"--data-path {prefix} --split 0,1,0"), None, mesh())


def test_waiting_for_data_is_counted(prefix: str) -> None:
    batches = MicroBatches(RunData.build(run(f"--data-path {prefix} --split 1,0,0"), None, mesh()).train, 0, 2, mesh())
    batches.take(2)
    assert batches.blocked_s > 0
