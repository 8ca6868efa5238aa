"""From samples to micro-batches: which samples a data-parallel rank reads, and their collation into arrays.

The number of samples that the whole run has consumed is the only state; a run that resumes with it reads exactly what
the uninterrupted run would have read.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class LoaderError(ValueError):
    """Settings of the sampler that cannot work, or a read past the last sample."""


class SampleDataset(Protocol):
    """Anything with a length whose items are dicts of equally shaped arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Mapping[str, Array]: ...


class Sampler(Protocol):
    """Yields the sample numbers of one rank's micro-batches, from ``consumed_samples`` on."""

    total_samples: int
    consumed_samples: int
    samples_per_step: int

    def __iter__(self) -> Iterator[list[int]]: ...


class SequentialSampler:
    """Consecutive samples, dealt to the data-parallel ranks in blocks of one micro-batch.

    Of each ``micro_batch_size * data_parallel_size`` samples, rank r takes the r-th micro-batch. It starts at
    ``consumed_samples``, which counts the samples of all ranks, and makes one pass: epochs are the data set's business.
    An incomplete block at the end is dropped; without ``drop_last`` the ranks get what there is, perhaps nothing.
    """

    def __init__(
        self,
        total_samples: int,
        *,
        micro_batch_size: int,
        consumed_samples: int = 0,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        drop_last: bool = True,
    ) -> None:
        if micro_batch_size < 1:
            raise LoaderError(f"--micro-batch-size {micro_batch_size} holds no sample; use at least 1.")
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise LoaderError(f"data-parallel rank {data_parallel_rank} is outside 0..{data_parallel_size - 1}.")
        if total_samples < 1:
            raise LoaderError("the data set has 0 samples; use more data or another --split.")
        if not 0 <= consumed_samples < total_samples:
            raise LoaderError(
                f"{consumed_samples} samples are consumed already, but the data set has {total_samples}: nothing is left to read; "
                "raise --train-iters so that the data set is built with more epochs, or start anew."
            )
        self.total_samples, self.consumed_samples = total_samples, consumed_samples
        self.micro_batch_size, self.drop_last = micro_batch_size, drop_last
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.samples_per_step = micro_batch_size * data_parallel_size

    def __len__(self) -> int:
        """Micro-batches that each rank gets."""
        left = self.total_samples - self.consumed_samples
        return left // self.samples_per_step if self.drop_last else -(-left // self.samples_per_step)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            begin = self.consumed_samples + step * self.samples_per_step + self.data_parallel_rank * self.micro_batch_size
            yield list(range(min(begin, self.total_samples), min(begin + self.micro_batch_size, self.total_samples)))


class Batches:
    """Iterator over one rank's micro-batches: dicts of arrays whose first dimension is the batch, [b, s].

    ``tokens``, ``labels`` and ``position_ids`` are int64, ``loss_mask`` is float32; ``attention_mask`` [b, 1, s, s] is
    there when the samples carry one. ``consumed_samples`` counts the samples of all data-parallel ranks and goes up
    with every micro-batch. Reading past the end raises LoaderError, never StopIteration: a training step that found no
    data must not end quietly on one rank.
    """

    def __init__(self, dataset: SampleDataset, sampler: Sampler) -> None:
        if sampler.total_samples > len(dataset):
            raise LoaderError(f"the sampler deals {sampler.total_samples} samples, but the data set has {len(dataset)}.")
        self._dataset, self._sampler = dataset, sampler
        self._indices = iter(sampler)
        self.consumed_samples = sampler.consumed_samples

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Array]:
        indices = next(self._indices, None)
        if indices is None:
            raise LoaderError(
                f"the data set has {self._sampler.total_samples} samples; {self.consumed_samples} are consumed, and the next step needs "
                f"{self._sampler.samples_per_step} more: lower --train-iters (or --eval-iters), or use more data."
            )
        self.consumed_samples += self._sampler.samples_per_step
        return collate([self._dataset[i] for i in indices])


def collate(samples: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Samples stacked along a new first dimension, key by key."""
    if not samples:
        raise LoaderError("a micro-batch without samples; with drop_last off, this rank has nothing left to read.")
    return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
