"""Losses and gradient norms that jump: they are warned of once an interval, or end the run."""

from dataclasses import dataclass

from domino_lm.config.settings import TrainingConfig
from domino_lm.training.skipped_steps import last_saved
from domino_lm.watch.metrics import StepReport

FACTOR = 10.0
"""How many times its running estimate a value must exceed to be a spike; Megatron's factor for losses."""

FIRST_STEPS = 3
"""Steps before anything is judged: fewer say little of what is usual."""

SHARE = 0.02
"""Weight of the newest step in the estimate, which remembers about the last fifty."""


class RunningEstimate:
    """Exponential mean of a value over past steps, a plain mean while they are few."""

    def __init__(self) -> None:
        self.mean = 0.0
        self._steps = 0

    def is_spike(self, value: float) -> bool:
        """Whether ``value`` is far above what the steps so far lead to expect."""
        return self._steps >= FIRST_STEPS and self.mean > 0 and value > FACTOR * self.mean

    def add(self, value: float) -> None:
        """Take a value in. A spike counts as the largest value that is none, so that it does not hide the next one."""
        kept = FACTOR * self.mean if self.is_spike(value) else value
        self._steps += 1
        self.mean += (kept - self.mean) * max(1 / self._steps, SHARE)


@dataclass(frozen=True)
class Spike:
    """A value far above its estimate, and the samples of its step."""

    what: str
    value: float
    usual: float
    iteration: int
    samples: range

    def __str__(self) -> str:
        return (
            f"{self.what} {self.value:.4g} at iteration {self.iteration} (samples {self.samples[0]} to {self.samples[-1]}) is "
            f"{self.value / self.usual:.1f} times its running estimate, {self.usual:.4g}"
        )


class Spikes:
    """Judges each step's loss and gradient norm; every rank holds one and reaches the same answer at the same step."""

    def __init__(self, training: TrainingConfig) -> None:
        self._ends = {"loss": training.check_for_spiky_loss, "gradient norm": training.check_for_large_grads}
        self._estimates = {name: RunningEstimate() for name in self._ends}
        self._found: list[Spike] = []

    def fault(self, report: StepReport, saved_at: int | None) -> str | None:
        """Judge a step; why the run must end, or None if it need not. ``saved_at`` is the iteration of its last checkpoint.

        Steps that were skipped, or in which no token counts, say nothing.
        """
        if report.skipped or report.tokens == 0:
            return None
        found = []
        for name, value in (("loss", report.loss), ("gradient norm", report.grad_norm)):
            estimate = self._estimates[name]
            if estimate.is_spike(value):
                found.append(Spike(name, value, estimate.mean, report.iteration, report.samples))
            estimate.add(value)
        ending = next((spike for spike in found if self._ends[spike.what]), None)
        if ending is None:
            self._found += found
            return None
        flag = {"loss": "--check-for-spiky-loss", "gradient norm": "--check-for-large-grads"}[ending.what]
        return (
            f"{ending}; {flag} ends the run here. This step has changed the weights, which are not saved; {last_saved(saved_at)}. "
            f"Look at these samples, leave the step out with --iterations-to-skip {ending.iteration}, or lower --lr."
        )

    def warning(self) -> str | None:
        """One line on the spikes since the last one, the largest of each kind; None if there were none."""
        found, self._found = self._found, []
        if not found:
            return None
        worst = [
            max((spike for spike in found if spike.what == name), key=lambda spike: spike.value / spike.usual, default=None)
            for name in self._ends
        ]
        told = [spike for spike in worst if spike is not None]
        rest = len({spike.iteration for spike in found} - {spike.iteration for spike in told})
        return "; ".join(map(str, told)) + (f"; so was that of {rest} more step(s)" if rest else "")
