"""The curves of a run that is over or still goes on, from what it wrote. Nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from domino_lm.watch.metrics_file import read_lines

PANELS = {
    "lm_loss": "loss (nats per token)",
    "learning_rate": "learning rate of the next step",
    "grad_norm": "gradient norm, before clipping",
    "tokens_per_s": "throughput (tokens/s over all ranks)",
}
TAGS = {"lm loss": "lm_loss", "learning-rate": "learning_rate", "grad-norm": "grad_norm"}
"""Their TensorBoard tags. Tokens per second have none; they come from a metrics file."""

VALIDATION = "validation_loss"
"""Of several validation sets each has a number behind this name: ``validation_loss-0``."""

VALIDATION_TAG = re.compile(r"lm loss validation(-\d+)?")

Point = tuple[int, int | None, float]


class RunCurvesError(ValueError):
    """A file or folder that holds no curves; the message names it and what would."""


@dataclass(frozen=True)
class RunCurves:
    """Quantities of one run by name, each a list of iteration, samples and value."""

    values: Mapping[str, list[Point]]
    resumes: Sequence[tuple[int, int | None]] = ()
    """Iteration and samples after which the run was started again."""

    @property
    def evaluations(self) -> list[str]:
        """Quantities that are losses on validation sets."""
        return sorted(name for name in self.values if name.startswith(VALIDATION))

    def resumed_at(self, along: str) -> list[int]:
        """Where the run was started again, along ``iteration`` or ``samples``."""
        return [at for pair in self.resumes if (at := pair[along != "iteration"]) is not None]

    def points(self, quantity: str, along: str) -> list[tuple[int, float]]:
        """The values of one quantity along ``iteration`` or ``samples``; empty if the run has none."""
        number = 0 if along == "iteration" else 1
        return [(point[number], point[2]) for point in self.values.get(quantity, ()) if point[number] is not None]  # type: ignore[misc]


def read_run(path: Path) -> RunCurves:
    """Curves of a metrics file, or of a folder with TensorBoard events. Raises RunCurvesError if there are none."""
    run = _from_events(path) if path.is_dir() else _from_lines(path)
    if not run.values:
        raise RunCurvesError(f"{path} holds no step of a run; give what --metrics-file or --tensorboard-dir wrote.")
    return run


def _from_lines(path: Path) -> RunCurves:
    found: dict[str, list[Point]] = {}
    resumes: list[tuple[int, int | None]] = []
    try:
        lines = read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RunCurvesError(f"{path} cannot be read: {error}.") from error
    for line in lines:
        if not isinstance(line, dict) or "iteration" not in line:
            continue
        iteration, samples, split = line["iteration"], line.get("consumed_samples"), str(line.get("split", ""))
        if "lm_loss" in line:
            values = {name: line.get(name) for name in PANELS}
        else:
            values = {VALIDATION + split.removeprefix("valid"): line.get(VALIDATION)} if split.startswith("valid") else {}
        if line.get("resumed"):
            resumes.append((iteration - 1, None if samples is None else samples - line.get("batch_size", 0)))
        for name, value in values.items():
            if value is not None:
                found.setdefault(name, []).append((iteration, samples, value))
    return RunCurves(found, resumes)


def _from_events(folder: Path) -> RunCurves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    present = set(events.Tags()["scalars"])
    names = {tag: name for tag, name in TAGS.items() if tag in present}
    names |= {tag: VALIDATION + (match[1] or "") for tag in present if (match := VALIDATION_TAG.fullmatch(tag))}
    found: dict[str, list[Point]] = {}
    for tag, name in names.items():
        samples = events.Scalars(f"{tag} vs samples") if f"{tag} vs samples" in present else []
        steps = [event.step for event in samples] or [None] * len(events.Scalars(tag))
        found[name] = [(event.step, at, event.value) for event, at in zip(events.Scalars(tag), steps, strict=False)]
    samples_after = {iteration: samples for iteration, samples, _ in found.get("learning_rate", ())}
    texts = [tag for tag in events.Tags()["tensors"] if tag.endswith("/text_summary")]  # every start writes its settings
    begins = {event.step for event in events.Tensors(texts[0])} if texts else set()
    return RunCurves(found, [(begin, samples_after.get(begin)) for begin in sorted(begins) if begin])
