"""Runs a step and looks at what every op puts out, to find the first value that is not finite.

Nothing of this is in the way of other steps: an `InspectingExecutor` is made when there is a step to look at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from domino_lm.model.batch import MicroBatch, RowContext
from domino_lm.schedule.binding import BoundOp, Call, Columns
from domino_lm.schedule.collectives import REPLICA_SUM
from domino_lm.schedule.executor import NEIGHBOURS, Executor, StepResult
from domino_lm.schedule.ops import Kind, Op, is_gather, writes_gradient
from domino_lm.schedule.recorder import Observer

CHUNK = 2**24
"""Elements that are looked at in one go, so that looking takes little memory."""


@dataclass(frozen=True)
class Statistics:
    """What is worth knowing of a tensor; numbers are of its finite elements, None if it has none."""

    shape: tuple[int, ...]
    dtype: str
    minimum: float | None
    maximum: float | None
    mean: float | None
    rms: float | None
    nan: int
    inf: int

    @classmethod
    def of(cls, tensor: Tensor) -> Statistics:
        """Those of ``tensor``; waits for the device."""
        flat, exact = tensor.detach().reshape(-1), torch.float64
        lowest, highest, total, squares, finite, nan = math.inf, -math.inf, 0.0, 0.0, 0, 0
        for part in flat.split(CHUNK):
            mask = torch.isfinite(part)
            kept = part[mask].to(exact)
            nan += int(torch.isnan(part).sum())
            if kept.numel():
                lowest, highest = min(lowest, kept.min().item()), max(highest, kept.max().item())
                total, squares, finite = total + kept.sum().item(), squares + kept.square().sum().item(), finite + kept.numel()
        name, inf = str(tensor.dtype).removeprefix("torch."), flat.numel() - finite - nan
        if not finite:
            return cls(tuple(tensor.shape), name, None, None, None, None, nan, inf)
        return cls(tuple(tensor.shape), name, lowest, highest, total / finite, math.sqrt(squares / finite), nan, inf)

    def __str__(self) -> str:
        bad = f", {self.nan} nan, {self.inf} inf" if self.nan or self.inf else ""
        numbers = (
            "nothing finite"
            if self.minimum is None
            else f"min {self.minimum:.4g}, max {self.maximum:.4g}, mean {self.mean:.4g}, rms {self.rms:.4g}"
        )
        return f"{list(self.shape)} {self.dtype}: {numbers}{bad}"


@dataclass(frozen=True)
class Finding:
    """The first op on one rank whose output is not finite."""

    place: tuple[int, int]
    """Pass of the step, and position of the op in it: the same on all ranks, so that the smallest of theirs is where it began."""

    op: str
    part: int | None
    """Number of its part in the chain; None at the step's end."""

    name: str
    """What the part is, or the bucket."""

    micro_batch: int | None
    """Number of the micro-batch within the step, on this replica; None at the step's end."""

    row: int | None
    """Which slice of the micro-batch; None at the step's end."""

    element: tuple[int, ...]
    """Index of the first element that is not finite in the first such output."""

    inputs: Mapping[str, Statistics]
    outputs: Mapping[str, Statistics]
    weights: Mapping[str, Statistics]
    around: tuple[str, ...]
    """The op with its neighbours in the plan."""


class InspectingExecutor(Executor):
    """Runs steps as `Executor` does and keeps the ``finding`` of each, None if every output is finite. The host waits for every op."""

    finding: Finding | None = None
    _pass_number = -1

    @torch.no_grad()
    def run_step(self, micro_batches: Sequence[MicroBatch], iteration: int, recorder: Observer | None = None) -> StepResult:
        """As `Executor.run_step`."""
        self.finding, self._pass_number, self._count = None, -1, len(micro_batches)
        self._sent: dict[Op, Mapping[str, Statistics]] = {}
        return super().run_step(micro_batches, iteration, recorder)

    def run(self, bound: Sequence[BoundOp], values: list[Any]) -> None:
        """One pass, each op looked at until one is found."""
        self._pass_number += 1
        super().run([step._replace(call=self._watched(bound, position)) for position, step in enumerate(bound)], values)

    def _watched(self, bound: Sequence[BoundOp], position: int) -> Call:
        op, call = bound[position].op, bound[position].call

        def watched(**given: Any) -> Mapping[str, Any] | None:
            if self.finding is not None:
                return call(**given)
            inputs = self._inputs(op, given)  # before the call, since ops may overwrite them
            made = call(**given)
            outputs = dict(self._outputs(op, made or {}))
            bad = next((tensor for tensor in outputs.values() if not is_finite(tensor)), None)
            if bad is not None:
                around = tuple(str(step.op) for step in bound[max(0, position - NEIGHBOURS) : position + NEIGHBOURS + 1])
                self.finding = Finding(
                    place=(self._pass_number, position),
                    op=str(op),
                    part=None if op.phase == "S" else op.part,
                    name=self._part_name(op),
                    micro_batch=None if op.phase == "S" else self._micro_batch(op),
                    row=None if op.phase == "S" else op.row,
                    element=first_not_finite(bad),
                    inputs=inputs,
                    outputs={name: Statistics.of(tensor) for name, tensor in outputs.items()},
                    weights={name: Statistics.of(tensor) for name, tensor in self._weights(op)},
                    around=around,
                )
            return made

        return watched

    def _micro_batch(self, op: Op) -> int:
        """Which micro-batch of the step an op of the running pass works on."""
        if not self.plan.interleaved:
            return self._pass_number
        begun = op.micro == self._pass_number % 2 and self._pass_number < self._count
        return self._pass_number if begun else self._pass_number - 1

    def _part_name(self, op: Op) -> str:
        if op.phase == "S":
            return "the step's end" if op.kind is Kind.STEP else f"gradient bucket {op.part}"
        return type(self.stack.parts[op.part]).__name__

    def _inputs(self, op: Op, given: Mapping[str, Any]) -> Mapping[str, Statistics]:
        """Statistics of what an op reads; a WAIT reads what its START sent, which travels meanwhile."""
        if op.kind is Kind.WAIT:
            return self._sent.pop(op, {})
        found = {name: Statistics.of(tensor) for role, value in given.items() for name, tensor in tensors_in(role, value)}
        if op.phase == "S" and op.kind is Kind.START and not is_gather(op):
            found["gradients"] = Statistics.of(self.gradients.buckets[op.part].flat)
        if op.phase != "S" and op.part in (0, self.plan.slicing.last) and op.micro in self._state.rows:
            row = self._state.rows[op.micro][op.row]
            read = {"tokens": row.tokens} if op.part == 0 else {"labels": row.labels, "loss_weight": row.loss_weight}
            found |= {name: Statistics.of(tensor) for name, tensor in read.items()}
        if op.kind is Kind.START:
            self._sent[op._replace(kind=Kind.WAIT)] = found
        return found

    def _outputs(self, op: Op, made: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """What an op hands over, adds to gradients, or leaves for the step's end; not what it keeps for backward."""
        for role, value in made.items():
            if not isinstance(value, RowContext):
                yield from tensors_in(role, value)
        if op.kind is Kind.LOSS:
            yield "loss", self._state.row_losses[-1]
        if op.kind is Kind.STEP:
            yield from tensors_in("found", list(self._state.found))
        if op.phase == "B" and writes_gradient(op, self.plan.slicing):
            yield from self._gradients(op)
        if op.phase == "S" and op.kind is Kind.WAIT and not is_gather(op):
            bucket = self.gradients.buckets[op.part]
            shared = self.gradients.zero and op.collective != REPLICA_SUM.name
            yield "gradients", bucket.shard if shared else bucket.flat

    def _gradients(self, op: Op) -> Iterator[tuple[str, Tensor]]:
        for parameter in self.stack.parts[op.part].parameters():
            if parameter.main_grad.untyped_storage().nbytes():  # optim_grads frees what it has reduced
                yield f"gradient of {parameter.spec.name}", parameter.main_grad

    def _weights(self, op: Op) -> Iterator[tuple[str, Tensor]]:
        """Parameters of the op's part; at the step's end there are none."""
        if op.phase != "S":
            yield from ((parameter.spec.name, parameter) for parameter in self.stack.parts[op.part].parameters())


def tensors_in(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors that a value of the plan holds, named by the way to them; a collective in flight and memory not yet written hold none."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Columns):
        yield from tensors_in(name, value.mid)
    elif isinstance(value, RowContext):
        yield from tensors_in(f"{name}.x", value.x)
        yield from tensors_in(name, value.saved)
        yield from tensors_in(f"{name}.shared", value.shared)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for field, item in zip(value._fields, value, strict=True):
            yield from tensors_in(f"{name}.{field}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(f"{name}[{index}]", item)


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are; waits for the device."""
    if not tensor.is_floating_point():
        return True
    # A sum is finite if all of its terms are, unless it overflows, and takes no memory.
    return bool(torch.isfinite(tensor.detach().sum(dtype=torch.float64))) or bool(torch.isfinite(tensor.detach()).all())


def first_not_finite(tensor: Tensor) -> tuple[int, ...]:
    """Index of the first element that is not finite, which there must be."""
    flat = tensor.detach().reshape(-1)
    for number, part in enumerate(flat.split(CHUNK)):
        found = torch.isfinite(part).logical_not().nonzero()
        if len(found):
            position = number * CHUNK + int(found[0])
            return tuple(int(index) for index in torch.unravel_index(torch.tensor(position), tensor.shape))
    raise AssertionError("every element is finite")
