"""The folder of ``--save`` belongs to one run, and is one folder for all of its ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from domino_lm.checkpoint.owner import Claim
from domino_lm.config.settings import ConfigError
from domino_lm.launch import shared_folder
from domino_lm.launch.shared_folder import unshared
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.pretrain import main
from domino_lm.training import save_folder
from domino_lm.training.save_folder import own_folder
from tests.distributed.training_runs import TINY, program, write_tokens
from tests.rank_pool import RankPool
from tests.unit.test_owner import ELSEWHERE, records, write_record

Ranks = Callable[[int], RankPool]
PATIENCE_S = 120


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def attempt(mesh: ParallelMesh, folder: str, meanwhile: Callable[[int], None] = lambda count: None) -> tuple[str, list[str]]:
    """What comes of taking ``folder``; ``meanwhile`` runs before each look but the first."""
    said, looks = [], []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if mesh.world.rank == 0:
            meanwhile(len(looks))

    with mock.patch.object(save_folder.time, "sleep", sleep):
        try:
            with own_folder(folder, mesh.world, said.append, lambda error: None) as claim:
                mesh.world.barrier()
                return f"taken, {'claimed' if isinstance(claim, Claim) else 'none'}, {records(Path(folder))}", said
        except ConfigError as error:
            return str(error), said


def taken_alone(mesh: ParallelMesh, folder: str) -> tuple[str, list[str]]:
    return attempt(mesh, folder)


def test_rank_0_takes_the_folder_for_all_and_gives_it_back(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    first, second = ranks(2).run(taken_alone, str(folder))
    assert first == ("taken, claimed, ['.domino_owner.1']", [])
    assert second == ("taken, none, ['.domino_owner.1']", [])
    assert os.listdir(folder) == []


def held(mesh: ParallelMesh, folder: str) -> tuple[str, list[str]]:
    return attempt(mesh, folder, lambda count: os.utime(Path(folder) / ".domino_owner.1") if count == 3 else None)


def test_a_folder_of_a_run_that_is_alive_is_refused_on_all_ranks_after_waiting(ranks: Ranks, tmp_path: Path) -> None:
    write_record(tmp_path, ELSEWHERE, age_s=20)
    answers = ranks(2).run(held, str(tmp_path))
    assert all("belongs to run 01234567, process 1 on elsewhere, which is running" in error for error, _ in answers)
    assert [len(said) for _, said in answers] == [1, 0]
    assert "waiting 40 s" in answers[0][1][0]
    assert records(tmp_path) == [".domino_owner.1"]


def left(mesh: ParallelMesh, folder: str) -> tuple[str, list[str]]:
    return attempt(mesh, folder, lambda count: os.utime(Path(folder) / ".domino_owner.1", (1, 1)) if count == 2 else None)


def test_a_folder_whose_run_is_silent_is_taken(ranks: Ranks, tmp_path: Path) -> None:
    write_record(tmp_path, ELSEWHERE)
    assert ranks(2).run(left, str(tmp_path))[0][0] == "taken, claimed, ['.domino_owner.2']"


def apart(mesh: ParallelMesh, folder: str) -> tuple[str, list[str]]:
    """Every rank stands in a folder of its own, as if on a node of its own."""
    before = os.getcwd()
    os.makedirs(f"{folder}/{mesh.world.rank}")
    os.chdir(f"{folder}/{mesh.world.rank}")
    try:
        with mock.patch.object(save_folder, "unshared", lambda *asked: unshared(*asked, patience_s=0.2)):
            return attempt(mesh, "checkpoints")
    finally:
        os.chdir(before)


def test_a_folder_that_the_ranks_do_not_share_is_refused_at_the_start(ranks: Ranks, tmp_path: Path) -> None:
    for error, _ in ranks(2).run(apart, str(tmp_path)):
        assert re.match(r"--save checkpoints is not one folder for all ranks: rank 1 on \S+ cannot write there: No such file", error)
        assert "Give a folder on storage that all nodes share" in error
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_files_of_a_look_that_was_killed_are_removed_an_hour_later(ranks: Ranks, tmp_path: Path) -> None:
    old, new = tmp_path / ".seen-0123-0", tmp_path / ".seen-4567-0"
    for path in (old, new):
        path.touch()
    os.utime(old, (1, 1))
    assert ranks(2).run(looked_at, str(tmp_path)) == [None, None]
    assert [path.name for path in tmp_path.iterdir()] == [new.name]


def looked_at(mesh: ParallelMesh, folder: str) -> object:
    return shared_folder.unshared(folder, mesh.world)


def code_of_program(mesh: ParallelMesh, tokens: Path, flags: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()), mock.patch.object(save_folder.time, "sleep"):
        return main(f"{TINY} --data-path {tokens} {flags}".split()), said.getvalue()


def test_loading_and_evaluating_take_nothing(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    assert ranks(1).run(code_of_program, tokens, f"--save {tmp_path}") == [(0, "")]
    assert records(tmp_path) == []
    write_record(tmp_path, ELSEWHERE)
    for flags in (f"--load {tmp_path} --train-iters 8", f"--load {tmp_path} --save {tmp_path} --skip-train"):
        assert ranks(1).run(code_of_program, tokens, flags) == [(0, "")]
    assert records(tmp_path) == [".domino_owner.1"]


def taken_in_between(mesh: ParallelMesh, tokens: Path, folder: str) -> tuple[int, str]:
    """Another run takes the folder after two steps."""
    from domino_lm.training.trainer import Trainer

    step = Trainer.step

    def stepped(trainer: Trainer, *rest: object) -> object:
        if trainer.iteration == 2:
            write_record(Path(folder), ELSEWHERE, number=2)
        return step(trainer, *rest)  # type: ignore[arg-type]

    with mock.patch.object(Trainer, "step", stepped):
        return code_of_program(mesh, tokens, f"--save {folder} --save-interval 2")


def test_a_run_whose_folder_was_taken_saves_nothing_more_and_fails(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    ((code, said),) = ranks(1).run(taken_in_between, tokens, str(tmp_path))
    assert code == 3
    assert re.search(
        r"error: \S+ has been taken by run 01234567, process 1 on elsewhere.* The run ends at iteration 4; the last whole", said
    )
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002"]
    assert ".domino_owner.2" in records(tmp_path)


@pytest.mark.long
@pytest.mark.slow
def test_ranks_whose_torchrun_is_killed_end_and_save_nothing_and_the_next_job_goes_on(tokens: Path, tmp_path: Path) -> None:
    flags = f"--save {tmp_path} --load {tmp_path} --save-interval 3 --eval-interval 0 --tensor-model-parallel-size"
    first = program(tokens, f"{flags} 2 --train-iters 100000", ranks=2)
    assert first.stdout is not None
    assert first.stderr is not None
    try:
        while "successfully saved" not in first.stdout.readline():
            assert first.poll() is None, first.stderr.read()
        beside = program(tokens, f"{flags} 1 --train-iters 6")
        out, error = beside.communicate(timeout=PATIENCE_S)
        assert beside.returncode == 2, out + error
        assert "which is running" in error
        ranks_of_it = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        first.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        while any(Path(f"/proc/{pid}").exists() for pid in ranks_of_it):
            assert time.monotonic() - killed_s < 30
            time.sleep(0.05)
        saved = (tmp_path / "latest_checkpointed_iteration.txt").read_text()
        assert first.stderr.read().count("torchrun, which started this rank, is gone") == 1
    finally:
        first.kill()
    second = program(tokens, f"{flags} 1 --train-iters {int(saved) + 1}")
    out, error = second.communicate(timeout=PATIENCE_S)
    assert (second.returncode, error) == (0, "")
    assert f"at iteration {saved}," in out
