"""From ops of a plan to callables: what each calls on its part or communicator, and the slots that its values travel in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from domino_lm.model.batch import Row, RowContext
from domino_lm.model.part import ALL_COLUMNS
from domino_lm.parallel.buckets import Bucket, GradientBuckets
from domino_lm.parallel.collectives import LAUNCHERS, Launcher, Pending
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.collectives import REPLICA_SUM
from domino_lm.schedule.ops import MARKERS, Flow, Kind, Op, Value, concerns_matrices, dataflow, is_gather, writes_gradient
from domino_lm.schedule.plan import Plan
from domino_lm.schedule.recorder import Observer

Call = Callable[..., Mapping[str, Any] | None]
"""Takes the values that its op reads as keywords, by their roles, and returns those that it writes; see `dataflow`."""


class BoundOp(NamedTuple):
    """An op, its callable, and by role the slots that it reads, reads several of for one role, writes, and empties."""

    op: Op
    call: Call
    reads: tuple[tuple[str, int], ...]
    several: tuple[tuple[str, tuple[int, ...]], ...]
    writes: tuple[tuple[str, int], ...]
    frees: tuple[int, ...]


class Columns(NamedTuple):
    """A middle value whose product leaves in column blocks, and the buffer that they are written to."""

    mid: Any
    buffer: Tensor  # [c, s, b, h/c]


class MatrixUpdates(Protocol):
    """What an optimizer does at the step's end, before the STEP op, with the matrices that it updates whole; parts are numbers in the chain."""

    def begin(self, loss_sum: Tensor) -> None:
        """Bring the momentum of all parts up to date, by the reduced gradients; ``loss_sum`` [] is that of the step on this rank."""

    def gather_start(self, part: int) -> Pending:
        """Begin to gather a part's momentum [n] over tensor-parallel ranks, into [t, n]."""

    def update(self, part: int, gathered: Tensor) -> None:
        """Update the matrices of a part, by the momentum of all ranks [t, n]."""


@dataclass
class StepState:
    """What the ops of a running step share beside the values that they hand over."""

    rows: dict[int, list[Row]] = field(default_factory=dict)
    """Rows of each micro-batch of the template."""

    shares: dict[int, list[Row]] = field(default_factory=dict)
    """This rank's tokens of them, where replicated parts hold a share."""

    row_losses: list[Tensor] = field(default_factory=list)
    replayed_loss: Tensor | None = None
    """Summed loss of micro-batches that graphs have replayed."""

    found: Sequence[Tensor] = ()
    """What the STEP op returned."""

    gathers: dict[int, Pending] = field(default_factory=dict)
    """Parameters in flight, by bucket; the next step waits for them."""

    recorder: Observer | None = None

    def loss_sum(self) -> Tensor:
        """Summed token losses [] of the micro-batches so far; in the STEP op those of the whole step on this rank."""
        own = torch.stack(self.row_losses).sum() if self.row_losses else None
        if self.replayed_loss is None:
            assert own is not None, "losses are summed after a LOSS op"
            return own
        return self.replayed_loss.clone() if own is None else self.replayed_loss + own


class Binder:
    """Binds templates of one plan. ``on_step(loss_sum)`` is the STEP op, ``matrices`` are the ops of matrices that are updated whole;
    ``launchers`` start tensor-parallel collectives, by name.

    Slots are shared by all templates of the plan, so that values can pass from one to the next.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Sequence[Any],
        mesh: ParallelMesh,
        gradients: GradientBuckets,
        state: StepState,
        on_step: Callable[[Tensor], Sequence[Tensor]],
        launchers: Mapping[str, Launcher] = LAUNCHERS,
        matrices: MatrixUpdates | None = None,
    ) -> None:
        self.slicing = plan.slicing
        self._matrices = matrices
        self.slots: dict[Value, int] = {}
        self._parts = parts
        self._mesh = mesh
        self._buckets = gradients.buckets
        self._state = state
        self._on_step = on_step
        self._launchers = launchers
        self._hidden_size = parts[0].weight.shape[1]

    def bind(self, template: Sequence[Op], following: Sequence[Op] = ()) -> list[BoundOp]:
        """Give every value a slot and every op its callable. The op that reads a value last empties its slot, unless the
        ``following`` template reads it too."""
        flows = [_handed_over(dataflow(op, self.slicing)) for op in template]
        last_use = {value: position for position, flow in enumerate(flows) for value in (*flow.inputs, *flow.outputs)}
        for value in last_use:
            self.slots.setdefault(value, len(self.slots))
        kept = {value for flow in flows for value in flow.outputs}
        kept &= {value for op in following for value in dataflow(op, self.slicing).inputs}
        acquired = dict(self._first_gradients(template))
        bound = []
        for position, (op, flow) in enumerate(zip(template, flows, strict=True)):
            call = _allocating_first(acquired[position], self._call(op)) if position in acquired else self._call(op)
            single = tuple((role, self.slots[value]) for role, value in flow.reads.items() if isinstance(value, Value))
            several = tuple(
                (role, tuple(self.slots[value] for value in values)) for role, values in flow.reads.items() if not isinstance(values, Value)
            )
            writes = tuple((role, self.slots[value]) for role, value in flow.writes.items() if isinstance(value, Value))
            last = {value for value in (*flow.inputs, *flow.outputs) if last_use[value] == position and value not in kept}
            bound.append(BoundOp(op, call, single, several, writes, tuple(self.slots[value] for value in last)))
        return bound

    def _first_gradients(self, template: Sequence[Op]) -> Iterator[tuple[int, list[Bucket]]]:
        """Buckets that allocate their gradients again (optim_grads), by the first op that writes one of them."""
        open_buckets: set[int] = set()
        for position, op in enumerate(template if self.slicing.sharding == "optim_grads" else ()):
            if op.kind is Kind.WAIT and op.phase == "S" and self.slicing.collective(op).traffic == "reduce_scatter":
                open_buckets.discard(op.part)
            first = set(self.slicing.buckets_of(op.part)) - open_buckets if writes_gradient(op, self.slicing) else set[int]()
            open_buckets |= first
            if first:
                yield position, [self._buckets[bucket] for bucket in sorted(first)]

    def _call(self, op: Op) -> Call:
        """The callable of an op."""
        if concerns_matrices(op) and op.kind is not Kind.START:
            return self._matrix(op)
        made = {
            Kind.START: self._start,
            Kind.WAIT: self._wait,
            Kind.LOCAL: self._local if op.phase == "F" else self._local_grad,
            Kind.BODY: self._body if op.phase == "F" else self._body_grad,
            Kind.TAIL: self._tail,
            Kind.WGRAD: self._wgrad,
            Kind.RECOMPUTE: self._recompute,
            Kind.LOSS: self._loss,
            Kind.STEP: self._step,
        }
        return made[op.kind](op)

    def _start(self, op: Op) -> Call:
        launch, state = self._bucket_launch(op) if op.phase == "S" else self._launch(op), self._state

        def start(**source: Any) -> Mapping[str, Any]:
            pending = launch(**source)
            if state.recorder is not None:
                state.recorder.follow(op, pending)
            return {"sent": pending}

        return start

    def _launch(self, op: Op) -> Callable[..., Pending]:
        """The call that starts a tensor-parallel collective, of a value or of what a norm has kept."""
        if op.collective not in self._launchers:
            raise ValueError(f"{op}: nothing starts {op.collective!r}; known are {', '.join(self._launchers)}")
        launcher, tp = self._launchers[op.collective], self._mesh.tp
        before = self._parts[op.part - 1]

        def launch(source: Tensor | None = None, norm: RowContext | None = None) -> Pending:
            return launcher(tp, before.normed(norm) if source is None else source)

        return launch

    def _bucket_launch(self, op: Op) -> Callable[..., Pending]:
        """The call that starts a bucket's collective, or the gather of a part's momentum."""
        if concerns_matrices(op):
            return partial(self._whole_matrices.gather_start, op.part)
        bucket, tp, gathers = self._buckets[op.part], self._mesh.tp, self._state.gathers

        def gather() -> Pending:
            gathers[op.part] = bucket.gather_start()
            return gathers[op.part]

        if is_gather(op):
            return gather
        return (lambda: tp.all_reduce_start(bucket.flat)) if op.collective == REPLICA_SUM.name else bucket.reduce_start

    def _wait(self, op: Op) -> Call:
        if op.phase != "S":
            return lambda pending: {"arrived": pending.wait()}
        bucket, gathers = self._buckets[op.part], self._state.gathers

        def gathered(**_: Any) -> None:  # the step before may have started it, and the first step has none
            if op.part in gathers:
                gathers.pop(op.part).wait()

        def reduced(pending: Pending) -> None:
            found = pending.wait()
            if op.collective != REPLICA_SUM.name:
                bucket.reduced(found)

        return gathered if is_gather(op) else reduced

    def _local(self, op: Op) -> Call:
        part, state = self._parts[op.part], self._state
        forget = op.part + 1 in self.slicing.recompute_full

        def local(blocks: Sequence[Tensor], residual: Tensor | None = None) -> Mapping[str, Any]:
            ctx = RowContext(state.shares[op.micro][op.row])
            normed, hidden = part.local(_column_view(blocks), residual, ctx)
            if forget:
                part.forget(ctx)
            return {"normed": normed, "saved": ctx, "residual": hidden}

        return local

    def _local_grad(self, op: Op) -> Call:
        part = self._parts[op.part]

        def local_grad(saved: RowContext, blocks: Sequence[Tensor], residual: Tensor | None = None) -> Mapping[str, Any]:
            d_normed = _column_view(blocks)
            d_branch, d_hidden = part.local_grad(d_normed.flatten(2) if len(blocks) > 1 else d_normed, residual, saved)
            return {"branch": d_branch, "residual": d_hidden}

        return local_grad

    def _body(self, op: Op) -> Call:
        part, slicing, state = self._parts[op.part], self.slicing, self._state
        shares, in_blocks = slicing.coupled(op.part), self._in_blocks(op.part, "F")
        forget, keep_gemm = op.part in slicing.recompute_full | slicing.recompute_core, op.part in slicing.recompute_core

        def body(x: Tensor | None = None, earlier: Sequence[RowContext] = ()) -> Mapping[str, Any]:
            ctx = RowContext(state.rows[op.micro][op.row], earlier, shares)
            out = part.body(x, ctx)
            if forget:
                part.forget(ctx, keep_gemm)
            if slicing.sequence_parallel:
                ctx.x = None  # the norm keeps this rank's share; the whole is gathered again
            return {"out": in_blocks(out, ctx.row), "saved": ctx}

        return body

    def _body_grad(self, op: Op) -> Call:
        part, in_blocks = self._parts[op.part], self._in_blocks(op.part, "B")
        return lambda saved, dy: {"mid": in_blocks(part.body_grad(dy, saved), saved.row)}

    def _loss(self, op: Op) -> Call:
        part, in_blocks, state = self._parts[op.part], self._in_blocks(op.part, "B"), self._state

        def loss(saved: RowContext, gathered: Tensor) -> Mapping[str, Any]:
            d_logits, loss_sum = part.loss(gathered, saved)
            state.row_losses.append(loss_sum)
            return {"mid": in_blocks(d_logits, saved.row)}

        return loss

    def _tail(self, op: Op) -> Call:
        part = self._parts[op.part]
        tail, blocks = part.tail if op.phase == "F" else part.tail_grad, self.slicing.blocks(op.part, op.phase)
        if blocks == 1:
            return lambda mid: {"partial": tail(mid, ALL_COLUMNS)}
        width = self._block_width(blocks)
        columns = slice(width * op.col, width * (op.col + 1))
        return lambda mid: {"partial": tail(mid.mid, columns, mid.buffer[op.col])}

    def _wgrad(self, op: Op) -> Call:
        part, blocks = self._parts[op.part], self.slicing.blocks(op.part, "B")

        def wgrad(saved: RowContext, mid: Any, x: Tensor | None = None) -> None:
            if x is not None:
                saved.x = x
            part.wgrad(saved, mid.mid if blocks > 1 else mid)

        return wgrad

    def _recompute(self, op: Op) -> Call:
        part = self._parts[op.part]
        if not self.slicing.chain[op.part].sharded:
            return lambda saved: {"normed": part.rebuild(saved)}
        return lambda saved, x=None, earlier=(): part.rebuild(saved, x)

    def _step(self, op: Op) -> Call:
        state = self._state

        def step() -> None:
            state.found = self._on_step(state.loss_sum())

        return step

    def _matrix(self, op: Op) -> Call:
        """Momentum, its arrival, or the update of a part's matrices."""
        state, matrices = self._state, self._whole_matrices
        if op.kind is Kind.WAIT:
            return lambda pending: {"arrived": pending.wait()}
        if op.kind is Kind.MOMENTUM:
            return lambda: matrices.begin(state.loss_sum())
        return lambda gathered: matrices.update(op.part, gathered)

    @property
    def _whole_matrices(self) -> MatrixUpdates:
        assert self._matrices is not None, "a plan that updates whole matrices needs the optimizer that does"
        return self._matrices

    def _in_blocks(self, part: int, phase: str) -> Callable[[Any, Row], Any]:
        """Adds to a middle value the buffer for its column blocks, if it leaves in several."""
        blocks, weight = self.slicing.blocks(part, phase), self._parts[0].weight
        if blocks < 2:
            return lambda mid, row: mid
        width = self._block_width(blocks)
        return lambda mid, row: Columns(mid, weight.new_empty(blocks, row.length, row.tokens.shape[1], width))

    def _block_width(self, blocks: int) -> int:
        assert self._hidden_size % blocks == 0, f"{blocks} column blocks do not divide the hidden size {self._hidden_size}"
        return self._hidden_size // blocks


def _handed_over(flow: Flow) -> Flow:
    """The values that are more than a mark that something has been done."""
    reads, writes = ({role: value for role, value in roles.items() if role not in MARKERS} for roles in flow)
    return Flow(reads, writes)


def _allocating_first(buckets: Sequence[Bucket], call: Call) -> Call:
    """``call`` after allocating the gradients that it is the first to write."""

    def acquired(**reads: Any) -> Mapping[str, Any] | None:
        for bucket in buckets:
            bucket.acquire()
        return call(**reads)

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
