"""A collective more in the table: it is validated, predicted, described, run and drawn without a change to any of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from domino_lm.config.settings import ScheduleConfig
from domino_lm.model.stack import Stack
from domino_lm.parallel.collectives import LAUNCHERS, Communicator, Pending
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.collectives import ALL_REDUCE, STANDARD, Collective
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.ops import TP_LINK, ChainPart, PartSpec
from domino_lm.schedule.passes import reduce_gradients
from domino_lm.schedule.plan import Plan, build_plan
from domino_lm.schedule.prepare import prepare_plan
from domino_lm.schedule.recorder import Recorder
from domino_lm.schedule.render import draw
from domino_lm.schedule.timeline import Timeline
from domino_lm.schedule.validate import validate
from domino_lm.simulate.costs import cost
from domino_lm.simulate.hardware import HARDWARE
from domino_lm.simulate.predict import Setting, planned
from domino_lm.simulate.remarks import plan_text
from domino_lm.simulate.simulator import simulate
from tests.distributed.models import GPT, MICRO_BATCH, float64_stack, micro_batches, plan_gradients, unsharded
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
NARROW = Collective(name="narrow_sum", passes="partial", arrives="sum", traffic="all_reduce", cut_by_columns=True, size=0.5)
ROWS2 = ScheduleConfig(schedule="domino", domino_row_slices=2)
COLUMNS = [1, 2]
SETTING = Setting(model=GPT, hardware=HARDWARE["dgx-h100"], tensor_parallel=2, micro_batch_size=MICRO_BATCH)


def narrow_sum_start(tp: Communicator, tensor: Tensor) -> Pending:
    """Sum in fp32 what is in float64."""
    pending = tp.all_reduce_start(tensor.float())
    pending.then(lambda found: found.to(tensor.dtype))
    return pending


def narrowed(part: ChainPart) -> PartSpec:
    """The part with the new collective in place of its all-reduces."""
    spec = PartSpec.of(part)
    forward, backward = (NARROW.name if name == ALL_REDUCE.name else name for name in (spec.forward_collective, spec.backward_collective))
    return spec._replace(forward_collective=forward, backward_collective=backward)


def narrow_plan(standard: Plan) -> Plan:
    """A plan whose partial sums leave by the new collective, cut and ended as ``standard`` is."""
    cut = standard.slicing
    chain = [narrowed(part) for part in cut.chain]
    return reduce_gradients(build_plan(chain, cut.row_sizes, cut.cols, collectives=(*STANDARD, NARROW)), cut.buckets)


@pytest.mark.parametrize("cols", COLUMNS)
def test_it_is_sound_and_costs_what_its_size_says(cols: int) -> None:
    standard, shapes = planned(SETTING, replace(ROWS2, domino_column_slices=cols))
    plan = narrow_plan(standard)
    validate(plan)
    assert len(plan.ops) == len(standard.ops)
    narrow = replace(shapes, slicing=plan.slicing)
    for op, usual in zip(plan.ops, standard.ops, strict=True):
        sent, before = cost(op, narrow).transfer_bytes, cost(usual, shapes).transfer_bytes
        assert sent == before / (2 if op.collective == NARROW.name else 1)
    hardware = SETTING.hardware
    assert simulate(plan, narrow, hardware).busy_s(TP_LINK) < simulate(standard, shapes, hardware).busy_s(TP_LINK)
    line = next(line for line in plan_text(plan, narrow, 1).splitlines() if "startF2.0:narrow_sum" in line)
    assert "all-reduce attention output" in line


def test_a_table_without_it_is_refused() -> None:
    with pytest.raises(ValueError, match="'narrow_sum' is no collective of this plan; known are all_reduce, reduce_scatter"):
        build_plan([narrowed(part) for part in planned(SETTING, ROWS2)[0].slicing.chain], (2, 2))


def gradients_by_it(mesh: ParallelMesh, cols: int, picture: str | None) -> tuple[float, dict[str, Tensor]]:
    stack: Stack = float64_stack(GPT, mesh.tp)
    standard, gradients = prepare_plan(stack, mesh, replace(ROWS2, domino_column_slices=cols), MICRO_BATCH, GPT.seq_length)
    launchers = {**LAUNCHERS, NARROW.name: narrow_sum_start}
    executor = Executor(narrow_plan(standard), stack, mesh, gradients, launchers=launchers)
    recorder = Recorder()
    made = executor.run_step(micro_batches(mesh.dp), 1, recorder)
    if picture is not None and mesh.world.rank == 0:
        draw(Timeline.of(recorder.spans, "narrow"), picture)
    return made.loss_sum.item(), unsharded(stack, mesh.tp, [parameter.main_grad for parameter in stack.parameters()])


@pytest.mark.parametrize("cols", COLUMNS)
def test_it_runs_and_is_drawn(ranks: Ranks, cols: int, tmp_path: Path) -> None:
    picture = tmp_path / "narrow.png"
    loss, found = ranks(2).run(gradients_by_it, cols, str(picture), tp=2)[0]
    expected_loss, expected = ranks(2).run(plan_gradients, GPT, replace(ROWS2, domino_column_slices=cols), tp=2)[0]
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    for name, gradient in expected.items():
        difference = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert 0 < difference < 1e-4, name
    assert picture.stat().st_size > 10_000


def without_a_launcher(mesh: ParallelMesh) -> str:
    stack = float64_stack(GPT, mesh.tp)
    standard, gradients = prepare_plan(stack, mesh, ROWS2, MICRO_BATCH, GPT.seq_length)
    try:
        Executor(narrow_plan(standard), stack, mesh, gradients).run_step(micro_batches(mesh.dp), 1)
    except ValueError as error:
        return str(error)
    return ""


def test_one_that_nothing_starts_is_named(ranks: Ranks) -> None:
    (message,) = set(ranks(1).run(without_a_launcher))
    assert message == "m0 startF0.0:narrow_sum: nothing starts 'narrow_sum'; known are " + ", ".join(LAUNCHERS)


def test_what_arrives_has_the_type_that_was_sent() -> None:
    pending = narrow_sum_start(Communicator.single(), torch.ones(2, dtype=torch.float64))
    assert pending.wait().dtype == torch.float64
