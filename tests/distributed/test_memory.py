"""Cutting a micro-batch costs no memory, and recompute gives some back; live tensor bytes, counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest
import torch

from domino_lm.config.settings import ModelConfig, ScheduleConfig
from domino_lm.model.batch import MicroBatch
from domino_lm.model.build import build_stack
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.passes import step_templates
from domino_lm.schedule.prepare import prepare_plan
from domino_lm.simulate.hardware import HARDWARE
from domino_lm.simulate.memory import Memory, memory_of
from domino_lm.simulate.predict import Setting, planned
from tests.distributed.models import GPT
from tests.distributed.test_schedules import COMBINATIONS, CUTS
from tests.live_bytes import peak_bytes
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
MODEL = replace(GPT, num_layers=6, hidden_size=64, seq_length=128, max_position_embeddings=128, vocab_size=256)
SAMPLES = 4
REPEATS = 3


def peak(
    mesh: ParallelMesh,
    schedule: ScheduleConfig,
    model: ModelConfig = MODEL,
    micro_batches: int = 1,
    dtype: torch.dtype = torch.float32,
    masked: bool = False,
) -> int:
    """Bytes of a step when everything that is kept between steps exists: the least of some, since gloo's threads let buffers go late."""
    stack = build_stack(model, mesh.tp, 1, dtype)
    plan, gradients = prepare_plan(stack, mesh, schedule, SAMPLES, model.seq_length)
    executor = Executor(plan, stack, mesh, gradients)
    tokens = torch.randint(0, 256, (model.seq_length, SAMPLES))
    mask = torch.ones(SAMPLES, 1, model.seq_length, model.seq_length, dtype=torch.bool).triu(1) if masked else None
    batches = [MicroBatch(tokens, tokens.roll(-1, 0), torch.ones(tokens.shape), attention_mask=mask)] * micro_batches
    executor.run_step(batches, 1)
    return min(peak_bytes(lambda: executor.run_step(batches, 2)) for _ in range(REPEATS))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("rows2", "sequence4") else pytest.mark.exhaustive)
        for name in ("rows2", "rows4", "sequence2", "sequence4")
    ],
)
def test_rows_need_as_much_memory_as_the_baseline(ranks: Ranks, name: str) -> None:
    baseline, cut = (min(ranks(2).run(peak, CUTS[schedule])) for schedule in ("baseline", name))
    assert cut <= 1.05 * baseline


@pytest.mark.exhaustive
def test_recompute_and_sequence_parallelism_each_save_memory(ranks: Ranks) -> None:
    names = ("rows2-tp-keep", "rows2-tp-selective", "rows2-tp-full", "rows2-sp-keep", "rows2-sp-full")
    keep, selective, full, shared, both = (min(ranks(2).run(peak, COMBINATIONS[name])) for name in names)
    assert full < 0.5 * keep
    assert selective < keep
    assert shared < keep
    assert both < full


WIDE = ModelConfig(
    num_layers=3,
    hidden_size=256,
    num_attention_heads=4,
    seq_length=256,
    vocab_size=2000,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)
LLAMA = replace(
    WIDE,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    group_query_attention=True,
    num_query_groups=2,
)
MODELS = {"gpt": WIDE, "gpt with dropout": replace(WIDE, attention_dropout=0.1, hidden_dropout=0.1), "llama": LLAMA}
ROWS = ScheduleConfig(schedule="domino", domino_row_slices=2)
FULL = replace(ROWS, recompute_granularity="full", recompute_method="uniform")
ESTIMATED = {
    "baseline": ScheduleConfig(schedule="baseline"),
    "two rows": ROWS,
    "two rows, deferred": replace(ROWS, domino_defer_wgrad=True),
    "four sequence rows": replace(ROWS, domino_row_slices=4, domino_row_dim="sequence"),
    "row groups": replace(ROWS, domino_row_slices=4, domino_pair="row-groups"),
    "paired": replace(ROWS, domino_pair="micro-batches"),
    "columns": replace(ROWS, domino_row_slices=1, domino_column_slices=2),
    "sequence parallel": replace(ROWS, sequence_parallel=True),
    "selective": replace(ROWS, recompute_granularity="selective"),
    "full": FULL,
    "full, sequence parallel": replace(FULL, sequence_parallel=True),
}
COMPARED = [("gpt", name) for name in ESTIMATED] + [("llama", name) for name in ESTIMATED]
COMPARED += [("gpt with dropout", name) for name in ("baseline", "four sequence rows", "selective", "full")]


def estimated(
    model: ModelConfig, schedule: ScheduleConfig, micro_batches: int, tensor_parallel: int, element_bytes: int = 4, masked: bool = False
) -> Memory:
    """What a start-up summary says of one rank on CPUs."""
    hardware = replace(HARDWARE["dgx-h100"], cpu=True, element_bytes=element_bytes, fused=False)
    setting = Setting(model=model, hardware=hardware, tensor_parallel=tensor_parallel, micro_batch_size=SAMPLES, masked=masked)
    plan, shapes = planned(setting, schedule)
    return memory_of(chain.from_iterable(step_templates(plan, micro_batches)), shapes)


ALWAYS = [("gpt", "full"), ("llama", "sequence parallel"), ("gpt with dropout", "baseline")]


@pytest.mark.parametrize(
    ("model", "schedule"),
    [pytest.param(*pair, marks=[] if pair in ALWAYS else pytest.mark.exhaustive, id="-".join(pair)) for pair in COMPARED],
)
def test_the_estimate_of_activations_is_within_a_tenth_of_the_measured_peak(ranks: Ranks, model: str, schedule: str) -> None:
    micro_batches = 3 if schedule == "paired" else 1
    measured = min(ranks(2).run(peak, ESTIMATED[schedule], MODELS[model], micro_batches))
    assert estimated(MODELS[model], ESTIMATED[schedule], micro_batches, 2).activations == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("model", "schedule"),
    [
        pytest.param("llama", "two rows", marks=pytest.mark.exhaustive),
        pytest.param("gpt", "baseline", marks=pytest.mark.exhaustive),
        pytest.param("llama", "full", marks=pytest.mark.exhaustive),
        pytest.param("llama", "sequence parallel", marks=pytest.mark.exhaustive),
        pytest.param("gpt with dropout", "two rows", marks=pytest.mark.exhaustive),
    ],
)
def test_so_it_is_in_bf16(ranks: Ranks, model: str, schedule: str) -> None:
    measured = min(ranks(2).run(peak, ESTIMATED[schedule], MODELS[model], 1, torch.bfloat16))
    assert estimated(MODELS[model], ESTIMATED[schedule], 1, 2, 2).activations == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("model", "schedule"), [("llama", "baseline"), pytest.param("gpt", "four sequence rows", marks=pytest.mark.exhaustive)]
)
def test_so_it_is_under_attention_masks(ranks: Ranks, model: str, schedule: str) -> None:
    measured = min(ranks(2).run(peak, ESTIMATED[schedule], MODELS[model], 1, torch.float32, True))
    assert estimated(MODELS[model], ESTIMATED[schedule], 1, 2, 4, True).activations == pytest.approx(measured, rel=0.1)


def test_weights_and_gradients_take_what_the_estimate_says(ranks: Ranks) -> None:
    for model in (WIDE, LLAMA):
        found = estimated(model, ROWS, 1, 2)
        assert ranks(2).run(held, model) == [(found.weights, found.gradients)] * 2


def held(mesh: ParallelMesh, model: ModelConfig) -> tuple[int, int]:
    """Bytes of weights and of gradient buckets on this rank."""
    stack = build_stack(model, mesh.tp, 1)
    _, gradients = prepare_plan(stack, mesh, ROWS, SAMPLES, model.seq_length)
    return sum(parameter.nbytes for parameter in stack.parameters()), sum(bucket.flat.nbytes for bucket in gradients.buckets)
