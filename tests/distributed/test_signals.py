"""Signals to a run: ranks agree, save once and end alike; real programs with and without torchrun."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.training.saving import SaveError
from tests.distributed.training_runs import REPOSITORY, TINY, built, heed_signals, program, ranks_of, write_tokens
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
PATIENCE_S = 240
ENDLESS = "--train-iters 100000 --eval-interval 0"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def signalled(mesh: ParallelMesh, tokens: Path, flags: str, signals: dict[int, int]) -> tuple[list[str], str]:
    """A run of which rank 1 gets each of ``signals`` after a step: its lines, and how it ended."""
    trainer, lines = built(mesh, tokens, f"--eval-interval 0 {flags}"), []
    trainer.console = lines.append
    step = trainer.step

    def step_and_signal(*args: object) -> object:
        made = step(*args)
        if mesh.world.rank == mesh.world.size - 1 and trainer.iteration in signals:
            os.kill(os.getpid(), signals[trainer.iteration])
            time.sleep(0.1)
        return made

    trainer.step = step_and_signal
    try:
        return lines, trainer.fit().reason
    except SaveError as error:
        return lines, str(error)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_one_rank_has_all_save_once_and_end(ranks: Ranks, tokens: Path, tmp_path: Path, number: signal.Signals) -> None:
    for lines, reason in ranks(2).run(signalled, tokens, f"--save {tmp_path}", {2: number}):
        assert reason == number.name
        assert lines == [] or [line for line in lines if "successfully" in line] == [
            f"  successfully saved checkpoint from iteration       3 to {tmp_path}"
        ]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_sigusr1_to_one_rank_saves_and_goes_on(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    (lines, reason), _ = ranks(2).run(signalled, tokens, f"--save {tmp_path}", {2: signal.SIGUSR1})
    assert reason == "finished"
    assert re.findall(r"successfully saved checkpoint from iteration +(\d+)", "\n".join(lines)) == ["3", "8"]


def test_a_run_without_a_folder_says_that_a_signal_lost_it(ranks: Ranks, tokens: Path) -> None:
    for _, ending in ranks(2).run(signalled, tokens, "", {2: signal.SIGTERM}):
        assert ending == "SIGTERM ended the run at iteration 3, and without --save nothing of it is kept."


def launched(tokens: Path, flags: str, ranks: int) -> subprocess.Popen[str]:
    """The same program as `program`, by the launcher of the examples and as ``nohup`` starts it."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", "NPROC": str(ranks)}
    words = [str(REPOSITORY / "examples" / "launch.sh"), *f"{TINY} --data-path {tokens} {flags}".split()]
    return subprocess.Popen(
        ["nohup", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heed_signals
    )


class Run:
    """An endless run of the real program, read up to a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines = process, list[str]()

    def until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return
        raise AssertionError(f"{text!r} never came: {''.join(self.lines)}")

    def end(self) -> tuple[int, str, str]:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.lines += self.process.stdout.readlines()
        err = self.process.stderr.read()
        return self.process.wait(PATIENCE_S), "".join(self.lines), err


@pytest.fixture
def start(tokens: Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """An endless run that saves, after its third step; ``by`` says how it is started."""
    started: list[subprocess.Popen[str]] = []
    late: list[threading.Timer] = []

    def begin(by: Callable[..., subprocess.Popen[str]], ranks: int) -> Run:
        started.append(by(tokens, f"{ENDLESS} --tensor-model-parallel-size {ranks} --save {tmp_path}", ranks))
        late.append(threading.Timer(PATIENCE_S, started[-1].terminate))
        late[-1].start()
        run = Run(started[-1])
        run.until("iteration        3/")
        return run

    yield begin
    for timer in late:
        timer.cancel()
    for process in started:
        process.kill()
        process.wait()


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("iter_*"))


WAYS = [
    pytest.param(program, 1, 0, id="plain"),
    pytest.param(program, 2, 1, id="torchrun", marks=pytest.mark.long),  # torchrun's own code after a signal
    pytest.param(launched, 2, 0, id="launcher", marks=pytest.mark.long),
]


@pytest.mark.slow
@pytest.mark.parametrize(("by", "ranks", "code"), WAYS)
def test_ctrl_c_saves_once_and_ends_without_a_traceback_of_ours(
    start: Callable[..., Run], tmp_path: Path, by: Callable[..., subprocess.Popen[str]], ranks: int, code: int
) -> None:
    run = start(by, ranks)
    run.process.send_signal(signal.SIGINT)
    found, out, err = run.end()
    assert found == code, err
    assert out.count("successfully saved checkpoint") == 1
    assert len(saved(tmp_path)) == 1
    assert err.count("SIGINT: the run saves at the end of this step and ends") == 1
    assert "domino_lm/" not in err


@pytest.mark.long
@pytest.mark.parametrize(
    ("by", "ranks", "code"), [(program, 1, 3), (program, 2, 1), (launched, 2, 3)], ids=["plain", "torchrun", "launcher"]
)
def test_ctrl_c_during_the_save_leaves_at_once_and_the_last_checkpoint_whole(
    start: Callable[..., Run], tmp_path: Path, by: Callable[..., subprocess.Popen[str]], ranks: int, code: int
) -> None:
    run = start(by, ranks)
    rank = run.process.pid if ranks == 1 else ranks_of(run.process.pid)[0]
    os.kill(rank, signal.SIGUSR1)
    run.until("successfully saved")
    run.process.send_signal(signal.SIGINT)
    run.until("saving checkpoint")
    run.process.send_signal(signal.SIGINT)
    found, _, err = run.end()
    kept = [name for name in saved(tmp_path) if "tmp" not in name]
    assert found in (code, 0), err  # the save may have been done
    assert err.count("Ctrl-C again: left at once;") == 1
    assert f"the last whole checkpoint is {tmp_path}/{kept[0]}" in err
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() in [str(int(name[5:])) for name in kept]
    assert "domino_lm/" not in err


@pytest.mark.long
def test_nohup_holds_and_sigusr1_to_the_launcher_saves_and_goes_on(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(launched, 2)
    run.process.send_signal(signal.SIGHUP)
    run.process.send_signal(signal.SIGUSR1)
    run.until("successfully saved")
    run.until("elapsed time")
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert code == 0, err
    assert len(saved(tmp_path)) == 2
