"""A rank that torchrun started ends when torchrun is gone, and no other process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from domino_lm.launch.launcher import Launcher, chain_of

REPOSITORY = Path(__file__).parents[2]
RANK = """
import sys, threading
sys.path.insert(0, {repository!r})
from domino_lm.launch.launcher import Launcher
gone = threading.Event()
with Launcher(gone.set, every_s=0.01) as launcher:
    print(launcher.is_gone, flush=True)
    print(gone.wait(20), launcher.is_gone, flush=True)
"""
LAUNCHER = """
import os, subprocess, sys
environment = {{**os.environ, "TORCHELASTIC_RUN_ID": "some run"}}
child = subprocess.Popen({words!r}, env=environment)
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize("wrapper", [[], ["sh", "-c", '"$@"; true', "sh"]], ids=["direct", "wrapped"])
def test_the_end_of_the_launcher_is_noticed_through_wrappers_too(wrapper: list[str]) -> None:
    words = [*wrapper, sys.executable, "-c", RANK.format(repository=str(REPOSITORY))]
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER.format(words=words)], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    child = int(launcher.stdout.readline())
    try:
        assert launcher.stdout.readline() == "False\n"
        launcher.kill()
        launcher.wait()
        assert launcher.stdout.readline() == "True True\n"
    finally:
        launcher.kill()
        if wrapper:
            os.kill(child, signal.SIGKILL)


def test_without_torchrun_nobody_is_watched() -> None:
    before = threading.active_count()
    with Launcher(lambda: None, environment={}) as launcher:
        assert threading.active_count() == before
        assert not launcher.is_gone


def test_the_launcher_is_the_first_process_that_is_not_of_the_run() -> None:
    assert chain_of("no process has this") == [(os.getpid(), os.getppid())]
    assert chain_of(None) == []


def test_a_watch_that_is_over_leaves_no_thread() -> None:
    before = threading.active_count()
    with Launcher(lambda: None, environment={"TORCHELASTIC_RUN_ID": "run"}):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
