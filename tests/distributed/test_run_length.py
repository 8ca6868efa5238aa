"""How a run grows, ends, collects garbage and reports: batch ramp, early exits, metrics files, losses that are not finite."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.pretrain import build_trainer
from domino_lm.training.garbage import GarbageCollection
from domino_lm.training.trainer import FitResult
from domino_lm.watch.metrics_file import read_lines
from tests.distributed.training_runs import built, configure, steps, write_tokens
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
QUIET = "--eval-interval 0"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def fit(mesh: ParallelMesh, tokens: Path, *runs: str) -> list[FitResult]:
    return [built(mesh, tokens, flags).fit() for flags in runs]


def test_a_ramped_batch_is_the_same_on_every_layout_and_after_a_resume(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    ramp = f"{QUIET} --rampup-batch-size 4 4 8"
    whole, parts = str(tmp_path / "whole.jsonl"), str(tmp_path / "parts.jsonl")
    ranks(2).run(fit, tokens, f"{ramp} --metrics-file {whole}", tp=2)
    save = f"{ramp} --save {tmp_path} --load {tmp_path} --metrics-file {parts}"
    ranks(2).run(fit, tokens, f"{save} --exit-interval 2", save, tp=1)
    found, expected = read_lines(parts), read_lines(whole)
    assert [line["batch_size"] for line in expected] == [4, 4, 8, 8, 8, 8, 8, 8]
    assert [line["consumed_samples"] for line in found] == [line["consumed_samples"] for line in expected]
    assert [line["lm_loss"] for line in found] == pytest.approx([line["lm_loss"] for line in expected], abs=1e-4)


def test_a_run_counted_in_samples_takes_as_many_steps_as_they_fill(ranks: Ranks, tokens: Path) -> None:
    (result,) = ranks(1).run(fit_by_samples, tokens)
    assert (result.iteration, result.reason) == (3, "finished")


def fit_by_samples(mesh: ParallelMesh, tokens: Path) -> FitResult:
    run = configure(tokens, f"{QUIET} --lr-warmup-iters 0")
    trainer = build_trainer(replace(run, training=replace(run.training, train_iters=None, train_samples=30)), mesh)
    return trainer.fit()


def test_a_finished_run_that_is_started_again_says_that_nothing_was_left(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    first, again = ranks(1).run(fit, tokens, *[f"{QUIET} --save {tmp_path} --load {tmp_path} --log-interval 100"] * 2)[0]
    assert re.search(r"finished at iteration 8, first loss \d\.\d{4}, last \d\.\d{4}, ", str(first))
    assert first.last_loss is not None
    assert first.first_loss is not None
    assert first.last_loss < first.first_loss
    assert str(again) == "nothing was trained: the run had ended before, at iteration 8; a larger --train-iters or --train-samples goes on"


@pytest.mark.parametrize(
    ("flags", "iteration", "reason"),
    [
        ("--exit-interval 3", 3, "exit-interval"),
        ("--exit-samples 30", 4, "exit-samples"),
        ("--exit-duration-in-mins 0.0000001", 1, "exit-duration-in-mins"),
    ],
)
def test_every_rank_ends_the_run_at_the_same_early_exit(ranks: Ranks, tokens: Path, flags: str, iteration: int, reason: str) -> None:
    for (result,) in ranks(2).run(fit, tokens, f"{QUIET} {flags}", tp=2):
        assert (result.iteration, result.reason) == (iteration, reason)


def test_an_early_exit_is_saved(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    ranks(1).run(fit, tokens, f"{QUIET} --exit-samples 16 --save {tmp_path}")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_finetuning_starts_a_new_run_from_the_weights_alone(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    ranks(1).run(fit, tokens, f"{QUIET} --exit-interval 4 --save {tmp_path}")
    ranks(1).run(assert_new_run_with_old_weights, tokens, f"--load {tmp_path}")


def assert_new_run_with_old_weights(mesh: ParallelMesh, tokens: Path, flags: str) -> None:
    trainer, trained = built(mesh, tokens, f"{flags} --finetune --lr 5e-3"), built(mesh, tokens, flags)
    assert (trainer.iteration, trainer.consumed_samples, trainer.lr_schedule.samples, trainer.optimizer.step_count) == (0, 0, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(trainer.stack.parameters(), trained.stack.parameters(), strict=True))


def test_the_weights_stay_where_the_loss_is_not_finite_and_the_gradient_is(ranks: Ranks, tokens: Path) -> None:
    assert ranks(4).run(step_with_infinite_loss, tokens, tp=2) == [(True, True)] * 4


def step_with_infinite_loss(mesh: ParallelMesh, tokens: Path) -> tuple[bool, bool]:
    """Whether the step was skipped, and whether the weights are the same; replica 1 alone reports the infinite loss."""
    trainer = built(mesh, tokens)
    before = [parameter.detach().clone() for parameter in trainer.stack.parameters()]
    if mesh.dp.rank == 1:
        state = trainer.executor._state
        state.loss_sum = lambda: torch.stack(state.row_losses).sum() + torch.inf  # type: ignore[method-assign]
    (report,) = steps(trainer, 1)
    assert torch.isfinite(torch.tensor(report.grad_norm))
    return report.skipped, all(torch.equal(a, b) for a, b in zip(before, trainer.stack.parameters(), strict=True))


def test_a_metrics_file_has_every_step_and_evaluation_and_what_was_asked_for(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    ranks(2).run(fit, tokens, f"--metrics-file {path} --log-params-norm --log-num-zeros-in-grad --peak-tflops 1", tp=2)
    lines = read_lines(path)
    steps_found = [line for line in lines if "lm_loss" in line]
    assert [line["iteration"] for line in steps_found] == list(range(1, 9))
    assert [(line["iteration"], line["split"]) for line in lines if "validation_loss" in line] == [(4, "valid"), (8, "valid")]
    last = steps_found[-1]
    assert last["params_norm"] > 0
    assert last["num_zeros"] >= 0
    assert 0 < last["mfu"] < 1
    assert 0 <= last["exposed_s"] < last["seconds"]


def test_manual_collection_keeps_python_from_collecting_by_itself() -> None:
    with GarbageCollection(manual=True, interval=2) as garbage:
        assert not gc.isenabled()
        before = gc.get_stats()[2]["collections"]
        garbage.step(1)
        assert gc.get_stats()[2]["collections"] == before
        garbage.step(2)
        assert gc.get_stats()[2]["collections"] == before + 1
    assert gc.isenabled()
