"""TensorBoard events under Megatron's tags, and beside them what else a run tells, in groups."""

import os
import struct
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from domino_lm.watch.metrics import StepReport, perplexity

SAMPLES_SUFFIX = " vs samples"
TEXT_SUFFIX = "/text_summary"
LAYOUT = {
    "training": {
        "loss": ["Multiline", [r"^lm loss$", r"^lm loss validation(-\d+)?$"]],
        "gradient norm": ["Multiline", ["^grad-norm$"]],
        "learning rate": ["Multiline", ["^learning-rate$"]],
        "steps skipped since the last point": ["Multiline", ["^progress/skipped-steps$"]],
        "epochs": ["Multiline", ["^progress/epoch$"]],
    },
    "speed": {
        "tokens per second": ["Multiline", ["^speed/tokens-per-second$"]],
        "MFU": ["Multiline", ["^speed/mfu$"]],
        "share of a step that waits for communication": ["Multiline", ["^speed/exposed-communication$"]],
        "ms of a step that wait for data": ["Multiline", ["^speed/data-wait-ms$"]],
        "peak memory of rank 0, GiB": ["Multiline", ["^memory/peak-gib$"]],
    },
}
"""The page of custom scalars: charts by group, each with patterns of its tags."""

RESULTS = ("lm loss", "lm loss validation", "speed/tokens-per-second")
"""What the page of hyperparameters shows of a run beside its settings."""


class TensorBoardLog:
    """Scalars under Megatron's tags, and others that have a / in theirs. One rank holds one; a disk that fails turns it off with a warning."""

    def __init__(self, writer: Any, iteration: int, world_size: int | None = None) -> None:
        self._writer = writer
        self._begin = iteration
        self._world_size = world_size

    @classmethod
    def open(cls, folder: str, iteration: int, consumed_samples: int, world_size: int | None = None) -> Self | None:
        """Write events into ``folder``, made if it is missing; points beyond ``iteration``, of the run that is now resumed, are removed.

        ``world_size`` is recorded if it is given. None, with a warning, if the folder cannot be written.
        """
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and one rank needs it

        silence_writer()
        try:
            os.makedirs(folder, exist_ok=True)
            if iteration:
                drop_later_points(folder, iteration, consumed_samples)
            return cls(SummaryWriter(log_dir=folder), iteration, world_size)
        except OSError as error:
            warnings.warn(f"--tensorboard-dir {folder} cannot be written ({error}); training goes on without it.", stacklevel=2)
            return None

    def settings(self, values: Mapping[str, object], hyperparameters: Mapping[str, object] | None = None) -> None:
        """Record ``values`` as one text and some of them as ``hyperparameters``, at the step that the run begins with; lay charts out."""
        from torch.utils.tensorboard.summary import hparams

        table = "\n".join(["| setting | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())])
        plain = {name: value if type(value) in (int, float) else str(value) for name, value in (hyperparameters or {}).items()}

        def write() -> None:
            self._writer.add_text("settings", table, self._begin)
            for summary in hparams(plain, dict.fromkeys(RESULTS, 0)):
                self._writer.file_writer.add_summary(summary, self._begin)
            self._writer.add_custom_scalars(LAYOUT)

        self._guard(write)

    def step(self, report: StepReport, throughput: float | None = None) -> None:
        """Record one training step, with TFLOP/s per rank if asked; the time of a run's first step is start-up and stays out."""
        values: dict[str, float | None] = {"learning-rate": report.learning_rate, "batch-size": report.batch_size}
        if not report.skipped:
            values |= {"lm loss": report.loss, "grad-norm": report.grad_norm}
        values |= {
            "loss-scale": report.loss_scale,
            "num-zeros": report.num_zeros,
            "params-norm": report.params_norm,
            "world-size": self._world_size,
        }
        self._scalars({tag: value for tag, value in values.items() if value is not None}, report.iteration, report.consumed_samples)
        timed = {"throughput": throughput} if throughput is not None else {}
        if report.iteration > self._begin + 1:
            timed["iteration-time"] = report.seconds
        self._guard(lambda: [self._writer.add_scalar(tag, value, report.iteration) for tag, value in timed.items()])

    def validation(self, iteration: int, consumed_samples: int, loss: float, suffix: str = "") -> None:
        """Record one evaluation on the validation split; ``suffix`` tells several sets apart."""
        values = {f"lm loss validation{suffix}": loss, f"lm loss validation{suffix} ppl": perplexity(loss)}
        self._scalars(values, iteration, consumed_samples)

    def extras(self, values: Mapping[str, float | None], iteration: int) -> None:
        """Record those of ``values`` that are known; their tags are group/name."""
        known = {tag: value for tag, value in values.items() if value is not None}
        self._guard(lambda: [self._writer.add_scalar(tag, value, iteration) for tag, value in known.items()])

    def picture(self, tag: str, path: str, iteration: int) -> None:
        """Record a PNG file as it is."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        def write() -> None:
            png = Path(path).read_bytes()
            width, height = struct.unpack(">II", png[16:24])
            image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
            self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), iteration)

        self._guard(write)

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


def silence_writer() -> None:
    """Keep what the disk does to TensorBoard's own thread from being printed: the next call gets the same error, and warns of it."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if not (isinstance(args.exc_value, OSError) and type(args.thread).__module__.startswith("tensorboard.")):
            before(args)

    if getattr(before, "__qualname__", "") != hook.__qualname__:  # once for a process
        threading.excepthook = hook


def drop_later_points(folder: str, iteration: int, consumed_samples: int) -> None:
    """Rewrite the event files of ``folder`` without scalars beyond ``iteration``, or beyond ``consumed_samples`` if that is their axis.

    TensorBoard's own purge knows one axis only. Each file is replaced whole, and only if it holds such a point.
    """
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.summary.writer.record_writer import RecordWriter

    for path in sorted(Path(folder).glob("events.out.tfevents.*")):
        events = list(LegacyEventFileLoader(str(path)).Load())
        kept = list(_without_later(events, iteration, consumed_samples))
        if len(kept) == len(events):
            continue
        beside = path.with_name(".trimmed")  # a name that TensorBoard does not read
        try:
            with open(beside, "wb") as file:
                writer = RecordWriter(file)
                for event in kept:
                    writer.write(event.SerializeToString())
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def _without_later(events: Iterable[Any], iteration: int, consumed_samples: int) -> Iterator[Any]:
    for event in events:
        tags = [value.tag for value in event.summary.value]
        if any(tag.endswith(TEXT_SUFFIX) for tag in tags):
            limit = iteration - 1  # the resumed run writes its own at `iteration`
        else:
            limit = consumed_samples if any(tag.endswith(SAMPLES_SUFFIX) for tag in tags) else iteration
        if not tags or event.step <= limit:
            yield event
