"""Static proof that a plan is sound, or a table with an arrow at the first op that is not."""

from __future__ import annotations

from collections import defaultdict, deque

from domino_lm.schedule.ops import Kind, Op, Value, dataflow
from domino_lm.schedule.passes import step_templates
from domino_lm.schedule.plan import Plan

CONTEXT_OPS = 3


class PlanError(ValueError):
    """A plan that breaks a rule; the message shows the op, its neighbours and the rule."""


def validate(plan: Plan) -> None:
    """Prove that every value is written once before it is read and that every collective is redeemed once, in order.

    Checks, op by op: reads follow writes; no value is written twice; nothing is left unread at the end, gradients
    of a micro-batch without a step excepted; a wait names a started collective, and waits follow the order of starts
    on each communicator; a row's collective leaves before the weight gradients of its part start; the step is last.
    A paired plan is proven over a step of two micro-batches.
    Raises PlanError at the first op that breaks one.
    """
    if plan.paired:
        plan = plan.with_ops(op for template in step_templates(plan, 2) for op in template)
    written: set[Value] = set()
    unread: dict[Value, int] = {}
    in_flight: dict[str, deque[Op]] = defaultdict(deque)
    left: set[tuple[str, int, int, int, int]] = set()
    for position, op in enumerate(plan.ops):
        reads, writes = dataflow(op, plan.slicing)
        for value in reads:
            if value not in written:
                raise _fault(plan, position, f"reads {_name(value)}, which no earlier op writes")
            unread.pop(value, None)
        for value in writes:
            if value in written:
                raise _fault(plan, position, f"writes {_name(value)} a second time")
            written.add(value)
            unread[value] = position
        _check_collective(plan, position, op, in_flight[op.lane])
        if op.kind is Kind.START and op.collective == plan.slicing.leaving:
            left.add((op.phase, op.micro, op.part, op.row, op.col))
        if op.kind is Kind.WGRAD and plan.slicing.chain[op.part].backward_collective is not None:
            for row in plan.slicing.rows_of(op):
                for col in range(plan.slicing.cols):
                    if ("B", op.micro, op.part, row, col) not in left:
                        raise _fault(plan, position, f"starts before the collective of row {row}, column {col} has left")
        if op.kind is Kind.STEP and position != len(plan.ops) - 1:
            raise _fault(plan, position, "is not the last op, but nothing may follow the optimizer's step")
    for lane, pending in in_flight.items():
        if pending:
            raise _fault(plan, plan.ops.index(pending[0]), f"is never waited for on the {lane} link")
    for value, position in unread.items():
        reduced = plan.ops[-1].kind is Kind.STEP and value.micro == plan.ops[-1].micro
        if value.name != "grad" or reduced:
            raise _fault(plan, position, f"writes {_name(value)}, which nothing reads: leaked")


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
