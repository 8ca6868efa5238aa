"""Every schedule on every layout computes the gradients of plain autograd, and those of an unsharded reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from domino_lm.config.settings import ModelConfig, ScheduleConfig
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.prepare import prepare_plan
from tests.distributed.models import (
    MICRO_BATCH,
    MODELS,
    Gradients,
    autograd_gradients,
    float64_stack,
    micro_batches,
    plan_gradients,
    reference_gradients,
    worst_difference,
)
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
LAYOUTS = {"tp1_dp1": (1, 1), "tp2_dp1": (2, 1), "tp1_dp2": (1, 2), "tp2_dp2": (2, 2)}


def domino(rows: int, columns: int = 1, **settings: Any) -> ScheduleConfig:
    return ScheduleConfig(schedule="domino", domino_row_slices=rows, domino_column_slices=columns, **settings)


ROWS = {"baseline": ScheduleConfig(schedule="baseline"), **{f"rows{rows}": domino(rows) for rows in (1, 2, 3, 4)}}
CUTS = {
    **ROWS,
    "columns2": domino(1, 2),
    "columns4": domino(1, 4),
    "rows2_columns2": domino(2, 2),
    "sequence2": domino(2, domino_row_dim="sequence"),
    "sequence4": domino(4, domino_row_dim="sequence"),
    "row_groups": domino(4, domino_pair="row-groups"),
    "paired": domino(2, domino_pair="micro-batches"),
}
VARIANTS = {
    "wgrad_deferred": domino(2, domino_defer_wgrad=True),
    "small_buckets": domino(3, ddp_bucket_size=3000),
    "late_reduction": domino(2, ddp_bucket_size=3000, overlap_grad_reduce=False),
    "sequence3_columns2": domino(3, 2, domino_row_dim="sequence"),
    "paired_single_row": domino(1, domino_pair="micro-batches"),
    "recompute_first_layer": domino(2, recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "keep": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform"},
}
COMBINATIONS = {
    f"{cut}-{'sp' if sequence_parallel else 'tp'}-{kept}": replace(CUTS[cut], sequence_parallel=sequence_parallel, **RECOMPUTE[kept])
    for cut in CUTS
    for sequence_parallel in (False, True)
    for kept in RECOMPUTE
}
# of the six combinations of each cut, every run takes two, in turn, one for each model; all of them run under the marker
COVERING = [name for i, name in enumerate(COMBINATIONS) if (i + i // 6) % 3 == 0]
COVERED = list(zip([*MODELS, *reversed(MODELS)] * len(CUTS), COVERING, strict=False))
# Without tensor parallelism no collective hides: there a few schedules stand for all, and all of them run under the marker
EACH_LAYOUT = [(layout, name) for layout in LAYOUTS for name in (*ROWS, *VARIANTS)]
FEW = {"tp1_dp1": ("rows3", "recompute_first_layer"), "tp1_dp2": ("rows2", "small_buckets", "late_reduction")}
FOUR_RANKS = {name: replace(MODELS[name], num_attention_heads=8, num_query_groups=4) for name in MODELS}


def differences(mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig, per_token: bool) -> tuple[float, float, float, float]:
    """Relative differences of the plan's loss and gradients to autograd's, and of autograd's to the reference's."""
    plan_loss, plan = plan_gradients(mesh, model, schedule, per_token)
    autograd_loss, autograd = autograd_gradients(mesh, model, per_token)
    reference_loss, reference = reference_gradients(model, per_token)
    return (
        abs(plan_loss / autograd_loss - 1),
        worst_difference(plan, autograd),
        abs(autograd_loss / reference_loss - 1),
        worst_difference(autograd, reference),
    )


@pytest.mark.parametrize(
    ("layout", "name"),
    [pytest.param(*case, marks=pytest.mark.exhaustive if case[1] not in FEW.get(case[0], case) else ()) for case in EACH_LAYOUT],
)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_gradients_do_not_depend_on_schedule_or_layout(ranks: Ranks, model: ModelConfig, layout: str, name: str) -> None:
    tp, dp = LAYOUTS[layout]
    for found in ranks(tp * dp).run(differences, model, (ROWS | VARIANTS)[name], False, tp=tp):
        assert max(found) < 1e-12, found


@pytest.mark.parametrize(("model", "name"), COVERED)
def test_gradients_do_not_depend_on_cut_sequence_parallelism_and_recompute(ranks: Ranks, model: str, name: str) -> None:
    for found in ranks(2).run(differences, MODELS[model], COMBINATIONS[name], False):
        assert max(found) < 1e-12, found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COMBINATIONS)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_all_combinations_have_the_same_gradients(ranks: Ranks, model: str, tp: int, name: str) -> None:
    config = FOUR_RANKS[model] if tp == 4 else MODELS[model]
    for found in ranks(tp).run(differences, config, COMBINATIONS[name], False):
        assert max(found) < 1e-12, found


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("schedule", [CUTS["rows2"], COMBINATIONS["paired-sp-full"]], ids=["rows2", "paired"])
def test_per_token_objective_is_the_mean_over_the_global_batch(ranks: Ranks, schedule: ScheduleConfig, layout: tuple[int, int]) -> None:
    tp, dp = layout
    for found in ranks(tp * dp).run(differences, MODELS["gpt"], schedule, True, tp=tp):
        assert max(found) < 1e-12, found


def document_difference(mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig) -> float:
    plan, autograd = (
        gradients(documents=True)
        for gradients in (partial(plan_gradients, mesh, model, schedule), partial(autograd_gradients, mesh, model))
    )
    return worst_difference(plan[1], autograd[1])


@pytest.mark.parametrize("name", ["rows2-tp-keep", "sequence2-tp-full", "sequence4-sp-keep", "rows2_columns2-sp-selective"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_documents_keep_their_masks_and_positions_in_every_cut(ranks: Ranks, model: ModelConfig, name: str) -> None:
    assert max(ranks(2).run(document_difference, model, COMBINATIONS[name])) < 1e-12


def dropout_difference(mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig) -> float:
    return worst_difference(plan_gradients(mesh, model, schedule, seed=7)[1], autograd_gradients(mesh, model, seed=7)[1])


@pytest.mark.parametrize("schedule", [CUTS["baseline"], VARIANTS["small_buckets"]], ids=["baseline", "rows3"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_backward_drops_what_forward_dropped(ranks: Ranks, model: ModelConfig, schedule: ScheduleConfig) -> None:
    dropped = replace(model, hidden_dropout=0.2, attention_dropout=0.1)
    assert max(ranks(2).run(dropout_difference, dropped, schedule)) < 1e-12


@pytest.mark.parametrize("model", ["gpt", pytest.param("llama", marks=pytest.mark.exhaustive)])
def test_dropout_masks_depend_on_neither_schedule_nor_layout(ranks: Ranks, model: str) -> None:
    dropped = replace(MODELS[model], hidden_dropout=0.2, attention_dropout=0.1)
    expected = ranks(1).run(plan_gradients, dropped, CUTS["baseline"], False, 7, tp=1)[0][1]
    for (tp, dp), rows in zip(LAYOUTS.values(), ("rows3", "rows2", "rows4", "rows3"), strict=True):
        found = ranks(tp * dp).run(plan_gradients, dropped, ROWS[rows], False, 7, tp=tp)[0][1]
        assert worst_difference(found, expected) < 1e-12, (tp, dp, rows)
    for name in ("columns2-sp-keep", "rows2_columns2-tp-full", "sequence4-tp-keep", "sequence2-sp-full", "paired-sp-selective"):
        found = ranks(2).run(plan_gradients, dropped, COMBINATIONS[name], False, 7)[0][1]
        assert worst_difference(found, expected) < 1e-12, name


def gradients_of_steps(mesh: ParallelMesh, model: ModelConfig, seed: int, iterations: Sequence[int]) -> list[Gradients]:
    """Gradients of the same micro-batches and weights at each of the iterations, one after the other."""
    stack = float64_stack(model, mesh.tp)
    plan, buckets = prepare_plan(stack, mesh, CUTS["rows2"], MICRO_BATCH, model.seq_length)
    executor, found = Executor(plan, stack, mesh, buckets, seed=seed), []
    for iteration in iterations:
        executor.run_step(micro_batches(mesh.dp), iteration)
        found.append({parameter.spec.name: parameter.main_grad.clone() for parameter in stack.parameters()})
    return found


def test_dropout_masks_change_from_step_to_step_and_with_the_seed(ranks: Ranks) -> None:
    dropped = replace(MODELS["gpt"], hidden_dropout=0.2)
    first, second, again = ranks(1).run(gradients_of_steps, dropped, 1, (1, 2, 1), tp=1)[0]
    (other_seed,) = ranks(1).run(gradients_of_steps, dropped, 2, (1,), tp=1)[0]
    assert worst_difference(first, second) > 1e-3
    assert worst_difference(first, other_seed) > 1e-3
    assert all(torch.equal(first[name], again[name]) for name in first)
