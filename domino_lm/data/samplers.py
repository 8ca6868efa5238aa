"""Which samples each data-parallel rank reads, micro-batch by micro-batch.

The number of samples that the whole run has consumed is the only state; a run that resumes with it reads exactly what
the uninterrupted run would have read.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

from domino_lm.data.indices import DatasetError


@dataclass(kw_only=True)
class Sampler(ABC):
    """Yields the sample numbers of one rank's micro-batches, from ``consumed_samples`` (of all ranks) on."""

    total_samples: int = field(kw_only=False)
    micro_batch_size: int = 1
    consumed_samples: int = 0
    data_parallel_rank: int = 0
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.micro_batch_size < 1:
            raise DatasetError(f"--micro-batch-size {self.micro_batch_size} holds no sample; use at least 1.")
        if not 0 <= self.data_parallel_rank < self.data_parallel_size:
            raise DatasetError(f"data-parallel rank {self.data_parallel_rank} is outside 0..{self.data_parallel_size - 1}.")
        if self.total_samples < 1:
            raise DatasetError("the data set has 0 samples; use more data or another --split.")
        self.samples_per_step = self.micro_batch_size * self.data_parallel_size

    @abstractmethod
    def __iter__(self) -> Iterator[list[int]]:
        """Sample numbers of each micro-batch."""


@dataclass(kw_only=True)
class SequentialSampler(Sampler):
    """Consecutive samples, dealt to the data-parallel ranks in blocks of one micro-batch.

    Of each ``micro_batch_size * data_parallel_size`` samples, rank r takes the r-th micro-batch. It makes one pass:
    epochs are the data set's business. An incomplete block at the end is dropped; without ``drop_last`` the ranks get
    what there is, perhaps nothing.
    """

    drop_last: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.consumed_samples < self.total_samples:
            raise DatasetError(
                f"{self.consumed_samples} samples are consumed already, but the data set has {self.total_samples}: nothing is left to read; "
                "raise --train-iters so that the data set is built with more epochs, or start anew."
            )

    def __len__(self) -> int:
        """Micro-batches that each rank gets."""
        left = self.total_samples - self.consumed_samples
        return left // self.samples_per_step if self.drop_last else -(-left // self.samples_per_step)

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            begin = self.consumed_samples + step * self.samples_per_step + self.data_parallel_rank * self.micro_batch_size
            yield list(range(min(begin, self.total_samples), min(begin + self.micro_batch_size, self.total_samples)))


@dataclass(kw_only=True)
class CyclicSampler(Sampler):
    """A new permutation of the samples in every epoch, without end; the order depends on the number of the epoch alone.

    With ``data_sharding`` each rank permutes a share of its own, otherwise the ranks take turns in one permutation of
    all. What does not fill a step of all ranks is left out of its epoch.
    """

    data_sharding: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.total_samples < self.samples_per_step:
            raise DatasetError(
                f"the data set has {self.total_samples} samples, less than --micro-batch-size {self.micro_batch_size} x data-parallel size "
                f"{self.data_parallel_size}: --dataloader-type cyclic has no step to give; use more data or a smaller micro-batch."
            )
        self.epoch_samples = self.total_samples - self.total_samples % self.samples_per_step
        if self.consumed_samples < 0 or self.consumed_samples % self.epoch_samples % self.samples_per_step:
            raise DatasetError(
                f"{self.consumed_samples} samples are consumed already, which is no whole number of steps of {self.samples_per_step} samples "
                f"into an epoch of {self.epoch_samples}; resume with the micro-batch size and data-parallel size that were used, or with "
                "--dataloader-type single."
            )

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


class FullPassSampler(Sampler):
    """Every sample once, dealt to the ranks one by one; rank r reads r, r + ranks, ... Later ranks may get one less."""

    @property
    def _mine(self) -> range:
        return range(self.data_parallel_rank, self.total_samples, self.data_parallel_size)

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
