"""The plan language: ops, the chain they act on, and what each op reads and writes.

`dataflow` is the only place that knows dependencies; planner passes, validator, executor and simulator all ask it.
The table behind it stands in ``schedule/README.md``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, Protocol

from domino_lm.config.settings import Sharding
from domino_lm.schedule.collectives import ALL_REDUCE, BUCKET_GATHER, MOMENTUM_GATHER, REPLICA_SUM, STANDARD, Collective

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
    MOMENTUM = "momentum"
    ORTHOGONALIZE = "orthogonalize"


class Op(NamedTuple):
    """One unit of work. ``part`` counts along the chain: even = sharded, odd = replicated."""

    kind: Kind
    phase: str  # "F" forward, "B" backward, "S" the step's end; in "S" part numbers a gradient bucket unless `concerns_matrices`
    part: int
    row: int  # which slice of the micro-batch; ALL_ROWS in phase S
    col: int = 0  # which slice of the output dimension (TAIL, START, WAIT)
    micro: int = 0  # which micro-batch of the template
    collective: str = ALL_REDUCE.name  # name of the collective (START, WAIT); the table in `Slicing` says what it does

    def __str__(self) -> str:
        row = "*" if self.row == ALL_ROWS else str(self.row)
        col = f"c{self.col}" if self.col else ""
        collective = f":{self.collective}" if self.collective != ALL_REDUCE.name else ""
        return f"m{self.micro} {self.kind}{self.phase}{self.part}.{row}{col}{collective}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read back what ``str`` printed; raises ValueError naming the text."""
        match = re.fullmatch(r"m(\d+) ([a-z]+)([FBS])(\d+)\.(\d+|\*)(?:c(\d+))?(?::(\w+))?", text.strip())
        if match is None or match[2] not in tuple(Kind):
            raise ValueError(f"{text!r} is no op; one looks like 'm0 tailF4.1c2' or 'm0 startF4.1:reduce_scatter'")
        micro, kind, phase, part, row, col, collective = match.groups()
        row_number = ALL_ROWS if row == "*" else int(row)
        return cls(Kind(kind), phase, int(part), row_number, int(col or 0), int(micro), collective or ALL_REDUCE.name)

    @property
    def lane(self) -> str:
        """Where the op's work runs: the compute lane, or the link of the communicator it uses."""
        if self.kind not in (Kind.START, Kind.WAIT):
            return COMPUTE
        return DP_LINK if self.phase == "S" and self.collective not in (REPLICA_SUM.name, MOMENTUM_GATHER.name) else TP_LINK


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

    @property
    def core_weights(self) -> bool:
        """Whether its core has weights of its own, whose gradients backward of the core writes."""


class PartSpec(NamedTuple):
    """A `ChainPart` without a model behind it."""

    sharded: bool
    forward_collective: str | None = None
    backward_collective: str | None = None
    couples_tokens: bool = False
    core_weights: bool = False

    @classmethod
    def of(cls, part: ChainPart) -> PartSpec:
        """The record of a model's part."""
        return cls(part.sharded, part.forward_collective, part.backward_collective, part.couples_tokens, part.core_weights)


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

    collectives: tuple[Collective, ...] = STANDARD
    """The collectives that the plan may use."""

    orthogonalized: tuple[int, ...] = field(default=(), repr=False)  # the ops of a plan, which its hash covers, name them
    """Parts with matrices that the optimizer updates whole, in the order in which it does."""

    @property
    def rows(self) -> int:
        """Pieces each micro-batch is cut into."""
        return len(self.row_sizes)

    @property
    def last(self) -> int:
        """Number of the head."""
        return len(self.chain) - 1

    @property
    def zero(self) -> bool:
        """Whether DP ranks share the optimizer's work out."""
        return self.sharding != "no_shard"

    @cached_property
    def _by_name(self) -> Mapping[tuple[str, bool], Collective]:
        return {(item.name, item.of_bucket): item for item in self.collectives}

    def named(self, name: str, of_bucket: bool = False) -> Collective:
        """The collective of that name. Raises ValueError if the table has none."""
        if (name, of_bucket) not in self._by_name:
            known = ", ".join(item.name for item in self.collectives if item.of_bucket is of_bucket)
            raise ValueError(f"{name!r} is no collective of this plan; known are {known}")
        return self._by_name[name, of_bucket]

    def collective(self, op: Op) -> Collective:
        """That of a START or WAIT."""
        return self.named(op.collective, op.phase == "S")

    def leaving(self, part: int, phase: str) -> Collective | None:
        """The collective that a sharded part's forward or backward leaves with, if it leaves with one."""
        name = self.chain[part].forward_collective if phase == "F" else self.chain[part].backward_collective
        if name is None:
            return None
        found = self.named(name)
        return self.named(found.scattered) if self.sequence_parallel and found.scattered else found

    def blocks(self, part: int, phase: str) -> int:
        """Column blocks that a sharded part's forward or backward leaves in; 0 if nothing leaves, or no partial sum."""
        found = self.leaving(part, phase)
        if found is None or found.passes != "partial":
            return 0
        return self.cols if found.cut_by_columns else 1

    def coupled(self, part: int) -> bool:
        """Whether rows of this part depend on each other."""
        return self.sequence_rows and self.chain[part].couples_tokens

    def buckets_of(self, part: int) -> list[int]:
        """Buckets that hold some of the part's parameters."""
        return [bucket for bucket, parts in enumerate(self.buckets) if part in parts]


Values = Value | tuple[Value, ...]

MARKERS = frozenset({"grad", "shared", "later", "rebuilt", "grads", "summed", "reduced", "updated", "momentum", "orthogonalized"})
"""Roles of values that hand nothing over: they say that something in a row's context or a bucket is ready."""


class Flow(NamedTuple):
    """What an op reads and writes, by role; a role that several values play together has a tuple of them."""

    reads: Mapping[str, Values]
    writes: Mapping[str, Values]

    @property
    def inputs(self) -> tuple[Value, ...]:
        """All values that the op reads."""
        return _flat(self.reads)

    @property
    def outputs(self) -> tuple[Value, ...]:
        """All values that the op writes."""
        return _flat(self.writes)


def dataflow(op: Op, slicing: Slicing) -> Flow:
    """Values that ``op`` reads and values that it writes, by the roles that they play for it."""
    if op.phase == "S":
        return _step_flow(op, slicing)
    flow = _FLOWS.get((op.kind, op.phase))
    if flow is None:
        raise ValueError(f"{op} has no meaning: {op.kind} does not exist in phase {op.phase}")
    return flow(op, slicing)


def uses_weights(op: Op) -> bool:
    """Whether ``op`` multiplies with, adds or looks up parameters of its part, so that they must have been gathered."""
    return op.phase != "S" and op.kind in (Kind.LOCAL, Kind.BODY, Kind.TAIL, Kind.RECOMPUTE)


def writes_gradient(op: Op, slicing: Slicing) -> bool:
    """Whether ``op`` adds to gradients of its part's parameters."""
    return "grad" in dataflow(op, slicing).writes


def is_gather(op: Op) -> bool:
    """Whether ``op`` gathers the updated parameters of a bucket; such ops belong to the step, not to one of its micro-batches."""
    return op.phase == "S" and op.collective == BUCKET_GATHER.name


def concerns_matrices(op: Op) -> bool:
    """Whether ``op`` is one of those that update whole matrices at the step's end; its part is one of the chain, no bucket."""
    return op.kind in (Kind.MOMENTUM, Kind.ORTHOGONALIZE) or op.collective == MOMENTUM_GATHER.name


def _flat(roles: Mapping[str, Values]) -> tuple[Value, ...]:
    found: list[Value] = []
    for values in roles.values():
        if isinstance(values, Value):
            found.append(values)
        else:
            found += values
    return tuple(found)


def _at(op: Op, name: str, phase: str, part: int | None = None, row: int | None = None, col: int = 0) -> Value:
    """A value of the op's micro-batch, by default of its own part and row."""
    return Value(name, phase, op.part if part is None else part, op.row if row is None else row, col, op.micro)


def _blocks(op: Op, slicing: Slicing, phase: str, part: int) -> tuple[Value, ...]:
    return tuple(_at(op, "sum", phase, part, col=col) for col in range(slicing.blocks(part, phase)))


def _local_forward(op: Op, slicing: Slicing) -> Flow:
    reads: dict[str, Values] = {"blocks": _blocks(op, slicing, "F", op.part - 1)}
    writes: dict[str, Values] = {"normed": _at(op, "input", "F"), "saved": _at(op, "saved", "F")}
    if op.part > 1:
        reads["residual"] = _at(op, "residual", "F", op.part - 2)
    if op.part < slicing.last - 1:
        writes["residual"] = _at(op, "residual", "F")
    return Flow(reads, writes)


def _local_backward(op: Op, slicing: Slicing) -> Flow:
    reads: dict[str, Values] = {"saved": _at(op, "saved", "F"), "blocks": _blocks(op, slicing, "B", op.part + 1)}
    writes: dict[str, Values] = {"branch": _at(op, "input", "B"), "grad": _at(op, "grad", "B")}
    if op.part < slicing.last - 1:
        reads["residual"] = _at(op, "residual", "B", op.part + 2)
    if op.part > 1:
        writes["residual"] = _at(op, "residual", "B")
    return Flow(reads, writes)


def _earlier_rows(op: Op, slicing: Slicing) -> dict[str, Values]:
    """What rows of the same sequence before this one keep, if the part couples them."""
    return {"earlier": tuple(_at(op, "saved", "F", row=row) for row in range(op.row))} if slicing.coupled(op.part) else {}


def _entered(op: Op, slicing: Slicing, neighbour: int) -> Value:
    return _at(op, "gathered", op.phase) if slicing.sequence_parallel else _at(op, "input", op.phase, neighbour)


def _body_forward(op: Op, slicing: Slicing) -> Flow:
    out = "mid" if slicing.blocks(op.part, "F") else "partial"
    entered = {"x": _entered(op, slicing, op.part - 1)} if op.part else {}
    return Flow({**entered, **_earlier_rows(op, slicing)}, {"out": _at(op, out, "F"), "saved": _at(op, "saved", "F")})


def _body_backward(op: Op, slicing: Slicing) -> Flow:
    part, coupled = op.part, slicing.coupled(op.part)
    reads: dict[str, Values] = {"saved": _at(op, "saved", "F"), "dy": _entered(op, slicing, part + 1)}
    writes: dict[str, Values] = {"mid": _at(op, "mid", "B")}
    if part in slicing.recompute_full | slicing.recompute_core:
        reads["rebuilt"] = _at(op, "rebuilt", "B")
    if coupled and op.row < slicing.rows - 1:
        reads["later"] = _at(op, "shared", "B", row=op.row + 1)
    if coupled and op.row > 0:
        writes["shared"] = _at(op, "shared", "B")
    if slicing.chain[part].core_weights:
        writes["grad"] = _at(op, "core grad", "B")
    return Flow(reads, writes)


def _loss(op: Op, slicing: Slicing) -> Flow:
    return Flow({"saved": _at(op, "saved", "F"), "gathered": _at(op, "sum", "F")}, {"mid": _at(op, "mid", "B")})


def _tail(op: Op, slicing: Slicing) -> Flow:
    return Flow({"mid": _at(op, "mid", op.phase)}, {"partial": _at(op, "partial", op.phase, col=op.col)})


def _wgrad(op: Op, slicing: Slicing) -> Flow:
    again = {"x": _at(op, "gathered_input", "B")} if slicing.sequence_parallel and op.part else {}
    return Flow({"saved": _at(op, "saved", "F"), "mid": _at(op, "mid", "B"), **again}, {"grad": _at(op, "grad", "B")})


def _recompute(op: Op, slicing: Slicing) -> Flow:
    part, reads = op.part, {"saved": _at(op, "saved", "F")}
    if not slicing.chain[part].sharded:
        return Flow(reads, {"normed": _at(op, "rebuilt_input", "B")})
    if part in slicing.recompute_full:
        reads["x"] = _at(op, "gathered_input", "B") if slicing.sequence_parallel else _at(op, "rebuilt_input", "B", part - 1)
    return Flow({**reads, **_earlier_rows(op, slicing)}, {"rebuilt": _at(op, "rebuilt", "B")})


def _start(op: Op, slicing: Slicing) -> Flow:
    passes = slicing.collective(op).passes
    if passes == "input":
        return Flow({"source": _at(op, "input", op.phase, op.part - 1 if op.phase == "F" else op.part + 1)}, {"sent": _in_flight(op)})
    if passes in ("partial", "statistics"):
        return Flow({"source": _at(op, "partial", op.phase, col=op.col)}, {"sent": _in_flight(op)})
    if op.part in slicing.recompute_full:
        return Flow({"source": _at(op, "rebuilt_input", "B", op.part - 1)}, {"sent": _in_flight(op)})
    return Flow({"norm": _at(op, "saved", "F", op.part - 1)}, {"sent": _in_flight(op)})


def _wait(op: Op, slicing: Slicing) -> Flow:
    return Flow({"pending": _in_flight(op)}, {"arrived": _at(op, slicing.collective(op).arrives, op.phase, col=op.col)})


def _in_flight(op: Op) -> Value:
    return Value(f"{op.collective} in flight", op.phase, op.part, 0 if op.phase == "S" else op.row, op.col, op.micro)


def _step_flow(op: Op, slicing: Slicing) -> Flow:
    """The step's end: a bucket's gradients are summed (over TP, then DP), updated, and its parameters gathered."""
    if concerns_matrices(op):
        return _matrix_flow(op, slicing)
    bucket = op.part
    if op.kind is Kind.STEP:
        updated = tuple(Value("updated", "S", b) for b in range(len(slicing.buckets))) if slicing.zero else ()
        reads: dict[str, Values] = {"reduced": _reduced(op, slicing)}
        if slicing.orthogonalized:
            reads["orthogonalized"] = tuple(Value("orthogonalized", "S", part, micro=op.micro) for part in slicing.orthogonalized)
        return Flow(reads, {"updated": updated})
    if op.kind not in (Kind.START, Kind.WAIT):
        raise ValueError(f"{op} has no meaning: {op.kind} does not exist in phase S")
    if op.kind is Kind.WAIT:
        return Flow({"pending": _in_flight(op)}, {"arrived": Value(slicing.collective(op).arrives, "S", bucket, micro=op.micro)})
    if slicing.collective(op).passes == "parameters":
        return Flow({"updated": Value("updated", "S", bucket)}, {"sent": _in_flight(op)})
    if bucket in slicing.replica_buckets and op.collective != REPLICA_SUM.name:
        return Flow({"summed": Value("summed", "S", bucket, micro=op.micro)}, {"sent": _in_flight(op)})
    grads = tuple(
        Value(name, "B", part, row, micro=op.micro)
        for part in sorted(slicing.buckets[bucket])
        for row in range(slicing.rows)
        for name in (("grad", "core grad") if slicing.chain[part].core_weights and slicing.chain[part].sharded else ("grad",))
    )
    return Flow({"grads": grads}, {"sent": _in_flight(op)})


def _reduced(op: Op, slicing: Slicing) -> tuple[Value, ...]:
    """Gradients of all buckets, as the ops after their reductions read them."""
    return tuple(Value("reduced", "S", bucket, micro=op.micro) for bucket in range(len(slicing.buckets)))


def _matrix_flow(op: Op, slicing: Slicing) -> Flow:
    """Matrices that are updated whole: momentum of all parts, its gather over TP ranks, then the update, part by part."""
    if op.kind is Kind.MOMENTUM:
        momentum = tuple(Value("momentum", "S", part, micro=op.micro) for part in slicing.orthogonalized)
        return Flow({"reduced": _reduced(op, slicing)}, {"momentum": momentum})
    arrived = Value(MOMENTUM_GATHER.arrives, "S", op.part, micro=op.micro)
    if op.kind is Kind.START:
        return Flow({"momentum": Value("momentum", "S", op.part, micro=op.micro)}, {"sent": _in_flight(op)})
    if op.kind is Kind.WAIT:
        return Flow({"pending": _in_flight(op)}, {"arrived": arrived})
    return Flow({"gathered": arrived}, {"orthogonalized": Value("orthogonalized", "S", op.part, micro=op.micro)})


_FLOWS: Mapping[tuple[Kind, str], Callable[[Op, Slicing], Flow]] = MappingProxyType(
    {
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
    }
)
