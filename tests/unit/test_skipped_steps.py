"""Which steps that are not finite count, and when they end a run."""

from __future__ import annotations

import math

import pytest
import torch

from domino_lm.config.settings import TrainingConfig
from domino_lm.training.loss_scale import LossScale
from domino_lm.training.skipped_steps import SkippedSteps
from domino_lm.watch.metrics import StepReport


def report(number: int, skipped: bool, loss: float = 1.0, scale: float = 1.0) -> StepReport:
    return StepReport(
        iteration=number,
        consumed_samples=number,
        batch_size=1,
        loss_sum=loss,
        tokens=1,
        learning_rate=0.1,
        grad_norm=math.inf if skipped else 1.0,
        skipped=skipped,
        loss_scale=scale,
        seconds=1.0,
    )


def faults(steps: str, limit: int = 2, scale: LossScale | None = None) -> list[bool]:
    """Whether each step ends the run: ``.`` is a good one, ``g`` has a bad gradient, ``l`` a bad loss."""
    counter = SkippedSteps(TrainingConfig(micro_batch_size=1, train_iters=9, max_skipped_steps=limit), scale)
    reports = [report(i, step != ".", math.nan if step == "l" else 1.0, 512.0 if scale else 1.0) for i, step in enumerate(steps)]
    return [counter.fault(found, None) is not None for found in reports]


@pytest.mark.parametrize("kind", ["g", "l"])
def test_one_step_more_in_a_row_than_may_be_skipped_ends_the_run(kind: str) -> None:
    assert faults(3 * kind) == [False, False, True]
    assert faults(f"{kind}{kind}.{kind}{kind}.") == [False] * 6


def test_bad_losses_and_bad_gradients_count_together() -> None:
    assert faults("glg") == [False, False, True]


def test_a_gradient_that_overflows_counts_only_at_the_lowest_scale() -> None:
    cpu = torch.device("cpu")
    assert faults("gggg", scale=LossScale(1024.0, cpu, dynamic=True, minimum=1.0)) == [False] * 4
    assert faults("gggg", scale=LossScale(512.0, cpu, dynamic=True, minimum=512.0)) == [False, False, True, True]
    assert faults("gggg", scale=LossScale(512.0, cpu)) == [False, False, True, True]


@pytest.mark.parametrize(("steps", "failed"), [("gl", True), ("g.l", False), ("", False)])
def test_a_run_of_skipped_steps_alone_has_failed(steps: str, failed: bool) -> None:
    counter = SkippedSteps(TrainingConfig(micro_batch_size=1, train_iters=9, check_for_nan_in_loss_and_grad=False), None)
    for i, step in enumerate(steps):
        assert counter.fault(report(i, step != ".", math.nan if step == "l" else 1.0), None) is None
    fault = counter.fault_of_run()
    assert (fault is not None) == failed
    assert fault is None or ("all 2 of them" in fault and "loss was nan" in fault)


def test_a_run_that_ends_before_its_loss_scale_fits_is_told_what_to_do() -> None:
    counter = SkippedSteps(TrainingConfig(micro_batch_size=1, train_iters=9), LossScale(1024.0, torch.device("cpu"), dynamic=True))
    assert counter.fault(report(1, skipped=True, scale=512.0), None) is None
    fault = counter.fault_of_run()
    assert fault is not None
    assert "the loss scale is now 512" in fault
    assert "--initial-loss-scale" in fault
