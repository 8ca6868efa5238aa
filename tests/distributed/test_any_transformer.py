"""The model on the page `docs/any-transformer.md` trains under every schedule, with nothing changed under `schedule/`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from domino_lm.config.settings import ScheduleConfig
from domino_lm.model.stack import Stack
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.prepare import prepare_plan
from tests.distributed.models import (
    GPT,
    MICRO_BATCH,
    MICRO_BATCHES,
    SEED,
    grad_of,
    micro_batches,
    unsharded,
    worst_difference,
)
from tests.distributed.test_schedules import CUTS, RECOMPUTE
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
PAGE = Path(__file__).parents[2] / "docs" / "any-transformer.md"


def code_of_page() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return code


def page_stack(tp: Communicator) -> Stack:
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(compile(code_of_page(), str(PAGE), "exec"), namespace)
    return namespace["parallel_stack"](GPT, tp, SEED, torch.float64)


def plan_gradients(mesh: ParallelMesh, schedule: ScheduleConfig) -> dict[str, Tensor]:
    stack = page_stack(mesh.tp)
    plan, gradients = prepare_plan(stack, mesh, schedule, MICRO_BATCH, GPT.seq_length)
    Executor(plan, stack, mesh, gradients).run_step(micro_batches(mesh.dp), 1)
    return unsharded(stack, mesh.tp, [parameter.main_grad for parameter in stack.parameters()])


def autograd_gradients() -> dict[str, Tensor]:
    """On one rank, where nothing is sharded and nothing has to be summed."""
    single = Communicator.single()
    stack = page_stack(single)
    for batch in micro_batches(single):
        loss = (stack.forward(batch) * batch.loss_mask).sum() / batch.loss_mask.sum().clamp_min(1)
        (loss / MICRO_BATCHES).backward()
    return unsharded(stack, single, [grad_of(parameter) for parameter in stack.parameters()])


def difference(mesh: ParallelMesh, schedule: ScheduleConfig) -> float:
    return worst_difference(plan_gradients(mesh, schedule), autograd_gradients())


def test_the_model_is_written_in_under_80_lines() -> None:
    assert len([line for line in code_of_page().splitlines() if line.strip()]) < 80


IN_TURN = [(name, bool(i % 2)) for i, name in enumerate(CUTS)]
"""Every cut, half of them under sequence parallelism; the other halves run under the marker."""


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [*IN_TURN, *(pytest.param(name, not other, marks=pytest.mark.exhaustive) for name, other in IN_TURN)],
)
def test_its_gradients_do_not_depend_on_the_schedule(ranks: Ranks, name: str, sequence_parallel: bool) -> None:
    kept = RECOMPUTE["full" if sequence_parallel else "selective"]
    schedule = replace(CUTS[name], sequence_parallel=sequence_parallel, **kept)
    assert max(ranks(2).run(difference, schedule)) < 1e-12


def losses(mesh: ParallelMesh, schedule: ScheduleConfig) -> list[float]:
    """Summed losses of ten steps of plain gradient descent on the same samples."""
    stack = page_stack(mesh.tp)
    plan, gradients = prepare_plan(stack, mesh, schedule, MICRO_BATCH, GPT.seq_length)

    def descend(loss_sum: Tensor) -> list[Tensor]:
        for parameter in stack.parameters():
            parameter.data.sub_(parameter.main_grad)
        return []

    executor = Executor(plan, stack, mesh, gradients, descend)
    return [executor.run_step(micro_batches(mesh.dp), step).loss_sum.item() for step in range(10)]


def test_it_trains(ranks: Ranks) -> None:
    (found, _) = ranks(2).run(losses, CUTS["rows2"])
    assert found == pytest.approx(ranks(1).run(losses, CUTS["baseline"])[0], rel=1e-9)
    assert found[-1] < 0.8 * found[0]
