"""Cutting a micro-batch costs no memory, and recompute gives some back; live tensor bytes, counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from domino_lm.config import ScheduleConfig
from domino_lm.model.batch import MicroBatch
from domino_lm.model.stack import build_stack
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.prepare import prepare_plan
from tests.distributed.models import GPT
from tests.distributed.test_schedules import COMBINATIONS, CUTS
from tests.live_bytes import peak_bytes
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
MODEL = replace(GPT, num_layers=6, hidden_size=64, seq_length=128, max_position_embeddings=128, vocab_size=256)
SAMPLES = 4


def peak(mesh: ParallelMesh, schedule: ScheduleConfig) -> int:
    """Bytes of a second step, when everything that is kept between steps exists."""
    stack = build_stack(MODEL, mesh.tp, 1)
    plan, gradients = prepare_plan(stack, mesh, schedule, SAMPLES, MODEL.seq_length)
    executor = Executor(plan, stack, mesh, gradients, lambda: None)
    tokens = torch.randint(0, 256, (MODEL.seq_length, SAMPLES))
    batch = MicroBatch(tokens, tokens.roll(-1, 0), torch.ones(tokens.shape))
    executor.run_step([batch], 1)
    return peak_bytes(lambda: executor.run_step([batch], 2))


@pytest.mark.parametrize("name", ["rows2", "rows4", "sequence2", "sequence4"])
def test_rows_need_as_much_memory_as_the_baseline(ranks: Ranks, name: str) -> None:
    baseline, cut = (max(ranks(2).run(peak, CUTS[schedule])) for schedule in ("baseline", name))
    assert cut <= 1.05 * baseline


def test_recompute_and_sequence_parallelism_each_save_memory(ranks: Ranks) -> None:
    names = ("rows2-tp-keep", "rows2-tp-selective", "rows2-tp-full", "rows2-sp-keep", "rows2-sp-full")
    keep, selective, full, shared, both = (max(ranks(2).run(peak, COMBINATIONS[name])) for name in names)
    assert full < 0.5 * keep
    assert selective < keep
    assert shared < keep
    assert both < full
