"""How long a run is, and how its batch grows."""

from __future__ import annotations

import pytest

from domino_lm.config.batch_plan import BatchPlan

RAMP = BatchPlan(full=16, start=4, increment=4, ramp_samples=60, train_samples=200)


def sizes(batches: BatchPlan) -> list[int]:
    found: list[int] = []
    while not batches.ended(len(found), sum(found)):
        found.append(batches.at(sum(found)))
    return found


def test_a_batch_without_a_ramp_is_always_full() -> None:
    batches = BatchPlan(full=8, start=8, train_iters=3)
    assert sizes(batches) == [8, 8, 8]
    assert (batches.iterations, batches.samples) == (3, 24)


def test_samples_that_fill_no_batch_are_left_out() -> None:
    batches = BatchPlan(full=8, start=8, train_samples=30)
    assert (batches.iterations, batches.samples) == (3, 24)


def test_a_ramp_grows_after_equal_stretches_of_samples() -> None:
    assert [RAMP.at(samples) for samples in (0, 19, 20, 39, 40, 59, 60, 61, 1000)] == [4, 4, 8, 8, 12, 12, 16, 16, 16]


@pytest.mark.parametrize("length", [{"train_samples": 200}, {"train_samples": 50}, {"train_iters": 5}, {"train_iters": 40}], ids=str)
def test_the_length_counts_the_steps_of_the_ramp_one_by_one(length: dict[str, int]) -> None:
    batches = BatchPlan(full=16, start=4, increment=4, ramp_samples=60, **length)
    assert (batches.iterations, batches.samples) == (len(sizes(batches)), sum(sizes(batches)))


def test_a_long_run_is_counted_at_once() -> None:
    assert BatchPlan(full=16, start=4, increment=4, ramp_samples=60, train_samples=10**15).iterations > 10**13
