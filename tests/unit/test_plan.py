"""What every plan promises, over chains, cuts and passes; no torch needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domino_lm.schedule.ops import Kind, Op, dataflow, transformer_chain
from domino_lm.schedule.plan import Plan, build_plan, cut, last_writers, reduce_gradients, serialize, wgrad_each_row, without_reduction
from domino_lm.schedule.validate import PlanError, validate

GOLDEN = Path(__file__).parents[1] / "golden" / "plans"


def full_plan(layers: int, rows: int, cols: int, each_row: bool, buckets: int, overlap: bool = True) -> Plan:
    plan = build_plan(transformer_chain(layers), cut(rows + 1, rows), cols)
    plan = wgrad_each_row(plan) if each_row else plan
    writers = last_writers(plan)
    order = sorted(writers, key=lambda part: writers[part])
    bounds = [len(order) * i // buckets for i in range(buckets + 1)]
    return reduce_gradients(plan, [order[bounds[i] : bounds[i + 1]] for i in range(buckets)], overlap)


plans = st.builds(
    full_plan,
    layers=st.integers(0, 4),
    rows=st.integers(1, 5),
    cols=st.integers(1, 3),
    each_row=st.booleans(),
    buckets=st.integers(1, 3),
    overlap=st.booleans(),
)


@given(plans)
def test_every_plan_is_sound_with_and_without_the_steps_end(plan: Plan) -> None:
    validate(plan)
    validate(without_reduction(plan))
    validate(serialize(plan))


@given(plans)
def test_ops_read_back_as_they_print(plan: Plan) -> None:
    assert tuple(Op.parse(line) for line in str(plan).splitlines()) == plan.ops


@given(plans)
def test_every_part_and_row_is_computed_once_each_way(plan: Plan) -> None:
    rows, last = plan.slicing.rows, len(plan.slicing.chain) - 1
    for kind, phase, parts in (
        (Kind.BODY, "F", range(0, last + 1, 2)),
        (Kind.BODY, "B", range(0, last, 2)),
        (Kind.LOCAL, "F", range(1, last, 2)),
        (Kind.LOCAL, "B", range(1, last, 2)),
        (Kind.LOSS, "F", [last]),
    ):
        found = sorted((op.part, op.row) for op in plan.ops if op.kind is kind and op.phase == phase)
        assert found == [(part, row) for part in parts for row in range(rows)]


@given(plans)
def test_nothing_stands_between_a_tail_and_its_start(plan: Plan) -> None:
    for op, following in zip(plan.ops, plan.ops[1:], strict=False):
        if op.kind is Kind.TAIL:
            assert following == op._replace(kind=Kind.START)


@given(plans)
def test_weight_gradients_start_after_the_rows_collective_has_left(plan: Plan) -> None:
    position = {op: i for i, op in enumerate(plan.ops)}
    for op in plan.ops:
        if op.kind is Kind.START and op.phase == "B":
            wgrads = [w for w in plan.ops if w.kind is Kind.WGRAD and w.part == op.part and op.row in plan.slicing.rows_of(w)]
            assert all(position[op] < position[w] for w in wgrads)


@given(st.integers(0, 4), st.integers(2, 5), st.booleans())
def test_one_row_computes_while_another_rows_collective_travels(layers: int, rows: int, each_row: bool) -> None:
    plan = full_plan(layers, rows, 1, each_row, 1)
    position = {op: i for i, op in enumerate(plan.ops)}
    for op in plan.ops:
        if op.kind is Kind.START and op.phase != "S":
            between = plan.ops[position[op] + 1 : position[op._replace(kind=Kind.WAIT)]]
            assert any(other.kind in (Kind.BODY, Kind.TAIL, Kind.WGRAD, Kind.LOSS) and other.row != op.row for other in between), op


@given(plans, st.data())
def test_a_plan_without_one_of_its_ops_is_refused(plan: Plan, data: st.DataObject) -> None:
    removed = data.draw(st.integers(0, len(plan.ops) - 2))
    with pytest.raises(PlanError):
        validate(plan.with_ops(op for i, op in enumerate(plan.ops) if i != removed))


@given(plans, st.data())
def test_an_op_moved_before_what_it_reads_is_refused_and_shown(plan: Plan, data: st.DataObject) -> None:
    flows = [dataflow(op, plan.slicing) for op in plan.ops]
    position = data.draw(st.sampled_from([i for i, (reads, _) in enumerate(flows) if reads]))
    reads = set(flows[position][0])
    writer = max(i for i in range(position) if reads & set(flows[i][1]))
    ops = list(plan.ops)
    ops.insert(writer, ops.pop(position))
    with pytest.raises(PlanError, match="-->"):
        validate(plan.with_ops(ops))


def test_waits_out_of_the_order_of_starts_are_refused() -> None:
    plan = full_plan(1, 2, 1, False, 1)
    ops = list(plan.ops)
    waits = [i for i, op in enumerate(ops) if op.kind is Kind.WAIT and op.collective == "statistics"]
    starts_and_losses = ops[waits[0] : waits[1] + 2]
    ops[waits[0] : waits[1] + 2] = starts_and_losses[2:] + starts_and_losses[:2]
    with pytest.raises(PlanError, match=r"waits out of order: the oldest in flight is m0 startF6\.0:statistics"):
        validate(plan.with_ops(ops))


def test_a_reduction_before_its_last_gradient_is_refused() -> None:
    plan = full_plan(1, 1, 1, False, 2)
    start = next(i for i, op in enumerate(plan.ops) if op.kind is Kind.START and op.phase == "S")
    ops = list(plan.ops)
    ops.insert(start - 1, ops.pop(start))
    with pytest.raises(PlanError, match=r"startS0\.\*, reads grad"):
        validate(plan.with_ops(ops))


def test_serial_plans_redeem_each_collective_at_once() -> None:
    plan = serialize(full_plan(2, 3, 2, True, 1))
    for op, following in zip(plan.ops, plan.ops[1:], strict=False):
        if op.kind is Kind.START and op.phase != "S":
            assert following == op._replace(kind=Kind.WAIT)


@pytest.mark.parametrize(("size", "pieces", "expected"), [(5, 4, (2, 1, 1, 1)), (4, 2, (2, 2)), (7, 3, (3, 2, 2)), (1, 1, (1,))])
def test_pieces_differ_by_one_at_most(size: int, pieces: int, expected: tuple[int, ...]) -> None:
    assert cut(size, pieces) == expected


@pytest.mark.parametrize(("size", "pieces"), [(2, 3), (4, 0), (0, 1)])
def test_empty_pieces_are_refused(size: int, pieces: int) -> None:
    with pytest.raises(ValueError, match="pieces that each hold something"):
        cut(size, pieces)


@pytest.mark.parametrize("text", ["", "m0 tail", "m0 flyF1.0", "tailF1.0", "m0 tailX1.0"])
def test_what_is_no_op_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no op"):
        Op.parse(text)


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("baseline", full_plan(2, 1, 1, False, 1)),
        ("rows2", full_plan(2, 2, 1, False, 2)),
        ("rows2_wgrad_each", full_plan(2, 2, 1, True, 2)),
    ],
)
def test_two_layers_are_planned_as_reviewed(name: str, plan: Plan) -> None:
    assert str(plan) + "\n" == (GOLDEN / f"{name}.txt").read_text()
