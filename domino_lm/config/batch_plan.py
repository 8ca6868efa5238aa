"""How long a run is and how large its batches are, step by step. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from domino_lm.config.settings import RunConfig


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Global batch of each step as a function of the samples before it, and the run's length in steps or in samples.

    The batch is ``start`` sequences and grows by ``increment`` in equal stretches of ``ramp_samples`` until it is ``full``.
    """

    full: int
    train_iters: int | None = None
    train_samples: int | None = None
    start: int
    increment: int = 0
    ramp_samples: int = 0

    @classmethod
    def of(cls, run: RunConfig, world_size: int) -> BatchPlan:
        """That of ``run``; `checks.check_run` has found its numbers sound."""
        full, training = global_batch_size(run, world_size), run.training
        start, increment, ramp = training.rampup_batch_size or (full, 0, 0)
        return cls(
            full=full,
            train_iters=training.train_iters,
            train_samples=training.train_samples,
            start=start,
            increment=increment,
            ramp_samples=ramp,
        )

    @property
    def ramps(self) -> bool:
        """Whether the batch grows at all."""
        return self.start < self.full

    def at(self, samples: int) -> int:
        """Sequences in the step that ``samples`` samples went before."""
        if not self.ramps or samples > self.ramp_samples:
            return self.full
        stretches = (self.full - self.start) // self.increment
        return min(self.full, self.start + samples * stretches // self.ramp_samples * self.increment if self.ramp_samples else self.full)

    @property
    def iterations(self) -> int:
        """Steps of the whole run."""
        return self._length[0]

    @property
    def samples(self) -> int:
        """Samples that the whole run reads: at most ``train_samples``, whose last incomplete batch is left out."""
        return self._length[1]

    @cached_property
    def _length(self) -> tuple[int, int]:
        return self.end(0, 0)

    def samples_in(self, iterations: int) -> int:
        """Samples that the first ``iterations`` steps read."""
        return replace(self, train_iters=iterations, train_samples=None).samples

    def end(self, steps: int, samples: int) -> tuple[int, int]:
        """Steps and samples of the whole run when ``steps`` and ``samples`` are done: those of the ramp one by one, the others at once."""
        while self.ramps and samples <= self.ramp_samples and not self.ended(steps, samples):
            samples, steps = samples + self.at(samples), steps + 1
        further = max(0, self._left(samples, steps, self.at(samples)))
        return steps + further, samples + further * self.at(samples)

    def ended(self, steps: int, samples: int) -> bool:
        """Whether nothing is left to do after ``steps`` steps and ``samples`` samples."""
        return self._left(samples, steps, self.at(samples)) <= 0

    def _left(self, samples: int, steps: int, size: int) -> int:
        """Steps of ``size`` sequences that the run still has room for."""
        if self.train_iters is not None:
            return self.train_iters - steps
        assert self.train_samples is not None, "checks.check_run asks for one of the two"
        return (self.train_samples - samples) // size


def data_parallel_size(run: RunConfig, world_size: int) -> int:
    """Replicas of the model on ``world_size`` ranks."""
    return world_size // run.parallel.tensor_model_parallel_size


def global_batch_size(run: RunConfig, world_size: int) -> int:
    """Sequences in one optimizer step over all ranks."""
    return run.training.global_batch_size or run.training.micro_batch_size * data_parallel_size(run, world_size)


def eval_batch_size(run: RunConfig, world_size: int) -> int:
    """Sequences in one batch of an evaluation over all ranks."""
    return run.training.eval_global_batch_size or global_batch_size(run, world_size)


def eval_micro_batch_size(run: RunConfig) -> int:
    """Sequences in one forward of an evaluation."""
    return run.training.eval_micro_batch_size or run.training.micro_batch_size
