"""What ``--dump-on-nan`` leaves of a step that is not finite: where it began, and all that is needed to run it again.

The step is run once more, since it has changed no weight, and every op's output is looked at; steps that are finite pay nothing.
``report.json`` says which op was the first. ``config.toml``, each rank's micro-batches, and the weights of the replica in which
it began are what ``domino-lm-verify --replay`` runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from domino_lm.checkpoint.source import softmax_rows_of
from domino_lm.config.settings import ConfigError, RunConfig
from domino_lm.config.toml_file import CONFIG_NAME, config_text
from domino_lm.model.batch import MicroBatch
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.inspection import Finding, InspectingExecutor
from domino_lm.training.nan_report import REPORT_FILE, RankSamples, describe, report_text
from domino_lm.training.optimizer import Optimizer
from domino_lm.watch.metrics import StepReport

TENSORS = [item.name for item in fields(MicroBatch) if item.name != "sample_offset"]


@dataclass(frozen=True)
class PastStep:
    """A step as this rank ran it."""

    number: int
    """Steps before it, which seeds its dropout."""

    micro_batches: Sequence[MicroBatch]

    loss_scale: float | None
    """The one under which it ran."""


def look_at(step: PastStep, run: RunConfig, executor: Executor, optimizer: Optimizer) -> list[Finding | None]:
    """Run a step again without an update; what each rank of the world finds, in rank order. Every rank calls, with its own share."""
    executor.complete_gathers()
    mesh, scale = executor.mesh, None
    if step.loss_scale is not None:
        scale = torch.full((), step.loss_scale, dtype=torch.float32, device=mesh.device)
    inspecting = InspectingExecutor(
        executor.plan,
        executor.stack,
        mesh,
        executor.gradients,
        lambda loss_sum: [loss_sum, optimizer.gradient_norm()],
        seed=run.training.seed,
        per_token_loss=run.training.calculate_per_token_loss,
        loss_scale=scale,
    )
    inspecting.run_step(step.micro_batches, step.number)
    inspecting.complete_gathers()
    return mesh.world.all_gather_object(inspecting.finding)


class NanDump:
    """Writes the first step of this run that is not finite. Every rank holds one and calls alike."""

    def __init__(self, folder: str, run: RunConfig, executor: Executor, optimizer: Optimizer) -> None:
        self._folder, self._run, self._executor, self._optimizer = Path(folder), run, executor, optimizer
        self._done = False

    def write(self, step: PastStep, report: StepReport, samples: Sequence[Sequence[int]]) -> str:
        """Look at a step whose micro-batches hold ``samples``, and write what is found; what to say of it, nothing if an earlier step
        has been written. A disk that fails is part of what is said."""
        if self._done:
            return ""
        self._done = True
        mesh, stack = self._executor.mesh, self._executor.stack
        findings = look_at(step, self._run, self._executor, self._optimizer)
        mine = RankSamples(mesh.dp.rank, mesh.tp.rank, [[int(number) for number in numbers] for numbers in samples])
        described = describe(
            findings,
            mesh.world.all_gather_object(mine),
            self._executor.plan.slicing,
            iteration=report.iteration,
            loss=report.loss,
            grad_norm=report.grad_norm,
            loss_scale=step.loss_scale,
            steps_before=step.number,
            softmax_rows=softmax_rows_of(stack),
        )
        weights = stack.parameters() if mesh.dp.rank == described["weights_of_replica"] else []
        folder = self._folder / f"iter_{report.iteration:07d}"
        faults = mesh.world.all_gather_object(_save(folder, mesh.world.rank, to_tensors(step.micro_batches, weights)))
        if mesh.world.rank == 0 and not any(faults):
            try:
                (folder / CONFIG_NAME).write_text(config_text(self._run), encoding="utf-8")
                (folder / REPORT_FILE).write_text(json.dumps(described, indent=1), encoding="utf-8")  # last: it says that all is there
            except OSError as error:
                faults = [str(error)]
        fault = next(filter(None, faults), None)
        said = f"warning: nothing was written: {fault}" if fault else f"domino-lm-verify --replay {folder} shows it again"
        return f"{report_text(described)}\n--dump-on-nan: {said}"


def _save(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> str | None:
    """Write a rank's file, and take away the report of an older dump; what went wrong, if something did."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REPORT_FILE).unlink(missing_ok=True)
        save_file({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}, folder / rank_file(rank))
    except (OSError, SafetensorError) as error:
        return f"rank {rank}: {error}"
    return None


def rank_file(rank: int) -> str:
    """Name of the file with a rank's tensors."""
    return f"rank_{rank:05d}.safetensors"


def to_tensors(micro_batches: Sequence[MicroBatch], weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """What a rank's file holds: ``batch.{number}.{field}``, and ``weight.{name}`` of parameters."""
    found = {f"weight.{weight.spec.name}": weight for weight in weights}  # type: ignore[attr-defined]
    for number, batch in enumerate(micro_batches):
        values = {name: getattr(batch, name) for name in TENSORS} | {"sample_offset": torch.tensor(batch.sample_offset)}
        found |= {f"batch.{number}.{name}": value for name, value in values.items() if value is not None}
    return found


def from_tensors(found: Mapping[str, Tensor]) -> tuple[list[MicroBatch], dict[str, Tensor]]:
    """The micro-batches of a rank's file, in order, and its weights by name."""
    count = sum(name.startswith("batch.") and name.endswith(".tokens") for name in found)
    batches = [
        MicroBatch(
            **{name: found.get(f"batch.{number}.{name}") for name in TENSORS},  # type: ignore[arg-type]
            sample_offset=int(found[f"batch.{number}.sample_offset"]),
        )
        for number in range(count)
    ]
    return batches, {name.removeprefix("weight."): value for name, value in found.items() if name.startswith("weight.")}


def read_rank(folder: Path, rank: int, device: torch.device) -> tuple[list[MicroBatch], dict[str, Tensor]]:
    """What a rank has written. Raises ConfigError if its file is missing or damaged."""
    path = folder / rank_file(rank)
    try:
        return from_tensors(load_file(path, device=str(device)))
    except (OSError, SafetensorError, LookupError) as error:
        raise ConfigError(f"--replay {path} cannot be read ({error}); bring the files of all nodes into one folder.") from error
