"""Which samples each data-parallel rank reads, micro-batch by micro-batch.

The number of samples that the whole run has consumed is the only state; a run that resumes with it reads exactly what
the uninterrupted run would have read.
"""

from collections.abc import Iterator
from typing import Protocol


class LoaderError(ValueError):
    """Settings of the sampler that cannot work, or a read past the last sample."""


class Sampler(Protocol):
    """Yields the sample numbers of one rank's micro-batches, from ``consumed_samples`` on."""

    total_samples: int
    consumed_samples: int
    samples_per_step: int

    def __iter__(self) -> Iterator[list[int]]: ...


class _Dealt:
    """What all samplers hold: the samples, how many are consumed, and this rank's place among those that share a step."""

    def __init__(
        self, total_samples: int, micro_batch_size: int, consumed_samples: int, data_parallel_rank: int, data_parallel_size: int
    ) -> None:
        if micro_batch_size < 1:
            raise LoaderError(f"--micro-batch-size {micro_batch_size} holds no sample; use at least 1.")
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise LoaderError(f"data-parallel rank {data_parallel_rank} is outside 0..{data_parallel_size - 1}.")
        if total_samples < 1:
            raise LoaderError("the data set has 0 samples; use more data or another --split.")
        self.total_samples, self.consumed_samples, self.micro_batch_size = total_samples, consumed_samples, micro_batch_size
        self.data_parallel_rank, self.data_parallel_size = data_parallel_rank, data_parallel_size
        self.samples_per_step = micro_batch_size * data_parallel_size


class SequentialSampler(_Dealt):
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
        super().__init__(total_samples, micro_batch_size, consumed_samples, data_parallel_rank, data_parallel_size)
        if not 0 <= consumed_samples < total_samples:
            raise LoaderError(
                f"{consumed_samples} samples are consumed already, but the data set has {total_samples}: nothing is left to read; "
                "raise --train-iters so that the data set is built with more epochs, or start anew."
            )
        self.drop_last = drop_last

    def __len__(self) -> int:
        """Micro-batches that each rank gets."""
        left = self.total_samples - self.consumed_samples
        return left // self.samples_per_step if self.drop_last else -(-left // self.samples_per_step)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            begin = self.consumed_samples + step * self.samples_per_step + self.data_parallel_rank * self.micro_batch_size
            yield list(range(min(begin, self.total_samples), min(begin + self.micro_batch_size, self.total_samples)))


class CyclicSampler(_Dealt):
    """A new permutation of the samples in every epoch, without end; the order depends on the number of the epoch alone.

    With ``data_sharding`` each rank permutes a share of its own, otherwise the ranks take turns in one permutation of
    all. What does not fill a step of all ranks is left out of its epoch.
    """

    def __init__(
        self,
        total_samples: int,
        *,
        micro_batch_size: int,
        consumed_samples: int = 0,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        data_sharding: bool = True,
    ) -> None:
        super().__init__(total_samples, micro_batch_size, consumed_samples, data_parallel_rank, data_parallel_size)
        if total_samples < self.samples_per_step:
            raise LoaderError(
                f"the data set has {total_samples} samples, less than --micro-batch-size {micro_batch_size} x data-parallel size "
                f"{data_parallel_size}: --dataloader-type cyclic has no step to give; use more data or a smaller micro-batch."
            )
        self.epoch_samples = total_samples - total_samples % self.samples_per_step
        if consumed_samples < 0 or consumed_samples % self.epoch_samples % self.samples_per_step:
            raise LoaderError(
                f"{consumed_samples} samples are consumed already, which is no whole number of steps of {self.samples_per_step} samples into "
                f"an epoch of {self.epoch_samples}; resume with the micro-batch size and data-parallel size that were used, or with "
                "--dataloader-type single."
            )
        self.data_sharding = data_sharding

    def __iter__(self) -> Iterator[list[int]]:
        consumed = self.consumed_samples
        while True:
            epoch, within = divmod(consumed, self.epoch_samples)
            steps = (self.epoch_samples - within) // self.samples_per_step
            # Ranks whose share gives one more micro-batch than others' must not take it: they would be a step ahead for good.
            for _, batch in zip(range(steps), self.epoch_batches(epoch, within), strict=False):
                yield batch
            consumed += steps * self.samples_per_step

    def epoch_batches(self, epoch: int, consumed_in_epoch: int = 0) -> Iterator[list[int]]:
        """This rank's whole micro-batches of one epoch, from the samples on that all ranks have ``consumed_in_epoch``."""
        if self.data_sharding:
            share = self.total_samples // self.samples_per_step * self.micro_batch_size
            offset = consumed_in_epoch // self.data_parallel_size
            order = [self.data_parallel_rank * share + i for i in _permutation(share, epoch)[offset:]]
        else:
            order = _permutation(self.total_samples // self.micro_batch_size * self.micro_batch_size, epoch)
            order = order[consumed_in_epoch + self.data_parallel_rank :: self.data_parallel_size]
        for begin in range(0, len(order) - self.micro_batch_size + 1, self.micro_batch_size):
            yield order[begin : begin + self.micro_batch_size]


class FullPassSampler(_Dealt):
    """Every sample once, dealt to the ranks one by one; rank r reads r, r + ranks, ... Later ranks may get one less."""

    def __init__(self, total_samples: int, *, micro_batch_size: int = 1, data_parallel_rank: int = 0, data_parallel_size: int = 1) -> None:
        super().__init__(total_samples, micro_batch_size, 0, data_parallel_rank, data_parallel_size)
        self._mine = range(data_parallel_rank, total_samples, data_parallel_size)

    def __len__(self) -> int:
        """Micro-batches of this rank; its last one may be short."""
        return -(-len(self._mine) // self.micro_batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        for begin in range(0, len(self._mine), self.micro_batch_size):
            yield list(self._mine[begin : begin + self.micro_batch_size])


def _permutation(count: int, seed: int) -> list[int]:
    """PyTorch's permutation of ``count`` numbers: the order that Megatron's runs have had."""
    import torch  # the only place that needs it; sequential order and the tools do without

    generator = torch.Generator()
    generator.manual_seed(seed)
    order: list[int] = torch.randperm(count, generator=generator).tolist()
    return order
