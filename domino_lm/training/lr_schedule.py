"""Learning rate as a function of the samples seen. Nothing here imports torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

from domino_lm.config.batch_plan import BatchPlan
from domino_lm.config.settings import ConfigError, OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class LearningRateShape:
    """Linear warm-up, then a decay; lengths in samples."""

    peak: float
    minimum: float
    initial: float
    style: str
    warmup_samples: float
    decay_samples: int
    wsd_style: str | None = None
    """Shape of WSD's decay; None for the other styles."""

    wsd_samples: int | None = None

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig, batch_plan: BatchPlan) -> Self:
        """Lengths in iterations become the samples that the run reads in them, while the batch ramps up too.

        Without ``lr_decay_iters`` or ``lr_decay_samples`` the decay lasts as long as the run.
        """
        decay_iters = optimizer.lr_decay_iters or batch_plan.train_iters
        decay = optimizer.lr_decay_samples or batch_plan.train_samples
        if decay_iters is not None:
            decay = batch_plan.samples_in(decay_iters)
        assert decay is not None, "checks.check_run asks for a length in one of the units"
        warmup = optimizer.lr_warmup_samples or batch_plan.samples_in(optimizer.lr_warmup_iters)
        fraction, anneal = optimizer.lr_warmup_fraction, optimizer.lr_wsd_decay_samples
        if optimizer.lr_wsd_decay_iters is not None and decay_iters is not None:
            anneal = decay - batch_plan.samples_in(decay_iters - optimizer.lr_wsd_decay_iters)
        is_wsd = optimizer.lr_decay_style == "WSD"
        return cls(
            peak=optimizer.lr,
            minimum=optimizer.min_lr,
            initial=optimizer.lr_warmup_init,
            style=optimizer.lr_decay_style,
            warmup_samples=warmup if fraction is None else fraction * decay,
            decay_samples=decay,
            wsd_style=optimizer.lr_wsd_decay_style if is_wsd else None,
            wsd_samples=anneal if is_wsd else None,
        )

    def at(self, samples: int) -> float:
        """Learning rate of a step that ``samples`` samples went before."""
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.initial + (self.peak - self.initial) * samples / self.warmup_samples
        if self.style == "constant":
            return self.peak
        if samples > self.decay_samples:
            return self.minimum
        if self.style == "inverse-square-root":
            return max(self.minimum, self.peak * math.sqrt(max(self.warmup_samples, 1) / max(samples, 1)))
        return self.minimum + self._share(samples) * (self.peak - self.minimum)

    def _share(self, samples: int) -> float:
        """How much of the way from minimum to peak is left."""
        if self.style == "WSD":
            assert self.wsd_samples is not None, "checks.check_run asks for it"
            done = (samples - (self.decay_samples - self.wsd_samples)) / self.wsd_samples
            return 1.0 if done <= 0 else SHARES[str(self.wsd_style)](done)
        done = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        return SHARES[self.style](done)


SHARES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (math.cos(math.pi * done) + 1.0),
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,
    "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
}


class LearningRateSchedule:
    """Where a run stands on its shape.

    A step takes `value()`, then calls `advance`: with a warm-up the first step runs at the initial rate, 0 by default,
    as Megatron's does. Steps that were skipped do not advance.
    """

    def __init__(self, shape: LearningRateShape, full_batches: LearningRateShape | None = None) -> None:
        """``full_batches`` is the shape by the rule of earlier versions, which took each iteration of a ramp for a full batch."""
        self.shape = shape
        self.samples = 0
        self._full_batches = full_batches

    @classmethod
    def of(cls, optimizer: OptimizerConfig, batch_plan: BatchPlan) -> Self:
        """That of a run."""
        shape = partial(LearningRateShape.from_config, optimizer)
        return cls(shape(batch_plan), shape(replace(batch_plan, start=batch_plan.full)) if batch_plan.ramps else None)

    def value(self) -> float:
        """Learning rate of the next step."""
        return self.shape.at(self.samples)

    def advance(self, samples: int) -> None:
        """Count the samples of a step that was applied."""
        self.samples += samples

    def state_dict(self) -> dict[str, Any]:
        """Position and shape, as JSON values."""
        return {"samples": self.samples, **asdict(self.shape)}

    def load_state_dict(self, state: dict[str, Any], *, override: bool = False, use_checkpoint: bool = False) -> str:
        """Take over the position; a shape that differs is this run's with ``override``, the checkpoint's with ``use_checkpoint``.

        The whole shape comes from one side. Returns in words which one, and what differs. Raises ConfigError if shapes
        differ and neither is asked for.
        """
        mine = asdict(self.shape)
        differing = [f"{name} {state.get(name)} in the checkpoint, {mine[name]} now" for name in mine if state.get(name) != mine[name]]
        if differing and not (override or use_checkpoint):
            former = self._full_batches
            if former is not None and all(state.get(name) == value for name, value in asdict(former).items()):
                anneal = "" if former.wsd_samples is None else f" --lr-wsd-decay-samples {former.wsd_samples}"
                raise ConfigError(
                    "the checkpoint's learning rate is of an earlier version, which took each iteration of the batch ramp for a full batch "
                    f"({'; '.join(differing)}). Go on with it by --use-checkpoint-opt-param-scheduler, which says the same as a run counted by "
                    f"--lr-warmup-samples {former.warmup_samples:g} --lr-decay-samples {former.decay_samples}{anneal}, or take the "
                    "iterations as they are given from here on by --override-opt-param-scheduler."
                )
            raise ConfigError(
                f"the learning-rate schedule differs from the checkpoint's: {'; '.join(differing)}. Give the flags of the first run "
                f"(--lr, --min-lr, --lr-decay-style, its lengths, --train-iters or --train-samples, --global-batch-size), "
                f"follow the new ones from here with --override-opt-param-scheduler, or the checkpoint's with --use-checkpoint-opt-param-scheduler."
            )
        self.samples = int(state["samples"])
        if use_checkpoint:
            self.shape = LearningRateShape(**{name: state[name] for name in mine if name in state})
        at = f"{self.samples} samples into it"
        if not differing:
            return f"learning rate: that of the checkpoint, which is what the flags say, {at}"
        sides = ("the checkpoint's", "this command line's") if use_checkpoint else ("this command line's", "the checkpoint's")
        return f"learning rate: {sides[0]} as a whole, {at}, not {sides[1]} ({'; '.join(differing)})"
