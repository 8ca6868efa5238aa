"""Saves that a process beside each rank writes while training goes on.

A save copies this rank's share into memory that its process sees, and returns. The process beside rank 0 publishes as soon as
every rank's files are whole, whatever the ranks do meanwhile; `BackgroundSaves.poll` tells all ranks alike how it ended.
"""

import os
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from domino_lm.checkpoint.agreement import first_failure, on_every_rank, on_first_rank
from domino_lm.checkpoint.background_writing import AbandonedError, Job, Outcome, Publication, Word
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.owner import Claim
from domino_lm.checkpoint.retention import Retention, saving_in
from domino_lm.checkpoint.save_load import NewCheckpoint, begin, new_checkpoint, save_failure, share_of
from domino_lm.checkpoint.shared_copy import Place, SharedCopy, new_memory, places_of
from domino_lm.checkpoint.source import HasMoments, HasParameters, blocks_of_all
from domino_lm.checkpoint.writing import WritePlan, plan_writes
from domino_lm.parallel.mesh import ParallelMesh

_WAIT_S = 0.1
_END_S = 5.0


class Helper(Protocol):
    """The process beside a rank, as its rank sees it."""

    connection: Connection

    def end(self, timeout_s: float) -> int | None:
        """Wait for its end, and kill it after ``timeout_s``; its exit code."""


class WriterProcess:
    """A new Python process in a session of its own: neither a fork of this one, nor reached by a terminal's signals."""

    def __init__(self, memory: int) -> None:
        here, there = socket.socketpair()
        with there:
            command = ["-m", "domino_lm.checkpoint.writer_process", str(there.fileno()), str(memory), str(os.getpid())]
            packages = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
            self._process = subprocess.Popen(
                [sys.executable, *command],
                pass_fds=(there.fileno(), memory),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(packages), "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.connection = Connection(here.detach())

    def end(self, timeout_s: float) -> int | None:
        """Wait for its end, and kill it after ``timeout_s``; its exit code."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        self._process.kill()
        return self._process.wait()


class _Layout(NamedTuple):
    """What is the same at each save of a run."""

    stack: HasParameters
    optimizer: HasMoments | None
    plan: WritePlan
    places: list[Place]
    copy: SharedCopy


class BackgroundSaves:
    """One save at a time, written beside training. Every rank holds one and calls the same methods.

    Built early, since its process takes seconds to start; `reserve` follows once model and optimizer exist.
    """

    def __init__(self, mesh: ParallelMesh, claim: Claim | None = None, start: Callable[[int], Helper] | None = None) -> None:
        """With rank 0's ``claim`` nothing is published once another run has the folder."""
        self._mesh, self._claim, self._start = mesh, claim, start or WriterProcess
        self._memory = new_memory()
        self._helper = self._start(self._memory)
        self._layout: _Layout | None = None
        self._under_way: NewCheckpoint | None = None
        self._outcome: Outcome | None = None
        self._told = False
        self._hold = ExitStack()

    @property
    def iteration(self) -> int | None:
        """That of the save under way, if there is one."""
        return None if self._under_way is None else self._under_way.manifest.iteration

    def reserve(self, stack: HasParameters, optimizer: HasMoments | None) -> None:
        """Plan the saves of a model and, unless None, its optimizer, and take the memory for them.

        Raises CheckpointError on all ranks if there is not so much on one.
        """
        blocks = share_of(blocks_of_all(stack.parameters(), optimizer, self._mesh.tp), self._mesh)
        places, device = places_of([block.values for block in blocks]), self._mesh.device
        copy = on_every_rank(self._mesh.world, lambda: SharedCopy.reserve(self._memory, places, device))
        self._layout = _Layout(stack, optimizer, plan_writes(blocks, self._mesh.world), places, copy)

    def begin(
        self,
        folder: Path | str,
        iteration: int,
        state: dict[str, Any],
        run_id: str,
        retention: Retention,
        may_save: Callable[[], None] | None = None,
    ) -> None:
        """Copy what `reserve` named, with ``state``, as a save of ``iteration``; it is written while the caller goes on.

        None may be under way. Raises CheckpointError on all ranks if the folder cannot be written to, or rank 0's ``may_save`` raises it.
        """
        assert self._layout is not None, "what is saved is reserved first"
        assert self._under_way is None, "one save at a time"
        stack, optimizer, plan, places, copy = self._layout
        world = self._mesh.world
        new = new_checkpoint(folder, iteration, stack, optimizer, state, self._mesh, run_id)
        if world.rank == 0:
            self._hold.enter_context(saving_in(new.final.parent))
        try:
            on_first_rank(world, lambda: begin(new.unfinished, may_save or (lambda: None)))
        except CheckpointError as error:
            self._hold.close()
            raise save_failure(new.final, error) from error
        copy.take([block.values for block in share_of(blocks_of_all(stack.parameters(), optimizer, self._mesh.tp), self._mesh)])
        publication = Publication(new.final, world.size, new.record, retention, self._claim) if world.rank == 0 else None
        self._under_way, self._outcome, self._told = new, None, False
        self._send(Job(new.unfinished, plan, places, new.manifest, retention.removes, publication))

    def poll(self, wait_s: float = 0.0) -> Path | None:
        """The checkpoint's folder, once, when the save under way has ended well; None while it goes on, or if there is none.

        All ranks call this, and all get the same; each waits ``wait_s`` at most for its own process. Raises CheckpointError
        on all of them, once, if the save failed.
        """
        if self._under_way is None:
            return None
        mine = self._look(wait_s)
        counts = torch.tensor([mine is None, mine is not None and mine.failure is not None], dtype=torch.int32, device=self._mesh.device)
        running, failed = self._mesh.world.all_reduce(counts).tolist()
        if running:
            if failed and self._mesh.world.rank == 0 and mine is None:
                self._tell("abandon")
            return None
        return self._conclude()

    def wait(self) -> Path | None:
        """As `poll` does, once the save under way has ended."""
        while self._under_way is not None:
            path = self.poll(_WAIT_S)
            if path is not None:
                return path
        return None

    def close(self) -> Path | None:
        """Let a save under way end, and the process with it; gives the folder if it ended well, on rank 0 alone. No collective.

        The files of ranks that have died do not come, so those of others are waited for some seconds only.
        """
        found = None
        if self._under_way is not None:
            self._tell("hurry")
            while (outcome := self._look(_WAIT_S)) is None:
                pass
            found = self._settle(outcome)
        with suppress(OSError):
            self._helper.connection.send(None)
        self._helper.end(_END_S)
        self._helper.connection.close()
        if self._layout is not None:
            self._layout.copy.release()
        os.close(self._memory)
        return found

    def _conclude(self) -> Path:
        """Learn how the save ended, when all processes are done with it: a checkpoint that rank 0's has published is whole."""
        new, mine = self._under_way, self._outcome
        assert new is not None
        assert mine is not None
        failures: list[CheckpointError | None] = self._mesh.world.all_gather_object(mine.failure)
        published = failures[0] is None
        self._settle(mine)
        if published:
            return new.final
        if isinstance(failures[0], AbandonedError) and any(failures[1:]):
            failures[0] = None  # it only says that another failed
        error = first_failure(failures)
        assert error is not None
        raise save_failure(new.final, error) from error

    def _settle(self, mine: Outcome) -> Path | None:
        """End the save under way as far as this rank is concerned."""
        new, self._under_way = self._under_way, None
        for warning in mine.warnings:
            warnings.warn(warning, stacklevel=2)
        if new is None or self._mesh.world.rank != 0:
            return None
        if mine.failure is not None:
            shutil.rmtree(new.unfinished, ignore_errors=True)
        self._hold.close()
        return new.final if mine.failure is None else None

    def _send(self, job: Job) -> None:
        """Hand over a job, to a new process if the last one has died."""
        try:
            self._helper.connection.send(job)
        except OSError:
            self._helper.end(0)
            self._helper = self._start(self._memory)
            with suppress(OSError):  # it ended too: `_look` says so
                self._helper.connection.send(job)

    def _tell(self, word: Word) -> None:
        """Say a word to the process beside rank 0, once for a save."""
        if not self._told and self._mesh.world.rank == 0:
            with suppress(OSError):
                self._helper.connection.send(word)
        self._told = True

    def _look(self, wait_s: float) -> Outcome | None:
        """How this rank's process ended the save; None if it has not."""
        try:
            if self._outcome is None and self._helper.connection.poll(wait_s):
                self._outcome = self._helper.connection.recv()
        except (EOFError, OSError):
            code = self._helper.end(_END_S)
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            self._outcome = Outcome(CheckpointError(f"the process that writes checkpoints ended ({how}) before it was done"))
        return self._outcome
