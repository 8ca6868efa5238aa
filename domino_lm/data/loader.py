"""From samples to micro-batches: collation into arrays, ahead of the training step if workers are asked for."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from domino_lm.data.indices import DatasetError
from domino_lm.data.samplers import Sampler

Array = npt.NDArray[Any]
BATCHES_AHEAD = 4
"""Micro-batches that each worker may be ahead of the training step."""


class SampleDataset(Protocol):
    """Anything with a length whose items are dicts of equally shaped arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Mapping[str, Array]: ...


class Batches:
    """Iterator over one rank's micro-batches: dicts of arrays whose first dimension is the batch, [b, s].

    ``tokens``, ``labels`` and ``position_ids`` are int64, ``loss_mask`` is float32; ``attention_mask`` [b, 1, s, s] is
    there when the samples carry one. ``consumed_samples`` counts the samples of all data-parallel ranks and goes up
    with every micro-batch handed out, whatever the workers have read ahead. Reading past the end raises DatasetError,
    never StopIteration: a training step that found no data must not end quietly on one rank.

    ``workers`` threads read and collate ahead; with 0 each batch is read when it is asked for. Reading is copying out of mapped memory, which needs
    no interpreter lock for the time of a page fault, so threads are enough and nothing has to be sent between processes.
    ``blocked_s`` is the time that callers have waited here. `close` ends the workers; so does the end of the program.
    """

    def __init__(self, dataset: SampleDataset, sampler: Sampler, workers: int = 0) -> None:
        if workers < 0:
            raise DatasetError(f"--num-workers {workers} cannot be; use 0 to read without workers.")
        if sampler.total_samples > len(dataset):
            raise DatasetError(f"the sampler deals {sampler.total_samples} samples, but the data set has {len(dataset)}.")
        self._dataset, self._sampler = dataset, sampler
        self._indices = iter(sampler)
        self.consumed_samples = sampler.consumed_samples
        self.blocked_s = 0.0
        self._pool = ThreadPoolExecutor(workers, "batches") if workers else None
        self._ahead: deque[tuple[list[int], Callable[[], dict[str, Array]]]] = deque()
        self.numbers: list[int] = []
        """Those of the samples that were handed out last."""

        self._depth = workers * BATCHES_AHEAD or 1

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, Array]:
        begin = time.perf_counter()
        while len(self._ahead) < self._depth and (indices := next(self._indices, None)) is not None:
            read = partial(self._collated, indices)
            self._ahead.append((indices, read if self._pool is None else self._pool.submit(read).result))
        if not self._ahead:
            raise self._end()
        self.numbers, reading = self._ahead.popleft()
        batch = reading()
        self.blocked_s += time.perf_counter() - begin
        self.consumed_samples += self._sampler.samples_per_step
        return batch

    def close(self) -> None:
        """Ends the workers; what they have read ahead is dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._ahead.clear()

    def _collated(self, indices: list[int]) -> dict[str, Array]:
        return collate([self._dataset[i] for i in indices])

    def _end(self) -> DatasetError:
        return DatasetError(
            f"the data set has {self._sampler.total_samples} samples; {self.consumed_samples} are consumed, and the next step needs "
            f"{self._sampler.samples_per_step} more: lower --train-iters (or --eval-iters), or use more data."
        )


def collate(samples: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Samples stacked along a new first dimension, key by key."""
    if not samples:
        raise DatasetError("a micro-batch without samples; with drop_last off, this rank has nothing left to read.")
    return {key: np.stack([sample[key] for sample in samples]) for key in samples[0]}
