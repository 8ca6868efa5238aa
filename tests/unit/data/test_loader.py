"""Sampler and batches: every sample once over the ranks, resumable from one number, never silently at an end."""

import itertools
import time
from collections.abc import Mapping

import numpy as np
import pytest

from domino_lm.data.indices import DatasetError
from domino_lm.data.loader import Batches
from domino_lm.data.samplers import CyclicSampler, FullPassSampler, SequentialSampler


class Numbers:
    """Sample i holds the number i."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, i: int, /) -> Mapping[str, np.ndarray]:
        return {"tokens": np.full(4, i, np.int64), "loss_mask": np.ones(4, np.float32)}


def numbers(batches: Batches, steps: int) -> list[list[int]]:
    return [next(batches)["tokens"][:, 0].tolist() for _ in range(steps)]


def batches(samples: int, consumed: int = 0, micro_batch_size: int = 1, rank: int = 0, ranks: int = 1, workers: int = 0) -> Batches:
    sampler = SequentialSampler(
        samples, micro_batch_size=micro_batch_size, consumed_samples=consumed, data_parallel_rank=rank, data_parallel_size=ranks
    )
    return Batches(Numbers(samples), sampler, workers)


def test_ranks_together_read_every_sample_once() -> None:
    read = [
        i
        for rank in range(3)
        for batch in SequentialSampler(24, micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=3)
        for i in batch
    ]
    assert sorted(read) == list(range(24))


def test_a_batch_has_one_row_for_each_sample() -> None:
    batch = next(batches(8, micro_batch_size=3))
    assert {key: (value.shape, value.dtype) for key, value in batch.items()} == {
        "tokens": ((3, 4), np.int64),
        "loss_mask": ((3, 4), np.float32),
    }


def test_a_resumed_run_reads_what_the_uninterrupted_one_reads() -> None:
    first = batches(30)
    before = numbers(first, 7)
    assert before + numbers(batches(30, first.consumed_samples), 23) == numbers(batches(30), 30)


def test_a_second_resume_begins_at_its_place_too() -> None:
    read, consumed = [], 0
    for steps in (3, 4, 5):
        resumed = batches(64, consumed, micro_batch_size=2, rank=1, ranks=2)
        read += numbers(resumed, steps)
        consumed = resumed.consumed_samples
    assert read == numbers(batches(64, micro_batch_size=2, rank=1, ranks=2), 12)


def test_consumed_samples_count_all_ranks() -> None:
    reader = batches(64, consumed=8, micro_batch_size=2, rank=1, ranks=4)
    numbers(reader, 3)
    assert reader.consumed_samples == 8 + 3 * 8


def test_reading_past_the_end_says_how_many_samples_there_are() -> None:
    reader = batches(5, micro_batch_size=2)
    numbers(reader, 2)
    with pytest.raises(DatasetError, match=r"has 5 samples; 4 are consumed.*--train-iters"):
        next(reader)


def test_a_resume_behind_the_last_sample_is_refused() -> None:
    with pytest.raises(DatasetError, match="10 samples are consumed already, but the data set has 10"):
        batches(10, consumed=10)


def test_a_sampler_for_more_samples_than_there_are_is_refused() -> None:
    with pytest.raises(DatasetError, match="deals 10 samples, but the data set has 5"):
        Batches(Numbers(5), SequentialSampler(10, micro_batch_size=1))


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_change_nothing_about_the_order(workers: int) -> None:
    assert numbers(batches(100, consumed=6, micro_batch_size=2, workers=workers), 47) == numbers(batches(100, 6, 2), 47)


def test_samples_read_ahead_are_not_consumed() -> None:
    reader = batches(100, workers=2)
    next(reader)
    assert reader.consumed_samples == 1


def test_workers_read_ahead_no_further_than_their_depth() -> None:
    class Counting(Numbers):
        reads = 0

        def __getitem__(self, i: int, /) -> Mapping[str, np.ndarray]:
            self.reads += 1
            return super().__getitem__(i)

    dataset = Counting(1000)
    reader = Batches(dataset, SequentialSampler(1000, micro_batch_size=1), workers=1)
    for _ in range(10):
        next(reader)
    reader.close()
    assert dataset.reads <= 10 + 4


def test_reading_past_the_end_with_workers_says_the_same() -> None:
    reader = batches(5, micro_batch_size=2, workers=2)
    numbers(reader, 2)
    with pytest.raises(DatasetError, match="has 5 samples; 4 are consumed"):
        next(reader)


def test_a_fault_in_a_worker_comes_out_at_its_batch() -> None:
    class Faulty(Numbers):
        def __getitem__(self, i: int, /) -> Mapping[str, np.ndarray]:
            if i == 3:
                raise ValueError("sample 3 is bad")
            return super().__getitem__(i)

    reader = Batches(Faulty(10), SequentialSampler(10, micro_batch_size=1), workers=2)
    numbers(reader, 3)
    with pytest.raises(ValueError, match="sample 3 is bad"):
        next(reader)


def test_time_blocked_on_data_is_counted() -> None:
    class Slow(Numbers):
        def __getitem__(self, i: int, /) -> Mapping[str, np.ndarray]:
            time.sleep(0.02)
            return super().__getitem__(i)

    reader = Batches(Slow(10), SequentialSampler(10, micro_batch_size=2))
    numbers(reader, 3)
    assert 0.12 <= reader.blocked_s < 1


@pytest.mark.parametrize("data_sharding", [True, False])
def test_cyclic_order_is_resumed_to_the_sample(data_sharding: bool) -> None:
    def read(consumed: int, steps: int) -> list[list[int]]:
        sampler = CyclicSampler(
            103, micro_batch_size=2, consumed_samples=consumed, data_parallel_rank=1, data_parallel_size=4, data_sharding=data_sharding
        )
        return list(itertools.islice(sampler, steps))

    assert read(0, 5) + read(40, 30) == read(0, 35)


@pytest.mark.parametrize("data_sharding", [True, False])
def test_a_cyclic_epoch_reads_no_sample_twice(data_sharding: bool) -> None:
    read = [
        i
        for rank in range(4)
        for batch in itertools.islice(
            CyclicSampler(103, micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=4, data_sharding=data_sharding), 12
        )
        for i in batch
    ]
    assert (len(read), len(set(read))) == (96, 96)


def test_a_full_pass_reads_every_sample_once() -> None:
    read = [
        i
        for rank in range(3)
        for batch in FullPassSampler(25, micro_batch_size=4, data_parallel_rank=rank, data_parallel_size=3)
        for i in batch
    ]
    assert sorted(read) == list(range(25))
