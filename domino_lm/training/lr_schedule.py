"""Learning rate as a function of the samples seen. Nothing here imports torch."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from domino_lm.config import ConfigError, OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class LearningRateShape:
    """Linear warm-up, then a decay; lengths in samples."""

    peak: float
    minimum: float
    initial: float
    style: str
    warmup_samples: float
    decay_samples: int

    @classmethod
    def from_config(cls, optimizer: OptimizerConfig, train_iters: int, global_batch_size: int) -> LearningRateShape:
        """Iterations times batch size; without ``lr_decay_iters`` the decay lasts as long as the run."""
        decay = (optimizer.lr_decay_iters or train_iters) * global_batch_size
        fraction = optimizer.lr_warmup_fraction
        warmup: float = optimizer.lr_warmup_iters * global_batch_size if fraction is None else fraction * decay
        return cls(
            peak=optimizer.lr,
            minimum=optimizer.min_lr,
            initial=optimizer.lr_warmup_init,
            style=optimizer.lr_decay_style,
            warmup_samples=warmup,
            decay_samples=decay,
        )

    def at(self, samples: int) -> float:
        """Learning rate of a step that ``samples`` samples went before."""
        if self.warmup_samples > 0 and samples <= self.warmup_samples:
            return self.initial + (self.peak - self.initial) * samples / self.warmup_samples
        if self.style == "constant":
            return self.peak
        if samples > self.decay_samples:
            return self.minimum
        done = (samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
        share = 1.0 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return self.minimum + share * (self.peak - self.minimum)


class LearningRateSchedule:
    """Where a run stands on its shape.

    A step takes `value()`, then calls `advance`: with a warm-up the first step runs at the initial rate, 0 by default,
    as Megatron's does. Steps that were skipped do not advance.
    """

    def __init__(self, shape: LearningRateShape) -> None:
        self.shape = shape
        self.samples = 0

    def value(self) -> float:
        """Learning rate of the next step."""
        return self.shape.at(self.samples)

    def advance(self, samples: int) -> None:
        """Count the samples of a step that was applied."""
        self.samples += samples

    def state_dict(self) -> dict[str, Any]:
        """Position and shape, as JSON values."""
        return {"samples": self.samples, **asdict(self.shape)}

    def load_state_dict(self, state: dict[str, Any], override: bool) -> list[str]:
        """Take over the position; a shape that differs is refused, or with ``override`` replaced by this run's.

        Returns what differs, in words. Raises ConfigError without ``override``.
        """
        mine = asdict(self.shape)
        differing = [f"{name} {state[name]} in the checkpoint, {mine[name]} now" for name in mine if state[name] != mine[name]]
        if differing and not override:
            raise ConfigError(
                f"the learning-rate schedule differs from the checkpoint's: {'; '.join(differing)}. Give the flags of the first run "
                f"(--lr, --min-lr, --lr-decay-style, --lr-decay-iters, --lr-warmup-iters, --global-batch-size), "
                f"or follow the new ones from here with --override-opt-param-scheduler."
            )
        self.samples = int(state["samples"])
        return differing
