"""Runs whose steps are skipped, spike, or train nothing: what they say, and how they end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch

from domino_lm.data.indexed import IndexedDatasetWriter
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.pretrain import main
from domino_lm.training.saving import TrainingError
from tests.distributed.training_runs import TINY, VOCABULARY, built, write_tokens
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--fp16 --train-iters 2", "the loss scale is now"),
        ("--init-method-std 1e30 --no-check-for-nan-in-loss-and-grad --train-iters 2", "the loss was nan"),
        pytest.param(
            "--init-method-std 1e30 --no-check-for-nan-in-loss-and-grad --exit-interval 2", "all 2 of them", marks=pytest.mark.long
        ),
    ],
    ids=["loss scale", "weights", "an early end"],
)
def test_a_run_whose_every_step_was_skipped_fails_and_says_why(
    tokens: Path, tmp_path: Path, flags: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(f"{TINY} --data-path {tokens} --save {tmp_path} --log-interval 2 --eval-interval 0 --lr-warmup-iters 0 {flags}".split()) == 1
    )
    out, error = capsys.readouterr()
    (line,) = (line for line in out.splitlines() if "iteration        2/" in line)
    assert "lm loss" not in line
    assert "number of skipped iterations:   2" in line
    assert error.count("error: every step of this run was skipped, all 2 of them") == 1
    assert reason in error
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"


def spiking(mesh: ParallelMesh, tokens: Path, flags: str) -> tuple[str, list[str]]:
    """How a run ends whose weights grow by a thousand at its sixth step, and what it prints."""
    trainer, lines = built(mesh, tokens, flags), []
    trainer.console = lines.append
    take = trainer._take

    def corrupting(*args: object) -> object:
        if trainer.iteration == 5:
            torch._foreach_mul_([p.data for p in trainer.stack.final_norm.parameters()], 1000.0)
        return take(*args)  # type: ignore[arg-type]

    trainer._take = corrupting  # type: ignore[method-assign,assignment]
    try:
        return str(trainer.fit()), lines
    except TrainingError as error:
        return str(error), lines


def test_a_spike_is_warned_of_once_an_interval_and_the_run_goes_on(ranks: Ranks, tokens: Path) -> None:
    (end, lines), _ = ranks(2).run(spiking, tokens, "--log-interval 4 --eval-interval 0", tp=2)
    assert "training ended: finished at iteration 8" in end
    (warning,) = (line for line in lines if line.startswith("warning: "))
    assert "loss" in warning
    assert "at iteration 6 (samples 40 to 47)" in warning


def test_a_flag_ends_the_run_at_the_spike_on_all_ranks_and_saves_nothing(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    found = ranks(2).run(spiking, tokens, f"--check-for-spiky-loss --save {tmp_path} --save-interval 4", tp=2)
    assert len({end for end, _ in found}) == 1
    assert "at iteration 6 (samples 40 to 47)" in found[0][0]
    assert "--check-for-spiky-loss ends the run here" in found[0][0]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert not any(line.startswith("warning: ") for line in found[0][1])


def test_batches_and_evaluations_in_which_every_token_is_masked_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with IndexedDatasetWriter(tmp_path / "ends", numpy.uint16) as writer:
        for _ in range(10):
            writer.add_document([VOCABULARY - 1] * 200)
    flags = f"--tokenizer-type NullTokenizer --eod-mask-loss --train-iters 4 --log-interval 2 --data-path {tmp_path / 'ends'}"
    assert main(f"{TINY} {flags}".split()) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert lines[0].startswith("warning: all tokens of 8 micro-batch(es) are masked in 2 step(s), 2 whole batch(es) among them")
    assert "iteration 1 (samples 0 to 7)" in lines[0]
    assert "iteration 3 (samples 16 to 23)" in lines[1]
    assert "warning: all tokens of this evaluation are masked, so that it has no loss" in lines
