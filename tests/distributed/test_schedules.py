"""Every schedule on every layout computes the gradients of plain autograd, and those of an unsharded reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from domino_lm.config import ModelConfig, ScheduleConfig
from domino_lm.parallel.mesh import ParallelMesh
from tests.distributed.models import MODELS, autograd_gradients, plan_gradients, reference_gradients, worst_difference
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
LAYOUTS = {"tp1_dp1": (1, 1), "tp2_dp1": (2, 1), "tp1_dp2": (1, 2), "tp2_dp2": (2, 2)}
SCHEDULES = {
    "baseline": ScheduleConfig(schedule="baseline"),
    **{f"rows{rows}": ScheduleConfig(schedule="domino", domino_row_slices=rows) for rows in (1, 2, 3, 4)},
    "rows2_wgrad_together": ScheduleConfig(schedule="domino", domino_row_slices=2, domino_wgrad_rows="together"),
    "rows3_small_buckets": ScheduleConfig(schedule="domino", domino_row_slices=3, ddp_bucket_size=3000),
    "rows2_late_reduction": ScheduleConfig(schedule="domino", ddp_bucket_size=3000, overlap_grad_reduce=False),
}


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


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_gradients_do_not_depend_on_schedule_or_layout(
    ranks: Ranks, model: ModelConfig, schedule: ScheduleConfig, layout: tuple[int, int]
) -> None:
    tp, dp = layout
    for found in ranks(tp * dp).run(differences, model, schedule, False, tp=tp):
        assert max(found) < 1e-12, found


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_per_token_objective_is_the_mean_over_the_global_batch(ranks: Ranks, layout: tuple[int, int]) -> None:
    tp, dp = layout
    for found in ranks(tp * dp).run(differences, MODELS["gpt"], SCHEDULES["rows2_wgrad_together"], True, tp=tp):
        assert max(found) < 1e-12, found


def dropout_difference(mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig) -> float:
    return worst_difference(plan_gradients(mesh, model, schedule, seed=7)[1], autograd_gradients(mesh, model, seed=7)[1])


@pytest.mark.parametrize("schedule", [SCHEDULES["baseline"], SCHEDULES["rows3_small_buckets"]], ids=["baseline", "rows3"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_backward_drops_what_forward_dropped(ranks: Ranks, model: ModelConfig, schedule: ScheduleConfig) -> None:
    dropped = replace(model, hidden_dropout=0.2, attention_dropout=0.1)
    assert max(ranks(2).run(dropout_difference, dropped, schedule)) < 1e-12


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_dropout_masks_depend_on_neither_schedule_nor_layout(ranks: Ranks, model: ModelConfig) -> None:
    dropped = replace(model, hidden_dropout=0.2, attention_dropout=0.1)
    expected = ranks(1).run(plan_gradients, dropped, SCHEDULES["baseline"], False, 7, tp=1)[0][1]
    for tp, dp in LAYOUTS.values():
        for name in ("baseline", "rows1", "rows2", "rows3", "rows4"):
            found = ranks(tp * dp).run(plan_gradients, dropped, SCHEDULES[name], False, 7, tp=tp)[0][1]
            assert worst_difference(found, expected) < 1e-12, (tp, dp, name)


def test_dropout_masks_change_from_step_to_step_and_with_the_seed(ranks: Ranks) -> None:
    dropped = replace(MODELS["gpt"], hidden_dropout=0.2)
    first, second = (ranks(1).run(plan_gradients, dropped, SCHEDULES["baseline"], False, seed, tp=1)[0][1] for seed in (1, 2))
    assert worst_difference(first, second) > 1e-3
