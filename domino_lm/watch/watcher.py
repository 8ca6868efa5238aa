"""Watches the ranks of a job from a thread of each: says once why the job ends, and has all of them leave."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from domino_lm.parallel.board import Board, process_of, within
from domino_lm.parallel.progress import Cell, Cells, Progress, Stage
from domino_lm.watch.guard import start_guard
from domino_lm.watch.hang_timeout import HangTimeout
from domino_lm.watch.standstill import Named, Seen, at_fault, report, table_of

EXIT_FAILED_RUN = 1
TICK_S = 0.5
PUBLISH_S = 1.0
READ_AT_ONCE = 64
"""Ranks that read each other's numbers every PUBLISH_S; with more of them it takes longer, for the sake of the store."""

QUIET_S = 3.0
"""Whose connection broke and who has shown no sign of life for so long is taken for dead."""

PATIENCE_S = 5.0
"""How long a rank whose connection broke waits for another to say why."""

MOVES = slice(Cell.STAGE, Cell.COUNT + 1)
OF_COMMUNICATION = ("gloo", "nccl", "connection closed by peer", "connection reset", "broken pipe", "timed out waiting", "socket")

Leave = Callable[[int], None]


def leave_process(code: int) -> None:
    """End this process at once: a thread of it may stand still in a library for ever."""
    for stream in (sys.stdout, sys.stderr):
        within(1.0, stream.flush)
    os._exit(code)


class Watcher:
    """Watches from a thread while entered. ``progress`` is what the main thread notes of itself.

    On each node the lowest rank that runs judges whether somebody stands still, once it has stood still itself for long. One
    rank of the job says so, and all leave with exit code 1; those of its node that cannot are killed.
    """

    def __init__(self, board: Board, timeout: HangTimeout, *, leave: Leave = leave_process, tick_s: float = TICK_S) -> None:
        self.progress = Progress(board.own)
        self.named: Named = lambda rank, template, op: (f"op {op}", None)
        """Names an op of the plan, once there is one."""

        self._board, self._timeout, self._leave = board, timeout, leave
        self._tick_s = min(tick_s, (timeout.seconds or tick_s * 8) / 8)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._publisher = threading.Thread(target=self._publish, name="publisher", daemon=True)
        self._beats: dict[int, tuple[int, float]] = {}
        self._awake_s = 0.0
        self._moved = (b"", 0.0)

    def __enter__(self) -> Self:
        self._note()
        self._thread.start()
        if self._board.apart:
            self._board.publish()
            self._publisher.start()
            if min(self._board.local) == self._board.rank:
                start_guard(self._board.descriptors, self._timeout)
        self._board.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()
        self._board.own[Cell.ENDED] = 1
        if self._board.apart:
            within(PUBLISH_S, self._board.publish)

    def fail(self, error: Exception, cause: str | None = None) -> None:
        """End this rank after ``error``, and the job with it; ``cause`` is what is said of it, by default where and what it is.

        An error of the communication is somebody else's fault, who may say why; another one is told once for the job.
        """
        if is_of_communication(error):
            self._await_cause()
            self._judge([seen for seen in self._seen() if seen.gone or (not seen.ended and seen.silent_s >= QUIET_S)])
        self._say(cause or self._told(error))
        self._await_cause()  # another rank speaks
        return self._leave(EXIT_FAILED_RUN)

    def _await_cause(self) -> None:
        """Leave as soon as another rank has said why the job ends."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            if self._board.is_over():
                self._leave(EXIT_FAILED_RUN)
                return
            if any(seen.gone for seen in self._seen()) and self._leads():
                return
            time.sleep(self._tick_s / 5)

    def _told(self, error: Exception) -> str:
        """The frames of ``error``, and a line that says where it came from and what it is."""
        cells = self._board.own
        stage = Stage(cells[Cell.STAGE])
        where = self.named(self._board.rank, cells[Cell.TEMPLATE], cells[Cell.OP])[0] if stage is Stage.STEP else str(stage)
        frames = "".join(traceback.format_tb(error.__traceback__))
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        return f"{frames}error: rank {self._board.rank} failed in iteration {cells[Cell.STEP]}, in {where}: {type(error).__name__}: {error}{notes}"

    def _run(self) -> None:
        while not self._end.wait(self._tick_s):
            self._note()
            if self._board.is_over():
                self._leave(EXIT_FAILED_RUN)
                return
            if self._board.own[Cell.STILL_MS] >= self._timeout.silent_s(self._board.own) * 1e3:
                seen = self._seen()
                if self._leads():
                    self._judge(at_fault(seen, self.named), seen)

    def _note(self) -> None:
        """Beat, and note how long the main thread has stood still. Time in which this process itself was stopped does not count."""
        cells = self._board.own
        self._awake_s += self._tick_s
        place = bytes(array("q", cells[MOVES]))
        if place != self._moved[0]:
            self._moved = (place, self._awake_s)
        cells[Cell.BEAT] += 1
        cells[Cell.STILL_MS] = int((self._awake_s - self._moved[1]) * 1e3)
        for rank, each in self._board.known().items():
            self._heard(rank, each)

    def _heard(self, rank: int, cells: Cells) -> float:
        """Seconds since a beat of ``rank`` was seen to move on."""
        beat, since_s = self._beats.get(rank, (-1, 0.0))
        if cells[Cell.BEAT] != beat:
            self._beats[rank] = (cells[Cell.BEAT], self._awake_s)
            return 0.0
        return self._awake_s - since_s

    def _seen(self) -> list[Seen]:
        found = {rank: array("q", cells) for rank, cells in self._board.known().items()}
        for cells in found.values():  # what another node has published may be older than the limits that hold
            for number in (Cell.STEPS_DONE, Cell.LONGEST_STEP_MS):
                cells[number] = max(cells[number], self._board.own[number])
        return table_of(found, {rank: self._heard(rank, cells) for rank, cells in found.items()}, self._processes(), self._timeout)

    def _processes(self) -> dict[int, str]:
        """What the processes of this node's ranks do, in the kernel's letters."""
        return {rank: process_of(cells) for rank, cells in self._board.local.items()}

    def _leads(self) -> bool:
        """Whether this is the lowest of the node's ranks whose watchers run."""
        patience_s = 3 * self._tick_s + 1
        return not any(
            self._heard(rank, cells) < patience_s and not cells[Cell.ENDED]
            for rank, cells in self._board.local.items()
            if rank < self._board.rank
        )

    def _judge(self, fault: Sequence[Seen], seen: Sequence[Seen] | None = None) -> None:
        """Say who of ``seen`` is at ``fault``, if anybody is, and end the job."""
        if fault:
            self._say(
                "error: " + report(seen or self._seen(), fault, self.named, str(self._timeout)),
                [one.rank for one in fault if one.cannot_run],
            )

    def _say(self, text: str, kill: Sequence[int] = ()) -> None:
        """End the job and this rank with ``text``, unless another rank has spoken."""
        if not self._board.claim():
            return
        print(text, file=sys.stderr, flush=True)
        self._kill(kill)
        self._board.declare_over()  # the last thing, since this rank's other thread may leave from here on
        self._leave(EXIT_FAILED_RUN)

    def _kill(self, ranks: Sequence[int]) -> None:
        """Kill those of ``ranks`` that are of this node."""
        for rank in ranks:
            cells = self._board.local.get(rank)
            if cells is not None and process_of(cells):
                os.kill(cells[Cell.PID], signal.SIGKILL)

    def _publish(self) -> None:
        while not self._end.wait(max(PUBLISH_S, self._board.size * PUBLISH_S / READ_AT_ONCE)):
            with contextlib.suppress(RuntimeError):  # who held the store has left; its ranks' connections break too
                self._board.publish()
                self._board.read()


def is_of_communication(error: Exception) -> bool:
    """Whether ``error`` says that a connection broke or a collective took too long, as it does if another rank fails."""
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(words in text for words in OF_COMMUNICATION)
