"""What faults are injected into: small runs of the program, the uninterrupted run that they are compared with, and a process that only loads."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from domino_lm.checkpoint.manifest import MANIFEST_FILE, StoredFiles, iteration_named
from domino_lm.config.arguments import parse_arguments
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.pretrain import WRONG_SETTINGS, build_trainer, main
from domino_lm.training.trainer import Trainer
from tests.distributed.training_runs import TINY, program, write_tokens

STEPS = 24
FLAGS = f"--train-iters {STEPS} --save-interval 2 --eval-interval 8"
LIMIT_S = 240
"""A process that takes longer hangs."""


class Loaded(NamedTuple):
    """What came of loading: a state, or the one line that refuses it."""

    iteration: int | None
    digest: str
    said: tuple[str, ...]
    refused: str = ""


class Rig:
    """Token files and uninterrupted runs below ``folder``, and a folder for the injection under way."""

    def __init__(self, folder: Path, sources: str = "") -> None:
        """``sources`` names the state of the program: runs that another one made there are dropped."""
        self.folder, known = folder, folder / "sources"
        if not known.exists() or known.read_text() != sources:
            for kept in (*folder.glob("uninterrupted-*"), folder / "states"):
                shutil.rmtree(kept, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        known.write_text(sources)
        self.tokens = folder / "tokens"
        if not self.tokens.with_suffix(".idx").exists():
            write_tokens(folder)
        self.work = folder
        self._started: list[subprocess.Popen[str]] = []

    def new_folder(self, name: str) -> Path:
        """An empty folder for one injection."""
        self.work = self.folder / "tries" / name
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        return self.work

    def reference(self, ranks: int = 1) -> Path:
        """The checkpoints of a run that nothing happened to."""
        folder = self.folder / f"uninterrupted-{ranks}"
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            done = self.train(folder, ranks, "--save-interval 1")
            assert done[0] == 0, done
            (folder / "whole").touch()
        return folder

    def flags(self, save: Path, ranks: int = 1, more: str = "") -> str:
        """The command line of a run that saves in ``save`` and goes on from there."""
        return f"{FLAGS} --save {save} --load {save} --tensor-model-parallel-size {ranks} {more}"

    def start(self, save: Path, ranks: int = 1, more: str = "") -> subprocess.Popen[str]:
        """The real program, under torchrun for several ranks."""
        process = program(self.tokens, self.flags(save, ranks, more), ranks)
        self._started.append(process)
        return process

    def clear(self) -> None:
        """Kill what an injection that failed left running."""
        for process in self._started:
            kill([*children(process.pid), process.pid] if process.poll() is None else [])
        self._started.clear()

    def train(self, save: Path, ranks: int = 1, more: str = "") -> tuple[int, str]:
        """The program to its end, in forked processes that need not start: the highest exit code, and what all of them printed."""
        words = f"{TINY} --data-path {self.tokens} {self.flags(save, ranks, more)}".split()
        port = free_port()
        answers = forked([lambda rank=rank: _main(words, rank, ranks, port) for rank in range(ranks)])
        return max(code for code, _ in answers), "".join(text for _, text in answers)

    def load(self, folder: Path, more: str = "") -> Loaded:
        """What a process that only loads gets from ``folder``."""
        words = f"{TINY} --data-path {self.tokens} {FLAGS} --load {folder} {more}".split()
        return forked([lambda: _load(words)], limit_s=60)[0]

    def state_at(self, iteration: int) -> str:
        """The digest of the uninterrupted run's state at ``iteration``."""
        kept = self.folder / "states" / str(iteration)
        if not kept.exists():
            found = self.load(self.reference(), f"--ckpt-step {iteration}")
            assert found.iteration == iteration, found
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(found.digest)
        return kept.read_text()

    def copy(self, iterations: Sequence[int]) -> Path:
        """Some of the uninterrupted run's checkpoints, in a folder of their own whose tracker names the last."""
        folder = self.work / "checkpoints"
        for iteration in iterations:
            name = f"iter_{iteration:07d}"
            shutil.copytree(self.reference() / name, folder / name)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iterations[-1]))
        return folder

    def require_end(self, save: Path, ranks: int = 1) -> None:
        """Raise AssertionError if the run in ``save`` has not ended as the uninterrupted one, to the bit, or left anything about."""
        for iteration in (STEPS - 2, STEPS):
            path = save / f"iter_{iteration:07d}"
            if path.exists():
                assert content(path) == content(self.reference(ranks) / path.name), f"{path} differs from the uninterrupted run's"
        assert (save / "latest_checkpointed_iteration.txt").read_text() == str(STEPS)
        left = [path.name for path in save.iterdir() if ".tmp-" in path.name or path.name.startswith((".domino", ".seen"))]
        assert not left, f"left behind: {left}"

    def require_whole(self, save: Path, ranks: int = 1) -> None:
        """Raise AssertionError if a checkpoint that has its name is not the uninterrupted run's of that iteration."""
        for path in save.glob("iter_*"):
            if iteration_named(path) is not None:
                assert content(path) == content(self.reference(ranks) / path.name), f"{path} is not what it should be"


def content(path: Path) -> list[Any]:
    """Everything in a checkpoint that a run goes on from, verified."""
    files = StoredFiles(path)
    assert files.manifest is not None, f"{path} has no manifest"
    assert files.manifest.iteration == iteration_named(path)
    names = sorted(name for name in os.listdir(path) if name != MANIFEST_FILE)
    assert names == sorted(files.manifest.files), f"{path} holds {names}"
    record = json.loads(files.read("state.json"))
    record["state"]["settings"] = None
    return [record, *((name, hashlib.sha256(files.read(name)).hexdigest()) for name in names if name != "state.json")]


def last_saved(text: str) -> int:
    """The iteration of the last checkpoint that a run said to be saved; 0 if it said none."""
    return max(map(int, re.findall(r"successfully saved checkpoint from iteration +(\d+)", text)), default=0)


def resumed_from(text: str) -> int:
    """The iteration that a run went on from; 0 if it began."""
    found = re.search(r"resumed from \S+ at iteration (\d+)", text)
    return int(found[1]) if found else 0


def read_until(process: subprocess.Popen[str], pattern: str, limit_s: float = LIMIT_S) -> str:
    """What a program prints up to a line that ``pattern`` matches, or to its end."""
    assert process.stdout is not None
    text, until_s = "", time.monotonic() + limit_s
    while time.monotonic() < until_s:
        if select.select([process.stdout], [], [], 1.0)[0]:
            line = process.stdout.readline()
            text += line
            if not line or re.search(pattern, line):
                return text
    raise AssertionError(f"nothing like {pattern!r} in {limit_s} s: {text[-500:]}")


def children(pid: int) -> list[int]:
    """Processes that ``pid`` started."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def kill(pids: Sequence[int]) -> None:
    """SIGKILL to each; those that are gone are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def gone_within(pids: Sequence[int], limit_s: float) -> bool:
    """Whether all of them end in time."""
    until_s = time.monotonic() + limit_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > until_s:
            return False
        time.sleep(0.02)
    return True


def rest_of(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> tuple[str, str]:
    """What a program still prints until it ends: standard output and error. Raises AssertionError, and kills it, if it hangs."""
    try:
        return process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        kill([*children(process.pid), process.pid])
        raise AssertionError(f"the program did not end in {limit_s} s") from error


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def forked(functions: Sequence[Callable[[], Any]], limit_s: float = LIMIT_S) -> list[Any]:
    """What each function returns in a process of its own, all at once. Raises AssertionError if one raises, dies, or hangs."""
    started = [_fork(function) for function in functions]
    until_s, answers = time.monotonic() + limit_s, []
    try:
        for _, pipe in started:
            parts = b""
            while select.select([pipe], [], [], max(0.0, until_s - time.monotonic()))[0]:
                piece = os.read(pipe, 1 << 16)
                if not piece:
                    break
                parts += piece
            else:
                raise AssertionError(f"hung: no answer in {limit_s} s")
            if not parts:
                raise AssertionError("the process died without a word")
            ok, value = pickle.loads(parts)
            if not ok:
                raise AssertionError(value)
            answers.append(value)
    finally:
        for pid, pipe in started:
            kill([pid])
            os.waitpid(pid, 0)
            os.close(pipe)
    return answers


def _fork(function: Callable[[], Any]) -> tuple[int, int]:
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(write)
        return pid, read
    try:
        os.close(read)
        answer = (True, function())
    except BaseException:
        answer = (False, traceback.format_exc())
    with contextlib.suppress(BaseException), os.fdopen(write, "wb") as file:
        pickle.dump(answer, file)
    os._exit(0)


def _main(words: Sequence[str], rank: int, ranks: int, port: int) -> tuple[int, str]:
    """The program as rank ``rank``: exit code and what it printed."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words)
    return code, said.getvalue()


def _load(words: Sequence[str]) -> Loaded:
    with warnings.catch_warnings(record=True) as said, contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("always")
        try:
            trainer = build_trainer(parse_arguments(list(words)), ParallelMesh.single(torch.device("cpu")))
        except WRONG_SETTINGS as error:
            return Loaded(None, "", (), str(error))
        except ValueError as error:
            if type(error).__module__.startswith("domino_lm."):
                return Loaded(None, "", (), str(error))
            raise
    return Loaded(trainer.iteration, digest(trainer), tuple(str(warning.message) for warning in said))


def digest(trainer: Trainer) -> str:
    """A hash of everything that the next steps depend on."""
    found = hashlib.sha256()
    for tensor in (*trainer.stack.parameters(), *(moment for kept in trainer.optimizer.moments.values() for moment in kept)):
        found.update(tensor.detach().numpy().tobytes())
    numbers = (trainer.iteration, trainer.consumed_samples, trainer.optimizer.step_count, trainer.lr_schedule.value())
    found.update(repr(numbers).encode())
    return found.hexdigest()
