"""The curves of a run that is over or still goes on, from what it wrote. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from domino_lm.training.metrics_file import read_lines

PANELS = {
    "lm_loss": "loss (nats per token)",
    "learning_rate": "learning rate of the next step",
    "grad_norm": "gradient norm, before clipping",
    "tokens_per_s": "throughput (tokens/s over all ranks)",
}
TAGS = {"lm loss": "lm_loss", "learning-rate": "learning_rate", "grad-norm": "grad_norm", "lm loss validation": "validation_loss"}
"""What TensorBoard calls them. Tokens a second are no tag; a run that wants them writes a metrics file."""

Point = tuple[int, int | None, float]


class RunCurvesError(ValueError):
    """A file or folder that holds no curves; the message names it and what would."""


@dataclass(frozen=True)
class RunCurves:
    """Quantities of one run by name, each a list of iteration, samples and value."""

    values: Mapping[str, list[Point]]

    def points(self, quantity: str, along: str) -> list[tuple[int, float]]:
        """The values of one quantity along ``iteration`` or ``samples``; empty where the run has none."""
        number = 0 if along == "iteration" else 1
        return [(point[number], point[2]) for point in self.values.get(quantity, ()) if point[number] is not None]  # type: ignore[misc]


def read_run(path: Path) -> RunCurves:
    """Curves of a metrics file, or of a folder with TensorBoard events. Raises RunCurvesError where there are none."""
    values = _from_events(path) if path.is_dir() else _from_lines(path)
    if not values:
        raise RunCurvesError(f"{path} holds no step of a run; give what --metrics-file or --tensorboard-dir wrote.")
    return RunCurves(values)


def _from_lines(path: Path) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    try:
        lines = read_lines(path)
    except (OSError, UnicodeDecodeError) as error:
        raise RunCurvesError(f"{path} cannot be read: {error}.") from error
    for line in lines:
        if not isinstance(line, dict) or "iteration" not in line:
            continue
        names = [*PANELS] if "lm_loss" in line else ["validation_loss"] if line.get("split") == "valid" else []
        for name in names:
            if line.get(name) is not None:
                found.setdefault(name, []).append((line["iteration"], line.get("consumed_samples"), line[name]))
    return found


def _from_events(folder: Path) -> dict[str, list[Point]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    present = set(events.Tags()["scalars"])
    found: dict[str, list[Point]] = {}
    for tag in [tag for tag in TAGS if tag in present]:
        samples = events.Scalars(f"{tag} vs samples") if f"{tag} vs samples" in present else []
        steps = [event.step for event in samples] or [None] * len(events.Scalars(tag))
        found[TAGS[tag]] = [(event.step, at, event.value) for event, at in zip(events.Scalars(tag), steps, strict=False)]
    return found
