"""Runs a plan on real process groups: ops are bound to callables once, values travel in slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from domino_lm.model.batch import MicroBatch, Row, RowContext
from domino_lm.model.stack import Stack
from domino_lm.parallel.collectives import Pending
from domino_lm.parallel.grads import GradientBuckets
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.parallel.random import DropoutKey
from domino_lm.schedule.ops import COMPUTE, Kind, Op, Value, dataflow
from domino_lm.schedule.plan import Plan, without_reduction
from domino_lm.schedule.timeline import Span
from domino_lm.schedule.validate import validate

NEIGHBOURS = 2


class BoundOp(NamedTuple):
    """An op, its callable, and the slots that it reads, writes and empties."""

    op: Op
    call: Callable[..., tuple[Any, ...]]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    frees: tuple[int, ...]


class StepLoss(NamedTuple):
    """What one step's micro-batches lost on this rank, as device tensors that nobody has waited for."""

    loss_sum: Tensor  # [] summed over tokens that count
    tokens: Tensor  # [] how many those were


@dataclass
class Recorder:
    """Collects the spans of one step: ops by host time, collectives from start to completion."""

    spans: list[Span] = field(default_factory=list)

    @contextmanager
    def watch(self, op: Op) -> Iterator[None]:
        """Time one op on the compute lane."""
        start_s = time.perf_counter()
        yield
        self.spans.append(Span(str(op), COMPUTE, start_s, time.perf_counter()))

    def follow(self, op: Op, pending: Pending) -> None:
        """Note when a started collective completes, on its link's lane."""
        start_s = time.perf_counter()
        pending.on_completion(lambda: self.spans.append(Span(str(op), op.lane, start_s, time.perf_counter())))


class Executor:
    """Runs whole steps of one validated plan; every rank must hold the same plan.

    The plan covers one micro-batch and the step's end. Micro-batches before the last run it without the end.
    ``on_step`` is the STEP op: it finds reduced gradients in ``main_grad``. The objective is the mean of micro-batch
    means, or with ``per_token_loss`` the mean over all tokens of the global batch. Raises PlanError on an unsound plan.
    """

    def __init__(
        self,
        plan: Plan,
        stack: Stack,
        mesh: ParallelMesh,
        gradients: GradientBuckets,
        on_step: Callable[[], None],
        *,
        seed: int = 0,
        per_token_loss: bool = False,
    ) -> None:
        validate(plan)
        self.plan = plan
        self.mesh = mesh
        self.gradients = gradients
        self.per_token_loss = per_token_loss
        self._parts: Sequence[Any] = stack.parts
        self._on_step = on_step
        self._seed = seed
        self._step = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self._columns = _column_slices(stack.embedding.weight.shape[1], plan.slicing.cols)
        self._rows: list[Row] = []
        self._row_losses: list[Tensor] = []
        self._recorder: Recorder | None = None
        self._last = self._bind_all(plan)
        self._template = self._bind_all(without_reduction(plan))

    @torch.no_grad()
    def run_step(self, micro_batches: Sequence[MicroBatch], iteration: int, recorder: Recorder | None = None) -> StepLoss:
        """Forward and backward of every micro-batch, gradient reduction, optimizer.

        ``iteration`` seeds dropout together with the run's seed. The host waits for nothing that a device computes.
        """
        self.gradients.zero_()
        self._step.fill_(iteration)
        self._recorder = recorder
        self._row_losses = []
        tokens = torch.stack([batch.loss_mask.sum() for batch in micro_batches])  # [micro-batches]
        weights = self._loss_weights(tokens)
        for index, batch in enumerate(micro_batches):
            self._rows = batch.rows(self.plan.slicing.row_sizes, weights[index], self._dropout_key(batch))
            self._run(self._last if index == len(micro_batches) - 1 else self._template)
        return StepLoss(torch.stack(self._row_losses).sum(), tokens.sum())

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
        return DropoutKey(self._seed, self._step, samples, torch.arange(length, device=self.mesh.device))

    def _run(self, bound: Sequence[BoundOp]) -> None:
        """One pass over the plan; a failing op is named with its neighbours."""
        values: list[Any] = [None] * self._slots
        observe = self._recorder.watch if self._recorder is not None else _profiler_range
        position = 0
        try:
            for position, (op, call, reads, writes, frees) in enumerate(bound):  # noqa: B007
                with observe(op):
                    results = call(*[values[slot] for slot in reads])
                for slot, value in zip(writes, results, strict=True):
                    values[slot] = value
                for slot in frees:
                    values[slot] = None
        except Exception as error:
            around = bound[max(0, position - NEIGHBOURS) : position + NEIGHBOURS + 1]
            error.add_note(
                f"in op {position} of {len(bound)}, {bound[position].op} (rank {self.mesh.world.rank}), "
                f"among: {', '.join(str(step.op) for step in around)}"
            )
            raise

    def _bind_all(self, plan: Plan) -> list[BoundOp]:
        """Give every value a slot and every op its callable; a slot is emptied by the last op that reads it."""
        flows = [dataflow(op, plan.slicing) for op in plan.ops]
        slots: dict[Value, int] = {}
        last_use: dict[Value, int] = {}
        for position, (reads, writes) in enumerate(flows):
            for value in (*reads, *writes):
                slots.setdefault(value, len(slots))
                last_use[value] = position
        self._slots = max(len(slots), getattr(self, "_slots", 0))
        return [
            BoundOp(
                op,
                self._bind(op),
                tuple(slots[value] for value in reads),
                tuple(slots[value] for value in writes),
                tuple(slots[value] for value in {*reads, *writes} if last_use[value] == position),
            )
            for position, (op, (reads, writes)) in enumerate(zip(plan.ops, flows, strict=True))
        ]

    def _bind(self, op: Op) -> Callable[..., tuple[Any, ...]]:
        """The callable of an op; it takes what `dataflow` says it reads and returns what it writes, in that order."""
        if op.kind is Kind.START:
            return self._bind_start(op)
        if op.kind is Kind.WAIT:
            return lambda pending: (pending.wait(),)
        if op.kind is Kind.STEP:
            return self._finish
        part = self._parts[op.part]
        bind = {
            Kind.LOCAL: self._bind_local,
            Kind.BODY: self._bind_body,
            Kind.TAIL: self._bind_tail,
            Kind.WGRAD: self._bind_wgrad,
            Kind.LOSS: self._bind_loss,
        }[op.kind]
        return bind(op, part)

    def _bind_start(self, op: Op) -> Callable[..., tuple[Any, ...]]:
        if op.phase == "S":
            flat = self.gradients.buckets[op.part].flat
            launch: Callable[..., Pending] = lambda *_: self.mesh.dp.all_reduce_start(flat)  # noqa: E731
        elif op.collective == "statistics":
            launch = self.mesh.tp.all_gather_start
        else:
            launch = self.mesh.tp.all_reduce_start

        def start(*reads: Any) -> tuple[Any, ...]:
            pending = launch(*reads)
            if self._recorder is not None:
                self._recorder.follow(op, pending)
            return (pending,)

        return start

    def _bind_local(self, op: Op, part: Any) -> Callable[..., tuple[Any, ...]]:
        cols = self.plan.slicing.cols

        def forward(*reads: Any) -> tuple[Any, ...]:
            ctx = RowContext(self._rows[op.row])
            branch, residual = _assemble(reads[:cols]), reads[cols] if len(reads) > cols else None
            normed, hidden = part.local(branch, residual, ctx)
            return (normed, ctx, hidden)[: 3 if has_residual else 2]

        def backward(ctx: RowContext, *reads: Any) -> tuple[Any, ...]:
            d_normed, d_residual = _assemble(reads[:cols]), reads[cols] if len(reads) > cols else None
            d_branch, d_hidden = part.local_grad(d_normed, d_residual, ctx)
            return (d_branch, None, d_hidden)[: 3 if has_residual else 2]

        has_residual = len(dataflow(op, self.plan.slicing)[1]) == 3
        return forward if op.phase == "F" else backward

    def _bind_body(self, op: Op, part: Any) -> Callable[..., tuple[Any, ...]]:
        def forward(x: Tensor | None = None) -> tuple[Any, ...]:
            ctx = RowContext(self._rows[op.row])
            return part.body(x, ctx), ctx

        def backward(ctx: RowContext, dy: Tensor) -> tuple[Any, ...]:
            return (part.body_grad(dy, ctx),)

        return forward if op.phase == "F" else backward

    def _bind_tail(self, op: Op, part: Any) -> Callable[..., tuple[Any, ...]]:
        columns = self._columns[op.col]
        tail = part.tail if op.phase == "F" else part.tail_grad
        return lambda mid: (tail(mid, columns),)

    def _bind_wgrad(self, op: Op, part: Any) -> Callable[..., tuple[Any, ...]]:
        nothing = (None,) * len(self.plan.slicing.rows_of(op))

        def wgrad(*reads: Any) -> tuple[Any, ...]:
            part.wgrad(reads[0::2], reads[1::2])
            return nothing

        return wgrad

    def _bind_loss(self, op: Op, part: Any) -> Callable[..., tuple[Any, ...]]:
        def loss(ctx: RowContext, gathered: Tensor) -> tuple[Any, ...]:
            d_logits, loss_sum = part.loss(gathered, ctx)
            self._row_losses.append(loss_sum)
            return (d_logits,)

        return loss

    def _finish(self, *_: Any) -> tuple[Any, ...]:
        self._on_step()
        return ()


def _assemble(columns: Sequence[Tensor]) -> Tensor:
    """Column blocks [s, b, h/c] side by side, [s, b, h]; a single one is not copied."""
    return columns[0] if len(columns) == 1 else torch.cat(list(columns), -1)


def _column_slices(width: int, cols: int) -> tuple[slice, ...]:
    if cols == 1:
        return (slice(None),)
    bounds = [width * col // cols for col in range(cols + 1)]
    return tuple(slice(bounds[col], bounds[col + 1]) for col in range(cols))


def _profiler_range(op: Op) -> AbstractContextManager[Any]:
    """The op's name in a profile, at no cost where nobody profiles."""
    return torch.profiler.record_function(str(op)) if torch._C._autograd._profiler_enabled() else nullcontext()
