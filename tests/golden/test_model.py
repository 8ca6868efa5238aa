"""Logits, losses and gradients equal what Megatron computed, in fp32, at one and two tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from domino_lm.config.settings import ScheduleConfig
from domino_lm.model.batch import MicroBatch
from domino_lm.model.build import build_stack
from domino_lm.model.stack import Stack
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.prepare import prepare_plan
from tests.distributed.models import unsharded
from tests.golden.model_files import GOLDEN_MODELS, load_arrays, load_weights
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
SCHEDULES = {
    "baseline": ScheduleConfig(schedule="baseline"),
    "rows2": ScheduleConfig(schedule="domino", domino_row_slices=2),
    "rows3": ScheduleConfig(schedule="domino", domino_row_slices=3),
}


def golden_stack(kind: str, mesh: ParallelMesh) -> tuple[Stack, MicroBatch]:
    """The model of a golden file with its weights, and the file's samples."""
    inputs = load_arrays(f"{kind.removesuffix('_erf')}_tp1")
    stack = build_stack(GOLDEN_MODELS[kind], mesh.tp, seed=1)
    load_weights(stack, inputs["state_dict"], mesh.tp)
    return stack, MicroBatch(*(inputs[name].t().contiguous() for name in ("tokens", "labels", "loss_mask")))


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()


@torch.no_grad()
def forward_differences(mesh: ParallelMesh, kind: str) -> tuple[float, float]:
    golden = load_arrays(f"{kind}_tp1")
    stack, batch = golden_stack(kind, mesh)
    row = batch.whole()
    local = stack.head.logits(stack.hidden_states(row), row)  # [s, b, v/t]
    logits = torch.cat(mesh.tp.all_gather_object(local), -1)  # [s, b, v]
    losses = stack.forward(batch)
    return difference(logits.transpose(0, 1), golden["logits"]), difference(losses.t(), golden["per_token_loss"])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", GOLDEN_MODELS)
def test_logits_and_losses_equal_megatrons(ranks: Ranks, kind: str, tp: int) -> None:
    for logits, losses in ranks(tp).run(forward_differences, kind):
        assert logits < 1e-5
        assert losses < 1e-5


def gradient_differences(mesh: ParallelMesh, kind: str, schedule: ScheduleConfig) -> tuple[float, dict[str, float]]:
    golden = load_arrays(f"{kind}_tp1")
    stack, batch = golden_stack(kind, mesh)
    plan, gradients = prepare_plan(stack, mesh, schedule, batch.size, 32)
    loss = Executor(plan, stack, mesh, gradients).run_step([batch], 1)
    found = unsharded(stack, mesh.tp, [parameter.main_grad for parameter in stack.parameters()])
    assert found.keys() == golden["grads"].keys()
    mean = loss.loss_sum / loss.tokens
    return difference(mean, golden["loss"]), {name: difference(found[name], golden["grads"][name]) for name in found}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", GOLDEN_MODELS)
def test_gradients_under_every_schedule_equal_megatrons(ranks: Ranks, kind: str, tp: int, schedule: ScheduleConfig) -> None:
    for loss, grads in ranks(tp).run(gradient_differences, kind, schedule):
        assert loss < 5e-7
        worst = max(grads, key=lambda name: grads[name])
        assert grads[worst] < 1e-6, worst


def shard_differences(mesh: ParallelMesh, kind: str) -> dict[str, float]:
    stack, _ = golden_stack(kind, mesh)
    shards: dict[str, Any] = load_arrays(f"{kind}_tp2")[f"rank{mesh.tp.rank}"]["state_dict"]
    local = {parameter.spec.name: parameter.detach() for parameter in stack.parameters()}
    assert local.keys() == shards.keys()
    return {name: difference(local[name], shards[name]) for name in shards}


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_weights_are_cut_over_ranks_as_megatron_cuts_them(ranks: Ranks, kind: str) -> None:
    for differences in ranks(2).run(shard_differences, kind):
        assert set(differences.values()) == {0.0}
