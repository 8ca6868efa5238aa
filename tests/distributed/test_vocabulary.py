"""A vocabulary that divides by nothing: padding, tensor parallelism and a tied matrix change neither losses nor what is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from domino_lm.checkpoint.save_load import load_checkpoint
from domino_lm.parallel.mesh import ParallelMesh
from tests.distributed.training_runs import built, steps, write_tokens
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
FLAGS = "--train-iters 24 --eval-iters 0"
STEPS = 20


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokens(tmp_path_factory.mktemp("data")))


def losses(mesh: ParallelMesh, tokens: str, flags: str, count: int) -> list[float]:
    return [report.loss for report in steps(built(mesh, Path(tokens), f"{FLAGS} {flags}"), count)]


def save_and_go_on(mesh: ParallelMesh, tokens: str, folder: str) -> list[float]:
    """Save after some steps; losses of the steps that follow."""
    trainer = built(mesh, Path(tokens), f"{FLAGS} --save {folder}")
    steps(trainer, STEPS)
    trainer.save()
    return [report.loss for report in steps(trainer, 4)]


def matrices_are_one(mesh: ParallelMesh, tokens: str, folder: str) -> bool:
    trainer = built(mesh, Path(tokens), FLAGS)
    load_checkpoint(folder, trainer.stack, trainer.optimizer, mesh)
    return trainer.stack.embedding.weight.data_ptr() == trainer.stack.head.weight.data_ptr()


def test_losses_do_not_depend_on_the_padding_that_tensor_parallelism_asks_for(ranks: Ranks, tokens: str) -> None:
    expected = ranks(1).run(losses, tokens, "", STEPS)[0]
    for found in ranks(2).run(losses, tokens, "", STEPS, tp=2):
        assert found == pytest.approx(expected, abs=2e-6, rel=0)


@pytest.mark.parametrize("divisible_by", [1, 32, 128])
def test_a_checkpoint_is_padded_anew_for_the_run_that_loads_it(ranks: Ranks, tokens: str, tmp_path: Path, divisible_by: int) -> None:
    expected = ranks(1).run(save_and_go_on, tokens, str(tmp_path))[0]
    for found in ranks(2).run(losses, tokens, f"--load {tmp_path} --make-vocab-size-divisible-by {divisible_by}", 4, tp=2):
        assert found == pytest.approx(expected, abs=2e-6, rel=0)


def test_a_tied_matrix_is_one_after_loading_and_trains_on_to_the_bit(ranks: Ranks, tokens: str, tmp_path: Path) -> None:
    expected = ranks(2).run(save_and_go_on, tokens, str(tmp_path))
    assert ranks(2).run(losses, tokens, f"--load {tmp_path}", 4, tp=2) == expected
    assert ranks(2).run(matrices_are_one, tokens, str(tmp_path)) == [True, True]
