"""The planner: one order for forward, one for backward, whatever the cut."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from domino_lm.schedule.collectives import ALL_GATHER, GATHER_INPUT, STANDARD, Collective
from domino_lm.schedule.ops import ChainPart, Kind, Op, PartSpec, Slicing

Item = tuple[int, int]  # a sharded part and a row


@dataclass(frozen=True)
class Plan:
    """Ops of one micro-batch in the order in which every rank issues them, and the cut that they act on."""

    ops: tuple[Op, ...]
    slicing: Slicing
    interleaved: bool = False
    """Whether forward runs in turn with the backward of the micro-batch before; see `passes.step_templates`."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.ops))

    def digest(self) -> str:
        """Hash that is equal on two ranks exactly when they issue the same ops on the same cut."""
        return hashlib.sha256(f"{self.slicing}\n{self.interleaved}\n{self}".encode()).hexdigest()

    def with_ops(self, ops: Iterable[Op]) -> Plan:
        """The same cut under another order."""
        return replace(self, ops=tuple(ops))


def build_plan(
    chain: Sequence[ChainPart],
    row_sizes: Sequence[int] = (1,),
    cols: int = 1,
    *,
    sequence_rows: bool = False,
    sequence_parallel: bool = False,
    row_groups: int = 1,
    collectives: tuple[Collective, ...] = STANDARD,
) -> Plan:
    """Forward and backward of one micro-batch; one row and one column are Megatron's order.

    ``row_sizes`` holds the samples of each row, or its tokens with ``sequence_rows``. With more than one of
    ``row_groups``, a group of rows goes back while the next still goes forward. Parts name collectives of the table ``collectives``.
    """
    specs = tuple(PartSpec.of(part) for part in chain)
    slicing = Slicing(
        specs, tuple(row_sizes), cols, sequence_rows=sequence_rows, sequence_parallel=sequence_parallel, collectives=collectives
    )
    assert row_groups == 1 or not sequence_rows, "rows of one sequence go back in order, so they form no groups"
    bounds = [slicing.rows * group // row_groups for group in range(row_groups + 1)]
    groups = [range(*pair) for pair in pairwise(bounds)]
    forward = [list(_forward(slicing, rows)) for rows in groups]
    backward = [list(_backward(slicing, rows)) for rows in groups]
    ops = forward[0]
    for group in range(1, row_groups):
        ops = [*ops, *interleave(backward[group - 1], forward[group], within=GATHER_INPUT.name)]
    return Plan(tuple(in_issue_order([*ops, *backward[-1]], slicing)), slicing)


def _forward(slicing: Slicing, rows: range) -> Iterator[Op]:
    """Part by part, row by row: a row lands, computes, and sends each column block as soon as it is computed; the head sends statistics."""
    items = [(part, row) for part in range(0, slicing.last + 1, 2) for row in rows]
    if slicing.sequence_parallel and len(rows) > 1:
        yield from _staggered(slicing, "F", items, len(rows))
        return
    for part, row in items:
        if part > 0:
            yield from _land(slicing, "F", part, row)
            yield from _gather(slicing, "F", part, row)
        yield from _compute(slicing, "F", part, row)
        yield from _send(slicing, "F", part, row)


def _backward(slicing: Slicing, rows: range) -> Iterator[Op]:
    """From the losses down, row by row: a row lands, computes and sends; its weight gradient follows right behind its collective.

    Rows of one sequence go back from last to first once a part couples them, and from there on.
    """
    items, order = [], list(rows)
    for part in range(slicing.last, -1, -2):
        if slicing.coupled(part):
            order = sorted(rows, reverse=True)
        items += [(part, row) for row in order]
    if slicing.sequence_parallel and len(rows) > 1:
        yield from _staggered(slicing, "B", items, len(rows))
        return
    for part, row in items:
        yield from _land(slicing, "B", part, row)
        if part < slicing.last:
            yield from _gather(slicing, "B", part, row)
        yield from _compute(slicing, "B", part, row)
        yield from _send(slicing, "B", part, row)


def _staggered(slicing: Slicing, phase: str, items: Sequence[Item], rows: int) -> Iterator[Op]:
    """Several rows under sequence parallelism: between BODY and TAIL of one row, the row that was sent last lands and the next one's gather
    sets out, so that a reduce-scatter travels behind a BODY and an all-gather behind a TAIL.

    Where rows turn round, the row that was sent last is next itself: it lands and gathers with nothing to hide behind.
    """
    gathered = True  # nothing is gathered for the first part
    for position, (part, row) in enumerate(items):
        turned = position >= rows and row == items[position - 1][1]
        if turned or (phase == "B" and position < rows):
            yield from _land(slicing, phase, part, row)
        if position >= rows and not gathered:
            yield from _gather(slicing, phase, part, row)
        yield from _compute(slicing, phase, part, row)
        # the last row of the first part is followed by the first one; then the others of that part have been sent, too
        sent = range(1, rows) if position == rows else [position - 1 if position >= rows else 0]
        landing = [_next(phase, items[i]) for i in sent]
        gathered = False
        if position >= rows - 1 and not turned and 0 <= landing[-1][0] <= slicing.last:
            for item in landing:
                yield from _land(slicing, phase, *item)
            following = items[position + 1]
            if following[1] != row:
                yield from _gather(slicing, phase, *following)
                gathered = True
        yield from _send(slicing, phase, part, row)


def _next(phase: str, item: Item) -> Item:
    """Where an item's result goes: the same row of the next sharded part in this direction."""
    return (item[0] + 2 if phase == "F" else item[0] - 2, item[1])


def _land(slicing: Slicing, phase: str, part: int, row: int) -> Iterator[Op]:
    """All column blocks of the part before (in backward: after) have arrived, and the replicated part between runs."""
    if phase == "B" and part == slicing.last:
        yield Op(Kind.WAIT, "F", part, row, collective=_name(slicing, part, "F"))
        yield Op(Kind.LOSS, "F", part, row)
        return
    step = 1 if phase == "F" else -1
    for col in range(slicing.blocks(part - 2 * step, phase)):
        yield Op(Kind.WAIT, phase, part - 2 * step, row, col, collective=_name(slicing, part - 2 * step, phase))
    yield Op(Kind.LOCAL, phase, part - step, row)


def _gather(slicing: Slicing, phase: str, part: int, row: int) -> Iterator[Op]:
    """Under sequence parallelism the other ranks' tokens set out."""
    if slicing.sequence_parallel:
        yield Op(Kind.START, phase, part, row, collective=ALL_GATHER.name)


def _compute(slicing: Slicing, phase: str, part: int, row: int) -> Iterator[Op]:
    """BODY, after the tokens that it needs have come; the head goes back from its loss, without one.

    The input that a weight gradient needs sets out behind the input gradient. If nothing leaves, the weight gradient follows at once.
    """
    if slicing.sequence_parallel and part != (0 if phase == "F" else slicing.last):
        yield Op(Kind.WAIT, phase, part, row, collective=ALL_GATHER.name)
    if slicing.sequence_parallel and phase == "B" and part:
        yield Op(Kind.START, "B", part, row, collective=GATHER_INPUT.name)
    if phase == "F" or part != slicing.last:
        yield Op(Kind.BODY, phase, part, row)
    if phase == "B" and slicing.chain[part].backward_collective is None:
        yield Op(Kind.WGRAD, "B", part, row)


def _send(slicing: Slicing, phase: str, part: int, row: int) -> Iterator[Op]:
    """Each column block travels as soon as it is computed; nothing stands between a tail and its start. Then the weight gradient."""
    if slicing.leaving(part, phase) is None:
        return
    for col in range(slicing.blocks(part, phase)):
        yield Op(Kind.TAIL, phase, part, row, col)
        yield Op(Kind.START, phase, part, row, col, collective=_name(slicing, part, phase))
    if not slicing.blocks(part, phase):
        yield Op(Kind.START, phase, part, row, collective=_name(slicing, part, phase))
    if phase == "B" and slicing.sequence_parallel and part:
        yield Op(Kind.WAIT, "B", part, row, collective=GATHER_INPUT.name)
    if phase == "B":
        yield Op(Kind.WGRAD, "B", part, row)


def _name(slicing: Slicing, part: int, phase: str) -> str:
    """Name of the collective that a part leaves with."""
    found = slicing.leaving(part, phase)
    assert found is not None, f"nothing leaves part {part}"
    return found.name


def in_issue_order(ops: Iterable[Op], slicing: Slicing) -> Iterator[Op]:
    """Redeem collectives in the order of their starts: a wait brings all older ones of its lane along, which is never wrong.

    LOCAL and LOSS need nothing but the last of their waits, and follow it wherever it goes.
    """
    in_flight: dict[str, deque[Op]] = defaultdict(deque)
    for op in ops:
        pending = in_flight[op.lane]
        if op.kind is Kind.START:
            pending.append(op._replace(kind=Kind.WAIT))
        if op.kind not in (Kind.WAIT, Kind.LOCAL, Kind.LOSS):
            yield op
        while op.kind is Kind.WAIT and op in pending:
            oldest = pending.popleft()
            yield oldest
            yield from _follower(oldest, slicing)


def _follower(wait: Op, slicing: Slicing) -> Iterator[Op]:
    """What runs right after a wait."""
    left = slicing.leaving(wait.part, wait.phase) if wait.phase != "S" else None
    if left is None or wait.collective != left.name:
        return
    if left.passes == "statistics":
        yield Op(Kind.LOSS, "F", wait.part, wait.row, micro=wait.micro)
    elif wait.col == slicing.blocks(wait.part, wait.phase) - 1:
        step = 1 if wait.phase == "F" else -1
        yield Op(Kind.LOCAL, wait.phase, wait.part + step, wait.row, micro=wait.micro)


def interleave(first: Sequence[Op], second: Sequence[Op], within: str = "") -> Iterator[Op]:
    """Two independent pieces in turn: each runs up to its next wait, but for waits for the collective ``within``, then the other."""
    stretches = [_stretches(first, within), _stretches(second, within)]
    for turn in range(max(map(len, stretches))):
        for pieces in stretches:
            if turn < len(pieces):
                yield from pieces[turn]


def _stretches(ops: Sequence[Op], within: str) -> list[list[Op]]:
    """Pieces that begin with their waits and hold none further on, except for the collective ``within``."""
    pieces: list[list[Op]] = [[]]
    for op in ops:
        if op.kind is Kind.WAIT and op.collective != within and pieces[-1] and pieces[-1][-1].kind is not Kind.WAIT:
            pieces.append([])
        pieces[-1].append(op)
    return pieces
