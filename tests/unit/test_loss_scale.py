"""The loss scale follows overflows as Megatron's does, and without the host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from domino_lm.config.precision import PrecisionConfig
from domino_lm.training.loss_scale import LossScale

CPU = torch.device("cpu")
RECORDED = Path(__file__).parents[1] / "golden" / "model" / "loss_scales.json"


def dynamic(**settings: float) -> LossScale:
    return LossScale(2.0**10, CPU, **{"dynamic": True, "window": 3, "hysteresis": 1, **settings})  # type: ignore[arg-type]


def values(scale: LossScale, overflows: str) -> list[float]:
    """The scale after each step; ``x`` is an overflow, ``.`` a clean step, as exponents of 2."""
    found = []
    for step in overflows:
        scale.update(torch.tensor(float(step == "x")))
        found.append(torch.log2(scale.value).item())
    return found


def test_random_overflows_lead_where_megatrons_scale_goes() -> None:
    for run in json.loads(RECORDED.read_text()):
        scale = LossScale(run["initial"], CPU, dynamic=True, **{name: run[name] for name in ("minimum", "window", "hysteresis")})
        assert [2.0**value for value in values(scale, run["overflows"])] == run["scales"]


def test_an_overflow_halves_the_scale() -> None:
    assert values(dynamic(), "xx") == [9, 8]


def test_a_window_of_clean_steps_doubles_the_scale() -> None:
    assert values(dynamic(), "......") == [10, 10, 11, 11, 11, 12]


def test_an_overflow_begins_the_window_anew() -> None:
    assert values(dynamic(), "..x...") == [10, 10, 9, 9, 9, 10]


def test_hysteresis_bears_overflows_before_the_first_halving_and_none_after_it() -> None:
    assert values(dynamic(hysteresis=3), "xxxx") == [10, 10, 9, 8]


def test_clean_steps_short_of_a_window_restore_no_patience() -> None:
    assert values(dynamic(hysteresis=2), "x..x") == [10, 10, 10, 9]


def test_a_doubling_restores_the_patience() -> None:
    assert values(dynamic(hysteresis=2), "xx...xx") == [10, 9, 9, 9, 10, 10, 9]


def test_the_scale_stops_at_its_minimum() -> None:
    assert values(dynamic(minimum=2.0**8), "xxxx") == [9, 8, 8, 8]


def test_a_constant_scale_stays() -> None:
    assert values(LossScale(2.0**10, CPU), "x...x.") == [10] * 6


def test_a_scale_resumed_goes_on_as_the_uninterrupted_one() -> None:
    whole, saved, resumed = dynamic(hysteresis=2), dynamic(hysteresis=2), dynamic(hysteresis=2)
    expected = values(whole, "xx..x.....")
    values(saved, "xx..x")
    resumed.load_state_dict(saved.state_dict())
    assert values(resumed, ".....") == expected[5:]


def test_the_scale_of_a_running_step_is_the_memory_that_others_read() -> None:
    scale = dynamic()
    memory = scale.value
    values(scale, "x")
    assert memory.item() == 2.0**9


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"bf16": True}, None),
        ({"fp16": True}, (2.0**32, True)),
        ({"fp16": True, "initial_loss_scale": 64.0}, (64.0, True)),
        ({"fp16": True, "loss_scale": 128.0}, (128.0, False)),
        ({"bf16": True, "loss_scale": 128.0}, (128.0, False)),
    ],
)
def test_settings_give_the_scale_that_megatron_would_take(settings: dict[str, float], expected: tuple[float, bool] | None) -> None:
    scale = LossScale.of(PrecisionConfig(**settings), CPU)  # type: ignore[arg-type]
    assert (None if scale is None else (scale.value.item(), scale.dynamic)) == expected
