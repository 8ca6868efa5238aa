"""Rank processes of one program, started inside a shaped network and driven in lockstep over pipes."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.case import DEEPSPEED, MEGATRON, OURS, Case
from benchmarks.peers import peer_python
from benchmarks.shaped_network import ShapedNetwork

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    OURS: "benchmarks.programs.ours",
    MEGATRON: "benchmarks.programs.megatron",
    DEEPSPEED: "benchmarks.programs.deepspeed_domino",
}
ANSWER_SECONDS = 600.0
LOG_LINES = 30


class GangError(RuntimeError):
    """A program failed or stopped answering; the message holds what it said."""


class Gang:
    """One program on all ranks. Idle ranks sleep in a read, so several gangs can share cores and take turns."""

    def __init__(self, network: ShapedNetwork, program: str, folder: Path) -> None:
        self.program = program
        self.folder = folder
        python = sys.executable if program == OURS else str(peer_python())
        self._logs = [folder / f"{program}_{rank}.log" for rank in range(network.ranks)]
        self._ranks: list[subprocess.Popen[str]] = []
        for rank, log in enumerate(self._logs):
            env = {**network.environment(rank), "DOMINO_BENCH_STORE": str(folder / f"{program}.store"), "PYTHONPATH": str(ROOT)}
            with log.open("w") as errors:
                pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
                self._ranks.append(network.start(rank, [python, "-m", MODULES[program]], env, cwd=ROOT, **pipes))

    def build(self, case: Case) -> list[Any]:
        """Make the model on every rank; ours must be first, since it saves the weights that the others load."""
        return self.call("build", case=case.to_json(), folder=str(self.folder))

    def call(self, method: str, **arguments: Any) -> list[Any]:
        """Call the program's method on every rank and return the answers in rank order; raises GangError."""
        for rank in self._ranks:
            assert rank.stdin is not None
            try:
                print(json.dumps({"method": method, "arguments": arguments}), file=rank.stdin, flush=True)
            except BrokenPipeError as error:
                raise self._failure(self._ranks.index(rank), "the process has ended") from error
        return self._answers(method)

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.kill()
            rank.communicate()

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _answers(self, method: str) -> list[Any]:
        """One line from every rank; the first failure ends the wait for the others, which may hang in a collective."""
        answers: dict[int, Any] = {}
        deadline_s = time.monotonic() + ANSWER_SECONDS
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                assert rank.stdout is not None
                selector.register(rank.stdout, selectors.EVENT_READ, number)
            while len(answers) < len(self._ranks):
                ready = selector.select(deadline_s - time.monotonic())
                if not ready:
                    raise GangError(f"{self.program} gave no answer to {method!r} in {ANSWER_SECONDS:g} s")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        raise self._failure(key.data, f"the process ended in {method!r}")
                    said = json.loads(line)
                    if "error" in said:
                        raise self._failure(key.data, said["error"])
                    answers[key.data] = said["answer"]
        return [answers[number] for number in range(len(self._ranks))]

    def _failure(self, rank: int, what: str) -> GangError:
        log = "\n".join(self._logs[rank].read_text(errors="replace").splitlines()[-LOG_LINES:])
        return GangError(f"{self.program}, rank {rank}: {what}\n{log}".rstrip())
