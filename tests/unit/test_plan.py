"""What every plan promises, over chains, cuts and passes; no torch needed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domino_lm.config.settings import Sharding
from domino_lm.schedule.cuts import cut
from domino_lm.schedule.ops import DP_LINK, Kind, Op, dataflow, is_gather, uses_weights
from domino_lm.schedule.passes import (
    defer_wgrad,
    gather_parameters,
    last_writers,
    micro_batch,
    orthogonalize,
    pair_micro_batches,
    recompute,
    reduce_gradients,
    serialize,
    steady_state,
    step_templates,
)
from domino_lm.schedule.plan import Plan, build_plan
from domino_lm.schedule.validate import PlanError, validate
from tests.chains import transformer_chain

GOLDEN = Path(__file__).parents[1] / "golden" / "plans"
SHARDINGS: list[Sharding] = ["no_shard", "optim", "optim_grads"]
COMPUTES = (Kind.BODY, Kind.TAIL, Kind.LOCAL, Kind.LOSS, Kind.WGRAD)


def with_step(
    plan: Plan, buckets: int = 1, overlap: bool = True, replica: bool = False, sharding: Sharding = "no_shard", overlap_gather: bool = False
) -> Plan:
    """The plan with its parts' gradients in ``buckets``, and with ``replica`` one more that TP ranks sum."""
    writers = last_writers(plan)
    order = sorted(writers, key=lambda part: writers[part])
    bounds = [len(order) * i // buckets for i in range(buckets + 1)]
    groups: list[list[int]] = [order[bounds[i] : bounds[i + 1]] for i in range(buckets)]
    groups += [[part for part in order if part % 2]] if replica else []
    groups = [group for group in groups if group]
    plan = reduce_gradients(plan, groups, overlap, [len(groups) - 1] if replica else [], sharding)
    return gather_parameters(plan, overlap_gather) if sharding != "no_shard" else plan


def full_plan(
    layers: int,
    rows: int,
    cols: int,
    buckets: int,
    overlap: bool = True,
    sharding: Sharding = "no_shard",
    overlap_gather: bool = False,
) -> Plan:
    plan = build_plan(transformer_chain(layers), cut(rows + 1, rows), cols)
    return with_step(plan, buckets, overlap, False, sharding, overlap_gather)


plans = st.builds(
    full_plan,
    layers=st.integers(0, 3),
    rows=st.integers(1, 4),
    cols=st.integers(1, 3),
    buckets=st.integers(1, 3),
    overlap=st.booleans(),
    sharding=st.sampled_from(SHARDINGS),
    overlap_gather=st.booleans(),
)


@st.composite
def all_plans(draw: st.DrawFn) -> Plan:
    """Any combination of cuts and passes that flags can ask for."""
    layers, rows, cols = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    sequence_rows, sequence_parallel = draw(st.booleans()), draw(st.booleans())
    groups = 2 if not sequence_rows and rows >= 2 and draw(st.booleans()) else 1
    plan = build_plan(
        transformer_chain(layers),
        cut(rows + 1, rows),
        cols,
        sequence_rows=sequence_rows,
        sequence_parallel=sequence_parallel,
        row_groups=groups,
    )
    plan = defer_wgrad(plan, draw(st.integers(1, 2))) if draw(st.booleans()) else plan
    inner = list(range(2, 4 * layers + 1, 2))
    full = draw(st.sets(st.sampled_from(inner)))
    core = draw(st.sets(st.sampled_from(inner))) - full
    plan = recompute(plan, full, core) if full | core else plan
    plan = pair_micro_batches(plan) if groups == 1 and draw(st.booleans()) else plan
    sharding = draw(st.sampled_from(SHARDINGS))
    plan = with_step(plan, draw(st.integers(1, 3)), draw(st.booleans()), sequence_parallel, sharding, draw(st.booleans()))
    return orthogonalize(plan, inner) if sharding == "no_shard" and draw(st.booleans()) else plan


@given(all_plans())
def test_every_plan_is_sound_with_and_without_the_steps_end(plan: Plan) -> None:
    validate(plan)
    validate(plan.with_ops(micro_batch(plan)))
    if not plan.interleaved:
        validate(serialize(plan))


@given(all_plans(), st.integers(1, 5))
def test_every_micro_batch_of_a_step_is_computed_once(plan: Plan, micro_batches: int) -> None:
    ops = [op for template in step_templates(plan, micro_batches) for op in template]
    once = {op._replace(micro=0) for op in plan.ops if op.phase != "S"}
    counts = Counter(op._replace(micro=0) for op in ops if op.phase != "S")
    assert counts == dict.fromkeys(once, micro_batches)
    assert [op.kind for op in ops].count(Kind.STEP) == 1
    assert all(is_gather(op) for op in ops[ops.index(next(op for op in ops if op.kind is Kind.STEP)) + 1 :])


@given(all_plans(), st.integers(1, 5))
def test_gradients_are_reduced_once_a_step_or_by_shares_once_a_micro_batch(plan: Plan, micro_batches: int) -> None:
    ops = [op for template in step_templates(plan, micro_batches) for op in template]
    reductions = Counter(op.part for op in ops if op.phase == "S" and op.kind is Kind.START and op.lane == DP_LINK and not is_gather(op))
    times = micro_batches if plan.slicing.sharding == "optim_grads" else 1
    assert reductions == dict.fromkeys(range(len(plan.slicing.buckets)), times)


@given(all_plans(), st.integers(1, 5))
def test_parameters_are_gathered_once_a_step_and_before_they_are_used(plan: Plan, micro_batches: int) -> None:
    """Over two steps: the second uses no bucket between its update and the wait for its gather."""
    step = [op for template in step_templates(plan, micro_batches) for op in template]
    waits = [op.part for op in step if is_gather(op) and op.kind is Kind.WAIT]
    assert sorted(waits) == (list(range(len(plan.slicing.buckets))) if plan.slicing.zero else [])
    missing: set[int] = set()
    for op in step + step:
        if op.kind is Kind.STEP and plan.slicing.zero:
            missing = set(range(len(plan.slicing.buckets)))
        if is_gather(op) and op.kind is Kind.WAIT:
            missing.discard(op.part)
        assert not uses_weights(op) or missing.isdisjoint(plan.slicing.buckets_of(op.part)), op


@given(all_plans(), st.integers(1, 3))
def test_a_step_that_repeats_redeems_what_it_starts(plan: Plan, micro_batches: int) -> None:
    step = [op for template in step_templates(plan, micro_batches) for op in template]
    ops, in_flight = steady_state(step), []
    assert Counter(ops) == Counter(step)
    for op in ops:
        if op.kind is Kind.START and op.lane == DP_LINK:
            in_flight.append(op)
        if op.kind is Kind.WAIT and op.lane == DP_LINK:
            assert in_flight.pop(0) == op._replace(kind=Kind.START)
    assert not in_flight


@given(all_plans())
def test_gradients_by_shares_leave_two_buckets_travelling_at_no_time(plan: Plan) -> None:
    travelling = 0
    for op in plan.ops:
        if op.phase == "S" and op.lane == DP_LINK and not is_gather(op) and plan.slicing.sharding == "optim_grads":
            travelling += {Kind.START: 1, Kind.WAIT: -1}.get(op.kind, 0)
            assert travelling <= 1


@given(all_plans())
def test_passes_move_work_but_neither_add_nor_drop_any(plan: Plan) -> None:
    rows, last = plan.slicing.rows, plan.slicing.last
    wgrads = [(op.part, op.row) for op in plan.ops if op.kind is Kind.WGRAD]
    assert sorted(wgrads) == [(part, row) for part in range(0, last + 1, 2) for row in range(rows)]
    rebuilt = [(op.part, op.row) for op in plan.ops if op.kind is Kind.RECOMPUTE]
    full, core = plan.slicing.recompute_full, plan.slicing.recompute_core
    assert sorted(rebuilt) == [(p, r) for p in sorted(full | core | {part - 1 for part in full}) for r in range(rows)]


def waits_that_block(plan: Plan) -> list[str]:
    """Waits, and compute ops of their micro-batch behind them that had all they need before them."""
    written_at = {value: i for i, op in enumerate(plan.ops) for value in dataflow(op, plan.slicing).outputs}
    leaves = (Kind.START, "B", "reduce_scatter" if plan.slicing.sequence_parallel else "all_reduce")
    left_at = {(op.part, op.row): i for i, op in enumerate(plan.ops) if (op.kind, op.phase, op.collective) == leaves}
    waits = [i for i, op in enumerate(plan.ops) if op.kind is Kind.WAIT]
    found = []
    for position, op in enumerate(plan.ops):
        if op.kind not in COMPUTES:
            continue
        ready = max((written_at[value] for value in dataflow(op, plan.slicing).inputs), default=-1)
        if op.kind is Kind.WGRAD:  # starts after its row's collective has left
            ready = max(ready, left_at.get((op.part, op.row), -1))
        if op.kind is Kind.TAIL and plan.slicing.sequence_parallel:
            continue  # another row lands between BODY and TAIL, so that its gather has the TAIL to hide behind
        found += [f"{plan.ops[i]} blocks {op}" for i in waits if ready < i < position and plan.ops[i].micro == op.micro]
    return found


@st.composite
def plans_that_overlap(draw: st.DrawFn) -> Plan:
    layers, rows, cols = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    plan = build_plan(
        transformer_chain(layers),
        cut(rows + 1, rows),
        cols,
        sequence_rows=draw(st.booleans()),
        sequence_parallel=draw(st.booleans()),
    )
    inner = list(range(2, 4 * layers + 1, 2))
    full = draw(st.sets(st.sampled_from(inner)))
    return recompute(plan, full) if full else plan


@given(plans_that_overlap())
def test_no_wait_blocks_work_that_was_ready(plan: Plan) -> None:
    assert not waits_that_block(plan)


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
            assert position[op] < position[Op(Kind.WGRAD, "B", op.part, op.row)]


@given(st.integers(0, 4), st.integers(2, 5))
def test_one_row_computes_while_another_rows_collective_travels(layers: int, rows: int) -> None:
    plan = full_plan(layers, rows, 1, 1)
    position = {op: i for i, op in enumerate(plan.ops)}
    for op in plan.ops:
        if op.kind is Kind.START and op.phase != "S":
            between = plan.ops[position[op] + 1 : position[op._replace(kind=Kind.WAIT)]]
            assert any(other.kind in (Kind.BODY, Kind.TAIL, Kind.WGRAD, Kind.LOSS) and other.row != op.row for other in between), op


@given(plans, st.data())
def test_a_plan_without_one_of_its_ops_is_refused(plan: Plan, data: st.DataObject) -> None:
    removable = [i for i, op in enumerate(plan.ops) if op.kind is not Kind.STEP]
    removed = data.draw(st.sampled_from(removable))
    with pytest.raises(PlanError):
        validate(plan.with_ops(op for i, op in enumerate(plan.ops) if i != removed))


@given(plans, st.data())
def test_an_op_moved_before_what_it_reads_is_refused_and_shown(plan: Plan, data: st.DataObject) -> None:
    flows = [(flow.inputs, flow.outputs) for flow in (dataflow(op, plan.slicing) for op in plan.ops)]
    position = data.draw(
        st.sampled_from([i for i, (reads, _) in enumerate(flows) if any(reads and set(reads) & set(writes) for _, writes in flows[:i])])
    )
    reads = set(flows[position][0])
    writer = max(i for i in range(position) if reads & set(flows[i][1]))
    ops = list(plan.ops)
    ops.insert(writer, ops.pop(position))
    with pytest.raises(PlanError, match="-->"):
        validate(plan.with_ops(ops))


def test_waits_out_of_the_order_of_starts_are_refused() -> None:
    plan = full_plan(1, 2, 1, 1)
    ops = list(plan.ops)
    first = ops.index(Op.parse("m0 waitF2.0"))
    ops.insert(first, ops.pop(ops.index(Op.parse("m0 waitF2.1"))))
    with pytest.raises(PlanError, match=r"m0 waitF2\.1, waits out of order: the oldest in flight is m0 startF2\.0"):
        validate(plan.with_ops(ops))


def test_a_reduction_before_its_last_gradient_is_refused() -> None:
    plan = full_plan(1, 1, 1, 2)
    start = next(i for i, op in enumerate(plan.ops) if op.kind is Kind.START and op.phase == "S")
    ops = list(plan.ops)
    ops.insert(start - 1, ops.pop(start))
    with pytest.raises(PlanError, match=r"startS0\.\*, reads grad"):
        validate(plan.with_ops(ops))


def test_parameters_used_before_their_gather_are_refused() -> None:
    plan = full_plan(1, 1, 1, 2, sharding="optim", overlap_gather=True)
    ops = list(plan.ops)
    wait = next(i for i, op in enumerate(ops) if is_gather(op) and op.part == 0)
    ops.insert(wait + 1, ops.pop(wait))
    with pytest.raises(PlanError, match="uses parameters of bucket 0, whose gather has not been waited for"):
        validate(plan.with_ops(ops))


def test_a_step_that_leaves_a_bucket_ungathered_is_refused() -> None:
    plan = full_plan(1, 1, 1, 2, sharding="optim", overlap_gather=True)
    with pytest.raises(PlanError, match=r"writes updated S[01]\.0, which nothing reads"):
        validate(plan.with_ops(op for op in plan.ops if not is_gather(op)))


def test_a_gradient_that_changes_while_its_bucket_travels_is_refused() -> None:
    """The memory of a bucket serves the next micro-batch once the reduction has been redeemed, and not before."""
    paired = pair_micro_batches(full_plan(1, 1, 1, 1, sharding="optim_grads"))
    ops = [op for template in step_templates(paired, 2) for op in template]
    wait = ops.pop(ops.index(Op.parse("m0 waitS0.*:reduce_scatter")))
    ops.insert(ops.index(Op.parse("m1 startS0.*:reduce_scatter")), wait)
    with pytest.raises(PlanError, match="changes a gradient of bucket 0 after its reduction has started"):
        validate(replace(paired, ops=tuple(ops), interleaved=False))


def test_what_follows_the_step_is_refused_unless_it_gathers() -> None:
    plan = full_plan(1, 1, 1, 1)
    with pytest.raises(PlanError, match=r"m1 bodyF0\.0, follows the optimizer's step"):
        validate(plan.with_ops([*plan.ops, Op.parse("m1 bodyF0.0")]))


@pytest.mark.parametrize(("rows", "cols", "which"), [(1, 1, "row 0, column 0"), (2, 1, "row 1, column 0"), (1, 2, "row 0, column 1")])
def test_a_weight_gradient_before_its_rows_last_collective_has_left_is_refused(rows: int, cols: int, which: str) -> None:
    plan = full_plan(1, rows, cols, True, 1)
    ops = list(plan.ops)
    last_start = max(i for i, op in enumerate(ops) if (op.kind, op.phase, op.part, op.row) == (Kind.START, "B", 2, rows - 1))
    wgrad = ops.index(Op.parse(f"m0 wgradB2.{rows - 1}"))
    ops.insert(last_start, ops.pop(wgrad))
    with pytest.raises(PlanError, match=f"starts before the collective of {which} has left"):
        validate(plan.with_ops(ops))


def test_serial_plans_redeem_each_collective_at_once() -> None:
    plan = serialize(full_plan(2, 3, 2, 1))
    for op, following in zip(plan.ops, plan.ops[1:], strict=False):
        if op.kind is Kind.START and op.phase != "S":
            assert following == op._replace(kind=Kind.WAIT)


@pytest.mark.parametrize(("size", "pieces", "expected"), [(5, 4, (2, 1, 1, 1)), (4, 2, (2, 2)), (7, 3, (3, 2, 2)), (1, 1, (1,))])
def test_pieces_differ_by_one_at_most(size: int, pieces: int, expected: tuple[int, ...]) -> None:
    assert cut(size, pieces) == expected


@pytest.mark.parametrize(("size", "pieces"), [(2, 3), (4, 0), (0, 1)])
def test_empty_pieces_are_refused(size: int, pieces: int) -> None:
    with pytest.raises(ValueError, match="that each hold something"):
        cut(size, pieces)


@pytest.mark.parametrize("text", ["", "m0 tail", "m0 flyF1.0", "tailF1.0", "m0 tailX1.0"])
def test_what_is_no_op_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no op"):
        Op.parse(text)


def paired_text(plan: Plan) -> str:
    return "\n--\n".join("\n".join(map(str, template)) for template in step_templates(plan, 3))


def reviewed_plans() -> dict[str, str]:
    """Two layers under every schedule, as text; ``python -m tests.unit.test_plan`` writes the files anew."""
    chain, first_layer = transformer_chain(2), (2, 4)
    plans = {
        "baseline": build_plan(chain),
        "rows2": with_step(build_plan(chain, (1, 1)), 2),
        "rows2_optim": with_step(build_plan(chain, (1, 1)), 2, sharding="optim", overlap_gather=True),
        "rows2_optim_grads": with_step(build_plan(chain, (1, 1)), 3, sharding="optim_grads"),
        "columns2": build_plan(chain, (1,), 2),
        "rows2_columns2": build_plan(chain, (1, 1), 2),
        "sequence_rows3": build_plan(chain, (4, 4, 4), sequence_rows=True),
        "rows2_sequence_parallel": with_step(build_plan(chain, (1, 1), sequence_parallel=True), replica=True),
        "row_groups": build_plan(chain, (1, 1, 1, 1), row_groups=2),
        "rows2_wgrad_deferred": defer_wgrad(build_plan(chain, (1, 1))),
        "rows2_recompute": recompute(build_plan(chain, (1, 1)), full=first_layer),
        "sequence_parallel_recompute": recompute(build_plan(chain, sequence_parallel=True), full=first_layer),
    }
    texts = {name: str(plan) for name, plan in plans.items()}
    shared = with_step(build_plan(chain), 2, sharding="optim_grads", overlap_gather=True)
    return {
        **texts,
        "paired": paired_text(pair_micro_batches(with_step(build_plan(chain, (1, 1))))),
        "paired_optim_grads": paired_text(pair_micro_batches(shared)),
    }


@pytest.mark.parametrize("name", reviewed_plans())
def test_two_layers_are_planned_as_reviewed(name: str) -> None:
    assert reviewed_plans()[name] + "\n" == (GOLDEN / f"{name}.txt").read_text()


if __name__ == "__main__":
    for plan_name, text in reviewed_plans().items():
        (GOLDEN / f"{plan_name}.txt").write_text(text + "\n")
