"""Answers "is my parallel run right?": the same steps on one rank, on the requested layout, and under the requested schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from domino_lm.config.settings import ModelConfig, RunConfig, ScheduleConfig
from domino_lm.model.batch import MicroBatch
from domino_lm.model.build import build_stack
from domino_lm.model.families.lookup import family_of
from domino_lm.model.stack import Stack
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.prepare import prepare_plan
from domino_lm.training.optimizer import Optimizer

NORMAL = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Relative differences that rounding alone makes over a few steps; a wrong collective makes 1e-2 and more.

Gradients pass through a clip whose scale the optimizer takes in fp32, hence 1e-9 and not 1e-12 in float64.
"""

WORST_SHOWN = 3
BASELINE = ScheduleConfig(schedule="baseline")
MakeBatches = Callable[[ParallelMesh, int], Sequence[MicroBatch]]


@dataclass(frozen=True)
class Steps:
    """Results of a few steps of one way to run; the same on every rank."""

    losses: list[float]
    """Mean loss of each step's tokens."""

    norms: list[float]
    """Gradient norm of each step."""

    gradients: dict[str, Tensor]
    """Unsharded gradients of the first step, by name, on rank 0; empty elsewhere."""


@dataclass(frozen=True)
class Comparison:
    """How far one way to run lies from the reference, as relative differences."""

    name: str
    loss: float
    norm: float
    tensors: dict[str, float]
    """max|a - b| / max|b| of each gradient of the first step; one that is zero in the reference is left out."""

    @property
    def worst(self) -> list[tuple[str, float]]:
        """Tensors that differ most."""
        return sorted(self.tensors.items(), key=lambda item: -item[1])[:WORST_SHOWN]

    def is_normal(self, tolerance: float) -> bool:
        """Whether rounding explains every difference; never if one is NaN."""
        return all(difference <= tolerance for difference in (self.loss, self.norm, *self.tensors.values()))


def run_steps(run: RunConfig, mesh: ParallelMesh, schedule: ScheduleConfig, batches: MakeBatches, steps: int, dtype: torch.dtype) -> Steps:
    """Train ``steps`` steps at the peak learning rate from the run's initial weights; ``batches(mesh, step)`` is this rank's share."""
    stack = build_stack(run.model, mesh.tp, run.training.seed, dtype, mesh.device)
    plan, gradients = prepare_plan(stack, mesh, schedule, run.training.micro_batch_size, run.model.seq_length)
    optimizer = Optimizer(stack.parameters(), run.optimizer, mesh.tp, gradients=gradients, world=mesh.world)
    first: list[Tensor] = []

    def update(loss_sum: Tensor) -> list[Tensor]:
        if not first:
            first.extend(gradients.whole(stack.parameters()))
        return [optimizer.step(run.optimizer.lr).grad_norm]

    executor = Executor(plan, stack, mesh, gradients, update, seed=run.training.seed, per_token_loss=run.training.calculate_per_token_loss)
    losses, norms = [], []
    for step in range(steps):
        made = executor.run_step(batches(mesh, step), step)
        total, tokens = mesh.dp.all_reduce(torch.stack([made.loss_sum.double(), made.tokens.double()])).tolist()
        losses.append(total / max(tokens, 1))
        norms += [float(norm) for norm in made.found]
    return Steps(losses, norms, _unsharded(stack, mesh, first))


def compare(name: str, found: Steps, reference: Steps) -> Comparison:
    """Largest relative differences of ``found``."""
    tensors = {}
    for key, expected in reference.gradients.items():
        scale = expected.abs().max().item()
        if scale > 0:
            tensors[key] = (found.gradients[key] - expected).abs().max().item() / scale
    return Comparison(name, _furthest(found.losses, reference.losses), _furthest(found.norms, reference.norms), tensors)


def _furthest(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference; NaN if any is."""
    differences = [abs(a - b) / max(abs(b), 1e-30) for a, b in zip(found, expected, strict=True)]
    return max(differences, key=lambda difference: (difference != difference, difference))


def verify(run: RunConfig, mesh: ParallelMesh, batches: MakeBatches, steps: int, dtype: torch.dtype) -> tuple[str, bool]:
    """A report for rank 0 to print, and whether all is normal, the same on every rank.

    Rank 0 runs alone what one rank would do with the whole global batch, at the sizes of ``run``; then all ranks run the
    requested layout, once in Megatron's order and once under the requested schedule.
    """
    single = ParallelMesh.single(mesh.device)
    alone = run_steps(run, single, BASELINE, batches, steps, dtype) if mesh.world.rank == 0 else None
    layout = run_steps(run, mesh, replace(BASELINE, ddp_bucket_size=run.schedule.ddp_bucket_size), batches, steps, dtype)
    asked = run_steps(run, mesh, run.schedule, batches, steps, dtype)
    if alone is None:
        return "", bool(mesh.world.broadcast_object(None))
    name = f"TP {mesh.tp.size} x DP {mesh.dp.size}"
    comparisons = [compare(f"{name}, baseline", layout, alone), compare(f"{name}, as asked", asked, alone)]
    normal = all(comparison.is_normal(NORMAL[dtype]) for comparison in comparisons)
    mesh.world.broadcast_object(normal)
    return _report(alone, [layout, asked], comparisons, dtype, normal), normal


def cut_down(model: ModelConfig, largest: int) -> ModelConfig:
    """``model`` with as many layers as keep it under ``largest`` parameters, at least one."""
    one, two = (family_of(replace(model, num_layers=layers)).parameter_count() for layers in (1, 2))
    return replace(model, num_layers=max(1, min(model.num_layers, 1 + (largest - one) // (two - one))))


def _unsharded(stack: Stack, mesh: ParallelMesh, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
    """Whole gradients on rank 0, tensor by tensor, so that no rank holds all shards at once."""
    whole = {}
    for parameter, gradient in zip(stack.parameters(), gradients, strict=True):
        shards = mesh.tp.all_gather_object(gradient.cpu())
        if mesh.world.rank == 0:
            whole[parameter.spec.name] = parameter.spec.unshard(shards)[: parameter.spec.vocab_rows]
    return whole


def _report(alone: Steps, others: Sequence[Steps], comparisons: Sequence[Comparison], dtype: torch.dtype, normal: bool) -> str:
    names = ["one rank, baseline", *(comparison.name for comparison in comparisons)]
    width = max(map(len, names))
    lines = [f"{'':{width}}  {'last loss':>14} {'gradient norm':>14} {'loss off by':>12} {'norm off by':>12}"]
    lines.append(f"{names[0]:{width}}  {alone.losses[-1]:14.8f} {alone.norms[-1]:14.8f}")
    for name, steps, found in zip(names[1:], others, comparisons, strict=True):
        lines.append(f"{name:{width}}  {steps.losses[-1]:14.8f} {steps.norms[-1]:14.8f} {found.loss:12.1e} {found.norm:12.1e}")
    for found in comparisons:
        lines.append(f"gradients that differ most, {found.name}:")
        lines += [f"  {difference:8.1e}  {name}" for name, difference in found.worst]
    kind = str(dtype).removeprefix("torch.")
    lines.append(f"normal for {kind}: relative differences up to {NORMAL[dtype]:.0e}")
    lines.append("all is normal" if normal else "NOT NORMAL: rounding does not explain these differences")
    return "\n".join(lines)
