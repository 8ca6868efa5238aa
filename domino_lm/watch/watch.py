"""The outputs of a run: console, TensorBoard, metrics file, Weights & Biases, progress bar."""

import resource
import sys
import time
from collections.abc import Callable
from datetime import datetime

import torch

from domino_lm.config.schema import flat_values, settings
from domino_lm.config.settings import RunConfig
from domino_lm.model.families.lookup import family_of
from domino_lm.parallel.collectives import Communicator
from domino_lm.simulate.hardware import peak_flops_of
from domino_lm.simulate.predict import MFU_FORMULA
from domino_lm.watch.metrics import GIB, LogInterval, RunRate, SpeedScale, StepReport
from domino_lm.watch.metrics_file import MetricsFile
from domino_lm.watch.progress import ProgressBar
from domino_lm.watch.tensorboard import TensorBoardLog
from domino_lm.watch.wandb_log import WandbLog

Console = Callable[[str], None]
HYPERPARAMETERS = ("model", "parallel", "precision", "optimizer", "training", "schedule")
"""Parts of the settings by which runs are compared."""


class Watch:
    """What one run tells. Every rank has one, and on all but rank 0 it is silent.

    ``total`` is the number of steps of the whole run; ``begin`` and ``consumed_samples`` say where this part of it starts.
    """

    def __init__(
        self, run: RunConfig, console: Console, world: Communicator, device: torch.device, total: int, begin: int, consumed_samples: int
    ) -> None:
        self._run, self._console, self._rank, self._device, self._total = run, console, world.rank, device, total
        self._begin = begin
        self._skipped = 0  # steps since TensorBoard's last point
        logging = run.logging
        self.scale = SpeedScale(
            seq_length=run.model.seq_length,
            flops_per_token=family_of(run.model).flops_per_token(),
            ranks=world.size,
            peak_flops=peak_flops(run, device),
        )
        self.rate = RunRate()
        self._interval = LogInterval(self.scale, logging.log_throughput)
        self._tensorboard: TensorBoardLog | None = None
        self._metrics: MetricsFile | None = None
        self._wandb: WandbLog | None = None
        self._bar: ProgressBar | None = None
        if world.rank == 0:
            self._open(world.size, begin, consumed_samples)

    def _open(self, ranks: int, begin: int, consumed_samples: int) -> None:
        logging = self._run.logging
        if logging.tensorboard_dir is not None:
            world_size = ranks if logging.log_world_size_to_tensorboard else None
            self._tensorboard = TensorBoardLog.open(logging.tensorboard_dir, begin, consumed_samples, world_size)
            if self._tensorboard is not None:
                changed = [item for item in settings() if item.of(self._run) != item.default]
                names = {item.name for item in changed if item.part in HYPERPARAMETERS and not item.name.startswith(("eval", "exit"))}
                values = {item.name: item.of(self._run) for item in changed}
                self._tensorboard.settings(values, {name: value for name, value in values.items() if name in names})
        if logging.metrics_file is not None:
            self._metrics = MetricsFile.open(logging.metrics_file, begin)
        if logging.wandb_project is not None:
            self._wandb = WandbLog.open(logging.wandb_project, logging.wandb_exp_name, logging.wandb_save_dir, flat_values(self._run))
        if self._console is print and ProgressBar.fits() and begin < self._total:
            self._bar = ProgressBar(begin, self._total)

    def print(self, line: str) -> None:
        """A line on the console."""
        (self._bar.print if self._bar is not None else self._console)(line)

    def wants_exposed(self, iteration: int) -> bool:
        """Whether the waits of step ``iteration`` are to be measured: one step of each log interval, if waiting blocks the host."""
        return self._rank == 0 and self._device.type == "cpu" and iteration % self._run.logging.log_interval == 0

    def step(self, report: StepReport, epoch: float | None = None) -> None:
        """A step is done; ``epoch`` is how often the training data has been read by then."""
        self.rate.add(report)
        self._interval.add(report)
        if self._rank != 0:
            return
        tokens_per_s = self.scale.tokens_per_s(report.batch_size, report.seconds)
        tflops = self.scale.tflops_per_rank(report.batch_size, report.seconds)
        if report.iteration % self._run.logging.log_interval == 0:
            self.print(self._interval.line(report, self._total, datetime.now()))
            self.print(self._interval.speed_line(memory_bytes(self._device)))
            self._interval.clear()
        self._skipped += report.skipped
        if self._tensorboard is not None and report.iteration % self._run.logging.tensorboard_log_interval == 0:
            self._tensorboard.step(report, tflops if self._run.logging.log_throughput else None)
            self._tensorboard.extras(self._extras(report, epoch), report.iteration)
            self._skipped = 0
        if self._tensorboard is not None and report.exposed_s is not None:
            self._tensorboard.extras({"speed/exposed-communication": report.exposed_s / max(report.seconds, 1e-9)}, report.iteration)
        if self._metrics is not None:
            self._metrics.write(self._line(report, tokens_per_s, tflops))
        if self._wandb is not None:
            self._wandb.log(_scalars(report) | {"iteration-time": report.seconds, "throughput": tflops}, report.iteration)
        if self._bar is not None:
            self._bar.step(report, tokens_per_s)

    def validation(self, iteration: int, consumed_samples: int, loss: float, split: str, suffix: str = "") -> None:
        """An evaluation is done on ``split`` (valid or test); ``suffix`` tells several sets of it apart."""
        if split == "valid" and self._tensorboard is not None:
            self._tensorboard.validation(iteration, consumed_samples, loss, suffix)
        if self._metrics is not None:
            values = {"iteration": iteration, "consumed_samples": consumed_samples, "split": split + suffix, "validation_loss": loss}
            self._metrics.write(values)
        if split == "valid" and self._wandb is not None:
            self._wandb.log({"lm loss validation" + suffix: loss}, iteration)

    def timeline(self, path: str, iteration: int) -> None:
        """The picture of a step is drawn."""
        if self._tensorboard is not None:
            self._tensorboard.picture("timeline", path, iteration)

    def close(self) -> None:
        """Bring everything to the disk."""
        for log in (self._tensorboard, self._metrics, self._wandb, self._bar):
            if log is not None:
                log.close()
        self._tensorboard = self._metrics = self._wandb = self._bar = None

    def _extras(self, report: StepReport, epoch: float | None) -> dict[str, float | None]:
        """What TensorBoard gets beside Megatron's scalars; a run's first step is start-up, and its speed stays out."""
        started = report.iteration > self._begin + 1
        return {
            "speed/tokens-per-second": self.scale.tokens_per_s(report.batch_size, report.seconds) if started else None,
            "speed/mfu": self.scale.mfu(report.batch_size, report.seconds) if started else None,
            "speed/data-wait-ms": report.data_seconds * 1e3 if started else None,
            "memory/peak-gib": memory_bytes(self._device) / GIB,
            "progress/skipped-steps": self._skipped,
            "progress/tokens-consumed": report.consumed_samples * self.scale.seq_length,
            "progress/epoch": epoch,
        }

    def _line(self, report: StepReport, tokens_per_s: float, tflops: float) -> dict[str, object]:
        return {
            "iteration": report.iteration,
            "consumed_samples": report.consumed_samples,
            "time": time.time(),
            "lm_loss": None if report.skipped else report.loss,
            "learning_rate": report.learning_rate,
            "grad_norm": report.grad_norm,
            "batch_size": report.batch_size,
            "tokens": report.tokens,
            "resumed": report.iteration == self._begin + 1 > 1,
            "skipped": report.skipped,
            "loss_scale": report.loss_scale,
            "seconds": report.seconds,
            "tokens_per_s": tokens_per_s,
            "tflops_per_rank": tflops,
            "mfu": self.scale.mfu(report.batch_size, report.seconds),
            "data_s": report.data_seconds,
            "exposed_s": report.exposed_s,
            "memory_bytes": memory_bytes(self._device),
            "params_norm": report.params_norm,
            "num_zeros": report.num_zeros,
        }


def _scalars(report: StepReport) -> dict[str, float | None]:
    loss = {} if report.skipped else {"lm loss": report.loss, "grad-norm": report.grad_norm}
    return {
        "learning-rate": report.learning_rate,
        "batch-size": report.batch_size,
        **loss,
        "num-zeros": report.num_zeros,
        "params-norm": report.params_norm,
        "loss-scale": report.loss_scale,
        "samples": report.consumed_samples,
    }


def peak_flops(run: RunConfig, device: torch.device) -> float | None:
    """Dense peak of one rank's device in the dtype that it computes in; None if unknown."""
    if run.logging.peak_tflops is not None:
        return run.logging.peak_tflops * 1e12
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device), run.precision.element_bytes)


def mfu_basis(run: RunConfig, device: torch.device) -> str:
    """What MFU means in this run, or why it is n/a."""
    peak = peak_flops(run, device)
    if peak is None:
        return f"MFU n/a: the peak of this {device.type} is not known; --peak-tflops names it"
    source = (
        "--peak-tflops" if run.logging.peak_tflops is not None else f"{torch.cuda.get_device_name(device)}, {run.precision.params_dtype}"
    )
    return f"MFU of {peak / 1e12:g} TFLOP/s a rank ({source}); {MFU_FORMULA}"


def memory_bytes(device: torch.device) -> float:
    """Most memory that this rank has held so far: allocated on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
