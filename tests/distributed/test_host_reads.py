"""No step makes the host wait for the device, but for the one read at its edge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from domino_lm.config.settings import ModelConfig, OptimizerConfig, ScheduleConfig
from domino_lm.model.build import build_stack
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.prepare import prepare_plan
from domino_lm.training.optimizer import Optimizer
from tests.distributed.models import GPT, LLAMA, MICRO_BATCH, SEED, micro_batches
from tests.host_reads import host_reads
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
SCHEDULES = {
    "baseline": ScheduleConfig(schedule="baseline"),
    "rows": ScheduleConfig(schedule="domino", domino_row_slices=2),
    "2x2": ScheduleConfig(schedule="domino", domino_row_slices=2, domino_column_slices=2),
    "sequence rows": ScheduleConfig(schedule="domino", domino_row_slices=4, domino_row_dim="sequence"),
    "sequence parallel": ScheduleConfig(schedule="domino", domino_row_slices=2, sequence_parallel=True),
    "recompute": ScheduleConfig(
        schedule="domino", domino_row_slices=2, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    ),
    "paired": ScheduleConfig(schedule="domino", domino_row_slices=2, domino_pair="micro-batches"),
}
DROPPING = replace(GPT, hidden_dropout=0.1, attention_dropout=0.1)


def reads_of_a_step(mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig, per_token: bool) -> list[str]:
    stack = build_stack(model, mesh.tp, SEED)
    plan, gradients = prepare_plan(stack, mesh, schedule, MICRO_BATCH, model.seq_length)
    optimizer = Optimizer(stack.parameters(), OptimizerConfig(lr=1e-3), mesh.tp)

    def update(loss_sum: Tensor) -> list[Tensor]:
        return [optimizer.step(1e-3, mesh.dp.all_reduce(torch.logical_not(torch.isfinite(loss_sum)).float())).grad_norm]

    executor = Executor(plan, stack, mesh, gradients, update, per_token_loss=per_token)
    batches = micro_batches(mesh.dp, documents=True)
    with host_reads() as found:
        executor.run_step(batches, 1)
    return found


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("model", [DROPPING, LLAMA], ids=["gpt", "llama"])
def test_no_value_is_read_inside_a_step(ranks: Ranks, schedule: ScheduleConfig, model: ModelConfig) -> None:
    assert ranks(4).run(reads_of_a_step, model, schedule, model is LLAMA, tp=2) == [[]] * 4


def test_the_watch_sees_reads() -> None:
    x = torch.arange(3.0)
    with host_reads() as found:
        x.sum().item()
        x.tolist()
        x[x > 1]
        bool(x.any())
    assert {"item", "tolist", "__bool__"} <= set(found)
    assert {"_local_scalar_dense"} <= set(found)
    assert {"nonzero", "index"} & set(found)
