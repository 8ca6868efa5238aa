"""Passes: each turns a plan into another that computes the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from domino_lm.config.settings import Sharding
from domino_lm.schedule.collectives import ALL_GATHER, BUCKET_GATHER, BUCKET_SCATTER, BUCKET_SUM, GATHER_INPUT, MOMENTUM_GATHER, REPLICA_SUM
from domino_lm.schedule.ops import ALL_ROWS, Kind, Op, is_gather, uses_weights, writes_gradient
from domino_lm.schedule.plan import Plan, in_issue_order, interleave


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


def defer_wgrad(plan: Plan, parts: int = 1) -> Plan:
    """Hold each part's weight gradients back to fill later waits: one runs before each wait, ``parts`` parts later on.

    Costs the saved inputs of the held GEMMs meanwhile. What is still held runs at the end of backward.
    """
    held: deque[Op] = deque()

    def ops() -> Iterator[Op]:
        end = max(i for i, op in enumerate(plan.ops) if op.phase == "B")
        for position, op in enumerate(plan.ops):
            if op.kind is Kind.WGRAD:
                held.append(op)
            else:
                if op.kind is Kind.WAIT and op.phase == "B" and held and held[0].part >= op.part + 2 * parts:
                    yield held.popleft()
                yield op
            if position == end:
                yield from held
                held.clear()

    return plan.with_ops(ops())


def recompute(plan: Plan, full: Iterable[int] = (), core: Iterable[int] = ()) -> Plan:
    """Keep less in forward, and rebuild it before backward needs it; ``full`` and ``core`` name sharded parts.

    A ``full`` part keeps only the residual stream before its norm, a ``core`` part what its GEMMs need. No collective of
    the model is repeated; under sequence parallelism the part's input is gathered before it is rebuilt instead of after.
    A row is rebuilt before the wait for its gradient, so that rebuilding fills the wait.
    """
    slicing = replace(plan.slicing, recompute_full=frozenset(full), recompute_core=frozenset(core))
    assert not slicing.recompute_full & slicing.recompute_core, "a part is recomputed fully or at its core, not both"
    rebuilt = slicing.recompute_full | slicing.recompute_core
    assert rebuilt <= set(range(2, slicing.last, 2)), f"parts {sorted(rebuilt)}: only what lies between embedding and head is recomputed"
    if slicing.sequence_parallel:
        return Plan(tuple(in_issue_order(_recompute_gathered(plan, slicing.recompute_full, slicing.recompute_core), slicing)), slicing)

    def ops() -> Iterator[Op]:
        for op in plan.ops:
            part = op.part - 2  # the part that continues after a wait in backward
            if op.kind is Kind.WAIT and op.phase == "B" and op.col == 0 and part in rebuilt:
                if part in slicing.recompute_full:
                    yield op._replace(kind=Kind.RECOMPUTE, part=part - 1)
                yield op._replace(kind=Kind.RECOMPUTE, part=part)
            yield op

    return Plan(tuple(ops()), slicing, plan.interleaved)


def _recompute_gathered(plan: Plan, full: frozenset[int], core: frozenset[int]) -> Iterator[Op]:
    """Under sequence parallelism: norm and gather right behind the gradient's own gather, the part before its BODY."""
    for op in plan.ops:
        again = op.part in full and op.phase == "B"
        if again and op.collective == GATHER_INPUT.name:
            continue
        if again and op.kind is Kind.BODY:
            yield Op(Kind.WAIT, "B", op.part, op.row, micro=op.micro, collective=GATHER_INPUT.name)
        if op.kind is Kind.BODY and op.phase == "B" and op.part in full | core:
            yield Op(Kind.RECOMPUTE, "B", op.part, op.row, micro=op.micro)
        yield op
        if again and op.kind is Kind.START and op.collective == ALL_GATHER.name:
            yield Op(Kind.RECOMPUTE, "B", op.part - 1, op.row, micro=op.micro)
            yield Op(Kind.START, "B", op.part, op.row, micro=op.micro, collective=GATHER_INPUT.name)


def last_writers(plan: Plan) -> dict[int, int]:
    """Position of the last op that writes a gradient of each part."""
    return {op.part: i for i, op in enumerate(plan.ops) if op.phase == "B" and writes_gradient(op, plan.slicing)}


def reduce_gradients(
    plan: Plan,
    buckets: Sequence[Iterable[int]],
    overlap: bool = True,
    replica_buckets: Iterable[int] = (),
    sharding: Sharding = "no_shard",
) -> Plan:
    """Reduce each gradient bucket over data-parallel ranks, then step.

    ``buckets[i]`` names the parts that bucket i holds gradients of. A reduction starts right after the last op that
    writes one of them, or after the whole backward without ``overlap``; buckets must be in the order of those ops.
    ``replica_buckets`` hold gradients that each tensor-parallel rank computed from its share of the tokens; they are
    summed over these ranks first, and must come last.

    Under ``sharding`` each rank receives the sum of its share alone. ``optim_grads`` gives a bucket's memory back once its
    reduction is redeemed: each reduction before the next one starts, and without ``overlap`` at once.
    """
    parts_of = tuple(frozenset(parts) for parts in buckets)
    slicing = replace(plan.slicing, buckets=parts_of, replica_buckets=frozenset(replica_buckets), sharding=sharding)
    writers = last_writers(plan)
    ready = [max(writers[part] for part in parts) for parts in slicing.buckets]
    in_backward = [after for bucket, after in enumerate(ready) if bucket not in slicing.replica_buckets]
    assert in_backward == sorted(in_backward), f"buckets complete in the order {in_backward}; waits must follow the order of starts"
    freeing, in_flight = sharding == "optim_grads", deque[Op]()
    start_after = ready if overlap or freeing else [len(plan.ops) - 1] * len(ready)

    def launch(bucket: int) -> Iterator[Op]:
        start = Op(Kind.START, "S", bucket, ALL_ROWS, collective=(BUCKET_SCATTER if slicing.zero else BUCKET_SUM).name)
        if bucket in slicing.replica_buckets:
            yield start._replace(collective=REPLICA_SUM.name)
            yield start._replace(collective=REPLICA_SUM.name, kind=Kind.WAIT)
        if freeing:
            yield from redeem()
        yield start
        in_flight.append(start._replace(kind=Kind.WAIT))
        if freeing and not overlap:
            yield from redeem()

    def redeem() -> Iterator[Op]:
        yield from in_flight
        in_flight.clear()

    def ops() -> Iterator[Op]:
        for position, op in enumerate(plan.ops):
            yield op
            for bucket, after in enumerate(start_after):
                if after == position and bucket not in slicing.replica_buckets:
                    yield from launch(bucket)
        for bucket in sorted(slicing.replica_buckets):
            yield from launch(bucket)
        yield from redeem()
        yield Op(Kind.STEP, "S", 0, ALL_ROWS)

    return Plan(tuple(ops()), slicing, plan.interleaved)


def orthogonalize(plan: Plan, parts: Sequence[int]) -> Plan:
    """Update the matrices of ``parts`` whole, before STEP updates all other weights.

    The momentum of a part is gathered over tensor-parallel ranks behind the update of the part before it, so that no more than
    two parts' whole matrices are in memory.
    """
    assert not plan.slicing.zero, "a share of the optimizer's work holds no whole matrices"
    slicing = replace(plan.slicing, orthogonalized=tuple(parts), collectives=(*plan.slicing.collectives, MOMENTUM_GATHER))
    starts = [Op(Kind.START, "S", part, ALL_ROWS, collective=MOMENTUM_GATHER.name) for part in parts]

    def updates() -> Iterator[Op]:
        yield Op(Kind.MOMENTUM, "S", 0, ALL_ROWS)
        for number, start in enumerate(starts):
            yield from starts[:1] if number == 0 else ()
            yield start._replace(kind=Kind.WAIT)
            yield from starts[number + 1 : number + 2]
            yield Op(Kind.ORTHOGONALIZE, "S", start.part, ALL_ROWS)

    ops = [other for op in plan.ops for other in ((*updates(), op) if op.kind is Kind.STEP else (op,))]
    return Plan(tuple(ops), slicing, plan.interleaved)


def gather_parameters(plan: Plan, overlap: bool = False) -> Plan:
    """Gather each bucket's updated parameters after the step, in the order in which forward needs them.

    With ``overlap`` the gathers travel behind the next step's forward, which waits for each right before the first op
    that uses parameters of the bucket; without, nothing follows before all have arrived.
    """
    assert plan.slicing.zero, "only what ranks have updated by shares is gathered"
    first_use: dict[int, int] = {}
    for position, op in enumerate(plan.ops):
        for bucket in plan.slicing.buckets_of(op.part) if uses_weights(op) else ():
            first_use.setdefault(bucket, position)
    starts = [
        Op(Kind.START, "S", bucket, ALL_ROWS, collective=BUCKET_GATHER.name) for bucket in sorted(first_use, key=first_use.__getitem__)
    ]
    waits = [start._replace(kind=Kind.WAIT) for start in starts]
    if not overlap:
        return plan.with_ops([*plan.ops, *starts, *waits])

    def ops() -> Iterator[Op]:
        for position, op in enumerate(plan.ops):
            yield from (wait for wait in waits if first_use[wait.part] == position)
            yield op
        yield from starts

    return plan.with_ops(ops())


def micro_batch(plan: Plan, *, first: bool = False, last: bool = False) -> tuple[Op, ...]:
    """Ops of one micro-batch of a step.

    The ``first`` one waits for parameters still in flight from the step before; the ``last`` one ends the step. Only
    the last reduces gradients over data-parallel ranks, unless these keep shares of them.
    """
    step = next((position for position, op in enumerate(plan.ops) if op.kind is Kind.STEP), len(plan.ops))
    reduces = last or plan.slicing.sharding == "optim_grads"
    kept = [op for op in plan.ops[:step] if (first if is_gather(op) else reduces or op.phase != "S")]
    return (*kept, *(plan.ops[step:] if last else ()))


def pair_micro_batches(plan: Plan) -> Plan:
    """Run the forward of each micro-batch in turn with the backward of the one before; see `step_templates`.

    Costs the activations of one more micro-batch.
    """
    return replace(plan, interleaved=True)


def step_templates(plan: Plan, micro_batches: int) -> list[tuple[Op, ...]]:
    """The ops of a step as the stretches that it consists of; equal ones are equal tuples.

    Not interleaved: the plan without the step's end for each micro-batch but the last, which has it. Interleaved: the first
    forward; backward of one micro-batch in turn with forward of the next, their coordinates alternating between 0 and
    1; the last backward and the step's end.
    """
    first, inner, last = micro_batch(plan, first=True), micro_batch(plan), micro_batch(plan, last=True)
    if micro_batches == 1:
        return [micro_batch(plan, first=True, last=True)]
    if not plan.interleaved:
        return [first, *[inner] * (micro_batches - 2), last]
    opening = tuple(op for op in first if op.phase == "F" or is_gather(op))
    forward, backward, end = (
        [op for op in ops if (op.phase == "F") is wanted] for ops, wanted in ((inner, True), (inner, False), (last, False))
    )

    def of(ops: Sequence[Op], micro: int) -> list[Op]:
        return [op if is_gather(op) else op._replace(micro=micro % 2) for op in ops]

    pairs = [
        tuple(in_issue_order(interleave(of(backward, micro - 1), of(forward, micro)), plan.slicing))
        for micro in range(1, min(micro_batches, 3))
    ]
    steady = [pairs[(micro - 1) % 2] for micro in range(1, micro_batches)]
    return [opening, *steady, tuple(of(end, micro_batches - 1))]


def steady_state(ops: Sequence[Op]) -> list[Op]:
    """A step in its steady state, to simulate it alone: gathers that the next step's forward redeems start before it."""
    step = next((position for position, op in enumerate(ops) if op.kind is Kind.STEP), len(ops))
    redeemed_later = {op._replace(kind=Kind.START) for op in ops[:step] if is_gather(op)}
    return [*(op for op in ops[step:] if op in redeemed_later), *(op for op in ops if op not in redeemed_later)]
