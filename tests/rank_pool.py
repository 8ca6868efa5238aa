"""Gangs of gloo processes that live for a whole test run, since starting one costs more than most tests."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 180


class RankPool:
    """``run(function, *args)`` calls ``function(mesh, *args)`` on every rank and returns the results in rank order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "domino_lm.schedule.executor"])
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, self._folder.name, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def alive(self) -> bool:
        """Whether every process still answers."""
        return all(process.is_alive() for process in self._processes)

    def run(self, function: Callable[..., Any], *args: Any, tp: int | None = None) -> list[Any]:
        """Call ``function`` on every rank; ``tp`` is the tensor-parallel size, all ranks by default.

        Raises AssertionError with the rank's traceback when one fails; the gang is then thrown away.
        """
        for pipe in self._pipes:
            pipe.send((function, args, tp or self.size))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                answered = pipe.poll(ANSWER_SECONDS)
                ok, value = pipe.recv() if answered else (False, f"no answer in {ANSWER_SECONDS} s")
            except EOFError:
                ok, value = False, "the process died"
            if not ok:
                self.close()
                raise AssertionError(f"rank {rank} of {self.size}: {value}")
            answers.append(value)
        return answers

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from domino_lm.parallel.mesh import ParallelMesh

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    meshes = {}
    if size > 1:
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=ANSWER_SECONDS))
    else:
        meshes[1] = ParallelMesh.single(cpu)
    while True:
        function, args, tp = pipe.recv()
        try:
            if tp not in meshes:
                meshes[tp] = ParallelMesh.from_world(tp, cpu)
            pipe.send((True, function(meshes[tp], *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
