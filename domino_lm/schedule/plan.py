"""The planner: one order for forward, one for backward, whatever the cut."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from domino_lm.schedule.ops import ChainPart, Kind, Op, PartSpec, Slicing

Item = tuple[int, int]  # a sharded part and a row


@dataclass(frozen=True)
class Plan:
    """Ops of one micro-batch in the order in which every rank issues them, and the cut that they act on."""

    ops: tuple[Op, ...]
    slicing: Slicing
    paired: bool = False
    """Whether forward runs in turn with the backward of the micro-batch before; see `passes.step_templates`."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.ops))

    def digest(self) -> str:
        """Hash that is equal on two ranks exactly when they issue the same ops on the same cut."""
        return hashlib.sha256(f"{self.slicing}\n{self.paired}\n{self}".encode()).hexdigest()

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
) -> Plan:
    """Forward and backward of one micro-batch; one row and one column are Megatron's order.

    ``row_sizes`` holds the samples of each row, or its tokens with ``sequence_rows``. With more than one of
    ``row_groups``, a group of rows goes back while the next still goes forward.
    """
    specs = tuple(PartSpec.of(part) for part in chain)
    slicing = Slicing(specs, tuple(row_sizes), cols, sequence_rows=sequence_rows, sequence_parallel=sequence_parallel)
    assert row_groups == 1 or not sequence_rows, "rows of one sequence go back in order, so they form no groups"
    bounds = [slicing.rows * group // row_groups for group in range(row_groups + 1)]
    groups = [range(*pair) for pair in pairwise(bounds)]
    forward = [list(_forward(slicing, rows)) for rows in groups]
    backward = [list(_backward(slicing, rows)) for rows in groups]
    ops = forward[0]
    for group in range(1, row_groups):
        ops = [*ops, *interleave(backward[group - 1], forward[group], within="gather_input")]
    return Plan(tuple(in_issue_order([*ops, *backward[-1]], slicing)), slicing)


def _forward(slicing: Slicing, rows: range) -> Iterator[Op]:
    """Part by part, row by row, up to the statistics of the cross entropy."""
    items = [(part, row) for part in range(0, slicing.last + 1, 2) for row in rows]
    return _walk(slicing, items, "F", len(rows))


def _backward(slicing: Slicing, rows: range) -> Iterator[Op]:
    """From the losses down, row by row; a row's collective leaves before its weight gradient starts.

    Rows of one sequence go back from last to first where a part couples them, and so from the first such part on.
    """
    items, order = [], list(rows)
    for part in range(slicing.last, -1, -2):
        if slicing.coupled(part):
            order = sorted(rows, reverse=True)
        items += [(part, row) for row in order]
    return _walk(slicing, items, "B", len(rows))


def _walk(slicing: Slicing, items: Sequence[Item], phase: str, rows: int) -> Iterator[Op]:
    """The order of one direction. An item lands (wait, LOCAL; at the head LOSS), computes (BODY) and sends (TAIL, START).

    Items land in the order in which they were sent. Without sequence parallelism an item lands right before it
    computes. With it, another row lands between an item's BODY and TAIL: that row's reduce-scatter has travelled behind
    the BODY, and its all-gather will travel behind the TAIL.
    """
    staggered = slicing.sequence_parallel and rows > 1
    sent: deque[Item] = deque(items[:rows] if phase == "B" else ())
    landed: set[Item] = set(items[:rows] if phase == "F" else ())
    gathered: set[Item] = set(items[:rows])

    def land(item: Item) -> Iterator[Op]:
        while item not in landed:
            landed.add(sent[0])
            yield from _land(slicing, phase, *sent.popleft())

    def gather(item: Item) -> Iterator[Op]:
        if item in landed and item not in gathered:
            gathered.add(item)
            yield from _gather(slicing, phase, *item)

    for position, item in enumerate(items):
        part, row = item
        yield from land(item)
        yield from gather(item)
        yield from _compute(slicing, phase, part, row)
        if staggered and position >= rows - 1 and sent:
            yield from land(sent[0] if position == rows - 1 else sent[-1])
            yield from gather(items[position + 1]) if position + 1 < len(items) else ()
        yield from _send(slicing, phase, part, row)
        if 0 <= _next(phase, item)[0] <= slicing.last:
            sent.append(_next(phase, item))
        if phase == "B":
            if slicing.sequence_parallel and part:
                yield Op(Kind.WAIT, "B", part, row, collective="gather_input")
            if slicing.chain[part].backward_collective is not None:
                yield Op(Kind.WGRAD, "B", part, row)


def _next(phase: str, item: Item) -> Item:
    """Where an item's result goes: the same row of the next sharded part in this direction."""
    return (item[0] + 2 if phase == "F" else item[0] - 2, item[1])


def _land(slicing: Slicing, phase: str, part: int, row: int) -> Iterator[Op]:
    """All column blocks of the part before (in backward: after) have arrived, and the replicated part between runs."""
    if phase == "B" and part == slicing.last:
        yield Op(Kind.WAIT, "F", part, row, collective="statistics")
        yield Op(Kind.LOSS, "F", part, row)
        return
    step = 1 if phase == "F" else -1
    for col in range(slicing.cols):
        yield Op(Kind.WAIT, phase, part - 2 * step, row, col, collective=slicing.leaving)
    yield Op(Kind.LOCAL, phase, part - step, row)


def _gather(slicing: Slicing, phase: str, part: int, row: int) -> Iterator[Op]:
    """Under sequence parallelism the other ranks' tokens set out."""
    if slicing.sequence_parallel:
        yield Op(Kind.START, phase, part, row, collective="all_gather")


def _compute(slicing: Slicing, phase: str, part: int, row: int) -> Iterator[Op]:
    """BODY, after the tokens that it needs have come; the head goes back from its loss, without one.

    The input that a weight gradient needs sets out behind the input gradient.
    """
    if slicing.sequence_parallel and part != (0 if phase == "F" else slicing.last):
        yield Op(Kind.WAIT, phase, part, row, collective="all_gather")
    if slicing.sequence_parallel and phase == "B" and part:
        yield Op(Kind.START, "B", part, row, collective="gather_input")
    if phase == "F" or part != slicing.last:
        yield Op(Kind.BODY, phase, part, row)
    if phase == "B" and slicing.chain[part].backward_collective is None:
        yield Op(Kind.WGRAD, "B", part, row)


def _send(slicing: Slicing, phase: str, part: int, row: int) -> Iterator[Op]:
    """Each column block travels as soon as it is computed; nothing stands between a tail and its start."""
    spec = slicing.chain[part]
    collective = spec.forward_collective if phase == "F" else spec.backward_collective
    if collective == "statistics":
        yield Op(Kind.START, phase, part, row, collective=collective)
    elif collective is not None:
        for col in range(slicing.cols):
            yield Op(Kind.TAIL, phase, part, row, col)
            yield Op(Kind.START, phase, part, row, col, collective=slicing.leaving)


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
    if wait.collective == "statistics":
        yield Op(Kind.LOSS, "F", wait.part, wait.row, micro=wait.micro)
    elif wait.collective == slicing.leaving and wait.phase != "S" and wait.col == slicing.cols - 1:
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
