"""Saves that are written beside training: whole or absent whoever dies, waited for where they must be, equal to the bit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from domino_lm.checkpoint.background import BackgroundSaves
from domino_lm.checkpoint.folder import find_checkpoint
from domino_lm.checkpoint.index import CheckpointError, read_metadata
from domino_lm.checkpoint.owner import Claim, start_of
from domino_lm.checkpoint.retention import Retention, remove_leftovers
from domino_lm.checkpoint.save_load import load_checkpoint, save_checkpoint
from domino_lm.checkpoint.writer_process import IGNORED
from domino_lm.config.settings import OptimizerConfig
from domino_lm.model.build import build_stack
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.training.optimizer import Optimizer
from domino_lm.training.saving import SaveError
from tests.distributed.models import GPT
from tests.distributed.training_runs import built, program, write_tokens
from tests.forked_writer import ForkedWriter, die, fill_disk, held
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
ALL = Retention()
TRACKER = "latest_checkpointed_iteration.txt"


class Run:
    """A model whose weights are all one number, and its saves."""

    def __init__(self, mesh: ParallelMesh, folder: str, start: Callable[[int], Any] = ForkedWriter, claim: Claim | None = None) -> None:
        self.mesh, self.folder = mesh, Path(folder)
        self.stack = build_stack(GPT, mesh.tp, seed=1)
        self.optimizer = Optimizer(self.stack.parameters(), OptimizerConfig(lr=0.01), mesh.tp)
        self.saves = BackgroundSaves(mesh, claim, start)
        self.saves.reserve(self.stack, self.optimizer)

    def fill(self, number: float) -> None:
        for parameter in self.stack.parameters():
            parameter.data.fill_(number)

    def begin(self, iteration: int, retention: Retention = ALL) -> None:
        self.fill(iteration)
        self.saves.begin(self.folder, iteration, {}, "run", retention)
        self.fill(-1)  # training goes on

    def save(self, iteration: int, retention: Retention = ALL) -> str:
        self.begin(iteration, retention)
        try:
            return str(self.saves.wait())
        except CheckpointError as error:
            return f"error: {error}"

    def loaded(self) -> tuple[int, float]:
        """Iteration of the checkpoint that is taken, and what the weights are there."""
        state = load_checkpoint(self.folder, self.stack, self.optimizer, self.mesh)
        assert state is not None
        (value,) = {float(number) for parameter in self.stack.parameters() for number in parameter.detach().unique()}
        return state["iteration"], value


# --- whole or absent


def one_dies(mesh: ParallelMesh, folder: str, stage: str, rank: int) -> tuple[str, str, list[str], tuple[int, float]]:
    happens = die if mesh.world.rank == rank else None
    first, started = Run(mesh, folder), []

    def start(memory: int) -> ForkedWriter:
        started.append(True)
        return ForkedWriter(memory, stage, happens if len(started) == 1 else None)

    assert first.save(20).endswith("iter_0000020")
    first.saves.close()
    run = Run(mesh, folder, start)
    failed = run.save(40)
    taken, names = run.loaded(), sorted(os.listdir(folder))
    again = run.save(60)
    run.saves.close()
    return failed, again, names, taken


KILLS = [
    ("files", 1),
    ("tracker", 0),
    *(pytest.param(stage, rank, marks=pytest.mark.long) for stage, rank in (("files", 0), ("mark", 1), ("index", 0), ("name", 0))),
]


@pytest.mark.parametrize(("stage", "rank"), KILLS)
def test_whoever_of_the_writers_dies_the_last_whole_checkpoint_stays_and_the_next_save_succeeds(
    ranks: Ranks, tmp_path: Path, stage: str, rank: int
) -> None:
    for failed, again, names, taken in ranks(2).run(one_dies, str(tmp_path), stage, rank):
        assert "the process that writes checkpoints ended (signal 9) before it was done" in failed
        assert f"(rank {rank})" in failed
        assert taken == (20, 20)
        assert [name for name in names if "tmp" in name] == []
        assert again == f"{tmp_path}/iter_0000060"
    assert (tmp_path / TRACKER).read_text() == "60"
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000060"


def one_is_slow(mesh: ParallelMesh, folder: str, release: str) -> tuple[list[bool], str, tuple[int, float]]:
    slow = partial(ForkedWriter, stage="mark", happens=held(Path(release)))
    run = Run(mesh, folder, slow if mesh.world.rank == 1 else ForkedWriter)
    run.begin(20)
    published = []
    for _ in range(10):
        assert run.saves.poll(0.03) is None
        published.append(Path(folder, TRACKER).exists() or Path(folder, "iter_0000020").exists())
    mesh.world.barrier()
    Path(release).touch()
    path = run.saves.wait()
    run.saves.close()
    return published, str(path), run.loaded()


def test_the_tracker_moves_only_when_all_ranks_files_are_whole(ranks: Ranks, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    for published, path, loaded in ranks(2).run(one_is_slow, str(saved), str(tmp_path / "release")):
        assert not any(published)
        assert path == f"{saved}/iter_0000020"
        assert loaded == (20, 20)


def without_polling(mesh: ParallelMesh, folder: str) -> bool:
    run = Run(mesh, folder)
    run.begin(20)
    until_s = time.monotonic() + 20
    while not Path(folder, TRACKER).exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    seen = Path(folder, TRACKER).exists()
    run.saves.wait()
    run.saves.close()
    return seen


def test_it_moves_although_the_ranks_are_busy(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(without_polling, str(tmp_path)) == [True, True]


def without_a_rank(mesh: ParallelMesh, folder: str) -> str | None:
    """The run ends by an error while a save is under way, whose files rank 1 never writes."""
    dead = partial(ForkedWriter, stage="files", happens=die)
    run = Run(mesh, folder, dead if mesh.world.rank == 1 else ForkedWriter)
    with mock.patch("domino_lm.checkpoint.background_writing._GRACE_S", 0.1):
        run.saves.close()
        run = Run(mesh, folder, dead if mesh.world.rank == 1 else ForkedWriter)
    run.begin(20)
    return str(run.saves.close())


def test_a_run_that_ends_by_an_error_publishes_what_comes_and_leaves_the_rest(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(without_a_rank, str(tmp_path)) == ["None", "None"]
    assert os.listdir(tmp_path) == []


def closed_at_once(mesh: ParallelMesh, folder: str) -> str | None:
    run = Run(mesh, folder)
    run.begin(20)
    return str(run.saves.close())


def test_a_save_under_way_is_published_by_a_run_that_ends_by_an_error(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(closed_at_once, str(tmp_path)) == [f"{tmp_path}/iter_0000020", "None"]
    assert find_checkpoint(tmp_path) == tmp_path / "iter_0000020"


def taken_over(mesh: ParallelMesh, folder: str) -> str:
    claim = Claim(Path(folder), "mine")
    assert claim.take(1)
    other = Claim(Path(folder), "other")
    other._process = type(other._process)(**{**vars(other._process), "pid": 1})
    other._content = other._content.replace(f'"pid": {os.getpid()}'.encode(), b'"pid": 1')
    run = Run(mesh, folder, partial(ForkedWriter, stage="index", happens=lambda: [other.take(2)]), claim)
    error = run.save(20)
    run.saves.close()
    return error


def test_nothing_is_published_once_another_run_has_the_folder(ranks: Ranks, tmp_path: Path) -> None:
    (error,) = ranks(1).run(taken_over, str(tmp_path))
    assert "has been taken by" in error
    assert not list(tmp_path.glob("iter_*"))
    assert not (tmp_path / TRACKER).exists()


# --- what it is beside


def with_retention(mesh: ParallelMesh, folder: str) -> list[list[str]]:
    run, found = Run(mesh, folder), []
    for iteration in (20, 30, 40, 50):
        run.begin(iteration, Retention(2, 30))
        remove_leftovers(Path(folder))  # as a start of another run does
        assert run.saves.wait() is not None
        found.append(sorted(path.name[-2:] for path in Path(folder).glob("iter_*")))
        mesh.world.barrier()
    run.saves.close()
    return found


def test_older_ones_go_and_a_save_under_way_is_no_leftover(ranks: Ranks, tmp_path: Path) -> None:
    found, _ = ranks(2).run(with_retention, str(tmp_path))
    assert found == [["20"], ["20", "30"], ["30", "40"], ["30", "40", "50"]]


def files_of_both(mesh: ParallelMesh, folder: str) -> bool:
    run = Run(mesh, f"{folder}/beside")
    run.save(20)
    run.fill(20)
    plain = save_checkpoint(f"{folder}/now", 20, run.stack, run.optimizer, {}, mesh, "run")
    run.saves.close()
    names = sorted(os.listdir(plain))
    beside = run.folder / plain.name
    pickled = {".metadata", "domino_manifest.json"}  # what was sent to a process is pickled alike, but not to the byte
    same = all((plain / name).read_bytes() == (beside / name).read_bytes() for name in {*names} - pickled)
    return names == sorted(os.listdir(beside)) and same and read_metadata(plain) == read_metadata(beside)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_its_files_are_those_of_a_save_that_training_waits_for(ranks: Ranks, tmp_path: Path, size: int) -> None:
    assert ranks(size).run(files_of_both, str(tmp_path)) == [True] * size


def too_large(mesh: ParallelMesh, folder: str) -> str:
    with mock.patch("os.posix_fallocate", side_effect=OSError(12, "Cannot allocate memory")), pytest.raises(CheckpointError) as caught:
        Run(mesh, folder)
    return str(caught.value)


def test_memory_that_is_not_there_is_an_error_at_the_start(ranks: Ranks, tmp_path: Path) -> None:
    (error,) = ranks(1).run(too_large, str(tmp_path))
    assert re.fullmatch(r"--async-save needs 0\.\d\d GiB .*\(Cannot allocate memory\); leave it off.*", error)


# --- in training


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@contextmanager
def writers(*found: Callable[[int], Any]) -> Iterator[None]:
    """The processes that are started one after the other; plain ones follow."""
    rest = list(found)
    with mock.patch("domino_lm.checkpoint.background.WriterProcess", lambda memory: (rest.pop(0) if rest else ForkedWriter)(memory)):
        yield


def lines_of_run(mesh: ParallelMesh, tokens: Path, flags: str, *started: Callable[[int], Any], release: str = "") -> list[str]:
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        if release and "validation loss" in line:
            Path(release).touch()

    with writers(*started):
        trainer = built(mesh, tokens, flags)
        trainer.console = say
        with suppress(SaveError):
            lines.append(str(trainer.fit()))
    return lines


def losses(lines: list[str]) -> list[str]:
    return [found[1] for line in lines if (found := re.search(r"lm loss(?: value)?: (\S+)", line))]


def both_ways(mesh: ParallelMesh, tokens: Path, folder: str) -> tuple[list[str], list[str]]:
    flags = "--save-interval 2 --save"
    return losses(lines_of_run(mesh, tokens, f"{flags} {folder}/now")), losses(
        lines_of_run(mesh, tokens, f"{flags} {folder}/beside --async-save")
    )


def test_losses_and_checkpoints_are_those_of_a_run_that_waits(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    (now, beside), _ = ranks(2).run(both_ways, tokens, str(tmp_path))
    assert len(now) == 8 + 2
    assert now == beside
    for path in (tmp_path / "now").glob("iter_*/*.distcp"):
        assert path.read_bytes() == (tmp_path / "beside" / path.parent.name / path.name).read_bytes()
    assert len(list((tmp_path / "beside").glob("iter_*"))) == 4


def waiting(mesh: ParallelMesh, tokens: Path, folder: str, release: str) -> list[str]:
    flags = f"--save {folder} --save-interval 3 --eval-interval 4 --async-save"
    slow = partial(ForkedWriter, stage="files", happens=held(Path(release)))
    lines = lines_of_run(mesh, tokens, flags, slow, release=release)
    kept = "saving checkpoint|successfully|validation loss|training ended"
    return [found[0] + (re.search(r"iteration +\d", line) or [""])[0][-1:] for line in lines if (found := re.search(kept, line))]


def test_the_next_save_and_the_end_wait_and_evaluation_does_not(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    (said,) = ranks(1).run(waiting, tokens, str(tmp_path / "saved"), str(tmp_path / "release"))
    assert said[:2] == ["saving checkpoint3", "validation loss4"]
    assert said.index("successfully3") < said.index("saving checkpoint6")
    assert said.index("successfully6") < said.index("saving checkpoint8") < said.index("successfully8")
    assert said[-1] == "training ended8"


def failing(mesh: ParallelMesh, tokens: Path, folder: str, flags: str) -> list[str]:
    full = partial(ForkedWriter, stage="files", happens=fill_disk)
    return lines_of_run(mesh, tokens, f"--save {folder} --save-interval 3 --eval-interval 0 --async-save {flags}", full)


def test_a_save_that_fails_is_said_at_each_log_line_until_one_succeeds(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    lines, _ = ranks(2).run(failing, tokens, str(tmp_path), "")
    said = [line for line in lines if line.startswith("warning: not saved at iteration 3, this run has no whole checkpoint")]
    assert len(said) >= 2  # when it is found, and at a log line
    assert all("__0_0.distcp: No space left on device (rank 0)" in line for line in said)
    assert "the next --save-interval" in said[0]
    assert lines[-1].startswith("training ended: finished at iteration 8")
    assert sorted(os.listdir(tmp_path)) == ["config.toml", "iter_0000006", "iter_0000008", TRACKER]


def error_of_run(mesh: ParallelMesh, tokens: Path, folder: str, flags: str) -> str:
    full = partial(ForkedWriter, stage="files", happens=fill_disk)
    with writers(full), pytest.raises(SaveError) as caught:
        built(mesh, tokens, f"--save {folder} --eval-interval 0 --async-save {flags}").fit()
    return str(caught.value)


@pytest.mark.parametrize(
    "flags", ["", pytest.param("--save-interval 3 --exit-on-save-failure", marks=pytest.mark.long)], ids=["end", "flag"]
)
def test_a_save_that_must_not_fail_ends_the_run(ranks: Ranks, tokens: Path, tmp_path: Path, flags: str) -> None:
    for error in ranks(2).run(error_of_run, tokens, str(tmp_path), flags):
        assert "No space left on device" in error
        assert "this run has no whole checkpoint" in error


# --- the process itself


def test_signals_do_not_reach_it_and_it_ends_with_its_parent() -> None:
    read, write = os.pipe()
    parent = os.fork()
    if parent == 0:
        memory = os.memfd_create("test")
        os.write(write, ForkedWriter(memory).pid.to_bytes(4, "little"))
        time.sleep(60)
        os._exit(0)
    writer = int.from_bytes(os.read(read, 4), "little")
    time.sleep(0.1)
    for number in IGNORED:
        os.kill(writer, number)
    time.sleep(0.05)
    os.kill(writer, 0)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert is_soon_gone(writer)
    os.close(read)
    os.close(write)


def is_soon_gone(pid: int) -> bool:
    """Whether a process ends, or is known to nobody but its parent, within seconds."""
    until_s = time.monotonic() + 20
    while time.monotonic() < until_s:
        if start_of(pid) is None:
            return True
        time.sleep(0.01)
    return False


def writers_of(process: subprocess.Popen[str]) -> list[int]:
    """Processes that write checkpoints, below ``process``."""
    found, todo = [], [process.pid]
    while todo:
        pid = todo.pop()
        with suppress(OSError):
            if b"writer_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
            todo += [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]
    return found


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2])
def test_a_program_whose_writers_and_ranks_are_killed_loses_only_what_was_under_way(tokens: Path, tmp_path: Path, size: int) -> None:
    flags = f"--async-save --save-interval 2 --train-iters 400 --eval-interval 0 --keep-last 3 --save {tmp_path} --load {tmp_path}"
    tracker, last = tmp_path / TRACKER, 0
    for moment in range(4):
        process = program(tokens, flags, size)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if "successfully saved" in line:
                    break
            victims = writers_of(process)
            assert len(victims) == size
            os.kill(victims[-1], signal.SIGKILL)  # the next save says so, and has a new one
            for line in process.stdout:
                if "successfully saved" in line:
                    break
            time.sleep(0.03 * moment)
            ends = writers_of(process)
            for pid in _tree(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.communicate()
        finally:
            process.kill()
        assert all(is_soon_gone(pid) for pid in ends)
        found = find_checkpoint(tmp_path)
        assert found is not None
        assert int(tracker.read_text()) > last
        last = int(tracker.read_text())


def _tree(pid: int) -> list[int]:
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        with suppress(OSError):
            tasks = Path(f"/proc/{found[-1]}/task").iterdir()
            todo += [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return found
