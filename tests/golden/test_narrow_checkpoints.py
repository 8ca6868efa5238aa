"""Megatron's own checkpoints, of fp32 runs, go on in bf16 and fp16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from domino_lm.config.precision import PrecisionConfig
from domino_lm.config.settings import CheckpointConfig
from domino_lm.model.build import build_stack
from domino_lm.model.parameter import dtype_of
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.training.trainer import Trainer
from tests.golden.checkpoint_files import WITH_OPTIMIZER, family, unpack
from tests.golden.test_curves import GoldenSamples, settings
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
PRECISIONS = {"bf16": PrecisionConfig(bf16=True), "fp16": PrecisionConfig(fp16=True, initial_loss_scale=1024.0)}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("checkpoints"))


def continued(mesh: ParallelMesh, name: str, folder: str, precision: PrecisionConfig) -> tuple[list[Tensor], list[float]]:
    """What the optimizer updates after loading, and the losses of four more steps."""
    run = replace(settings(family(name), "baseline", mesh.tp.size), checkpoint=CheckpointConfig(load=folder), precision=precision)
    stack = build_stack(run.model, mesh.tp, 0, dtype_of(precision.params_dtype))
    trainer = Trainer(run, mesh, stack, data=None, console=lambda line: None)  # type: ignore[arg-type]
    trainer.load()
    weights = [piece.main.clone() for piece in trainer.optimizer.pieces]
    samples: Any = GoldenSamples(family(name), mesh)
    samples.blocked_s = 0.0
    return weights, [trainer.step(samples)[0].loss for _ in range(4)]


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS.keys())
@pytest.mark.parametrize("name", WITH_OPTIMIZER)
def test_a_checkpoint_of_megatron_goes_on_in_a_narrow_format_from_its_exact_weights(
    ranks: Ranks, checkpoints: Path, name: str, precision: PrecisionConfig
) -> None:
    exact, narrow = (ranks(2).run(continued, name, str(checkpoints / name), kind) for kind in (PrecisionConfig(), precision))
    for (weights, losses), (found, found_losses) in zip(exact, narrow, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, found, strict=True))
        assert found_losses == pytest.approx(losses, rel=2e-3)
