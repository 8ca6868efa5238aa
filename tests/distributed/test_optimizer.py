"""The gradient norm over tensor parallelism."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from domino_lm.config.settings import ModelConfig, OptimizerConfig
from domino_lm.model.build import build_stack
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.parallel.random import name_seed
from domino_lm.training.optimizer import Optimizer
from tests.distributed.models import GPT, LLAMA
from tests.rank_pool import RankPool


def gradient_norm(mesh: ParallelMesh, model: ModelConfig) -> float:
    stack = build_stack(model, mesh.tp, 1, torch.float64)
    for parameter in stack.parameters():
        full = torch.zeros(parameter.spec.shape, dtype=torch.float64)
        full[: parameter.spec.vocab_rows].normal_(generator=torch.Generator().manual_seed(name_seed(3, parameter.spec.name)))
        parameter.main_grad = parameter.spec.shard(full, mesh.tp.rank, mesh.tp.size)
    return float(Optimizer(stack.parameters(), OptimizerConfig(lr=1.0), mesh.tp).gradient_norm())


@pytest.mark.parametrize("model", [GPT, dataclasses.replace(LLAMA, num_query_groups=4)], ids=["gpt", "llama"])
def test_norm_does_not_depend_on_tensor_parallelism(ranks: Callable[[int], RankPool], model: ModelConfig) -> None:
    (alone,) = ranks(1).run(gradient_norm, model)
    for norm in (*ranks(2).run(gradient_norm, model, tp=2), *ranks(4).run(gradient_norm, model, tp=4)):
        assert norm == pytest.approx(alone, rel=1e-14)
