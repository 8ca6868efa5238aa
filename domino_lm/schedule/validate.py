"""Static proof that a plan is sound, or a table with an arrow at the first op that is not."""

from __future__ import annotations

from collections import defaultdict, deque

from domino_lm.schedule.ops import DP_LINK, Kind, Op, Value, concerns_matrices, dataflow, is_gather, uses_weights
from domino_lm.schedule.passes import step_templates
from domino_lm.schedule.plan import Plan

CONTEXT_OPS = 3


class PlanError(ValueError):
    """A plan that breaks a rule; the message shows the op, its neighbours and the rule."""


def validate(plan: Plan) -> None:
    """Prove that every value is written once before it is read and that every collective is redeemed once, in order.

    Checks, op by op: reads follow writes; no value is written twice; nothing is left unread at the end, gradients
    of a micro-batch without a step excepted; a wait names a started collective, and waits follow the order of starts
    on each communicator; a row's collective leaves before the weight gradients of its part start; no gradient changes
    once its bucket's reduction has started; nothing follows the step but gathers of its parameters, and those in flight
    at its end are redeemed by the next one, before parameters of the bucket are used.
    An interleaved plan is proven over a step of two micro-batches.
    Raises PlanError at the first op that breaks one.
    """
    if plan.interleaved:
        plan = plan.with_ops(op for template in step_templates(plan, 2) for op in template)
    carried = _left_travelling(plan)
    written: set[Value] = {value for op in carried for value in dataflow(op, plan.slicing).outputs}
    unread: dict[Value, int] = {}
    in_flight: dict[str, deque[Op]] = defaultdict(deque, {DP_LINK: deque(carried)})
    left: set[tuple[str, int, int, int, int]] = set()
    missing, closed = {op.part for op in carried}, set[int]()
    stepped: Op | None = None
    for position, op in enumerate(plan.ops):
        flow = dataflow(op, plan.slicing)
        reads, writes = flow.inputs, flow.outputs
        for value in reads:
            if value not in written:
                raise _fault(plan, position, f"reads {_name(value)}, which no earlier op writes")
            unread.pop(value, None)
        if op.kind is Kind.WAIT and is_gather(op):
            written -= set(reads)  # the step's end writes them again
            missing.discard(op.part)
        for value in writes:
            if value in written:
                raise _fault(plan, position, f"writes {_name(value)} a second time")
            written.add(value)
            unread[value] = position
        _check_collective(plan, position, op, in_flight[op.lane])
        _check_weight_gradient(plan, position, op, left)
        for bucket in plan.slicing.buckets_of(op.part) if op.phase != "S" else ():
            if bucket in missing and uses_weights(op):
                raise _fault(plan, position, f"uses parameters of bucket {bucket}, whose gather has not been waited for")
            if bucket in closed and "grad" in flow.writes:
                raise _fault(plan, position, f"changes a gradient of bucket {bucket} after its reduction has started")
        if op.phase == "S" and not is_gather(op) and not concerns_matrices(op):
            (closed.discard if op.kind is Kind.WAIT and plan.slicing.sharding == "optim_grads" else closed.add)(op.part)
        if stepped is not None and not is_gather(op):
            raise _fault(plan, position, "follows the optimizer's step, but nothing may except gathers of its parameters")
        stepped = op if op.kind is Kind.STEP else stepped
    for lane, pending in in_flight.items():
        if list(pending) != (carried if lane == DP_LINK else []):
            raise _fault(plan, plan.ops.index(pending[0]), f"is never waited for on the {lane} link")
    for value, position in unread.items():
        travels_on = value.name == "weights" or any(value in dataflow(op, plan.slicing).outputs for op in carried)
        summed_later = value.name in ("grad", "core grad", "reduced") and (stepped is None or value.micro != stepped.micro)
        if not travels_on and not summed_later:
            raise _fault(plan, position, f"writes {_name(value)}, which nothing reads: leaked")


def _left_travelling(plan: Plan) -> list[Op]:
    """Gathers that a step starts and does not wait for any more."""
    travelling: list[Op] = []
    for op in plan.ops:
        if is_gather(op) and op.kind is Kind.START:
            travelling.append(op)
        elif is_gather(op) and op._replace(kind=Kind.START) in travelling:
            travelling.remove(op._replace(kind=Kind.START))
    return travelling


def _check_weight_gradient(plan: Plan, position: int, op: Op, left: set[tuple[str, int, int, int, int]]) -> None:
    """Every collective that leaves backward has ``left`` before the weight gradients of its part and row start."""
    if op.kind is Kind.START and op.phase != "S" and plan.slicing.collective(op) is plan.slicing.leaving(op.part, op.phase):
        left.add((op.phase, op.micro, op.part, op.row, op.col))
    if op.kind is Kind.WGRAD:
        for col in range(plan.slicing.blocks(op.part, "B")):
            if ("B", op.micro, op.part, op.row, col) not in left:
                raise _fault(plan, position, f"starts before the collective of row {op.row}, column {col} has left")


def _check_collective(plan: Plan, position: int, op: Op, pending: deque[Op]) -> None:
    """Waits are redeemed first in, first out."""
    if op.kind is Kind.START:
        pending.append(op)
    elif op.kind is Kind.WAIT:
        expected = op._replace(kind=Kind.START)
        if not pending or pending[0] != expected:
            oldest = f"the oldest in flight is {pending[0]}" if pending else "nothing is in flight"
            raise _fault(plan, position, f"waits out of order: {oldest}")
        pending.popleft()


def _name(value: Value) -> str:
    return f"{value.name} {value.phase}{value.part}.{value.row}" + (f"c{value.col}" if value.col else "")


def _fault(plan: Plan, position: int, what: str) -> PlanError:
    around = range(max(0, position - CONTEXT_OPS), min(len(plan.ops), position + CONTEXT_OPS + 1))
    table = "\n".join(f"{'-->' if i == position else '   '} {i:4d}  {plan.ops[i]}" for i in around)
    return PlanError(f"op {position} of {len(plan.ops)}, {plan.ops[position]}, {what}\n{table}")
