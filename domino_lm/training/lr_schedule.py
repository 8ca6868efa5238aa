"""Learning rate as a function of the samples seen. Nothing here imports torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
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


DECOUPLED = ("decoupled_peak", "decoupled_minimum")
"""What a checkpoint calls the rates of embedding and output layer."""


def _decoupled_rates(optimizer: OptimizerConfig) -> tuple[float, float] | None:
    """Peak and minimum of embedding and output layer; None if they are those of the other weights."""
    peak, minimum = optimizer.decoupled_lr, optimizer.decoupled_min_lr
    if peak is None:
        return None
    return peak, optimizer.min_lr if minimum is None else minimum


SHARES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (math.cos(math.pi * done) + 1.0),
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,
    "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
}


@dataclass(frozen=True, kw_only=True)
class WeightDecayRamp:
    """Weight decay that grows or falls over a run; its length in samples."""

    start: float
    end: float
    style: str
    samples: int

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig, batch_plan: BatchPlan) -> Self | None:
        """That of a run, which lasts as long; None if weight decay is constant."""
        start, end, style = optimizer.start_weight_decay, optimizer.end_weight_decay, optimizer.weight_decay_incr_style
        if style == "constant" or start is None or end is None:
            return None
        return cls(start=start, end=end, style=style, samples=batch_plan.train_samples or batch_plan.samples)

    def at(self, samples: int) -> float:
        """Weight decay of a step that ``samples`` samples went before."""
        if samples > self.samples:
            return self.end
        return self.start + (1.0 - SHARES[self.style](samples / self.samples)) * (self.end - self.start)


class LearningRateSchedule:
    """Where a run stands on its shape.

    A step takes `value()`, then calls `advance`: with a warm-up the first step runs at the initial rate, 0 by default,
    as Megatron's does. Steps that were skipped do not advance.
    """

    def __init__(
        self,
        shape: LearningRateShape,
        full_batches: LearningRateShape | None = None,
        *,
        decoupled: tuple[float, float] | None = None,
        weight_decay: WeightDecayRamp | None = None,
    ) -> None:
        """``full_batches`` is the shape by the rule of earlier versions, which took each iteration of a ramp for a full batch.

        ``decoupled`` is the peak and the minimum of embedding and output layer, if they have a rate of their own.
        """
        self.shape = shape
        self.decoupled = decoupled
        self.weight_decay = weight_decay
        self.samples = 0
        self._full_batches = full_batches

    @classmethod
    def of(cls, optimizer: OptimizerConfig, batch_plan: BatchPlan) -> Self:
        """That of a run."""
        shape = partial(LearningRateShape.from_config, optimizer)
        return cls(
            shape(batch_plan),
            shape(replace(batch_plan, start=batch_plan.full)) if batch_plan.ramps else None,
            decoupled=_decoupled_rates(optimizer),
            weight_decay=WeightDecayRamp.from_config(optimizer, batch_plan),
        )

    def value(self) -> float:
        """Learning rate of the next step."""
        return self.shape.at(self.samples)

    def decoupled_value(self) -> float:
        """The same of embedding and output layer."""
        if self.decoupled is None:
            return self.value()
        peak, minimum = self.decoupled
        return replace(self.shape, peak=peak, minimum=minimum).at(self.samples)

    def weight_decay_value(self) -> float | None:
        """Weight decay of the next step; None if it never changes."""
        return None if self.weight_decay is None else self.weight_decay.at(self.samples)

    def advance(self, samples: int) -> None:
        """Count the samples of a step that was applied."""
        self.samples += samples

    def state_dict(self) -> dict[str, Any]:
        """Position and shape, as JSON values."""
        return {"samples": self.samples, **self._settings()}

    def _settings(self) -> dict[str, Any]:
        """All that a run is resumed with; what it does not have is left out."""
        ramp = {} if self.weight_decay is None else {f"weight_decay_{name}": value for name, value in asdict(self.weight_decay).items()}
        return {**asdict(self.shape), **dict(zip(DECOUPLED, self.decoupled or (), strict=False)), **ramp}

    def load_state_dict(self, state: dict[str, Any], *, override: bool = False, use_checkpoint: bool = False) -> str:
        """Take over the position; a shape that differs is this run's with ``override``, the checkpoint's with ``use_checkpoint``.

        The whole shape comes from one side. Returns in words which one, and what differs. Raises ConfigError if shapes
        differ and neither is asked for.
        """
        mine = self._settings()
        names = [*mine, *(name for name in state if name not in mine and name.startswith(("decoupled_", "weight_decay_")))]
        differing = [
            f"{name} {state.get(name)} in the checkpoint, {mine.get(name)} now" for name in names if state.get(name) != mine.get(name)
        ]
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
                f"(--lr, --min-lr, --lr-decay-style, its lengths, --decoupled-lr, --start-weight-decay, --train-iters or --train-samples, "
                f"--global-batch-size), "
                f"follow the new ones from here with --override-opt-param-scheduler, or the checkpoint's with --use-checkpoint-opt-param-scheduler."
            )
        self.samples = int(state["samples"])
        if use_checkpoint:
            self.shape = LearningRateShape(**{name: state[name] for name in asdict(self.shape) if name in state})
            self.decoupled = (state[DECOUPLED[0]], state[DECOUPLED[1]]) if DECOUPLED[0] in state else None
            ramp = {item.name: state.get(f"weight_decay_{item.name}") for item in fields(WeightDecayRamp)}
            self.weight_decay = None if None in ramp.values() else WeightDecayRamp(**ramp)  # type: ignore[arg-type]
        at = f"{self.samples} samples into it"
        if not differing:
            return f"learning rate: that of the checkpoint, which is what the flags say, {at}"
        sides = ("the checkpoint's", "this command line's") if use_checkpoint else ("this command line's", "the checkpoint's")
        return f"learning rate: {sides[0]} as a whole, {at}, not {sides[1]} ({'; '.join(differing)})"
