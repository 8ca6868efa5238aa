"""The plan language: ops, the chain they act on, and what each op reads and writes.

`dataflow` is the only place that knows dependencies; planner passes, validator, executor and simulator all ask it.
The table behind it stands in ``schedule/README.md``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from domino_lm.config.settings import Sharding

ALL_ROWS = -1
COMPUTE, TP_LINK, DP_LINK = "compute", "tp", "dp"


class Kind(StrEnum):
    """What an op does; see ``schedule/README.md``."""

    LOCAL = "local"
    BODY = "body"
    TAIL = "tail"
    WGRAD = "wgrad"
    LOSS = "loss"
    RECOMPUTE = "recompute"
    START = "start"
    WAIT = "wait"
    STEP = "step"


class Op(NamedTuple):
    """One unit of work. ``part`` counts along the chain: even = sharded, odd = replicated."""

    kind: Kind
    phase: str  # "F" forward, "B" backward, "S" the step's end; in "S" part numbers a gradient bucket
    part: int
    row: int  # which slice of the micro-batch; ALL_ROWS in phase S
    col: int = 0  # which slice of the output dimension (TAIL, START, WAIT)
    micro: int = 0  # which micro-batch of the template
    collective: str = "all_reduce"  # which collective (START, WAIT); `COLLECTIVES` says what each does

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
        return DP_LINK if self.phase == "S" and self.collective != "replica_sum" else TP_LINK


COLLECTIVES = {
    "all_reduce": "sums partial sums over TP ranks, or in phase S a gradient bucket over DP ranks",
    "reduce_scatter": "the same sum, each rank keeping its share: of the tokens (sequence parallelism), or of a bucket (distributed optimizer)",
    "all_gather": "every rank's share: of the tokens, entering a sharded part, or in phase S of a bucket's updated parameters",
    "gather_input": "a part's input once more, for its weight gradient or to recompute it (sequence parallelism)",
    "statistics": "three numbers a token from every rank's piece of the vocabulary",
    "replica_sum": "sums gradients of replicated weights that saw a share of the tokens each (sequence parallelism)",
}


class ChainPart(Protocol):
    """A part as the planner sees it; parts of a model have class attributes of these names."""

    @property
    def sharded(self) -> bool:
        """Whether the part's matrices are cut over the tensor-parallel group."""

    @property
    def forward_collective(self) -> str | None:
        """The collective its forward leaves with: all_reduce, statistics, or None for a replicated part."""

    @property
    def backward_collective(self) -> str | None:
        """The collective its backward leaves with, or None if no gradient goes further down."""

    @property
    def couples_tokens(self) -> bool:
        """Whether a token's output depends on earlier tokens, so that rows cut along the sequence depend on each other."""


class PartSpec(NamedTuple):
    """A `ChainPart` without a model behind it."""

    sharded: bool
    forward_collective: str | None = None
    backward_collective: str | None = None
    couples_tokens: bool = False

    @classmethod
    def of(cls, part: ChainPart) -> PartSpec:
        """The record of a model's part."""
        return cls(part.sharded, part.forward_collective, part.backward_collective, part.couples_tokens)


def transformer_chain(num_layers: int) -> tuple[PartSpec, ...]:
    """Embedding, then norm, attention, norm, MLP for each layer, then final norm and head: 4 L + 3 parts."""
    replicated = PartSpec(False)
    attention = PartSpec(True, "all_reduce", "all_reduce", couples_tokens=True)
    layer = (replicated, attention, replicated, PartSpec(True, "all_reduce", "all_reduce"))
    embedding, head = PartSpec(True, "all_reduce", None), PartSpec(True, "statistics", "all_reduce")
    return (embedding, *layer * num_layers, replicated, head)


class Value(NamedTuple):
    """Something an op writes once and others read."""

    name: str
    phase: str
    part: int
    row: int = 0
    col: int = 0
    micro: int = 0


@dataclass(frozen=True)
class Slicing:
    """What ops act on: the chain, how a micro-batch is cut, and which collectives join its parts."""

    chain: tuple[PartSpec, ...]

    row_sizes: tuple[int, ...] = (1,)
    """Samples, or under ``sequence_rows`` tokens, of each row."""

    cols: int = 1
    """Column blocks that leave a part one by one."""

    sequence_rows: bool = False
    """Rows are cut along the sequence: a row reads what earlier rows of a coupled part keep."""

    sequence_parallel: bool = False
    """Replicated parts hold a share of the tokens: reduce-scatter leaving a sharded part, all-gather entering one."""

    recompute_full: frozenset[int] = frozenset()
    """Sharded parts that keep nothing but the residual stream before their norm."""

    recompute_core: frozenset[int] = frozenset()
    """Sharded parts that keep their GEMMs' inputs, but not what lies between."""

    buckets: tuple[frozenset[int], ...] = ()
    """Parts that each gradient bucket holds gradients of."""

    replica_buckets: frozenset[int] = frozenset()
    """Buckets whose gradients are first summed over TP ranks."""

    sharding: Sharding = "no_shard"
    """Unless ``no_shard``, each DP rank updates a share of every bucket, and all gather the parameters afterwards."""

    @property
    def rows(self) -> int:
        """Pieces each micro-batch is cut into."""
        return len(self.row_sizes)

    @property
    def last(self) -> int:
        """Number of the head."""
        return len(self.chain) - 1

    @property
    def sharded(self) -> bool:
        """Whether DP ranks share the optimizer's work out."""
        return self.sharding != "no_shard"

    @property
    def leaving(self) -> str:
        """The collective that partial sums leave with."""
        return "reduce_scatter" if self.sequence_parallel else "all_reduce"

    def coupled(self, part: int) -> bool:
        """Whether rows of this part depend on each other."""
        return self.sequence_rows and self.chain[part].couples_tokens

    def buckets_of(self, part: int) -> list[int]:
        """Buckets that hold some of the part's parameters."""
        return [bucket for bucket, parts in enumerate(self.buckets) if part in parts]


Flow = tuple[tuple[Value, ...], tuple[Value, ...]]


def dataflow(op: Op, slicing: Slicing) -> Flow:
    """Values that ``op`` reads and values that it writes, each in the order in which its callable takes and returns them."""
    if op.phase == "S":
        return _step_flow(op, slicing)
    flow = {
        (Kind.LOCAL, "F"): _local_forward,
        (Kind.LOCAL, "B"): _local_backward,
        (Kind.BODY, "F"): _body_forward,
        (Kind.BODY, "B"): _body_backward,
        (Kind.LOSS, "F"): _loss,
        (Kind.TAIL, "F"): _tail,
        (Kind.TAIL, "B"): _tail,
        (Kind.WGRAD, "B"): _wgrad,
        (Kind.RECOMPUTE, "B"): _recompute,
        (Kind.START, "F"): _start,
        (Kind.START, "B"): _start,
        (Kind.WAIT, "F"): _wait,
        (Kind.WAIT, "B"): _wait,
    }.get((op.kind, op.phase))
    if flow is None:
        raise ValueError(f"{op} has no meaning: {op.kind} does not exist in phase {op.phase}")
    return flow(op, slicing)


def uses_weights(op: Op) -> bool:
    """Whether ``op`` multiplies with, adds or looks up parameters of its part, so that they must have been gathered."""
    return op.phase != "S" and op.kind in (Kind.LOCAL, Kind.BODY, Kind.TAIL, Kind.RECOMPUTE)


def is_gather(op: Op) -> bool:
    """Whether ``op`` gathers the updated parameters of a bucket; such ops belong to the step, not to one of its micro-batches."""
    return op.phase == "S" and op.collective == "all_gather"


def _at(op: Op, name: str, phase: str, part: int | None = None, row: int | None = None, col: int = 0) -> Value:
    """A value of the op's micro-batch, by default of its own part and row."""
    return Value(name, phase, op.part if part is None else part, op.row if row is None else row, col, op.micro)


def _sums(op: Op, slicing: Slicing, phase: str, part: int) -> tuple[Value, ...]:
    return tuple(_at(op, "sum", phase, part, col=col) for col in range(slicing.cols))


def _local_forward(op: Op, slicing: Slicing) -> Flow:
    part = op.part
    reads = (*_sums(op, slicing, "F", part - 1), *([_at(op, "residual", "F", part - 2)] if part > 1 else []))
    residual = [_at(op, "residual", "F")] if part < slicing.last - 1 else []
    return reads, (_at(op, "input", "F"), _at(op, "saved", "F"), *residual)


def _local_backward(op: Op, slicing: Slicing) -> Flow:
    part = op.part
    residual = [_at(op, "residual", "B", part + 2)] if part < slicing.last - 1 else []
    reads = (_at(op, "saved", "F"), *_sums(op, slicing, "B", part + 1), *residual)
    return reads, (_at(op, "input", "B"), _at(op, "grad", "B"), *([_at(op, "residual", "B")] if part > 1 else []))


def _earlier_rows(op: Op, slicing: Slicing) -> tuple[Value, ...]:
    return tuple(_at(op, "saved", "F", row=row) for row in range(op.row)) if slicing.coupled(op.part) else ()


def _body_forward(op: Op, slicing: Slicing) -> Flow:
    entered = _at(op, "gathered", "F") if slicing.sequence_parallel else _at(op, "input", "F", op.part - 1)
    out = "partial" if slicing.chain[op.part].forward_collective == "statistics" else "mid"
    reads = (*([entered] if op.part else []), *_earlier_rows(op, slicing))
    return reads, (_at(op, out, "F"), _at(op, "saved", "F"))


def _body_backward(op: Op, slicing: Slicing) -> Flow:
    part, coupled = op.part, slicing.coupled(op.part)
    entered = _at(op, "gathered", "B") if slicing.sequence_parallel else _at(op, "input", "B", part + 1)
    rebuilt = [_at(op, "rebuilt", "B")] if part in slicing.recompute_full | slicing.recompute_core else []
    later = [_at(op, "shared", "B", row=op.row + 1)] if coupled and op.row < slicing.rows - 1 else []
    shared = [_at(op, "shared", "B")] if coupled and op.row > 0 else []
    return (_at(op, "saved", "F"), entered, *rebuilt, *later), (_at(op, "mid", "B"), *shared)


def _loss(op: Op, slicing: Slicing) -> Flow:
    return (_at(op, "saved", "F"), _at(op, "sum", "F")), (_at(op, "mid", "B"),)


def _tail(op: Op, slicing: Slicing) -> Flow:
    return (_at(op, "mid", op.phase),), (_at(op, "partial", op.phase, col=op.col),)


def _wgrad(op: Op, slicing: Slicing) -> Flow:
    again = [_at(op, "gathered_input", "B")] if slicing.sequence_parallel and op.part else []
    return (_at(op, "saved", "F"), _at(op, "mid", "B"), *again), (_at(op, "grad", "B"),)


def _recompute(op: Op, slicing: Slicing) -> Flow:
    part, saved = op.part, _at(op, "saved", "F")
    if not slicing.chain[part].sharded:
        return (saved,), (_at(op, "rebuilt_input", "B"),)
    entered: list[Value] = []
    if part in slicing.recompute_full:
        entered = [_at(op, "gathered_input", "B") if slicing.sequence_parallel else _at(op, "rebuilt_input", "B", part - 1)]
    return (saved, *entered, *_earlier_rows(op, slicing)), (_at(op, "rebuilt", "B"),)


def _start(op: Op, slicing: Slicing) -> Flow:
    if op.collective == "all_gather":
        source = _at(op, "input", op.phase, op.part - 1 if op.phase == "F" else op.part + 1)
    elif op.collective == "gather_input":
        rebuilt = op.part in slicing.recompute_full
        source = _at(op, "rebuilt_input", "B", op.part - 1) if rebuilt else _at(op, "saved", "F", op.part - 1)
    else:
        source = _at(op, "partial", op.phase, col=op.col)
    return (source,), (_in_flight(op),)


def _wait(op: Op, slicing: Slicing) -> Flow:
    arrived = {"all_gather": "gathered", "gather_input": "gathered_input"}.get(op.collective, "sum")
    return (_in_flight(op),), (_at(op, arrived, op.phase, col=op.col),)


def _in_flight(op: Op) -> Value:
    return Value(f"{op.collective} in flight", op.phase, op.part, 0 if op.phase == "S" else op.row, op.col, op.micro)


def _step_flow(op: Op, slicing: Slicing) -> Flow:
    """The step's end: a bucket's gradients are summed (over TP, then DP), updated, and its parameters gathered."""
    bucket = op.part
    arrived = {"replica_sum": "summed", "all_gather": "weights"}.get(op.collective, "reduced")
    if op.kind is Kind.STEP:
        buckets = range(len(slicing.buckets))
        updated = tuple(Value("updated", "S", b) for b in buckets) if slicing.sharded else ()
        return tuple(Value("reduced", "S", b, micro=op.micro) for b in buckets), updated
    if op.kind is Kind.WAIT:
        return (_in_flight(op),), (Value(arrived, "S", bucket, micro=op.micro),)
    if op.kind is not Kind.START:
        raise ValueError(f"{op} has no meaning: {op.kind} does not exist in phase S")
    if is_gather(op):
        return (Value("updated", "S", bucket),), (_in_flight(op),)
    if bucket in slicing.replica_buckets and op.collective != "replica_sum":
        return (Value("summed", "S", bucket, micro=op.micro),), (_in_flight(op),)
    parts = sorted(slicing.buckets[bucket])
    return tuple(Value("grad", "B", part, row, micro=op.micro) for part in parts for row in range(slicing.rows)), (_in_flight(op),)
