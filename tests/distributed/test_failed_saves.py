"""A run whose checkpoints cannot be saved: it trains on and says so, and never ends as if all were well."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.save_load import save_checkpoint
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.pretrain import main
from domino_lm.training.saving import SaveError
from tests.distributed.training_runs import TINY, built, write_tokens
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def failing(*iterations: int) -> object:
    """`save_checkpoint`, with a full disk at these iterations."""

    def save(folder: str, iteration: int, *rest: object) -> Path:
        if iteration in iterations:
            raise CheckpointError("No space left on device.")
        return save_checkpoint(folder, iteration, *rest)  # type: ignore[arg-type]

    return mock.patch("domino_lm.training.saving.save_checkpoint", save)


def lines_of_run(mesh: ParallelMesh, tokens: Path, flags: str, *failures: int) -> list[str]:
    trainer, lines = built(mesh, tokens, flags), []
    trainer.console = lines.append
    with failing(*failures), contextlib.suppress(SaveError):  # type: ignore[attr-defined]
        lines.append(str(trainer.fit()))
    return [line for line in lines if "save" in line or "ended" in line or line.lstrip().startswith("iteration") or " iteration " in line]


def test_a_failed_save_is_said_at_each_log_line_until_one_succeeds(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    flags = f"--save {tmp_path} --save-interval 2 --eval-interval 0"
    lines, _ = ranks(2).run(lines_of_run, tokens, flags, 4)
    said = [line for line in lines if line.startswith("warning: not saved at iteration 4")]
    assert len(said) == 3  # at the save, and at the lines of iterations 5 and 6
    assert all(f"the last whole checkpoint is {tmp_path}/iter_0000002: No space left on device." in line for line in said)
    assert "the next --save-interval" in said[0]
    assert lines[-1].startswith("training ended: finished at iteration 8")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "8"


def error_of_run(mesh: ParallelMesh, tokens: Path, flags: str, *failures: int) -> tuple[int, str]:
    trainer = built(mesh, tokens, flags)
    with failing(*failures), pytest.raises(SaveError) as caught:  # type: ignore[attr-defined]
        trainer.fit()
    return trainer.iteration, str(caught.value)


@pytest.mark.parametrize(
    ("flags", "failures", "ends_at"),
    [("", (6, 8), 8), ("--exit-interval 5", (5,), 5), ("--exit-on-save-failure", (6,), 6)],
    ids=["end", "exit", "flag"],
)
def test_a_last_save_that_fails_is_an_error_that_names_the_last_whole_checkpoint(
    ranks: Ranks, tokens: Path, tmp_path: Path, flags: str, failures: tuple[int, ...], ends_at: int
) -> None:
    flags = f"--save {tmp_path} --save-interval 2 --eval-interval 0 {flags}"
    for iteration, error in ranks(2).run(error_of_run, tokens, flags, *failures):
        assert iteration == ends_at
        assert f"The run ends at iteration {ends_at}; the last whole checkpoint is {tmp_path}/iter_0000004" in error


def code_of_program(mesh: ParallelMesh, tokens: Path, flags: str) -> tuple[int, str]:
    said = io.StringIO()
    with failing(8), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):  # type: ignore[attr-defined]
        return main(f"{TINY} --data-path {tokens} {flags}".split()), said.getvalue()


def test_the_program_has_an_exit_code_for_it(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    ((code, said),) = ranks(1).run(code_of_program, tokens, f"--save {tmp_path} --eval-interval 0")
    assert code == 3
    assert "error: No space left on device. The run ends at iteration 8; this run has no whole checkpoint." in said
