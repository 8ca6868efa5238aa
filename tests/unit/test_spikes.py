"""Losses and gradient norms that jump: what counts as a spike, how often it is said, and when it ends a run."""

from __future__ import annotations

import math

import pytest

from domino_lm.config.settings import TrainingConfig
from domino_lm.training.spikes import Spikes
from domino_lm.training.step_checks import StepChecks
from domino_lm.watch.metrics import StepReport

LOSS, NORM = "--check-for-spiky-loss", "--check-for-large-grads"


def report(number: int, loss: float = 2.0, norm: float = 1.0, skipped: bool = False, tokens: int = 10, masked: int = 0) -> StepReport:
    return StepReport(
        iteration=number,
        consumed_samples=8 * number,
        batch_size=8,
        loss_sum=loss * tokens,
        tokens=tokens,
        learning_rate=0.1,
        grad_norm=norm,
        skipped=skipped,
        seconds=1.0,
        masked_micro_batches=masked,
    )


def training(flag: str = "") -> TrainingConfig:
    return TrainingConfig(micro_batch_size=1, train_iters=9, check_for_spiky_loss=flag == LOSS, check_for_large_grads=flag == NORM)


def usual(spikes: Spikes, steps: int = 5) -> None:
    for number in range(1, steps + 1):
        assert spikes.fault(report(number), None) is None


@pytest.mark.parametrize(("loss", "norm", "said"), [(21.0, 1.0, "loss 21"), (2.0, 11.0, "gradient norm 11"), (19.0, 9.0, None)])
def test_more_than_ten_times_the_running_estimate_is_a_spike(loss: float, norm: float, said: str | None) -> None:
    spikes = Spikes(training())
    usual(spikes)
    assert spikes.fault(report(6, loss, norm), None) is None
    found = spikes.warning()
    assert found is None if said is None else said in (found or "")


def test_a_warning_names_step_samples_and_estimate_once_an_interval() -> None:
    spikes = Spikes(training())
    usual(spikes)
    for number in (6, 7, 8):
        spikes.fault(report(number, loss=30.0 * number, norm=50.0), None)
    warning = spikes.warning()
    assert warning is not None
    assert warning.count("\n") == 0
    assert "iteration 6 (samples 40 to 47) is" in warning
    assert "times its running estimate, 2;" in warning
    assert spikes.warning() is None


def test_the_first_steps_of_a_run_are_no_spikes() -> None:
    spikes = Spikes(training(LOSS))
    for number, loss in enumerate((0.1, 9.0, 200.0), 1):
        assert spikes.fault(report(number, loss), None) is None
    assert spikes.warning() is None


def test_a_spike_does_not_hide_the_next_one_and_a_new_level_becomes_usual() -> None:
    spikes = Spikes(training())
    usual(spikes)
    spikes.fault(report(6, 2000.0), None)
    assert spikes.warning() is not None
    spikes.fault(report(7, 90.0), None)
    assert spikes.warning() is not None
    for number in range(8, 60):
        spikes.fault(report(number, 90.0), None)
    spikes.warning()
    spikes.fault(report(60, 90.0), None)
    assert spikes.warning() is None


def test_skipped_and_masked_steps_neither_are_spikes_nor_move_the_estimate() -> None:
    spikes = Spikes(training(LOSS))
    usual(spikes)
    for other in (report(6, math.nan, math.inf, skipped=True), report(7, 0.0, 0.0, tokens=0)):
        assert spikes.fault(other, None) is None
    assert spikes.fault(report(8, 19.9), None) is None
    assert spikes.warning() is None


@pytest.mark.parametrize("flag", ["", LOSS, NORM])
def test_a_flag_ends_the_run_at_its_kind_of_spike(flag: str) -> None:
    by_loss, by_norm = Spikes(training(flag)), Spikes(training(flag))
    usual(by_loss)
    usual(by_norm)
    found = {LOSS: by_loss.fault(report(6, loss=60.0), 4), NORM: by_norm.fault(report(6, norm=60.0), 4)}
    for kind, fault in found.items():
        assert (fault is not None) == (kind == flag)
        if fault is not None:
            assert f"{flag} ends the run here" in fault
            assert "iteration 6 (samples 40 to 47)" in fault
            assert "checkpoint is that of iteration 4" in fault
            assert "--iterations-to-skip 6" in fault


@pytest.mark.parametrize(
    ("tokens", "said"), [(0, "1 whole batch(es) among them, the first in iteration 2 (samples 8 to 15)"), (5, "in 2 step(s), the first")]
)
def test_masked_micro_batches_are_said_in_one_line_an_interval(tokens: int, said: str) -> None:
    checks = StepChecks(training(), None)
    for found in (report(1), report(2, tokens=tokens, masked=4), report(3, masked=1)):
        assert checks.fault(found, None) is None
    (line,) = checks.warnings()
    assert "all tokens of 5 micro-batch(es) are masked in 2 step(s)" in line
    assert said in line
    assert list(checks.warnings()) == []
