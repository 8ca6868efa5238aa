"""A rank that stands still, dies or fails ends the job in time, with one message that says which one and where."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from domino_lm.config.settings import ParallelConfig
from domino_lm.parallel.board import Board
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.parallel.progress import Cell, Progress, Stage
from domino_lm.parallel.rendezvous import Rendezvous
from domino_lm.training.straggler import slowest_line
from domino_lm.watch.hang_timeout import HangTimeout
from domino_lm.watch.watcher import Watcher
from tests.distributed.training_runs import program, write_tokens

TIMEOUT_S = 2.0
JOB_S = 60.0
PATIENCE_S = 90.0
FAULTY_STEP = 20


def misbehave(fault: str) -> None:
    """What happens to a rank in the middle of a step."""
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "sleeps":
        time.sleep(1000)
    elif fault == "raises":
        raise ValueError("the batch is empty")


def train(rank: int, size: int, port: int, faults: dict[int, str], folder: Path | None, errors: Path) -> None:
    """A rank that only sums numbers, and at FAULTY_STEP does what ``faults`` says of it."""
    sys.stderr = errors.open("w", buffering=1)
    torch.set_num_threads(1)
    rendezvous = Rendezvous(dist.TCPStore("localhost", port, is_master=False), rank, size, timedelta(seconds=60))
    board = Board.join(rendezvous, folder)
    dist.init_process_group("gloo", store=rendezvous.part("pg"), rank=rank, world_size=size, timeout=timedelta(seconds=60))
    with ParallelMesh.from_world(1, torch.device("cpu")) as mesh, Watcher(board, HangTimeout(TIMEOUT_S, 60, 60)) as watcher:
        try:
            for step in range(FAULTY_STEP + 1):
                watcher.progress.enter(Stage.DATA, step)
                if step == FAULTY_STEP and rank in faults:
                    misbehave(faults[rank])
                watcher.progress.enter(Stage.EDGE)
                mesh.world.all_reduce(torch.ones(3))
                watcher.progress.step_done(0.001)
        except Exception as error:
            watcher.fail(error)


@dataclass
class Ended:
    """What a job of forked ranks left."""

    codes: list[int]
    text: str
    seconds: float
    """From its start to the end of its last rank."""


Job = Callable[..., Ended]


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """``job(size, faults, folder, nodes)`` runs `train` on ``size`` ranks, each on a node of its own if ``nodes``."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    forker = multiprocessing.get_context("spawn").Process(target=serve_jobs, args=(theirs,))
    forker.start()

    def run(*job: Any) -> Ended:
        ours.send(job)
        assert ours.poll(PATIENCE_S), "no answer"
        answer = ours.recv()
        assert isinstance(answer, Ended), answer
        return answer

    yield run
    ours.send(None)
    forker.join(5)
    forker.kill()


def serve_jobs(pipe: Connection) -> None:
    """Fork the ranks of one job after the other: this process has torch and no threads."""
    while (job := pipe.recv()) is not None:
        try:
            pipe.send(forked(*job))
        except Exception:
            pipe.send(traceback.format_exc())


def forked(size: int, faults: dict[int, str], folder: Path, nodes: bool = False) -> Ended:
    """One job, and a process beside it that holds the store."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    errors = [folder / f"stderr {rank}" for rank in range(size)]
    places = [folder / f"node {rank}" if nodes else folder for rank in range(size)]
    for place in places:
        place.mkdir(exist_ok=True)
    holder = fork(hold_store, port)
    begin_s = time.monotonic()
    ranks = [fork(train, rank, size, port, faults, places[rank], errors[rank]) for rank in range(size)]
    codes: dict[int, int] = {}
    try:
        while len(codes) < size and time.monotonic() - begin_s < JOB_S:
            time.sleep(0.02)
            for pid in ranks:
                if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[pid] = found[1]
    finally:
        for pid in (holder, *(pid for pid in ranks if pid not in codes)):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    text = "".join(path.read_text() for path in errors if path.exists())
    assert len(codes) == size, f"still running after {JOB_S} s: {text}"
    assert not [path for place in places for path in place.glob("domino-lm-*")]
    return Ended([os.waitstatus_to_exitcode(codes[pid]) for pid in ranks], text, time.monotonic() - begin_s)


def fork(call: Callable[..., None], *args: Any) -> int:
    """Number of a new process that calls and ends."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            call(*args)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def hold_store(port: int) -> None:
    """As torchrun does."""
    store = dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)
    time.sleep(JOB_S + 5)
    del store


def test_a_stopped_rank_is_named_and_killed_and_the_others_leave(job: Job, tmp_path: Path) -> None:
    ended = job(4, {2: "stopped"}, tmp_path)
    assert ended.codes == [1, 1, -signal.SIGKILL, 1]
    first, *table = ended.text.splitlines()
    assert first.startswith(f"error: rank 2 stands still in reading data (its process is stopped), iteration {FAULTY_STEP}, since ")
    assert [line.split()[:2] for line in table] == [["rank", "iteration"], ["0-1,", "3"], ["2", str(FAULTY_STEP)]]
    assert "its process is stopped, is killed" in table[2]
    assert "the step's end" in table[1]
    assert "waits for rank 2" in table[1]


@pytest.mark.parametrize(
    ("fault", "said", "code"),
    [
        ("killed", "error: rank 1 died in reading data: killed, out of memory, or ended by a library, iteration 20", -signal.SIGKILL),
        ("sleeps", "error: rank 1 stands still in reading data, iteration 20, since ", 1),
        ("raises", "error: rank 1 failed in iteration 20, in reading data: ValueError: the batch is empty", 1),
    ],
)
def test_the_cause_is_told_once_for_the_job(job: Job, tmp_path: Path, fault: str, said: str, code: int) -> None:
    ended = job(3, {1: fault}, tmp_path)
    assert ended.codes == [1, code, 1]
    assert said in ended.text
    assert ended.text.count("error:") == 1
    assert ended.text.count("Traceback") == 0


def test_ranks_that_fail_alike_are_one_message(job: Job, tmp_path: Path) -> None:
    ended = job(3, dict.fromkeys(range(3), "raises"), tmp_path)
    assert ended.codes == [1, 1, 1]
    assert ended.text.count("ValueError: the batch is empty") == 1


@pytest.mark.parametrize("fault", [pytest.param("stopped", marks=pytest.mark.long), "raises"])
def test_nodes_learn_by_the_store(job: Job, tmp_path: Path, fault: str) -> None:
    ended = job(2, {1: fault}, tmp_path, True)
    assert ended.codes == [1, -signal.SIGKILL if fault == "stopped" else 1]
    assert ended.text.count("error: rank 1 ") == 1
    assert ended.text.count("error:") == 1


def test_a_sound_job_ends_in_silence(job: Job, tmp_path: Path) -> None:
    ended = job(2, {}, tmp_path)
    assert (ended.codes, ended.text) == ([0, 0], "")


def cells_at(stage: Stage, steps_done: int, longest_ms: int = 0) -> Progress:
    progress = Progress()
    progress.enter(stage, steps_done + 1)
    progress.cells[Cell.STEPS_DONE], progress.cells[Cell.LONGEST_STEP_MS] = steps_done, longest_ms
    return progress


@pytest.mark.parametrize(
    ("seconds", "stage", "steps_done", "longest_ms", "limit_s"),
    [
        (None, Stage.STEP, 0, 0, 540),  # the first steps have what collectives have, less a tenth
        (None, Stage.STEP, 9, 500, 30),
        (None, Stage.STEP, 9, 7_000, 70),
        (None, Stage.STEP, 9, 70_000, 180),  # --distributed-timeout-seconds-after-init 200
        (None, Stage.SAVE, 9, 500, 180),
        (20, Stage.STEP, 0, 0, 200),
        (20, Stage.EDGE, 9, 7_000, 20),
        (20, Stage.EVALUATE, 9, 7_000, 180),
        (900, Stage.STEP, 9, 500, 180),
    ],
)
def test_the_time_to_stand_still_is_of_the_run_and_bounded(
    seconds: float | None, stage: Stage, steps_done: int, longest_ms: int, limit_s: float
) -> None:
    assert HangTimeout(seconds, 600, 200).still_s(cells_at(stage, steps_done, longest_ms).cells) == pytest.approx(limit_s)


def test_a_link_between_nodes_may_be_cut_for_longer_than_a_rank_of_one_node_stands_still() -> None:
    one, several = (HangTimeout.of(ParallelConfig(), several_nodes) for several_nodes in (False, True))
    stepping = cells_at(Stage.STEP, 9, 500).cells
    assert (one.still_s(stepping), several.still_s(stepping)) == (30, 180)


def test_the_slowest_rank_is_named_by_how_much_it_is_slower() -> None:
    assert slowest_line([0.10, 0.10, 0.15, 0.11]) == (
        "   straggler: rank 2 takes 150.0 ms of its own in a step, 45.0 ms (42.9%) more than the median of 4 ranks"
    )
    assert slowest_line([0.0, 0.0]) == ""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("fault", ["stopped", "killed"])
def test_the_program_names_a_rank_that_does_not_run(tmp_path: Path, fault: str) -> None:
    flags = "--tensor-model-parallel-size 2 --train-iters 100000 --eval-interval 0 --hang-timeout-seconds 5 --log-straggler"
    process = program(write_tokens(tmp_path), flags, 2)
    assert process.stdout is not None
    try:
        head = []
        for line in process.stdout:
            head.append(line)
            if "iteration        5/" in line:
                break
        victim = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[-1])
        os.kill(victim, signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
        begin_s = time.monotonic()
        _, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode != 0
    assert time.monotonic() - begin_s < 5 + 10 + 10  # torchrun takes its time too
    assert "straggler: rank " in "".join(head)
    assert len(re.findall(r"^error: rank 1 ", err, re.M)) == 1
    assert err.count("error: ") == 1
    assert "domino_lm/pretrain.py" not in err  # no traceback of ours
