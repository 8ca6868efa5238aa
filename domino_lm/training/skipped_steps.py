"""Steps that are not finite: which of them count, and when they end a run."""

import math

from domino_lm.config.settings import TrainingConfig
from domino_lm.training.loss_scale import LossScale
from domino_lm.watch.metrics import StepReport


class SkippedSteps:
    """Counts consecutive steps that are not finite; every rank holds one and reaches the same answer at the same step."""

    def __init__(self, training: TrainingConfig, scale: LossScale | None) -> None:
        self._training, self._scale = training, scale
        self.in_a_row = 0
        """Steps up to now that count."""

        self.scale_used: float | None = None
        """The loss scale of the last step; None if there is none."""

        self._made = self._skipped = 0
        self._last: StepReport | None = None
        self.begin()

    def begin(self) -> None:
        """The next step is the first of this run, under the loss scale as it stands now."""
        self._scale_used = 1.0 if self._scale is None else self._scale.value.item()

    def fault(self, report: StepReport, saved_at: int | None) -> str | None:
        """Count a step; why the run must end, or None if it need not. ``saved_at`` is the iteration of its last checkpoint.

        A gradient that overflows under a dynamic loss scale counts for nothing, as long as the scale can fall.
        """
        used, self._scale_used = self._scale_used, report.loss_scale
        self.scale_used = None if self._scale is None else used
        self._made, self._skipped, self._last = self._made + 1, self._skipped + report.skipped, report
        finite_loss, scale = math.isfinite(report.loss_sum), self._scale
        if report.skipped and finite_loss and scale is not None and scale.dynamic and used > scale.minimum:
            return None
        self.in_a_row = self.in_a_row + 1 if report.skipped or not finite_loss else 0
        limit = self._training.most_skipped_steps
        if self.in_a_row <= limit:
            return None
        flag = "--check-for-nan-in-loss-and-grad" if self._training.check_for_nan_in_loss_and_grad else f"--max-skipped-steps {limit}"
        scaled = f", loss scale {used:g}" if scale is not None else ""
        return (
            f"loss or gradient was not finite in {self.in_a_row} step(s) in a row, the last at iteration {report.iteration} "
            f"(loss {report.loss}, gradient norm {report.grad_norm}{scaled}); {flag} ends the run here. No weight took part "
            f"in these steps; {last_saved(saved_at)}. Lower --lr, lengthen --lr-warmup-iters, or look at the data of these iterations."
        )

    def fault_of_run(self) -> str | None:
        """Why a run that has come to its end has failed all the same: every one of its steps was skipped; None if it has not."""
        if self._last is None or self._skipped < self._made:
            return None
        why = f"in the last of them the loss was {self._last.loss:g}, the gradient norm {self._last.grad_norm:g}"
        way = "lower --lr, or look at the weights that it began with and at the data"
        if self._scale is not None and self._scale.dynamic:
            why += f", and the loss scale is now {self._scale_used:g}"
            way = f"train for more iterations, begin with a lower --initial-loss-scale, or {way}"
        return f"every step of this run was skipped, all {self._made} of them, and no weight has changed: {why}; {way}."


def last_saved(saved_at: int | None) -> str:
    """Where a run that ends now can be taken up again."""
    return f"the last checkpoint is that of iteration {saved_at}" if saved_at else "this run has saved no checkpoint"
