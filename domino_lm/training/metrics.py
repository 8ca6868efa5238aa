"""What a run reports: Megatron's log lines on the console, its tags in TensorBoard."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

SAMPLES_SUFFIX = " vs samples"
TEXT_SUFFIX = "/text_summary"


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one training step gave, over all ranks."""

    iteration: int
    consumed_samples: int
    batch_size: int
    loss_sum: float
    """Sum of the token losses that count."""

    tokens: int
    """Tokens whose loss counts."""

    learning_rate: float
    """That of the next step, which is what Megatron reports."""

    grad_norm: float
    """Before clipping."""

    skipped: bool
    """The loss or the gradient was not finite, so that no weight changed."""

    seconds: float

    @property
    def loss(self) -> float:
        """Nats per token; 0 where every token is masked."""
        return self.loss_sum / max(self.tokens, 1)


class LogInterval:
    """Sums over the steps between two log lines."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin the next interval."""
        self.steps = 0
        self.loss_sum = 0.0
        self.tokens = 0
        self.seconds = 0.0
        self.skipped = 0

    def add(self, report: StepReport) -> None:
        """Count one step; the loss of a skipped one stays out of the mean."""
        self.steps += 1
        self.seconds += report.seconds
        self.skipped += report.skipped
        if not report.skipped:
            self.loss_sum += report.loss_sum
            self.tokens += report.tokens

    def line(self, last: StepReport, train_iters: int, now: datetime) -> str:
        """Megatron's log line; the loss is the mean over the interval's tokens."""
        loss = self.loss_sum / max(self.tokens, 1)
        fields = [
            f"iteration {last.iteration:8d}/{train_iters:8d}",
            f"consumed samples: {last.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {self.seconds * 1000 / self.steps:.1f}",
            f"learning rate: {last.learning_rate:.6E}",
            f"global batch size: {last.batch_size:5d}",
            f"lm loss: {loss:.6E}",
            "loss scale: 1.0",
            f"grad norm: {last.grad_norm:.3f}",
            f"number of skipped iterations: {self.skipped:3d}",
            f"number of nan iterations: {self.skipped:3d}",
        ]
        return f" [{now:%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(fields) + " |"


class RunRate:
    """First loss and speed of a run; its first step is start-up and does not count."""

    def __init__(self) -> None:
        self.first_loss = math.nan
        self._steps = -1
        self._seconds = 0.0

    def add(self, report: StepReport) -> None:
        """Count one step."""
        self._steps += 1
        if self._steps == 0:
            self.first_loss = report.loss
        else:
            self._seconds += report.seconds

    @property
    def steps_per_s(self) -> float:
        """0 before the second step."""
        return self._steps / self._seconds if self._steps > 0 else 0.0


def perplexity(loss: float) -> float:
    """exp of the loss, which is held at 20 so that it stays readable."""
    return math.exp(min(20.0, loss))


def validation_line(iteration: int, loss: float, split: str | None = None) -> str:
    """Megatron's line of an evaluation; ``split`` names the set of the evaluations after the last step."""
    where = f"iteration {iteration}" + (f" on {split} set" if split else "")
    return f" validation loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "


class TensorBoardLog:
    """Scalars under Megatron's tags. One rank holds one; a disk that fails turns it off with a warning."""

    def __init__(self, writer: Any, iteration: int) -> None:
        self._writer = writer
        self._begin = iteration

    @classmethod
    def open(cls, folder: str, iteration: int, consumed_samples: int) -> TensorBoardLog | None:
        """Write events into ``folder``, made where it is missing; points beyond ``iteration`` are of a run that is now resumed and go.

        None, with a warning, where the folder cannot be written.
        """
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and one rank needs it

        try:
            os.makedirs(folder, exist_ok=True)
            if iteration:
                drop_later_points(folder, iteration, consumed_samples)
            return cls(SummaryWriter(log_dir=folder), iteration)
        except OSError as error:
            warnings.warn(f"--tensorboard-dir {folder} cannot be written ({error}); training goes on without it.", stacklevel=2)
            return None

    def settings(self, values: dict[str, object]) -> None:
        """Record every flag as a text, at the step that the run begins with."""
        self._guard(lambda: [self._writer.add_text(name, str(value), self._begin) for name, value in values.items()])

    def step(self, report: StepReport) -> None:
        """Record one training step; the time of a run's first step is start-up and stays out."""
        values = {"learning-rate": report.learning_rate, "batch-size": report.batch_size}
        if not report.skipped:
            values |= {"lm loss": report.loss, "grad-norm": report.grad_norm}
        values["loss-scale"] = 1.0
        self._scalars(values, report.iteration, report.consumed_samples)
        if report.iteration > self._begin + 1:
            self._guard(lambda: self._writer.add_scalar("iteration-time", report.seconds, report.iteration))

    def validation(self, iteration: int, consumed_samples: int, loss: float) -> None:
        """Record one evaluation on the validation split."""
        self._scalars({"lm loss validation": loss, "lm loss validation ppl": perplexity(loss)}, iteration, consumed_samples)

    def close(self) -> None:
        """Bring everything to the disk."""
        self._guard(lambda: self._writer.close())

    def _scalars(self, values: dict[str, float], iteration: int, consumed_samples: int) -> None:
        def write() -> None:
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, iteration)
                self._writer.add_scalar(tag + SAMPLES_SUFFIX, value, consumed_samples)

        self._guard(write)

    def _guard(self, write: Any) -> None:
        if self._writer is None:
            return
        try:
            write()
        except OSError as error:
            warnings.warn(f"TensorBoard events can no longer be written ({error}); training goes on without them.", stacklevel=3)
            self._writer = None


def drop_later_points(folder: str, iteration: int, consumed_samples: int) -> None:
    """Rewrite the event files of ``folder`` without scalars beyond ``iteration``, or beyond ``consumed_samples`` where that is their axis.

    TensorBoard's own purge knows one axis only. Each file is replaced whole, and only where it holds such a point.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.summary.writer.record_writer import RecordWriter

    for path in sorted(Path(folder).glob("events.out.tfevents.*")):
        events = list(LegacyEventFileLoader(str(path)).Load())
        kept = list(_without_later(events, iteration, consumed_samples))
        if len(kept) == len(events):
            continue
        beside = path.with_name(".trimmed")  # a name that TensorBoard does not read
        with open(beside, "wb") as file:
            writer = RecordWriter(file)
            for event in kept:
                writer.write(event.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)


def _without_later(events: Iterable[Any], iteration: int, consumed_samples: int) -> Iterator[Any]:
    for event in events:
        tags = [value.tag for value in event.summary.value]
        if any(tag.endswith(TEXT_SUFFIX) for tag in tags):
            limit = iteration - 1  # the resumed run writes its own at `iteration`
        else:
            limit = consumed_samples if any(tag.endswith(SAMPLES_SUFFIX) for tag in tags) else iteration
        if not tags or event.step <= limit:
            yield event
