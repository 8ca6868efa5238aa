"""How the executor behaves beside being right: errors, memory, padding, recording, and plans that differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from domino_lm.config.settings import ConfigError, ModelConfig, ScheduleConfig
from domino_lm.model.batch import MicroBatch
from domino_lm.parallel.collectives import Communicator, Pending
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.ops import COMPUTE, DP_LINK, TP_LINK
from domino_lm.schedule.passes import serialize
from domino_lm.schedule.plan import Plan, build_plan
from domino_lm.schedule.prepare import compare_plans, prepare_plan
from domino_lm.schedule.recorder import Recorder
from domino_lm.simulate.hardware import HARDWARE
from domino_lm.simulate.predict import Setting, planned
from tests.distributed.models import GPT, MICRO_BATCH, MODELS, float64_stack, micro_batches, plan_gradients
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
ROWS2 = ScheduleConfig(schedule="domino", domino_row_slices=2)


def build(mesh: ParallelMesh, on_step: Callable[[Tensor], list[Tensor]] = lambda loss_sum: []) -> Executor:
    stack = float64_stack(GPT, mesh.tp)
    plan, gradients = prepare_plan(stack, mesh, ROWS2, MICRO_BATCH, GPT.seq_length)
    return Executor(plan, stack, mesh, gradients, on_step)


def failing_step(mesh: ParallelMesh) -> list[str]:
    def fail(loss_sum: Tensor) -> list[Tensor]:
        raise RuntimeError("disk on fire")

    try:
        build(mesh, fail).run_step(micro_batches(mesh.dp), 1)
    except RuntimeError as error:
        return error.__notes__
    return []


def test_a_failing_op_is_named_with_its_place_and_neighbours(ranks: Ranks) -> None:
    (note,) = ranks(1).run(failing_step)[0]
    assert "m0 stepS0.* (rank 0), among: m0 startS0.*, m0 waitS0.*, m0 stepS0.*" in note
    assert note.startswith("in op 1")


def recorded_lanes(mesh: ParallelMesh) -> tuple[dict[str, int], bool]:
    executor, recorder = build(mesh), Recorder()
    executor.run_step(micro_batches(mesh.dp)[:1], 1, recorder)
    lanes = {lane: sum(span.lane == lane for span in recorder.spans) for lane in (COMPUTE, TP_LINK, DP_LINK)}
    return lanes, all(span.start_s <= span.end_s for span in recorder.spans)


def test_a_recorded_step_has_a_span_for_every_op_and_every_transfer(ranks: Ranks) -> None:
    executor_ops = ranks(2).run(plan_sizes)[0]
    for lanes, ordered in ranks(2).run(recorded_lanes):
        assert lanes == executor_ops
        assert ordered


def plan_sizes(mesh: ParallelMesh) -> dict[str, int]:
    ops = build(mesh).plan.ops
    started = [op.lane for op in ops if op.kind == "start"]
    return {COMPUTE: len(ops), TP_LINK: started.count(TP_LINK), DP_LINK: started.count(DP_LINK)}


def prepared(mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig) -> Plan:
    return prepare_plan(float64_stack(model, mesh.tp), mesh, schedule, MICRO_BATCH, model.seq_length)[0]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_the_plan_that_runs_is_the_one_that_is_predicted(ranks: Ranks, model: str, tp: int, sequence_parallel: bool) -> None:
    """Its buckets and their order too."""
    schedule = replace(ROWS2, sequence_parallel=sequence_parallel, ddp_bucket_size=5_000, data_parallel_sharding_strategy="optim")
    setting = Setting(model=MODELS[model], hardware=HARDWARE["dgx-h100"], tensor_parallel=tp, data_parallel=2, micro_batch_size=MICRO_BATCH)
    expected, _ = planned(setting, schedule)
    assert len(expected.slicing.buckets) > 2
    assert ranks(2 * tp).run(prepared, MODELS[model], schedule, tp=tp)[0] == expected


def different_plans(mesh: ParallelMesh) -> str:
    plan = build_plan(float64_stack(GPT, mesh.tp).parts)
    try:
        compare_plans(serialize(plan) if mesh.world.rank == 1 else plan, mesh.world)
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_with_different_plans_are_told_the_first_op_that_differs(ranks: Ranks) -> None:
    for message in ranks(2).run(different_plans):
        assert re.search(r"disagree on op \d+ of the plan: m0 wgradB10.0 on rank 0, m0 waitB10.0 on rank 1; start every rank", message)


def padded_losses(mesh: ParallelMesh, vocab_size: int, masked: bool) -> float:
    model = replace(GPT, vocab_size=vocab_size, mask_padded_vocab=masked)
    stack = float64_stack(model, mesh.tp)
    batch = micro_batches(mesh.dp, vocab_size)[0]
    plan, gradients = prepare_plan(stack, mesh, ROWS2, MICRO_BATCH, GPT.seq_length)
    loss = Executor(plan, stack, mesh, gradients).run_step([batch], 1).loss_sum
    assert loss.item() == pytest.approx((stack.forward(batch) * batch.loss_mask).sum().item(), rel=1e-12)
    return loss.item()


@pytest.mark.parametrize("vocab_size", [97, 128, 130])
def test_padded_vocabulary_does_not_change_the_loss(ranks: Ranks, vocab_size: int) -> None:
    (whole,), halves = ranks(1).run(padded_losses, vocab_size, True), ranks(2).run(padded_losses, vocab_size, True)
    assert halves == pytest.approx([whole, whole], rel=1e-12)


def test_unmasked_padding_takes_part_in_the_softmax_as_in_megatron(ranks: Ranks) -> None:
    (masked,), (unmasked,) = ranks(1).run(padded_losses, 97, True), ranks(1).run(padded_losses, 97, False)
    assert unmasked > masked + 1e-3


def fully_masked(mesh: ParallelMesh) -> tuple[float, float, bool]:
    executor = build(mesh)
    batch: Any = micro_batches(mesh.dp)[0]
    nothing = MicroBatch(batch.tokens, batch.labels, torch.zeros_like(batch.loss_mask))
    loss = executor.run_step([nothing], 1)
    finite = all(bool((bucket.flat == 0).all()) for bucket in executor.gradients.buckets)
    return loss.loss_sum.item(), loss.tokens.item(), finite


def test_a_micro_batch_without_a_token_that_counts_has_zero_loss_and_gradient(ranks: Ranks) -> None:
    assert ranks(2).run(fully_masked) == [(0.0, 0.0, True)] * 2


def step_twice(mesh: ParallelMesh) -> bool:
    first, second = (plan_gradients(mesh, GPT, ROWS2)[1] for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


def test_the_same_step_gives_the_same_bits(ranks: Ranks) -> None:
    assert all(ranks(4).run(step_twice, tp=2))


def test_a_collective_is_redeemed_once() -> None:
    pending = Communicator.single().all_reduce_start(torch.ones(2))
    pending.wait()
    with pytest.raises(AssertionError, match="redeemed once"):
        pending.wait()


def strided_buffer(mesh: ParallelMesh) -> str:
    try:
        mesh.tp.all_reduce_start(torch.ones(4, 4).t()[:, :2])
    except AssertionError as error:
        return str(error)
    return ""


def test_strided_buffers_never_reach_a_collective(ranks: Ranks) -> None:
    assert all("contiguous" in message for message in ranks(2).run(strided_buffer))


def test_a_pending_owns_its_buffer() -> None:
    tensor = torch.ones(2)
    assert Pending(tensor, None).wait() is tensor
