"""The loss scale: small gradients are multiplied into the range of fp16, and the scale follows what overflows."""

from typing import Any, Self

import torch
from torch import Tensor

from domino_lm.config.precision import PrecisionConfig

GROWTH, BACKOFF = 2.0, 0.5
SCALE, GROWTH_TRACKER, HYSTERESIS_TRACKER = ("scale", "growth_tracker", "hysteresis_tracker")
"""What a checkpoint holds of it, by Megatron's names."""


class LossScale:
    """Megatron's constant or dynamic loss scale, all of it in device memory: `update` is arithmetic that the host does not wait for.

    ``value`` is 0-d fp32. A dynamic one halves at an overflow once ``hysteresis`` of them were borne, down to ``minimum``;
    it doubles after ``window`` steps in a row without one, and then bears as many again.
    """

    def __init__(
        self, initial: float, device: torch.device, *, dynamic: bool = False, minimum: float = 1.0, window: int = 1000, hysteresis: int = 2
    ) -> None:
        self.dynamic = dynamic
        self.minimum = torch.tensor(minimum, dtype=torch.float32).item()  # as the scale itself is rounded, to compare with it
        self._window, self._hysteresis = window, hysteresis
        self.value = torch.full((), initial, dtype=torch.float32, device=device)
        self._clean_steps = torch.zeros((), dtype=torch.int64, device=device)
        self._patience = torch.full((), hysteresis, dtype=torch.int64, device=device)

    @classmethod
    def of(cls, precision: PrecisionConfig, device: torch.device) -> Self | None:
        """The one that settings ask for; None if the loss is not scaled."""
        if not precision.scales_loss:
            return None
        if precision.loss_scale is not None:
            return cls(precision.loss_scale, device)
        return cls(
            precision.initial_loss_scale,
            device,
            dynamic=True,
            minimum=precision.min_loss_scale,
            window=precision.loss_scale_window,
            hysteresis=precision.hysteresis,
        )

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """A step has ended; ``found_inf`` [] is above 0 if a gradient was not finite, the same on every rank."""
        if not self.dynamic:
            return
        overflow = found_inf > 0
        clean = (self._clean_steps + 1).masked_fill(overflow, 0)  # torch.where would copy its scalars from the host
        grows = clean == self._window
        patience = (self._patience - overflow.to(torch.int64)).masked_fill(grows, self._hysteresis)
        lower = (self.value * BACKOFF).clamp(min=self.minimum)
        falls = overflow & (patience <= 0)
        self.value.copy_(torch.where(falls, lower, torch.where(grows, self.value * GROWTH, self.value)))
        self._patience.copy_(patience)
        self._clean_steps.copy_(clean.masked_fill(grows, 0))

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint holds of it; waits for the device."""
        return {SCALE: self.value.item(), GROWTH_TRACKER: int(self._clean_steps.item()), HYSTERESIS_TRACKER: int(self._patience.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` ended. A constant scale stays as its flag says."""
        if not self.dynamic:
            return
        self.value.fill_(state[SCALE])
        self._clean_steps.fill_(state.get(GROWTH_TRACKER, 0))
        self._patience.fill_(state.get(HYSTERESIS_TRACKER, self._hysteresis))
