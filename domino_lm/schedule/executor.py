"""Runs a plan on real process groups: ops are bound to callables once, values travel in slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from domino_lm.model.batch import MicroBatch, Row, RowContext
from domino_lm.model.part import ShardedPart
from domino_lm.model.stack import Stack
from domino_lm.parallel.buckets import Bucket, GradientBuckets
from domino_lm.parallel.collectives import Pending
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.parallel.random import DropoutKey
from domino_lm.schedule.ops import Kind, Op, Value, dataflow, is_gather
from domino_lm.schedule.passes import step_templates
from domino_lm.schedule.plan import Plan
from domino_lm.schedule.recorder import AnyRecorder
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
    """Losses of one step's micro-batches on this rank, as device tensors not yet waited for."""

    loss_sum: Tensor  # [] summed over tokens that count
    tokens: Tensor  # [] how many those were


class Executor:
    """Runs whole steps of one validated plan; every rank must hold the same plan.

    ``on_step`` is the STEP op: it finds reduced gradients in ``main_grad``, or in the buckets' shards. The objective is the mean of micro-batch
    means, or with ``per_token_loss`` the mean over all tokens of the global batch; gradients are those of the objective
    times ``loss_scale`` [], which is read at each step's start. Raises PlanError on an unsound plan.
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
        loss_scale: Tensor | None = None,
    ) -> None:
        validate(plan)
        self.plan = plan
        self.mesh = mesh
        self.gradients = gradients
        self.per_token_loss = per_token_loss
        self._loss_scale = loss_scale
        self._parts: Sequence[Any] = stack.parts
        self._kernels = stack.embedding.kernels
        self._on_step = on_step
        self._seed = seed
        self._step = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self._columns = _column_slices(stack.embedding.weight.shape[1], plan.slicing.cols)
        self._rows: dict[int, list[Row]] = {}
        self._shards: dict[int, list[Row]] = {}
        self._row_losses: list[Tensor] = []
        self._recorder: AnyRecorder | None = None
        self._slots: dict[Value, int] = {}
        self._gathers: dict[int, Pending] = {}
        self._steps: dict[int, list[list[BoundOp]]] = {}

    @torch.no_grad()
    def run_step(self, micro_batches: Sequence[MicroBatch], iteration: int, recorder: AnyRecorder | None = None) -> StepLoss:
        """Forward and backward of every micro-batch, gradient reduction, optimizer.

        ``iteration`` seeds dropout together with the run's seed. The host waits for nothing that a device computes.
        """
        self._kernels.invalidate()
        self.gradients.zero_()
        self._step.fill_(iteration)
        self._recorder = recorder
        self._row_losses = []
        tokens = torch.stack([batch.loss_mask.sum() for batch in micro_batches])  # [micro-batches]
        weights = self._loss_weights(tokens) if self._loss_scale is None else self._loss_weights(tokens) * self._loss_scale
        templates = self._bound_templates(len(micro_batches))
        values: list[Any] = [None] * len(self._slots)
        with torch.autograd.set_multithreading_enabled(False):  # each op's graph is too small to hand to another thread
            for index, template in enumerate(templates):
                batch, weight = (micro_batches[index], weights[index]) if index < len(micro_batches) else (None, None)
                self._pass(template, values, batch, index % 2 if self.plan.paired else 0, weight)
        return StepLoss(self.loss_sum(), tokens.sum())

    def complete_gathers(self) -> None:
        """Wait for parameters still in flight from the last step, before weights are read or written outside a step."""
        for bucket in list(self._gathers):
            self._gathers.pop(bucket).wait()

    def loss_sum(self) -> Tensor:
        """Summed token losses of the micro-batches so far, 0-d; in the STEP op those of the whole step on this rank."""
        return torch.stack(self._row_losses).sum()

    def _pass(self, template: list[BoundOp], values: list[Any], batch: MicroBatch | None, micro: int, weight: Tensor | None) -> None:
        """One pass over a template; ``batch`` is the micro-batch that begins in it, if one does."""
        if batch is not None and weight is not None:
            self._cut(batch, micro, weight)
        self._run(template, values)

    def _cut(self, batch: MicroBatch, micro: int, weight: Tensor) -> None:
        """Rows of a micro-batch, and under sequence parallelism this rank's share of each."""
        slicing = self.plan.slicing
        rows = batch.whole(weight, self._dropout_key(batch)).cut(slicing.row_sizes, slicing.sequence_rows)
        self._rows[micro] = rows
        tp = self.mesh.tp
        self._shards[micro] = [row.shard(tp.rank, tp.size) for row in rows] if slicing.sequence_parallel else rows

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

    def _run(self, bound: Sequence[BoundOp], values: list[Any]) -> None:
        """One pass over a template; a failing op is named with its neighbours."""
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

    def _bound_templates(self, micro_batches: int) -> list[list[BoundOp]]:
        """The step's templates, each distinct one bound once and kept for steps to come."""
        if micro_batches not in self._steps:
            templates = step_templates(self.plan, micro_batches)
            bound: dict[tuple[Op, ...], list[BoundOp]] = {}
            for index, template in enumerate(templates):
                if template not in bound:
                    following = templates[index + 1] if self.plan.paired and index + 1 < len(templates) else ()
                    bound[template] = self._bind_template(template, following)
            self._steps[micro_batches] = [bound[template] for template in templates]
        return self._steps[micro_batches]

    def _bind_template(self, template: tuple[Op, ...], following: tuple[Op, ...]) -> list[BoundOp]:
        """Give every value a slot and every op its callable. The op that reads a value last empties its slot, unless the
        ``following`` template reads it too."""
        flows = [dataflow(op, self.plan.slicing) for op in template]
        last_use = {value: position for position, flow in enumerate(flows) for values in flow for value in values}
        for value in last_use:
            self._slots.setdefault(value, len(self._slots))
        written = {value for _, writes in flows for value in writes}
        kept = written & {value for op in following for value in dataflow(op, self.plan.slicing)[0]}

        def bound(position: int, op: Op) -> BoundOp:
            reads, writes = flows[position]
            frees = {value for value in (*reads, *writes) if last_use[value] == position and value not in kept}
            slots = [tuple(self._slots[value] for value in values) for values in (reads, writes, frees)]
            call = _allocating_first(opened[position], self._bind(op)) if position in opened else self._bind(op)
            return BoundOp(op, call, *slots)

        opened = self._first_gradients(template)
        return [bound(position, op) for position, op in enumerate(template)]

    def _bind(self, op: Op) -> Callable[..., tuple[Any, ...]]:
        """The callable of an op; it takes what `dataflow` says it reads and returns what it writes, in that order."""
        if op.kind is Kind.WAIT:
            return self._bind_bucket_wait(op) if op.phase == "S" else lambda pending: (pending.wait(),)
        if op.kind is Kind.STEP:
            return self._finish
        bind = {
            (Kind.START, op.phase): self._bind_start,
            (Kind.LOCAL, "F"): self._bind_local,
            (Kind.LOCAL, "B"): self._bind_local_grad,
            (Kind.BODY, "F"): self._bind_body,
            (Kind.BODY, "B"): self._bind_body_grad,
            (Kind.TAIL, op.phase): self._bind_tail,
            (Kind.WGRAD, "B"): self._bind_wgrad,
            (Kind.RECOMPUTE, "B"): self._bind_recompute,
            (Kind.LOSS, "F"): self._bind_loss,
        }[op.kind, op.phase]
        return bind(op)

    def _bind_start(self, op: Op) -> Callable[..., tuple[Any, ...]]:
        launch = self._launcher(op)

        def start(*reads: Any) -> tuple[Any, ...]:
            pending = launch(*reads)
            if self._recorder is not None:
                self._recorder.follow(op, pending)
            return (pending,)

        return start

    def _bind_bucket_wait(self, op: Op) -> Callable[..., tuple[Any, ...]]:
        """A gather may have been started by the step before, or waited for since; the first step has none."""
        bucket = self.gradients.buckets[op.part]

        def arrive(*_: Any) -> tuple[Any, ...]:
            if op.part in self._gathers:
                self._gathers.pop(op.part).wait()
            return (None,)

        def redeem(pending: Pending) -> tuple[Any, ...]:
            found = pending.wait()
            if op.collective != "replica_sum":
                bucket.reduced(found)
            return (None,)

        return arrive if is_gather(op) else redeem

    def _bucket_launcher(self, op: Op) -> Callable[..., Pending]:
        """The call that starts a bucket's collective."""
        bucket, tp = self.gradients.buckets[op.part], self.mesh.tp

        def gather(*_: Any) -> Pending:
            self._gathers[op.part] = bucket.gather_start()
            return self._gathers[op.part]

        if is_gather(op):
            return gather
        if op.collective == "replica_sum":
            return lambda *_: tp.all_reduce_start(bucket.flat)
        return lambda *_: bucket.reduce_start()

    def _first_gradients(self, template: Sequence[Op]) -> dict[int, list[Bucket]]:
        """Buckets that allocate their gradients again (optim_grads), by the first op that writes one of them."""
        found: dict[int, list[Bucket]] = {}
        open_buckets: set[int] = set()
        for position, op in enumerate(template if self.gradients.sharding == "optim_grads" else ()):
            if op.phase == "S" and op.collective == "reduce_scatter" and op.kind is Kind.WAIT:
                open_buckets.discard(op.part)
            own = op.kind is Kind.BODY and isinstance(self._parts[op.part], ShardedPart) and self._parts[op.part].core_parameters()
            if op.phase == "B" and (op.kind in (Kind.LOCAL, Kind.WGRAD) or own):
                first = set(self.plan.slicing.buckets_of(op.part)) - open_buckets
                open_buckets |= first
                found.update({position: [self.gradients.buckets[bucket] for bucket in sorted(first)]} if first else {})
        return found

    def _launcher(self, op: Op) -> Callable[..., Pending]:
        """The call that starts the op's collective."""
        tp = self.mesh.tp
        if op.phase == "S":
            return self._bucket_launcher(op)
        if op.collective == "gather_input" and op.part not in self.plan.slicing.recompute_full:
            norm = self._parts[op.part - 1]
            return lambda ctx: tp.all_gather_tokens_start(norm.normed(ctx))
        return {
            "all_reduce": tp.all_reduce_start,
            "reduce_scatter": tp.reduce_scatter_start,
            "all_gather": tp.all_gather_tokens_start,
            "gather_input": tp.all_gather_tokens_start,
            "statistics": tp.all_gather_start,
        }[op.collective]

    def _bind_local(self, op: Op) -> Callable[..., tuple[Any, ...]]:
        part, cols, slicing = self._parts[op.part], self.plan.slicing.cols, self.plan.slicing
        has_residual = op.part < slicing.last - 1
        forget = op.part + 1 in slicing.recompute_full

        def local(*reads: Any) -> tuple[Any, ...]:
            ctx = RowContext(self._shards[op.micro][op.row])
            residual = reads[cols] if len(reads) > cols else None
            normed, hidden = part.local(_column_view(reads[:cols]), residual, ctx)
            if forget:
                part.forget(ctx)
            return (normed, ctx, hidden) if has_residual else (normed, ctx)

        return local

    def _bind_local_grad(self, op: Op) -> Callable[..., tuple[Any, ...]]:
        part, cols = self._parts[op.part], self.plan.slicing.cols

        def local_grad(ctx: RowContext, *reads: Any) -> tuple[Any, ...]:
            d_normed, d_residual = _column_view(reads[:cols]), reads[cols] if len(reads) > cols else None
            if cols > 1:
                d_normed = d_normed.flatten(2)  # [s, b, c, h/c] to [s, b, h]
            d_branch, d_hidden = part.local_grad(d_normed, d_residual, ctx)
            return (d_branch, None, d_hidden) if op.part > 1 else (d_branch, None)

        return local_grad

    def _bind_body(self, op: Op) -> Callable[..., tuple[Any, ...]]:
        part, slicing = self._parts[op.part], self.plan.slicing
        first = op.part == 0
        shares = slicing.coupled(op.part)
        forget, keep_gemm = op.part in slicing.recompute_full | slicing.recompute_core, op.part in slicing.recompute_core
        blocks = slicing.cols if slicing.chain[op.part].forward_collective == "all_reduce" else 1

        def body(*reads: Any) -> tuple[Any, ...]:
            x, earlier = (None, reads) if first else (reads[0], reads[1:])
            ctx = RowContext(self._rows[op.micro][op.row], earlier, shares)
            out = part.body(x, ctx)
            if forget:
                part.forget(ctx, keep_gemm)
            if slicing.sequence_parallel:
                ctx.x = None  # the norm keeps this rank's share; the whole is gathered again
            return self._with_blocks(out, ctx.row, blocks), ctx

        return body

    def _bind_body_grad(self, op: Op) -> Callable[..., tuple[Any, ...]]:
        part, slicing = self._parts[op.part], self.plan.slicing
        blocks = slicing.cols if slicing.chain[op.part].backward_collective is not None else 1
        shares = slicing.coupled(op.part) and op.row > 0

        def body_grad(ctx: RowContext, dy: Tensor, *_: Any) -> tuple[Any, ...]:
            mid = self._with_blocks(part.body_grad(dy, ctx), ctx.row, blocks)
            return (mid, None) if shares else (mid,)

        return body_grad

    def _with_blocks(self, mid: Any, row: Row, blocks: int) -> Any:
        """A middle value, then the buffer [c, s, b, h/c] for its column blocks."""
        if blocks == 1:
            return mid
        width = self._columns[0].stop
        return mid, self._parts[0].weight.new_empty(blocks, row.length, row.tokens.shape[1], width)

    def _bind_tail(self, op: Op) -> Callable[..., tuple[Any, ...]]:
        part, columns = self._parts[op.part], self._columns[op.col]
        tail = part.tail if op.phase == "F" else part.tail_grad
        if self.plan.slicing.cols == 1:
            return lambda mid: (tail(mid, columns),)
        return lambda mid: (tail(mid[0], columns, mid[1][op.col]),)

    def _bind_wgrad(self, op: Op) -> Callable[..., tuple[Any, ...]]:
        part, blocks = self._parts[op.part], self.plan.slicing.cols > 1 and op.part > 0

        def wgrad(ctx: RowContext, mid: Any, *gathered: Tensor) -> tuple[Any, ...]:
            if gathered:
                ctx.x = gathered[0]
            part.wgrad(ctx, mid[0] if blocks else mid)
            return (None,)

        return wgrad

    def _bind_recompute(self, op: Op) -> Callable[..., tuple[Any, ...]]:
        part, slicing = self._parts[op.part], self.plan.slicing
        if not slicing.chain[op.part].sharded:
            return lambda ctx: (part.rebuild(ctx),)
        full = op.part in slicing.recompute_full

        def recompute(ctx: RowContext, *reads: Any) -> tuple[Any, ...]:
            part.rebuild(ctx, reads[0] if full else None)
            return (None,)

        return recompute

    def _bind_loss(self, op: Op) -> Callable[..., tuple[Any, ...]]:
        part = self._parts[op.part]

        def loss(ctx: RowContext, gathered: Tensor) -> tuple[Any, ...]:
            d_logits, loss_sum = part.loss(gathered, ctx)
            self._row_losses.append(loss_sum)
            return (self._with_blocks(d_logits, ctx.row, self.plan.slicing.cols),)

        return loss

    def _finish(self, *_: Any) -> tuple[Any, ...]:
        self._on_step()
        return (None,) * len(self.gradients.buckets) if self.gradients.sharded else ()


def _allocating_first(buckets: Sequence[Bucket], call: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """``call`` after allocating the gradients that it is the first to write."""

    def acquired(*reads: Any) -> tuple[Any, ...]:
        for bucket in buckets:
            bucket.acquire()
        return call(*reads)

    return acquired


def _column_view(blocks: Sequence[Tensor]) -> Tensor:
    """Column blocks of one buffer [c, s, b, h/c] as a view [s, b, c, h/c]; a single one as it is.

    After a reduce-scatter the blocks lie apart, and are put together by a copy.
    """
    first = blocks[0]
    if len(blocks) == 1:
        return first
    s, b, width = first.shape
    apart = [block.data_ptr() - first.data_ptr() for block in blocks]
    if apart == [i * first.numel() * first.element_size() for i in range(len(blocks))]:
        return first.as_strided((s, b, len(blocks), width), (b * width, width, s * b * width, 1))
    return torch.stack(list(blocks), 2)


def _column_slices(width: int, cols: int) -> tuple[slice, ...]:
    if cols == 1:
        return (slice(None),)
    assert width % cols == 0, f"{cols} column blocks do not divide the hidden size {width}"
    return tuple(slice(width // cols * col, width // cols * (col + 1)) for col in range(cols))


def _profiler_range(op: Op) -> AbstractContextManager[Any]:
    """The op's name in a profile, at no cost if nobody profiles."""
    return torch.profiler.record_function(str(op)) if torch._C._autograd._profiler_enabled() else nullcontext()
