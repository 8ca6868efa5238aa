"""Runs a plan on real process groups, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from domino_lm.model.batch import MicroBatch
from domino_lm.model.stack import Stack
from domino_lm.parallel.buckets import GradientBuckets
from domino_lm.parallel.collectives import LAUNCHERS, Launcher
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.parallel.progress import Cell, Cells, Progress
from domino_lm.parallel.random import DropoutKey
from domino_lm.schedule.binding import Binder, BoundOp, MatrixUpdates, StepState
from domino_lm.schedule.ops import Kind, Op
from domino_lm.schedule.passes import step_templates
from domino_lm.schedule.plan import Plan
from domino_lm.schedule.recorder import Observer
from domino_lm.schedule.validate import validate

NEIGHBOURS = 2
BEFORE_OPS = -1


class StepResult(NamedTuple):
    """What one step left on this rank, as device tensors not yet waited for."""

    loss_sum: Tensor  # [] summed over tokens that count
    tokens: Tensor  # [] how many those were
    masked: Tensor  # [] micro-batches in which no token counts
    found: Sequence[Tensor]  # what ``on_step`` returned


class Executor:
    """Runs whole steps of one validated plan; every rank must hold the same plan.

    ``on_step(loss_sum)`` is the STEP op: it finds reduced gradients in ``main_grad``, or in the buckets' shards, and this rank's
    summed loss [] of the step; what it returns is the result's ``found``. The objective is the mean of micro-batch
    means, or with ``per_token_loss`` the mean over all tokens of the global batch; gradients are those of the objective
    times ``loss_scale`` [], which is read at each step's start. ``launchers`` start tensor-parallel collectives by their names in
    the plan's table; ``progress`` takes the place of each op as it begins. Raises PlanError on an unsound plan.
    """

    def __init__(
        self,
        plan: Plan,
        stack: Stack,
        mesh: ParallelMesh,
        gradients: GradientBuckets,
        on_step: Callable[[Tensor], Sequence[Tensor]] = lambda loss_sum: (),
        *,
        seed: int = 0,
        per_token_loss: bool = False,
        loss_scale: Tensor | None = None,
        launchers: Mapping[str, Launcher] = LAUNCHERS,
        progress: Cells | None = None,
        matrices: MatrixUpdates | None = None,
    ) -> None:
        validate(plan)
        self.plan = plan
        self.stack = stack
        self.mesh = mesh
        self.gradients = gradients
        self.per_token_loss = per_token_loss
        self._loss_scale = loss_scale
        self._seed = seed
        self._iteration = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self._state = StepState()
        self._binder = Binder(plan, stack.parts, mesh, gradients, self._state, on_step, launchers, matrices)
        self._steps: dict[int, list[list[BoundOp]]] = {}
        self._running: list[list[BoundOp]] = []
        self._progress = Progress().cells if progress is None else progress

    @torch.no_grad()
    def run_step(self, micro_batches: Sequence[MicroBatch], iteration: int, recorder: Observer | None = None) -> StepResult:
        """Forward and backward of every micro-batch, gradient reduction, optimizer.

        ``iteration`` seeds dropout together with the run's seed. The host waits for nothing that a device computes.
        """
        self._progress[Cell.TEMPLATE], self._progress[Cell.OP] = 0, BEFORE_OPS
        self.stack.embedding.kernels.invalidate()
        self.gradients.zero_()
        self._iteration.fill_(iteration)
        state = self._state
        state.recorder, state.row_losses, state.found = recorder, [], ()
        tokens = torch.stack([batch.loss_mask.sum() for batch in micro_batches])  # [micro-batches]
        weights = self._loss_weights(tokens) if self._loss_scale is None else self._loss_weights(tokens) * self._loss_scale
        templates = self._running = self.bound_templates(len(micro_batches))
        values = self.empty_slots()
        with torch.autograd.set_multithreading_enabled(False):  # each op's graph is too small to hand to another thread
            for index, template in enumerate(templates):
                self._progress[Cell.TEMPLATE] = index
                batch, weight = (micro_batches[index], weights[index]) if index < len(micro_batches) else (None, None)
                self._pass(template, values, batch, index % 2 if self.plan.interleaved else 0, weight)
        return StepResult(state.loss_sum(), tokens.sum(), (tokens == 0).sum(), state.found)

    def complete_gathers(self) -> None:
        """Wait for parameters still in flight from the last step, before weights are read or written outside a step."""
        for bucket in list(self._state.gathers):
            self._state.gathers.pop(bucket).wait()

    def bound_templates(self, micro_batches: int) -> list[list[BoundOp]]:
        """The step's templates, each distinct one bound once and kept for steps to come."""
        if micro_batches not in self._steps:
            templates = step_templates(self.plan, micro_batches)
            bound: dict[tuple[Op, ...], list[BoundOp]] = {}
            for index, template in enumerate(templates):
                if template not in bound:
                    following = templates[index + 1] if self.plan.interleaved and index + 1 < len(templates) else ()
                    bound[template] = self._binder.bind(template, following)
            self._steps[micro_batches] = [bound[template] for template in templates]
        return self._steps[micro_batches]

    def named(self, rank: int, template: int, position: int) -> tuple[str, Sequence[int] | None]:
        """Name of the op at a place of the running step, and the ranks that ``rank`` waits for in it if it is a wait."""
        everybody = range(self.mesh.world.size)
        if not (0 <= template < len(self._running) and 0 <= position < len(self._running[template])):
            return "the step's start", everybody
        op = self._running[template][position].op
        if op.kind is Kind.STEP:  # which sums the gradient norm
            return str(op), everybody
        return str(op), self.mesh.group_of(rank, op.lane) if op.kind is Kind.WAIT else None

    def empty_slots(self) -> list[Any]:
        """Slots of all values of the templates that are bound."""
        return [None] * len(self._binder.slots)

    def run(self, bound: Sequence[BoundOp], values: list[Any]) -> None:
        """One pass over a template; a failing op is named with its neighbours."""
        observe = _profiler_range if self._state.recorder is None else self._state.recorder.watch
        position, progress, place = 0, self._progress, int(Cell.OP)
        try:
            for position, (op, call, reads, several, writes, frees) in enumerate(bound):
                progress[place] = position
                given: dict[str, Any] = {role: values[slot] for role, slot in reads}
                for role, slots in several:
                    given[role] = [values[slot] for slot in slots]
                with observe(op):
                    made = call(**given)
                if made is not None:
                    for role, slot in writes:
                        values[slot] = made[role]
                for slot in frees:
                    values[slot] = None
        except Exception as error:
            around = bound[max(0, position - NEIGHBOURS) : position + NEIGHBOURS + 1]
            error.add_note(
                f"in op {position} of {len(bound)}, {bound[position].op} (rank {self.mesh.world.rank}), "
                f"among: {', '.join(str(step.op) for step in around)}"
            )
            raise

    def _pass(self, template: list[BoundOp], values: list[Any], batch: MicroBatch | None, micro: int, weight: Tensor | None) -> None:
        """One pass over a template; ``batch`` is the micro-batch that begins in it, if one does."""
        if batch is not None and weight is not None:
            self._cut(batch, micro, weight)
        self.run(template, values)

    def _cut(self, batch: MicroBatch, micro: int, weight: Tensor) -> None:
        """Rows of a micro-batch, and under sequence parallelism this rank's share of each."""
        slicing, tp = self.plan.slicing, self.mesh.tp
        rows = batch.whole(weight, self._dropout_key(batch)).cut(slicing.row_sizes, slicing.sequence_rows)
        self._state.rows[micro] = rows
        self._state.shares[micro] = [row.shard(tp.rank, tp.size) for row in rows] if slicing.sequence_parallel else rows

    def _loss_weights(self, tokens: Tensor) -> Tensor:
        """Derivative of the objective by a token's loss, for each micro-batch, from its ``tokens`` that count.

        Data-parallel ranks sum their gradients, so the mean over ranks is taken here.
        """
        if self.per_token_loss:
            total = self.mesh.dp.all_reduce(tokens.sum()).clamp_min(1)
            return (1 / total).expand(tokens.shape)
        return 1 / (tokens.clamp_min(1) * (tokens.shape[0] * self.mesh.dp.size))

    def _dropout_key(self, batch: MicroBatch) -> DropoutKey:
        length, size = batch.tokens.shape
        samples = torch.arange(batch.sample_offset, batch.sample_offset + size, device=self.mesh.device)
        return DropoutKey(self._seed, self._iteration, samples, torch.arange(length, device=self.mesh.device))


def _profiler_range(op: Op) -> AbstractContextManager[Any]:
    """The op's name in a profile, at no cost if nobody profiles."""
    return torch.profiler.record_function(str(op)) if torch._C._autograd._profiler_enabled() else nullcontext()
