"""A step that stands still is said while it lasts, and again when it goes on."""

from __future__ import annotations

import time

from domino_lm.watch.slow_step import Standstill


def lines_of(*steps_s: float) -> list[str]:
    lines: list[str] = []
    with Standstill(lines.append, 600.0, least_s=0.2) as standstill:
        for number, seconds in enumerate(steps_s, start=1):
            with standstill.step(number):
                time.sleep(seconds)
    return lines


def test_a_step_far_over_the_usual_is_said_while_it_lasts_and_when_it_goes_on() -> None:
    told, again, gone_on = lines_of(0.0, 0.01, 0.01, 0.6)
    assert told.startswith("iteration 4 stands still: 0 s so far, where a step takes 0.01")
    assert "for up to 600 s (--distributed-timeout-minutes)" in told
    assert again.startswith("iteration 4 stands still")
    assert gone_on == "iteration 4 went on after 1 s"


def test_a_first_step_and_steps_that_are_always_long_are_not_said() -> None:
    assert lines_of(0.5, 0.3, 0.3) == []
