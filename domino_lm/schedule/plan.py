"""The planner: one order for forward, one for backward, and passes that change a plan into another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from domino_lm.schedule.ops import ALL_ROWS, ChainPart, Kind, Op, PartSpec, Slicing


@dataclass(frozen=True)
class Plan:
    """Ops in the order in which every rank issues them, and the cut that they act on."""

    ops: tuple[Op, ...]
    slicing: Slicing

    def __str__(self) -> str:
        return "\n".join(map(str, self.ops))

    def digest(self) -> str:
        """Hash that is equal on two ranks exactly when they issue the same ops on the same cut."""
        return hashlib.sha256(f"{self.slicing}\n{self}".encode()).hexdigest()

    def with_ops(self, ops: Iterable[Op]) -> Plan:
        """The same cut under another order."""
        return replace(self, ops=tuple(ops))


def cut(size: int, pieces: int) -> tuple[int, ...]:
    """Sizes of ``pieces`` pieces of ``size`` that differ by one at most, larger ones first.

    Raises ValueError where a piece would be empty.
    """
    if not 1 <= pieces <= size:
        raise ValueError(f"cannot cut {size} into {pieces} pieces that each hold something; use 1 to {size}")
    return tuple(size // pieces + (i < size % pieces) for i in range(pieces))


def build_plan(chain: Sequence[ChainPart], row_sizes: Sequence[int] = (1,), cols: int = 1) -> Plan:
    """Forward and backward of one micro-batch; one row and one column are Megatron's order.

    ``row_sizes`` holds the sequences of each row. Weight gradients cover all rows of a part, see `wgrad_each_row`.
    """
    slicing = Slicing(tuple(PartSpec.of(part) for part in chain), tuple(row_sizes), cols)
    return Plan((*_forward(slicing), *_backward(slicing)), slicing)


def _forward(slicing: Slicing) -> Iterator[Op]:
    """Part by part, row by row: redeem the row's collective, normalise, compute, send; nothing between tail and start."""
    sharded = [p for p, spec in enumerate(slicing.chain) if spec.sharded]
    for part in sharded:
        for row in range(slicing.rows):
            if part:
                yield from _enter("F", part - 2, row, slicing)
                yield Op(Kind.LOCAL, "F", part - 1, row)
            yield Op(Kind.BODY, "F", part, row)
            if slicing.chain[part].forward_collective == "all_reduce":
                yield from _leave("F", part, row, slicing.cols)
            else:
                yield Op(Kind.START, "F", part, row, collective="statistics")
    for row in range(slicing.rows):
        yield Op(Kind.WAIT, "F", sharded[-1], row, collective="statistics")
        yield Op(Kind.LOSS, "F", sharded[-1], row)


def _backward(slicing: Slicing) -> Iterator[Op]:
    """Parts and rows from last to first; the last row's collective leaves before the part's weight gradients start."""
    last = len(slicing.chain) - 1
    for part in range(last, -1, -2):
        for row in reversed(range(slicing.rows)):
            if part != last:
                yield from _enter("B", part + 2, row, slicing)
                yield Op(Kind.LOCAL, "B", part + 1, row)
                yield Op(Kind.BODY, "B", part, row)
            if slicing.chain[part].backward_collective is not None:
                yield from _leave("B", part, row, slicing.cols)
        yield Op(Kind.WGRAD, "B", part, ALL_ROWS)


def _leave(phase: str, part: int, row: int, cols: int) -> Iterator[Op]:
    """Each column block travels as soon as it is computed."""
    for col in range(cols):
        yield Op(Kind.TAIL, phase, part, row, col)
        yield Op(Kind.START, phase, part, row, col)


def _enter(phase: str, part: int, row: int, slicing: Slicing) -> Iterator[Op]:
    """All column blocks of a row have arrived."""
    for col in range(slicing.cols):
        yield Op(Kind.WAIT, phase, part, row, col)


def wgrad_each_row(plan: Plan) -> Plan:
    """Give every row its own weight gradient, right after the row's last collective of that part has left."""

    def ops() -> Iterator[Op]:
        for position, op in enumerate(plan.ops):
            if op.kind is Kind.WGRAD and op.row == ALL_ROWS:
                continue
            yield op
            following = plan.ops[position + 1]
            row_ends = op.phase == "B" and op.kind in (Kind.START, Kind.BODY) and following.row != op.row
            if row_ends and plan.slicing.chain[op.part].sharded:
                yield Op(Kind.WGRAD, "B", op.part, op.row, micro=op.micro)

    return plan.with_ops(ops())


def serialize(plan: Plan) -> Plan:
    """Redeem each tensor-parallel collective right after it started: no overlap at all, for comparison."""

    def ops() -> Iterator[Op]:
        for op in plan.ops:
            if op.kind is Kind.WAIT and op.phase != "S":
                continue
            yield op
            if op.kind is Kind.START and op.phase != "S":
                yield op._replace(kind=Kind.WAIT)

    return plan.with_ops(ops())


def last_writers(plan: Plan) -> dict[int, int]:
    """Position of the last op that writes a gradient of each part."""
    writes_gradient = (Kind.WGRAD, Kind.LOCAL)
    return {op.part: i for i, op in enumerate(plan.ops) if op.phase == "B" and op.kind in writes_gradient}


def reduce_gradients(plan: Plan, buckets: Sequence[Iterable[int]], overlap: bool = True) -> Plan:
    """Reduce each gradient bucket over data-parallel ranks, then step.

    ``buckets[i]`` names the parts that bucket i holds gradients of. A reduction starts right after the last op that
    writes one of them, or after the whole backward without ``overlap``; buckets must be in the order of those ops.
    """
    slicing = replace(plan.slicing, buckets=tuple(frozenset(parts) for parts in buckets))
    writers = last_writers(plan)
    ready = [max(writers[part] for part in parts) for parts in slicing.buckets]
    assert ready == sorted(ready), f"buckets complete in the order {ready}; waits must follow the order of starts"
    start_after = ready if overlap else [len(plan.ops) - 1] * len(ready)

    def ops() -> Iterator[Op]:
        for position, op in enumerate(plan.ops):
            yield op
            for bucket, after in enumerate(start_after):
                if after == position:
                    yield Op(Kind.START, "S", bucket, ALL_ROWS)
        for bucket in range(len(ready)):
            yield Op(Kind.WAIT, "S", bucket, ALL_ROWS)
        yield Op(Kind.STEP, "S", 0, ALL_ROWS)

    return Plan(tuple(ops()), slicing)


def without_reduction(plan: Plan) -> Plan:
    """The same micro-batch as one that is not the step's last: no data-parallel reduction, no optimizer."""
    return plan.with_ops(op for op in plan.ops if op.phase != "S")
