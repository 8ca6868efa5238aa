"""What is looked at after every step: steps that are not finite, spikes, and batches in which no token counts."""

from collections.abc import Iterator

from domino_lm.config.settings import TrainingConfig
from domino_lm.training.loss_scale import LossScale
from domino_lm.training.skipped_steps import SkippedSteps
from domino_lm.training.spikes import Spikes
from domino_lm.watch.metrics import StepReport


class StepChecks:
    """Judges steps as they are reported; every rank holds one and reaches the same answer at the same step."""

    def __init__(self, training: TrainingConfig, scale: LossScale | None) -> None:
        self.skipped = SkippedSteps(training, scale)
        self._spikes = Spikes(training)
        self._masked: list[StepReport] = []

    def fault(self, report: StepReport, saved_at: int | None) -> str | None:
        """Count a step; why the run must end, or None if it need not. ``saved_at`` is the iteration of its last checkpoint."""
        if report.masked_micro_batches:
            self._masked.append(report)
        return self.skipped.fault(report, saved_at) or self._spikes.fault(report, saved_at)

    def warnings(self) -> Iterator[str]:
        """What the log line does not say of the steps since the last one, a line for each kind of thing."""
        spike, masked, self._masked = self._spikes.warning(), self._masked, []
        if spike is not None:
            yield spike
        if masked:
            yield masked_warning(masked)


def masked_warning(masked: list[StepReport]) -> str:
    """What is said of steps with micro-batches in which no token counts."""
    whole = [report for report in masked if report.tokens == 0]
    first = (whole or masked)[0]
    where = f"iteration {first.iteration} (samples {first.samples[0]} to {first.samples[-1]})"
    count = sum(report.masked_micro_batches for report in masked)
    what = f"all tokens of {count} micro-batch(es) are masked in {len(masked)} step(s)"
    if whole:
        said = f"{len(whole)} whole batch(es) among them, the first in {where}: their loss is 0, and so is their gradient"
    else:
        said = f"the first in {where}: they add nothing to the loss"
    return f"{what}, {said}. Look at the documents of these samples, and at the flags that mask losses (--eod-mask-loss)"
