"""Where a rank is: its stage, step and op as numbers, which the others of its node read in shared memory."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import MutableSequence
from enum import IntEnum

Cells = MutableSequence[int]
"""The int64 numbers of one rank, by `Cell`; a write costs as much as one into a list."""

RECENT_STEPS = 50


class Cell(IntEnum):
    """What each number means. The main thread writes up to STEPS_DONE, the rank's watcher the rest."""

    STAGE = 0
    STEP = 1
    TEMPLATE = 2
    """Which of the step's templates runs."""

    OP = 3
    """Position of the op that runs in it."""

    COUNT = 4
    """Moves on with each piece of work outside steps."""

    LONGEST_STEP_MS = 5
    """Of the last RECENT_STEPS."""

    STEPS_DONE = 6
    BEAT = 7
    """Moves on while the process can run at all."""

    STILL_MS = 8
    """Since the main thread last moved."""

    ENDED = 9
    """The rank leaves: its beat ends."""

    OVER = 10
    """Somebody has said why the job ends, and all ranks leave."""

    PID = 11
    STARTED = 12
    """When the process started, in the kernel's ticks since boot: tells it from a later one of the same number."""


CELLS = 16
"""Numbers of one rank, some of them spare."""

CELL_BYTES = 8


class Stage(IntEnum):
    """What a rank does."""

    START = 0
    DATA = 1
    STEP = 2
    EDGE = 3
    EVALUATE = 4
    SAVE = 5
    OUTPUT = 6

    def __str__(self) -> str:
        return {
            Stage.START: "building or loading",
            Stage.DATA: "reading data",
            Stage.STEP: "an op",
            Stage.EDGE: "the step's end",
            Stage.EVALUATE: "an evaluation",
            Stage.SAVE: "saving",
            Stage.OUTPUT: "writing logs",
        }[self]


class Progress:
    """What the main thread of a rank notes of itself. Without ``cells`` nobody reads it."""

    def __init__(self, cells: Cells | None = None) -> None:
        self.cells: Cells = array("q", bytes(CELLS * CELL_BYTES)) if cells is None else cells
        self._steps_ms: deque[int] = deque(maxlen=RECENT_STEPS)

    def enter(self, stage: Stage, step: int | None = None) -> None:
        """The rank does something else, in iteration ``step`` if that is new."""
        self.cells[Cell.STAGE] = stage
        if step is not None:
            self.cells[Cell.STEP] = step

    def move(self) -> None:
        """A piece of work outside steps is done."""
        self.cells[Cell.COUNT] += 1

    def step_done(self, seconds: float) -> None:
        """A step took so long."""
        self._steps_ms.append(int(seconds * 1e3))
        self.cells[Cell.LONGEST_STEP_MS] = max(self._steps_ms)
        self.cells[Cell.STEPS_DONE] += 1
