"""Laws that every simulation keeps, whatever the plan, the model and the machine."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domino_lm.config.settings import ModelConfig, ScheduleConfig, Sharding
from domino_lm.schedule.ops import COMPUTE, DP_LINK, TP_LINK, Kind
from domino_lm.schedule.passes import serialize, steady_state, step_templates
from domino_lm.schedule.plan import Plan, build_plan
from domino_lm.simulate.costs import Shapes
from domino_lm.simulate.hardware import HARDWARE, Hardware
from domino_lm.simulate.links import Fabric, Link
from domino_lm.simulate.predict import BASELINE, SCHEDULES, Prediction, Setting, optimum, planned, predict, sliced
from domino_lm.simulate.simulator import OpTime, Simulation, replay, simulate
from tests.chains import critical_path_s, transformer_chain

CLOSE = 1e-9
SHARDINGS: list[Sharding] = ["no_shard", "optim", "optim_grads"]
LAW = settings(max_examples=60, deadline=None)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Shapes, Hardware, int]:
    """A step of a small model under any schedule, its shapes, a machine and a data-parallel size."""
    model = ModelConfig(
        num_layers=draw(st.integers(1, 3)),
        hidden_size=draw(st.sampled_from([256, 1024])),
        num_attention_heads=32,
        seq_length=draw(st.sampled_from([128, 1024])),
        vocab_size=1000,
        swiglu=draw(st.booleans()),
        attention_dropout=draw(st.sampled_from([0.0, 0.1])),
    )
    rows, pair = draw(st.integers(1, 4)), draw(st.sampled_from([None, "micro-batches", "row-groups"]))
    schedule = ScheduleConfig(
        schedule="domino",
        domino_row_slices=rows,
        domino_row_dim="batch" if pair == "row-groups" else draw(st.sampled_from(["batch", "sequence"])),
        domino_column_slices=draw(st.sampled_from([1, 2, 4])),
        domino_pair=pair if rows > 1 or pair != "row-groups" else None,  # type: ignore[arg-type]
        domino_defer_wgrad=draw(st.booleans()),
        sequence_parallel=draw(st.booleans()),
        recompute_granularity=draw(st.sampled_from([None, "selective", "full"])),
        data_parallel_sharding_strategy=draw(st.sampled_from(SHARDINGS)),
        overlap_param_gather=draw(st.booleans()),
        ddp_bucket_size=100_000,
    )
    hardware = HARDWARE[draw(st.sampled_from(sorted(HARDWARE)))]
    tp, dp, size = draw(st.sampled_from([2, 8, 16, 32])), draw(st.sampled_from([1, 4])), draw(st.integers(rows, 8))
    setting = Setting(model=model, hardware=hardware, tensor_parallel=tp, data_parallel=dp, micro_batch_size=size)
    plan, shapes = planned(setting, schedule, serial=draw(st.booleans()) and not schedule.domino_defer_wgrad)
    step = plan.with_ops(steady_state(list(chain.from_iterable(step_templates(plan, draw(st.integers(1, 3)))))))
    return step, shapes, hardware, dp


def with_links(hardware: Hardware, factor: float) -> Hardware:
    """The same machine with all its links ``factor`` times as fast."""
    fabric = hardware.fabric
    assert isinstance(fabric, Fabric)

    def faster(link: Link) -> Link:
        return replace(link, bytes_per_s=link.bytes_per_s * factor)

    switch = fabric.switch_bytes_per_s * factor if fabric.switch_bytes_per_s is not None else None
    return replace(hardware, fabric=replace(fabric, local=faster(fabric.local), network=faster(fabric.network), switch_bytes_per_s=switch))


def run(case: tuple[Plan, Shapes, Hardware, int]) -> Simulation:
    return simulate(*case)


@LAW
@given(cases())
def test_the_makespan_is_at_least_the_work_of_each_lane(case: tuple[Plan, Shapes, Hardware, int]) -> None:
    step = run(case)
    assert all(step.makespan_s >= step.busy_s(lane) * (1 - CLOSE) for lane in (COMPUTE, TP_LINK, DP_LINK))


@LAW
@given(cases())
def test_the_makespan_is_at_least_the_critical_path(case: tuple[Plan, Shapes, Hardware, int]) -> None:
    step = run(case)
    assert step.makespan_s >= critical_path_s(step) * (1 - CLOSE)


@LAW
@given(cases())
def test_the_makespan_is_at_least_the_limit(case: tuple[Plan, Shapes, Hardware, int]) -> None:
    step = run(case)
    assert step.makespan_s >= step.limit_s * (1 - CLOSE)


@LAW
@given(cases())
def test_spans_of_a_lane_never_overlap(case: tuple[Plan, Shapes, Hardware, int]) -> None:
    timeline = run(case).timeline()
    for lane in (COMPUTE, TP_LINK, DP_LINK):
        spans = timeline.on(lane)
        assert all(before.end_s <= after.start_s + 1e-12 for before, after in pairwise(spans))


@LAW
@given(cases())
def test_a_collective_travels_after_its_start_and_before_its_wait_ends(case: tuple[Plan, Shapes, Hardware, int]) -> None:
    step, in_flight = run(case), {}
    for op, on_compute, transfer in zip(step.plan.ops, step.compute, step.transfers, strict=True):
        if transfer is not None:
            assert transfer.start_s >= on_compute.end_s
            in_flight[op] = transfer
        if op.kind is Kind.WAIT:
            assert on_compute.end_s >= in_flight.pop(op._replace(kind=Kind.START)).end_s


@LAW
@given(cases())
def test_free_links_give_no_exposure(case: tuple[Plan, Shapes, Hardware, int]) -> None:
    step = simulate(*case, free=(TP_LINK, DP_LINK))
    waited_for_host_s = sum(time.host_s for time in step.times)
    assert sum(map(step.exposed_s, "FBS")) <= waited_for_host_s
    assert all(item.end_s == item.start_s for item in step.transfers if item is not None)


@LAW
@given(cases())
def test_without_launch_overhead_free_links_give_zero_exposure(case: tuple[Plan, Shapes, Hardware, int]) -> None:
    plan, shapes, hardware, dp = case
    instant = replace(hardware, device=replace(hardware.device, launch_s=0.0))
    step = simulate(plan, shapes, instant, dp, free=(TP_LINK, DP_LINK))
    assert sum(map(step.exposed_s, "FBS")) == 0.0


@LAW
@given(cases(), st.floats(1.0, 100.0))
def test_without_contention_more_bandwidth_never_hurts(case: tuple[Plan, Shapes, Hardware, int], factor: float) -> None:
    plan, shapes, hardware, dp = case
    slow = simulate(plan, shapes, hardware.without_contention(), dp)
    fast = simulate(plan, shapes, with_links(hardware.without_contention(), factor), dp)
    assert fast.makespan_s <= slow.makespan_s * (1 + CLOSE)


@LAW
@given(cases())
def test_without_contention_the_hidden_share_lies_between_0_and_1(case: tuple[Plan, Shapes, Hardware, int]) -> None:
    plan, shapes, hardware, dp = case
    hardware = hardware.without_contention()
    serial = simulate(serialize(plan), shapes, hardware, dp).makespan_s
    ours = simulate(plan, shapes, hardware, dp).makespan_s
    no_comm = simulate(plan, shapes, hardware, dp, free=(TP_LINK,)).makespan_s
    assert no_comm * (1 - CLOSE) <= ours <= serial * (1 + CLOSE)


@LAW
@given(cases())
def test_contention_never_helps(case: tuple[Plan, Shapes, Hardware, int]) -> None:
    plan, shapes, hardware, dp = case
    assert run(case).makespan_s >= simulate(plan, shapes, hardware.without_contention(), dp).makespan_s * (1 - CLOSE)


def test_compute_beside_a_collective_runs_at_the_speed_that_is_left() -> None:
    plan = build_plan(transformer_chain(1))
    first_start = next(i for i, op in enumerate(plan.ops) if op.kind is Kind.START)
    nothing = OpTime(0.0, 0.0, 0.0, 0.0)
    times = [nothing] * len(plan.ops)
    times[first_start] = OpTime(0.0, 2.0, 0.5, 0.0)
    moved = [*plan.ops]
    moved.insert(first_start + 1, moved.pop(first_start + 2))  # a LOCAL op in place of its wait
    times[first_start + 1] = OpTime(3.0, 0.0, 0.0, 0.0)
    step = replay(plan.with_ops(moved), times)
    assert step.compute[first_start + 1].end_s == pytest.approx(4.0)  # 2 s at half speed, then 2 s alone


def test_a_host_that_waits_pays_for_the_transport_after_the_wait() -> None:
    plan = build_plan(transformer_chain(1))
    first_start = next(i for i, op in enumerate(plan.ops) if op.kind is Kind.START)
    times = [OpTime(0.0, 0.0, 0.0, 0.0)] * len(plan.ops)
    times[first_start] = OpTime(0.0, 2.0, 0.0, 0.0, wait_share=0.25)
    step = replay(plan, times)
    assert plan.ops[first_start + 1].kind is Kind.WAIT
    assert step.transfers[first_start] == (0.0, 2.0)
    assert step.compute[first_start + 1] == (0.0, 2.5)


def test_a_predicted_timeline_names_every_op() -> None:
    setting = Setting(model=model(2), hardware=HARDWARE["dgx-h100"], tensor_parallel=8, micro_batch_size=2)
    step = predict(setting, sliced(2)).shown
    assert {span.name for span in step.timeline().spans} == {str(op) for op in step.plan.ops}


def test_a_step_of_forty_layers_simulates_in_less_than_a_second() -> None:
    setting = Setting(model=model(40), hardware=HARDWARE["dgx-h100"], tensor_parallel=8, micro_batch_size=4, micro_batches=8)
    start_s = time.process_time()
    predict(setting, sliced(4, 2))
    assert time.process_time() - start_s < 1.0


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 7), st.sampled_from(["baseline", "rows 2", "paired"]))
def test_micro_batches_that_are_not_simulated_add_what_others_did(micro_batches: int, name: str) -> None:
    setting = Setting(model=model(2), hardware=HARDWARE["dgx-h100"], tensor_parallel=8, micro_batch_size=2, micro_batches=micro_batches)
    step = predict(setting, SCHEDULES[name])
    plan, shapes = planned(setting, SCHEDULES[name])
    ops = chain.from_iterable(step_templates(plan, micro_batches))
    whole = simulate(plan.with_ops(ops), shapes, setting.hardware)
    assert step.step_s == pytest.approx(whole.makespan_s, rel=1e-6)


def test_no_uncut_schedule_beats_the_optimum() -> None:
    setting = Setting(model=model(2), hardware=HARDWARE["dgx-h100"], tensor_parallel=16, micro_batch_size=4)
    assert optimum(setting).step_s <= predict(setting, BASELINE).step_s <= predict(setting, BASELINE, serial=True).step_s


def model(layers: int) -> ModelConfig:
    return ModelConfig(
        num_layers=layers, hidden_size=4096, num_attention_heads=32, seq_length=1024, vocab_size=50257, attention_dropout=0.0
    )


def replicated(sharding: Sharding, **settings: Any) -> Prediction:
    """One step of four micro-batches on 8 replicas under the distributed optimizer."""
    model = ModelConfig(num_layers=4, hidden_size=1024, num_attention_heads=16, seq_length=1024, vocab_size=1000)
    setting = Setting(model=model, hardware=HARDWARE["dgx-h100"], tensor_parallel=8, data_parallel=8, micro_batch_size=2, micro_batches=4)
    return predict(setting, replace(BASELINE, data_parallel_sharding_strategy=sharding, ddp_bucket_size=1_000_000, **settings))


def test_replicas_share_the_optimizers_memory_and_with_shares_of_gradients_theirs() -> None:
    plain, optim, both = (replicated(sharding).memory for sharding in SHARDINGS)
    assert optim.optimizer == both.optimizer == plain.optimizer / 8
    assert plain.gradients == optim.gradients > 1.5 * both.gradients


def test_gradients_by_shares_travel_once_a_micro_batch() -> None:
    optim, both = (replicated(sharding).over_step(reduction_s) for sharding in SHARDINGS[1:])
    assert both == pytest.approx(4 * optim)


def reduction_s(simulation: Simulation) -> float:
    found = zip(simulation.plan.ops, simulation.times, strict=True)
    return sum(time.transfer_s for op, time in found if op.phase == "S" and op.collective == "reduce_scatter")


def test_gathers_behind_forward_make_a_step_shorter() -> None:
    assert replicated("optim", overlap_param_gather=True).step_s < replicated("optim").step_s
