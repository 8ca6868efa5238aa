"""The words of the plan language: ops, the chain they act on, and what each op reads and writes.

`dataflow` is the only place that knows dependencies; planner passes, validator, executor and simulator all ask it.
The table behind it stands in ``schedule/README.md``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

ALL_ROWS = -1
COMPUTE, TP_LINK, DP_LINK = "compute", "tp", "dp"


class Kind(StrEnum):
    """What an op does; see DESIGN of the plan in ``schedule/README.md``."""

    LOCAL = "local"
    BODY = "body"
    TAIL = "tail"
    WGRAD = "wgrad"
    LOSS = "loss"
    START = "start"
    WAIT = "wait"
    STEP = "step"


class Op(NamedTuple):
    """One unit of work. ``part`` counts along the chain: even = sharded, odd = replicated."""

    kind: Kind
    phase: str  # "F" forward, "B" backward, "S" the step's end; in "S" part numbers a gradient bucket
    part: int
    row: int  # which slice of the micro-batch, or ALL_ROWS
    col: int = 0  # which slice of the output dimension (TAIL, START, WAIT)
    micro: int = 0  # which micro-batch of the template
    collective: str = "all_reduce"  # which collective (START, WAIT)

    def __str__(self) -> str:
        row = "*" if self.row == ALL_ROWS else str(self.row)
        col = f"c{self.col}" if self.col else ""
        collective = f":{self.collective}" if self.collective != "all_reduce" else ""
        return f"m{self.micro} {self.kind}{self.phase}{self.part}.{row}{col}{collective}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read back what ``str`` printed; raises ValueError naming the text."""
        match = re.fullmatch(r"m(\d+) ([a-z]+)([FBS])(\d+)\.(\d+|\*)(?:c(\d+))?(?::(\w+))?", text.strip())
        if match is None or match[2] not in tuple(Kind):
            raise ValueError(f"{text!r} is no op; one looks like 'm0 tailF4.1c2' or 'm0 startF4.1:reduce_scatter'")
        micro, kind, phase, part, row, col, collective = match.groups()
        row_number = ALL_ROWS if row == "*" else int(row)
        return cls(Kind(kind), phase, int(part), row_number, int(col or 0), int(micro), collective or "all_reduce")

    @property
    def lane(self) -> str:
        """Where the op's work runs: the compute lane, or the link of the communicator it uses."""
        if self.kind not in (Kind.START, Kind.WAIT):
            return COMPUTE
        return DP_LINK if self.phase == "S" else TP_LINK


class ChainPart(Protocol):
    """What the planner asks a part; parts of a model answer with class attributes."""

    @property
    def sharded(self) -> bool:
        """Whether the part's matrices are cut over the tensor-parallel group."""

    @property
    def forward_collective(self) -> str | None:
        """The collective its forward leaves with: all_reduce, statistics, or None for a replicated part."""

    @property
    def backward_collective(self) -> str | None:
        """The collective its backward leaves with, or None where no gradient goes further down."""


class PartSpec(NamedTuple):
    """A `ChainPart` without a model behind it."""

    sharded: bool
    forward_collective: str | None
    backward_collective: str | None

    @classmethod
    def of(cls, part: ChainPart) -> PartSpec:
        """The record of a model's part."""
        return cls(part.sharded, part.forward_collective, part.backward_collective)


def transformer_chain(num_layers: int) -> tuple[PartSpec, ...]:
    """Embedding, then norm, attention, norm, MLP for each layer, then final norm and head: 4 L + 3 parts."""
    replicated = PartSpec(False, None, None)
    block = (replicated, PartSpec(True, "all_reduce", "all_reduce"))
    embedding, head = PartSpec(True, "all_reduce", None), PartSpec(True, "statistics", "all_reduce")
    return (embedding, *block * (2 * num_layers), replicated, head)


class Value(NamedTuple):
    """Something an op writes once and others read."""

    name: str  # input, residual, mid, saved, partial, inflight, sum, grad, reduced
    phase: str
    part: int
    row: int = 0
    col: int = 0
    micro: int = 0


@dataclass(frozen=True)
class Slicing:
    """What ops act on: the chain, its cut, and which parts each gradient bucket holds gradients of."""

    chain: tuple[PartSpec, ...]
    row_sizes: tuple[int, ...] = (1,)
    cols: int = 1
    buckets: tuple[frozenset[int], ...] = ()

    @property
    def rows(self) -> int:
        """Pieces each micro-batch is cut into."""
        return len(self.row_sizes)

    def rows_of(self, op: Op) -> Sequence[int]:
        """The rows that an op covers."""
        return range(self.rows) if op.row == ALL_ROWS else (op.row,)


def dataflow(op: Op, slicing: Slicing) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """Values that ``op`` reads and values that it writes, each in the order in which its callable takes and returns them."""
    part, row, micro = op.part, op.row, op.micro
    last = len(slicing.chain) - 1

    def value(name: str, phase: str, part: int = part, row: int = row, col: int = 0) -> Value:
        return Value(name, phase, part, row, col, micro)

    def sums(phase: str, part: int) -> tuple[Value, ...]:
        cols = slicing.cols if slicing.chain[part].forward_collective == "all_reduce" or phase == "B" else 1
        return tuple(value("sum", phase, part, col=col) for col in range(cols))

    match op.kind, op.phase:
        case Kind.LOCAL, "F":
            reads = sums("F", part - 1) + ((value("residual", "F", part - 2),) if part > 1 else ())
            writes = (value("input", "F"), value("saved", "F")) + ((value("residual", "F"),) if part < last - 1 else ())
        case Kind.LOCAL, "B":
            above = (value("residual", "B", part + 2),) if part < last - 1 else ()
            reads = (value("saved", "F"), *sums("B", part + 1), *above)
            writes = (value("input", "B"), value("grad", "B")) + ((value("residual", "B"),) if part > 1 else ())
        case Kind.BODY, "F":
            reads = (value("input", "F", part - 1),) if part else ()
            out = "mid" if slicing.chain[part].forward_collective == "all_reduce" else "partial"
            writes = (value(out, "F"), value("saved", "F"))
        case Kind.BODY, "B":
            reads = (value("saved", "F"), value("input", "B", part + 1))
            writes = (value("mid", "B"),)
        case Kind.LOSS, "F":
            reads = (value("saved", "F"), value("sum", "F"))
            writes = (value("mid", "B"),)
        case Kind.TAIL, phase:
            reads, writes = (value("mid", phase),), (value("partial", phase, col=op.col),)
        case Kind.START, "F" | "B":
            reads, writes = (value("partial", op.phase, col=op.col),), (value("inflight", op.phase, col=op.col),)
        case Kind.WAIT, "F" | "B":
            reads, writes = (value("inflight", op.phase, col=op.col),), (value("sum", op.phase, col=op.col),)
        case Kind.WGRAD, "B":
            covered = slicing.rows_of(op)
            reads = tuple(value(name, phase, row=r) for r in covered for name, phase in (("saved", "F"), ("mid", "B")))
            writes = tuple(value("grad", "B", row=r) for r in covered)
        case Kind.START, "S":
            parts = sorted(slicing.buckets[part])
            reads = tuple(value("grad", "B", p, r) for p in parts for r in range(slicing.rows))
            writes = (value("inflight", "S", row=0),)
        case Kind.WAIT, "S":
            reads, writes = (value("inflight", "S", row=0),), (value("reduced", "S", row=0),)
        case Kind.STEP, "S":
            reads, writes = tuple(value("reduced", "S", b, row=0) for b in range(len(slicing.buckets))), ()
        case _:
            raise ValueError(f"{op} has no meaning: {op.kind} does not exist in phase {op.phase}")
    return reads, writes
