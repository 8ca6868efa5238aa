"""Runs that `docs/determinism.md` promises to be equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from domino_lm.parallel.mesh import ParallelMesh
from tests.distributed.training_runs import built, write_tokens
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
ZERO = "--use-distributed-optimizer --ddp-bucket-size 3000"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def trained(mesh: ParallelMesh, tokens: Path, flags: str) -> list[Tensor]:
    """This rank's weights and second moments after a run of five steps."""
    trainer = built(mesh, tokens, f"--train-iters 5 {flags}")
    trainer.fit()
    trainer.executor.complete_gathers()
    return [tensor.detach().clone() for tensor in (*trainer.stack.parameters(), *trainer.optimizer.exp_avg_sq)]


def assert_equal_runs(ranks: Ranks, tokens: Path, world: int, tp: int, first: str, second: str) -> None:
    runs = [ranks(world).run(trained, tokens, flags, tp=tp) for flags in (first, second)]
    for one, other in zip(*runs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("flags", ["", "--bf16 --domino-row-slices 2", "--fp16 --initial-loss-scale 1024"])
def test_a_run_made_again_is_the_same(ranks: Ranks, tokens: Path, flags: str) -> None:
    assert_equal_runs(ranks, tokens, 2, 2, flags, flags)


@pytest.mark.parametrize(
    ("common", "difference"),
    [
        ("", "--num-workers 3 --eval-interval 1"),
        pytest.param(
            "--num-workers 0",
            "--eval-interval 1 --log-interval 3 --timeline {folder}/step --save {folder}/save --save-interval 2",
            marks=pytest.mark.long,
        ),
        pytest.param("", "--recompute-granularity selective", marks=pytest.mark.long),
        pytest.param("--sequence-parallel", "--recompute-granularity full --recompute-method uniform", marks=pytest.mark.long),
    ],
    ids=["workers", "watching", "selective", "full"],
)
def test_a_run_does_not_depend_on(ranks: Ranks, tokens: Path, tmp_path: Path, common: str, difference: str) -> None:
    assert_equal_runs(ranks, tokens, 2, 2, common, f"{common} {difference}".format(folder=tmp_path))


@pytest.mark.long
@pytest.mark.parametrize(
    ("common", "difference"), [("--ddp-bucket-size 3000", "--no-overlap-grad-reduce"), (ZERO, "--overlap-param-gather")]
)
def test_a_run_does_not_depend_on_what_overlaps(ranks: Ranks, tokens: Path, common: str, difference: str) -> None:
    assert_equal_runs(ranks, tokens, 2, 1, common, f"{common} {difference}")
