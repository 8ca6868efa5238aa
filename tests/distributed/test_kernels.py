"""Models under other kernels: compiled ones give the same gradients, 8-bit ones nearly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from domino_lm.config.kernels import KernelConfig
from domino_lm.config.settings import ModelConfig, ScheduleConfig
from domino_lm.model.build import build_stack
from domino_lm.model.kernels.backends import choose_kernels, install_kernels
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.prepare import prepare_plan
from tests.distributed.models import GPT, LLAMA, MICRO_BATCH, SEED, Gradients, micro_batches, unsharded, worst_difference
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
BASELINE = ScheduleConfig(schedule="baseline")
CUTS = {
    "2x2": ScheduleConfig(schedule="domino", domino_row_slices=2, domino_column_slices=2),
    "sequence parallel, recompute": ScheduleConfig(
        schedule="domino", domino_row_slices=2, sequence_parallel=True, recompute_granularity="full", recompute_method="uniform"
    ),
}


def gradients(mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig, settings: KernelConfig, dtype: torch.dtype) -> Gradients:
    stack = build_stack(model, mesh.tp, SEED, dtype)
    install_kernels(stack, choose_kernels(settings, mesh.device, dtype, model.hidden_size))
    plan, buckets = prepare_plan(stack, mesh, schedule, MICRO_BATCH, model.seq_length)
    executor = Executor(plan, stack, mesh, buckets, seed=3)
    for iteration in (1, 2):
        executor.run_step(micro_batches(mesh.dp), iteration)
    return unsharded(stack, mesh.tp, [parameter.main_grad for parameter in stack.parameters()])


def compiled_difference(mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig, backend: str, dtype: torch.dtype) -> float:
    plain = gradients(mesh, model, schedule, KernelConfig(), dtype)
    return worst_difference(gradients(mesh, model, schedule, KernelConfig(compile=True, compile_backend=backend), dtype), plain)


@pytest.mark.parametrize(
    ("model", "cut"),
    [pytest.param(replace(GPT, hidden_dropout=0.1), "2x2", marks=pytest.mark.exhaustive), (LLAMA, "sequence parallel, recompute")],
)
def test_compiled_kernels_give_the_same_gradients(ranks: Ranks, model: ModelConfig, cut: str) -> None:
    assert max(ranks(2).run(compiled_difference, model, CUTS[cut], "aot_eager", torch.float64)) < 1e-12


@pytest.mark.long
def test_the_default_compiler_gives_the_same_gradients(ranks: Ranks) -> None:
    assert max(ranks(1).run(compiled_difference, replace(LLAMA, num_layers=1), BASELINE, "inductor", torch.float32)) < 1e-5


def fp8_angle(mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig, name: str) -> float:
    """Cosine between all gradients with and without 8 bits."""
    plain = gradients(mesh, model, BASELINE, KernelConfig(), torch.float32)
    narrow = gradients(mesh, model, schedule, KernelConfig(fp8_format=name), torch.float32)  # type: ignore[arg-type]
    a, b = (torch.cat([tensor.flatten() for tensor in found.values()]) for found in (plain, narrow))
    return torch.cosine_similarity(a, b, dim=0).item()


@pytest.mark.parametrize("schedule", [BASELINE, *CUTS.values()], ids=["baseline", *CUTS.keys()])
@pytest.mark.parametrize("model", [GPT, replace(LLAMA, ffn_hidden_size=64)], ids=["gpt", "llama"])
@pytest.mark.parametrize("name", ["hybrid", "e4m3"])
def test_8_bit_gradients_point_where_the_wide_ones_do(ranks: Ranks, model: ModelConfig, schedule: ScheduleConfig, name: str) -> None:
    assert min(ranks(2).run(fp8_angle, model, schedule, name)) > 0.99
