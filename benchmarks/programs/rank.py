"""What every rank process does: join its gang, then run steps on order. Knows no program."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.case import Case

TIMEOUT = timedelta(minutes=10)
SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
IDLE_COLUMNS = (3, 4)  # idle and iowait in a line of /proc/stat, counted after its name


@dataclass
class PhaseClock:
    """Splits a step's time into forward and backward; what runs calls `enter` where one ends."""

    seconds: dict[str, float] = field(default_factory=lambda: {"F": 0.0, "B": 0.0})
    phase: str = "F"
    since_s: float = 0.0

    def start(self) -> None:
        """A step begins, with its forward."""
        self.seconds = {"F": 0.0, "B": 0.0}
        self.phase, self.since_s = "F", time.perf_counter()

    def enter(self, phase: str) -> None:
        """What ran until now belongs to the phase entered last."""
        now_s = time.perf_counter()
        self.seconds[self.phase] += now_s - self.since_s
        self.phase, self.since_s = phase, now_s


class Program(ABC):
    """A model on this rank. ``rank`` counts over the world; tensor-parallel ranks are neighbours."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.rank = rank
        self.clock = PhaseClock()

    @abstractmethod
    def step(self, variant: str) -> Tensor:
        """Forward and backward of one step; calls ``clock.enter("B")`` between them and returns the mean loss."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """Gradients that the last step left, by Megatron's names."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Take the weights that our program's rank of the same tensor-parallel number saved in ``folder``."""

    def samples(self) -> list[tuple[Tensor, Tensor]]:
        """Tokens and labels [b, s] of each of this replica's micro-batches; equal in every program."""
        model, replica = self.case.model, self.rank // self.case.tensor_parallel
        generator = torch.Generator().manual_seed(self.case.seed + replica)
        shape = (self.case.micro_batches, self.case.micro_batch_size, model.seq_length + 1)
        tokens = torch.randint(0, model.vocab_size or 0, shape, generator=generator)
        return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens]

    def timed_step(self, variant: str) -> tuple[float, float]:
        """Seconds of forward and of backward of one step."""
        self.clock.start()
        self.step(variant)
        self.clock.enter("F")
        return self.clock.seconds["F"], self.clock.seconds["B"]

    def measure(self, variant: str, steps: int, warm_up: int) -> dict[str, Any]:
        """Time ``steps`` steps that all ranks begin together, and the CPU that they took on this rank's core."""
        for _ in range(warm_up):
            self.step(variant)
        dist.barrier()
        forward, backward = [], []
        idle_s, cpu_s, start_s = core_idle_seconds(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            dist.barrier()
            forward_s, backward_s = self.timed_step(variant)
            forward.append(forward_s)
            backward.append(backward_s)
        busy_s = time.perf_counter() - start_s - (core_idle_seconds() - idle_s)
        cpu_s = time.process_time() - cpu_s
        return {"forward_s": forward, "backward_s": backward, "core_busy_s": busy_s / steps, "process_cpu_s": cpu_s / steps}

    def check(self, variant: str, folder: str) -> dict[str, float]:
        """This rank's loss, and its gradients' largest difference to those that our program saved in ``folder``."""
        loss = self.step(variant).item()
        reference = torch.load(gradient_file(Path(folder), self.rank), weights_only=True)
        found = self.gradients()
        assert found.keys() == reference.keys(), f"gradients differ in their names: {sorted(found.keys() ^ reference.keys())}"
        differences = {name: float((found[name] - b).abs().max() / b.abs().max()) for name, b in reference.items() if comparable(name)}
        worst = max(differences, key=lambda name: differences[name])
        return {"loss": loss, "gradient_difference": differences[worst]}

    def save(self, variant: str, folder: str) -> dict[str, float]:
        """Run a step, and write the gradients that others are compared with."""
        loss = self.step(variant).item()
        torch.save({name: grad.clone() for name, grad in self.gradients().items()}, gradient_file(Path(folder), self.rank))
        return {"loss": loss}


def comparable(name: str) -> bool:
    """Key biases, a third of the qkv bias, have a true gradient of zero; what is there is rounding."""
    return not name.endswith("linear_qkv.bias")


def weight_file(folder: Path, tp_rank: int) -> Path:
    """Where a tensor-parallel rank's weights lie."""
    return folder / f"weights_{tp_rank}.pt"


def gradient_file(folder: Path, rank: int) -> Path:
    """Where our program's gradients of one rank lie."""
    return folder / f"gradients_{rank}.pt"


def core_idle_seconds() -> float:
    """How long the core that this process is pinned to has been idle since boot."""
    core = min(os.sched_getaffinity(0))
    line = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith(f"cpu{core} "))
    ticks = line.split()[1:]
    return sum(int(ticks[column]) for column in IDLE_COLUMNS) / os.sysconf("SC_CLK_TCK")


def serve(build: Callable[[Case, int], Program]) -> None:
    """Build the program and answer orders, one JSON line each, until standard input closes.

    While no order comes the process sleeps in a read. Whatever the program prints goes to standard error.
    """
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["DOMINO_BENCH_STORE"], size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    program: Program | None = None
    for line in sys.stdin:
        order = json.loads(line)
        method, arguments = order["method"], order["arguments"]
        try:
            if method == "build":
                program = build(Case.from_json(arguments["case"]), rank)
                program.load(Path(arguments["folder"]))
                answer: Any = {"torch": torch.__version__}
            else:
                answer = getattr(program, method)(**arguments)
            print(json.dumps({"answer": answer}), file=answers, flush=True)
        except Exception:
            print(json.dumps({"error": traceback.format_exc(limit=-12)}), file=answers, flush=True)
    os._exit(0)  # the gang's groups need no farewell, and a peer may be gone
