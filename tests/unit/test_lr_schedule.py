"""The learning rate equals Megatron's, step by step, and survives a resume."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from domino_lm.config.batch_plan import BatchPlan
from domino_lm.config.settings import ConfigError, OptimizerConfig
from domino_lm.training.lr_schedule import LearningRateSchedule, LearningRateShape

CURVES = json.loads((Path(__file__).parents[1] / "golden" / "model" / "train_gpt_tp1_dp1.json").read_text())
MEGATRON = OptimizerConfig(lr=4e-3, min_lr=4e-4, lr_decay_style="cosine", lr_warmup_iters=5, lr_decay_iters=20)
BATCH = 8


def schedule(optimizer: OptimizerConfig = MEGATRON, train_iters: int = 20) -> LearningRateSchedule:
    return LearningRateSchedule(LearningRateShape.from_config(optimizer, BatchPlan(full=BATCH, start=BATCH, train_iters=train_iters)))


def rates(run: LearningRateSchedule, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(run.value())
        run.advance(BATCH)
    return found


def test_every_step_takes_megatrons_rate() -> None:
    assert rates(schedule(), 20) == pytest.approx(CURVES["lr_used"], rel=1e-14)


def test_the_rate_after_each_step_is_the_one_megatron_logs() -> None:
    assert rates(schedule(), 21)[1:] == pytest.approx(CURVES["lr_logged"], rel=1e-14)


def test_the_first_step_of_a_warm_up_runs_at_the_initial_rate() -> None:
    assert schedule().value() == 0.0
    assert schedule(OptimizerConfig(lr=1e-3, lr_warmup_iters=5, lr_warmup_init=1e-5)).value() == 1e-5


def test_without_a_warm_up_the_first_step_runs_at_the_peak() -> None:
    assert schedule(OptimizerConfig(lr=1e-3)).value() == 1e-3


def test_the_rate_stays_at_the_minimum_after_the_decay() -> None:
    assert schedule().shape.at(20 * BATCH + 1) == schedule().shape.at(10**9) == 4e-4


def test_the_decay_lasts_as_long_as_the_run_by_default() -> None:
    run = schedule(OptimizerConfig(lr=1e-3, min_lr=1e-4), train_iters=7)
    assert run.shape.at(7 * BATCH) == pytest.approx(1e-4)


def test_a_warm_up_fraction_counts_parts_of_the_decay() -> None:
    run = schedule(OptimizerConfig(lr=1.0, lr_warmup_fraction=0.25, lr_decay_iters=20))
    assert run.shape.at(20 * BATCH // 4) == 1.0
    assert run.shape.at(20 * BATCH // 8) == 0.5


@pytest.mark.parametrize(("style", "halfway"), [("cosine", 0.5), ("linear", 0.5), ("constant", 1.0)])
def test_each_style_has_its_rate_halfway(style: str, halfway: float) -> None:
    run = schedule(OptimizerConfig(lr=1.0, lr_decay_style=style, lr_decay_iters=20))  # type: ignore[arg-type]
    assert run.shape.at(10 * BATCH) == pytest.approx(halfway)


def test_a_resumed_schedule_goes_on_where_it_stood() -> None:
    whole, first, second = schedule(), schedule(), schedule()
    expected = rates(whole, 20)
    found = rates(first, 9)
    assert "which is what the flags say, 72 samples into it" in second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + rates(second, 11) == expected


def test_another_rate_on_resume_is_refused_with_both_values_and_the_way_out() -> None:
    old = schedule(OptimizerConfig(lr=6e-4, lr_decay_style="constant"))
    with pytest.raises(ConfigError, match=r"peak 0.0006 in the checkpoint, 6e-05 now.*--override-opt-param-scheduler"):
        schedule(OptimizerConfig(lr=6e-5)).load_state_dict(old.state_dict())


def test_an_overridden_schedule_takes_the_new_rate_from_the_first_resumed_step_on() -> None:
    old, new = schedule(OptimizerConfig(lr=6e-4, lr_decay_style="constant")), schedule(OptimizerConfig(lr=6e-5))
    rates(old, 10)
    said = new.load_state_dict(old.state_dict(), override=True)
    assert "this command line's as a whole, 80 samples into it, not the checkpoint's (peak 0.0006 in the checkpoint, 6e-05 now" in said
    assert new.value() == new.shape.at(10 * BATCH) < 6e-5


def test_the_checkpoints_rate_is_taken_whole_when_it_is_asked_for() -> None:
    old, new = schedule(OptimizerConfig(lr=6e-4, lr_decay_style="cosine", lr_warmup_iters=3)), schedule(OptimizerConfig(lr=6e-5))
    rates(old, 10)
    said = new.load_state_dict(json.loads(json.dumps(old.state_dict())), use_checkpoint=True)
    assert "the checkpoint's as a whole, 80 samples into it, not this command line's (peak 0.0006 in the checkpoint, 6e-05 now" in said
    assert new.shape == old.shape
    assert rates(new, 5) == rates(old, 5)


def test_lengths_in_samples_mean_the_same_as_in_iterations() -> None:
    by_samples = OptimizerConfig(lr=4e-3, min_lr=4e-4, lr_decay_style="cosine", lr_warmup_samples=5 * BATCH, lr_decay_samples=20 * BATCH)
    shape = LearningRateShape.from_config(by_samples, BatchPlan(full=BATCH, start=BATCH, train_samples=20 * BATCH))
    assert shape == schedule().shape


def test_the_decay_lasts_for_the_samples_of_the_run_by_default() -> None:
    shape = LearningRateShape.from_config(OptimizerConfig(lr=1.0), BatchPlan(full=BATCH, start=BATCH, train_samples=100))
    assert shape.decay_samples == 100


def test_inverse_square_root_falls_from_the_peak_at_the_end_of_the_warm_up() -> None:
    run = schedule(OptimizerConfig(lr=1.0, min_lr=0.3, lr_decay_style="inverse-square-root", lr_warmup_iters=4), train_iters=100)
    assert run.shape.at(4 * BATCH) == 1.0
    assert run.shape.at(16 * BATCH) == pytest.approx(0.5)
    assert run.shape.at(64 * BATCH) == 0.3


def test_inverse_square_root_holds_up_to_the_last_sample_of_its_decay() -> None:
    run = schedule(OptimizerConfig(lr=1.0, min_lr=0.1, lr_decay_style="inverse-square-root", lr_warmup_iters=4), train_iters=100)
    assert run.shape.at(100 * BATCH) == pytest.approx(0.2)
    assert run.shape.at(100 * BATCH + 1) == 0.1


@pytest.mark.parametrize(
    ("style", "halfway"), [("linear", 0.5), ("cosine", 0.5), ("exponential", 2 * 0.5**0.5 - 1), ("minus_sqrt", 1 - 0.5**0.5)]
)
def test_wsd_holds_the_peak_and_decays_at_the_end(style: str, halfway: float) -> None:
    settings = OptimizerConfig(lr=1.0, lr_decay_style="WSD", lr_wsd_decay_style=style, lr_wsd_decay_iters=10, lr_warmup_iters=2)  # type: ignore[arg-type]
    shape = schedule(settings, train_iters=50).shape
    assert [shape.at(n * BATCH) for n in (1, 2, 30, 40)] == [0.5, 1.0, 1.0, 1.0]
    assert shape.at(45 * BATCH) == pytest.approx(halfway)
    assert shape.at(50 * BATCH) == pytest.approx(0.0)


RAMP = BatchPlan(full=16, start=4, increment=4, ramp_samples=60, train_iters=30)
BY_ITERATIONS = OptimizerConfig(lr=1.0, lr_warmup_iters=5, lr_decay_iters=20)


def ramped(optimizer: OptimizerConfig, batches: BatchPlan = RAMP) -> list[float]:
    """Rates after each of the run's first steps."""
    run, found, consumed = LearningRateSchedule.of(optimizer, batches), [], 0
    for _ in range(20):
        size = batches.at(consumed)
        run.advance(size)
        consumed += size
        found.append(run.value())
    return found


def test_iterations_mean_iterations_while_the_batch_ramps_up() -> None:
    found = ramped(BY_ITERATIONS)
    assert found[4] == max(found) == 1.0
    assert found[3] < 1.0
    assert found[19] == pytest.approx(0.0, abs=1e-12)
    assert found[18] > 0.0


def test_so_do_those_of_the_last_decay_and_of_the_run_itself() -> None:
    wsd = OptimizerConfig(lr=1.0, lr_decay_style="WSD", lr_wsd_decay_style="linear", lr_wsd_decay_iters=18, lr_decay_iters=20)
    found = ramped(wsd)
    assert found[:2] == [1.0, 1.0]
    assert found[2] < 1.0
    assert found[19] == pytest.approx(0.0, abs=1e-12)
    assert ramped(OptimizerConfig(lr=1.0), replace(RAMP, train_iters=20))[19] == pytest.approx(0.0, abs=1e-12)


def test_a_checkpoint_that_counted_full_batches_is_told_so_with_the_samples_that_say_the_same() -> None:
    old = LearningRateSchedule(LearningRateShape.from_config(BY_ITERATIONS, replace(RAMP, start=RAMP.full)))
    old.advance(100)
    run = LearningRateSchedule.of(BY_ITERATIONS, RAMP)
    with pytest.raises(
        ConfigError, match=r"earlier version.*--use-checkpoint-opt-param-scheduler.*--lr-warmup-samples 80 --lr-decay-samples 320"
    ):
        run.load_state_dict(old.state_dict())
    by_samples = OptimizerConfig(lr=1.0, lr_warmup_samples=80, lr_decay_samples=320)
    assert LearningRateSchedule.of(by_samples, replace(RAMP, train_iters=None, train_samples=400)).shape == old.shape
    run.load_state_dict(old.state_dict(), use_checkpoint=True)
    assert run.value() == old.value()


def test_embedding_and_output_layer_follow_the_same_shape_between_rates_of_their_own() -> None:
    own = replace(MEGATRON, decoupled_lr=2e-2, decoupled_min_lr=1e-3)
    batches = BatchPlan(full=BATCH, start=BATCH, train_iters=20)
    run, alone = LearningRateSchedule.of(own, batches), LearningRateSchedule.of(replace(MEGATRON, lr=2e-2, min_lr=1e-3), batches)
    for _ in range(21):
        assert (run.value(), run.decoupled_value()) == (schedule_at(run.samples), alone.value())
        run.advance(BATCH)
        alone.advance(BATCH)
    assert LearningRateSchedule.of(replace(MEGATRON, decoupled_lr=2e-2), batches).decoupled == (2e-2, MEGATRON.min_lr)


def schedule_at(samples: int) -> float:
    return schedule().shape.at(samples)


@pytest.mark.parametrize(("style", "shares"), [("linear", [0, 0.25, 0.5, 1, 1]), ("cosine", [0, (1 - 0.5**0.5) / 2, 0.5, 1, 1])])
def test_weight_decay_grows_from_the_first_step_to_the_end_of_the_run(style: str, shares: list[float]) -> None:
    own = OptimizerConfig(lr=1.0, start_weight_decay=0.02, end_weight_decay=0.1, weight_decay_incr_style=style)  # type: ignore[arg-type]
    run = LearningRateSchedule.of(own, BatchPlan(full=BATCH, start=BATCH, train_iters=20))
    found = []
    for steps in (0, 5, 10, 20, 25):
        run.samples = steps * BATCH
        found.append(run.weight_decay_value())
    assert found == pytest.approx([0.02 + share * 0.08 for share in shares], rel=1e-14)


def test_weight_decay_grows_over_the_samples_that_a_ramp_reads() -> None:
    own = OptimizerConfig(lr=1.0, start_weight_decay=0.0, end_weight_decay=1.0, weight_decay_incr_style="linear")
    run = LearningRateSchedule.of(own, RAMP)
    run.samples = RAMP.samples
    assert run.weight_decay_value() == 1.0


BOTH = replace(MEGATRON, decoupled_lr=2e-2, start_weight_decay=0.0, end_weight_decay=0.1, weight_decay_incr_style="cosine")


def test_rates_of_their_own_and_growing_decay_are_resumed_and_refused_like_the_rest() -> None:
    batches = BatchPlan(full=BATCH, start=BATCH, train_iters=20)
    old = LearningRateSchedule.of(BOTH, batches)
    old.advance(80)
    state = json.loads(json.dumps(old.state_dict()))
    again, plain = LearningRateSchedule.of(BOTH, batches), LearningRateSchedule.of(MEGATRON, batches)
    again.load_state_dict(state)
    assert (again.decoupled_value(), again.weight_decay_value()) == (old.decoupled_value(), old.weight_decay_value())
    with pytest.raises(ConfigError, match=r"decoupled_peak 0.02 in the checkpoint, None now.*weight_decay_start 0.0 in the checkpoint"):
        plain.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"decoupled_peak None in the checkpoint, 0.02 now"):
        LearningRateSchedule.of(BOTH, batches).load_state_dict(plain.state_dict())
    plain.load_state_dict(state, use_checkpoint=True)
    assert (plain.decoupled, plain.weight_decay) == (old.decoupled, old.weight_decay)
    again.load_state_dict(LearningRateSchedule.of(MEGATRON, batches).state_dict(), use_checkpoint=True)
    assert (again.decoupled, again.weight_decay) == (None, None)


def test_a_run_without_them_keeps_the_state_that_it_had() -> None:
    assert [name for name in schedule().state_dict() if name.startswith(("decoupled", "weight_decay"))] == []
