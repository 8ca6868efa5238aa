"""What signals do to one process: a run that trains, what it has started, and the launcher before torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.training_runs import heed_signals

ROOT = Path(__file__).parents[2]
START = """
import ctypes, os, signal, sys, time
from pathlib import Path
from domino_lm.launch.exit_code import leave_exit_code
from domino_lm.training.stop import BeforeTraining, RunSignals, Standing
"""
RUN = """
standing = Standing(7, int(os.environ.get("KEPT", "4")), Path("iter_0000004"), True)
with RunSignals(lambda: standing) as signals:
    print("ready", flush=True)
    {body}
"""
STEPS = """
    while not (asked := signals.take()).stop_signal:
        if asked.save:
            print("saved", flush=True)
        time.sleep(0.01)
    print(asked.stop_signal, flush=True)
    sys.exit(leave_exit_code(0))
"""
STUCK = """
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # for ever, and no signal wakes it
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a script, and returns once it has said that it is ready."""
    started: list[subprocess.Popen[str]] = []

    def begin(script: str, prepare: Callable[[], object] = heed_signals, **environment: str) -> subprocess.Popen[str]:
        whole = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        process = subprocess.Popen(
            [sys.executable, "-c", START + script], env=whole, preexec_fn=prepare, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code and what has not been read yet of both streams, which `communicate` would look for below their buffers."""
    assert process.stdout is not None
    assert process.stderr is not None
    late = threading.Timer(20, process.kill)
    late.start()
    out, err = process.stdout.read(), process.stderr.read()
    late.cancel()
    return process.wait(), out, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_asks_for_a_stop_by_its_name_and_says_so_in_a_line(start: Start, number: signal.Signals) -> None:
    process = start(RUN.format(body=STEPS))
    process.send_signal(number)
    code, out, err = ended(process)
    assert (code, out) == (0, f"{number.name}\n")
    assert err == f"{number.name}: the run saves at the end of this step and ends; Ctrl-C again leaves at once.\n"


@pytest.mark.parametrize(
    ("kept", "code", "lost"), [("4", 3, "iterations 5 to 7 are lost; the last whole checkpoint is"), ("7", 0, "nothing")]
)
def test_ctrl_c_again_leaves_at_once_even_a_library_that_stands_still_and_says_what_is_lost(
    start: Start, kept: str, code: int, lost: str
) -> None:
    process = start(RUN.format(body=STUCK), KEPT=kept)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("SIGINT: the run saves")
    process.send_signal(signal.SIGINT)
    found, _, err = ended(process)
    assert found == code
    assert err.startswith(f"Ctrl-C again: left at once; {lost}")
    assert err.count("\n") == 1


def test_under_a_launcher_an_echo_of_ctrl_c_is_no_second_one_and_sigterm_after_it_is(start: Start) -> None:
    process = start(RUN.format(body=STUCK), TORCHELASTIC_RUN_ID="one")
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 3


def test_signals_that_waited_together_are_a_second_ctrl_c_in_either_order(start: Start) -> None:
    process = start(RUN.format(body=STUCK), TORCHELASTIC_RUN_ID="one")
    process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    assert ended(process)[0] == 3


def ignore(*numbers: int) -> Callable[[], object]:
    return lambda: [signal.signal(number, signal.SIG_IGN) for number in numbers]


def test_signals_that_were_ignored_at_the_start_stay_so_and_sigusr1_does_not(start: Start) -> None:
    process = start(RUN.format(body=STEPS), ignore(signal.SIGHUP, signal.SIGINT, signal.SIGUSR1))
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1):
        process.send_signal(number)
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    process.send_signal(signal.SIGTERM)
    assert ended(process)[:2] == (0, "SIGTERM\n")


def test_a_save_is_asked_for_once(start: Start) -> None:
    process = start(RUN.format(body=STEPS))
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[:2] == (0, "saved\nSIGTERM\n")


HELPER = """
    if os.fork() == 0:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(os.getpid(), number)
        print("the helper lives", flush=True)
        os._exit(0)
    os.wait()
    print(any(signals.take()), flush=True)
"""


def test_signals_do_not_end_a_helper_process_and_reach_nobody_through_it(start: Start) -> None:
    assert ended(start(RUN.format(body=HELPER)))[:2] == (0, "the helper lives\nFalse\n")


@pytest.mark.parametrize(
    ("phase", "code", "said"), [("", 3, "SIGINT: left before the first step; nothing is lost.\n"), ("before.over()", 0, "")]
)
def test_ctrl_c_outside_training_is_a_line_and_no_traceback(start: Start, phase: str, code: int, said: str) -> None:
    process = start(f"with BeforeTraining() as before:\n    {phase}\n    print('ready', flush=True)\n    time.sleep(1)")
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGINT)
    assert ended(process) == (code, "", said)


LAUNCHER = """
import subprocess
from domino_lm.launch.torchrun import Node, train
class FakeNode(Node):
    def torchrun(self, port, restarts, store):
        return [sys.executable, "-c", os.environ["TORCHRUN"]]
print("ready", flush=True)
sys.exit(train(FakeNode(nproc_per_node=2), [], {**os.environ, "TORCHELASTIC_RUN_ID": "one"}))
"""
TORCHRUN = """
import os, signal, subprocess, sys
ranks = [
    subprocess.Popen([sys.executable, "-c", os.environ["RANK_SCRIPT"]], env={**os.environ, "LOCAL_RANK": str(rank)}, start_new_session=True)
    for rank in range(2)
]
codes = [rank.wait() for rank in ranks]
print("torchrun ended", flush=True)
sys.exit(any(codes))
"""


@pytest.fixture
def launched(start: Start) -> Callable[[str], subprocess.Popen[str]]:
    """The launcher with two ranks of a body, once both are ready."""

    def begin(body: str) -> subprocess.Popen[str]:
        process = start(LAUNCHER, RANK_SCRIPT=START + RUN.format(body=body), TORCHRUN=TORCHRUN)
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        return process

    return begin


def test_the_launcher_passes_signals_to_the_ranks_and_ends_as_they_do(launched: Callable[[str], subprocess.Popen[str]]) -> None:
    process = launched(STEPS)
    assert process.stdout is not None
    process.send_signal(signal.SIGUSR1)
    assert [process.stdout.readline() for _ in range(2)] == ["saved\n"] * 2
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out) == (0, "SIGINT\nSIGINT\ntorchrun ended\n")
    assert "Traceback" not in err


def test_ctrl_c_twice_at_the_launcher_ends_ranks_that_stand_still(launched: Callable[[str], subprocess.Popen[str]]) -> None:
    process = launched(STUCK)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    process.stderr.readline()
    process.send_signal(signal.SIGINT)
    code, out, err = ended(process)
    assert (code, out.replace("torchrun ended\n", "")) == (3, "")  # which ends by itself if it is quicker than the launcher
    assert "Ctrl-C again: left at once; iterations 5 to 7 are lost" in err


UNFINISHED = "os._exit(0)"


def test_the_launcher_fails_if_torchrun_ends_well_and_a_rank_did_not_end_its_run(launched: Callable[[str], subprocess.Popen[str]]) -> None:
    code, _, err = ended(launched(UNFINISHED))
    assert code == 1
    assert err == "error: node 0: torchrun ended with code 0, and not every rank of this node ended its run.\n"
