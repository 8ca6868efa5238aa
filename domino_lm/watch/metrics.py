"""What a run reports of its steps, and Megatron's log lines."""

import math
from dataclasses import dataclass
from datetime import datetime

TERA = 1e12
GIB = 2**30
UNLIKE = 3
"""A step this many times as long as the one whose waits are measured is named beside their share."""


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

    loss_scale: float = 1.0
    """That of the next step, which is what Megatron reports."""

    seconds: float

    data_seconds: float = 0.0
    """Of these, waiting for data on this rank."""

    exposed_s: float | None = None
    """Of these, waiting for communication; None if the step was not recorded, or cannot be from the host."""

    params_norm: float | None = None
    """After the update; None unless it was asked for."""

    num_zeros: int | None = None
    """Gradient entries that are exactly 0; None unless it was asked for."""

    masked_micro_batches: int = 0
    """Micro-batches in which no token counts."""

    @property
    def samples(self) -> range:
        """Numbers of its samples in the order of training, from 0."""
        return range(self.consumed_samples - self.batch_size, self.consumed_samples)

    @property
    def bad_loss(self) -> bool:
        """The step was skipped, and its loss was not finite."""
        return self.skipped and not math.isfinite(self.loss_sum)

    @property
    def loss(self) -> float:
        """Nats per token; 0 if every token is masked."""
        return self.loss_sum / max(self.tokens, 1)


@dataclass(frozen=True, kw_only=True)
class SpeedScale:
    """What turns seconds into throughput and MFU."""

    seq_length: int
    flops_per_token: float
    """Model FLOPs, forward and backward; recomputation does not count."""

    ranks: int
    peak_flops: float | None
    """Of one rank's device; None if unknown."""

    def tokens_per_s(self, sequences: int, seconds: float) -> float:
        """Over all ranks, masked tokens included."""
        return sequences * self.seq_length / seconds if seconds > 0 else 0.0

    def tflops_per_rank(self, sequences: int, seconds: float) -> float:
        """Model TFLOP/s of each rank."""
        return self.tokens_per_s(sequences, seconds) * self.flops_per_token / self.ranks / TERA

    def mfu(self, sequences: int, seconds: float) -> float | None:
        """Share of the peak that the model's FLOPs make up."""
        if self.peak_flops is None:
            return None
        return self.tflops_per_rank(sequences, seconds) * TERA / self.peak_flops


class LogInterval:
    """The steps between two log lines."""

    def __init__(self, scale: SpeedScale | None = None, log_throughput: bool = False) -> None:
        self._scale, self._log_throughput = scale, log_throughput
        self._reports: list[StepReport] = []

    def clear(self) -> None:
        """Begin the next interval."""
        self._reports.clear()

    def add(self, report: StepReport) -> None:
        """Count one step."""
        self._reports.append(report)

    @property
    def _sequences_and_seconds(self) -> tuple[int, float]:
        return sum(report.batch_size for report in self._reports), sum(report.seconds for report in self._reports)

    def line(self, last: StepReport, train_iters: int, now: datetime) -> str:
        """Megatron's log line; the loss is the mean over the tokens of the interval's steps that were not skipped.

        As in Megatron's, it is left out if all were.
        """
        counted = [report for report in self._reports if not report.skipped]
        loss = sum(report.loss_sum for report in counted) / max(sum(report.tokens for report in counted), 1)
        sequences, seconds = self._sequences_and_seconds
        throughput = []
        if self._log_throughput and self._scale is not None:
            throughput = [f"throughput per GPU (TFLOP/s/GPU): {self._scale.tflops_per_rank(sequences, seconds):.1f}"]
        extra = [f"num zeros: {last.num_zeros:.1f}"] if last.num_zeros is not None else []
        extra += [f"params norm: {last.params_norm:.3f}"] if last.params_norm is not None else []
        fields = [
            f"iteration {last.iteration:8d}/{train_iters:8d}",
            f"consumed samples: {last.consumed_samples:12d}",
            f"elapsed time per iteration (ms): {seconds * 1000 / len(self._reports):.1f}",
            *throughput,
            f"learning rate: {last.learning_rate:.6E}",
            f"global batch size: {last.batch_size:5d}",
            *([f"lm loss: {loss:.6E}"] if counted else []),
            f"loss scale: {last.loss_scale:.1f}",
            f"grad norm: {last.grad_norm:.3f}",
            *extra,
            f"number of skipped iterations: {len(self._reports) - len(counted):3d}",
            f"number of nan iterations: {sum(report.bad_loss for report in self._reports):3d}",
        ]
        return f" [{now:%Y-%m-%d %H:%M:%S.%f}] " + " | ".join(fields) + " |"

    def _unlike_recorded(self) -> str:
        """Which step the exposed share is of, if another one of the interval took far longer; empty if none did."""
        recorded = [report for report in self._reports if report.exposed_s is not None]
        longest = max(self._reports, key=lambda report: report.seconds)
        if longest.seconds <= UNLIKE * max(report.seconds for report in recorded):
            return ""
        return f" (of iteration {recorded[-1].iteration}; {longest.iteration} took {longest.seconds:.1f} s, and was not looked into)"

    def speed_line(self, memory_bytes: float) -> str:
        """Tokens per second, what the steps waited for, memory and MFU."""
        assert self._scale is not None, "a line about speed needs the run's scale"
        recorded = [(report.exposed_s, report.seconds) for report in self._reports if report.exposed_s is not None]
        share = sum(exposed_s for exposed_s, _ in recorded) / max(sum(seconds for _, seconds in recorded), 1e-9)
        sequences, seconds = self._sequences_and_seconds
        mfu = self._scale.mfu(sequences, seconds)
        return " | ".join(
            [
                f"   tokens/s: {self._scale.tokens_per_s(sequences, seconds):,.0f}",
                "exposed communication: " + (f"{share:.1%} of a step{self._unlike_recorded()}" if recorded else "n/a"),
                f"waiting for data: {sum(report.data_seconds for report in self._reports) * 1000 / len(self._reports):.1f} ms per step",
                f"memory: {memory_bytes / GIB:.2f} GiB",
                "MFU: " + ("n/a" if mfu is None else f"{mfu:.1%}"),
            ]
        )


class RunRate:
    """First and last loss of steps that were not skipped, and speed of a run; its first step is start-up and does not count."""

    def __init__(self) -> None:
        self.first_loss: float | None = None
        self.last_loss: float | None = None
        self.steps = 0
        self._seconds = 0.0
        self._sequences = 0
        self._data_seconds = 0.0

    def add(self, report: StepReport) -> None:
        """Count one step."""
        self.steps += 1
        if not report.skipped:
            self.last_loss = report.loss
            self.first_loss = report.loss if self.first_loss is None else self.first_loss
        if self.steps > 1:
            self._seconds += report.seconds
            self._sequences += report.batch_size
            self._data_seconds += report.data_seconds

    @property
    def sequences_per_s(self) -> float:
        """Over all ranks; 0 before the second step."""
        return self._sequences / self._seconds if self._seconds > 0 else 0.0

    @property
    def data_s_per_step(self) -> float:
        """Seconds of a step in which this rank waited for data; 0 before the second step."""
        return self._data_seconds / (self.steps - 1) if self.steps > 1 else 0.0


def perplexity(loss: float) -> float:
    """exp of the loss, which is capped at 20 so that the number stays readable."""
    return math.exp(min(20.0, loss))


def validation_line(iteration: int, loss: float, split: str | None = None) -> str:
    """Megatron's line of an evaluation; ``split`` names the set, of several or of the evaluations after the last step."""
    where = f"iteration {iteration}" + (f" on {split} set" if split else "")
    return f" validation loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
