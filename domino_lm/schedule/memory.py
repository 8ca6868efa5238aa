"""Memory of one device by kind, activations by walking the plan with the sizes of the values that are alive."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from domino_lm.schedule.costs import MAIN_GRAD_BYTES, STATISTICS_BYTES, PartShape, Shapes
from domino_lm.schedule.ops import Op, Value, dataflow

OPTIMIZER_BYTES = 8
"""AdamW's two moments, fp32; a master weight of 4 comes on top where weights are narrower."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        """All kinds; the allocator's waste and the libraries' buffers come on top."""
        return self.weights + self.gradients + self.optimizer + self.activations


def memory_of(ops: Iterable[Op], shapes: Shapes) -> Memory:
    """What a rank holds when the ops are at their peak; optimizer state is not cut over data-parallel ranks."""
    parameters, size = shapes.parameters, shapes.element_bytes
    master = 4 if size < 4 else 0
    state = parameters * (OPTIMIZER_BYTES + master)
    return Memory(parameters * size, parameters * MAIN_GRAD_BYTES, state, peak_activations(ops, shapes))


def peak_activations(ops: Iterable[Op], shapes: Shapes) -> float:
    """Largest sum of the values alive after any op; a value dies with the op that reads it last.

    Micro-batches may follow each other: a value written again is another one.
    """
    flows = [dataflow(op, shapes.slicing) for op in ops]
    written_at: dict[Value, int] = {}
    last_use: dict[tuple[Value, int], int] = {}
    for position, (reads, writes) in enumerate(flows):
        for value in reads:
            last_use[value, written_at.get(value, -1)] = position
        for value in writes:
            written_at[value] = position
            last_use[value, position] = position
    dying: dict[int, float] = {}
    for (value, written), position in last_use.items():
        if written >= 0:
            dying[position] = dying.get(position, 0.0) + value_bytes(value, shapes)
    alive = peak = 0.0
    for position, (_, writes) in enumerate(flows):
        alive += sum([value_bytes(value, shapes) for value in writes]) - dying.get(position, 0.0)
        peak = max(peak, alive)
    return peak


def value_bytes(value: Value, shapes: Shapes) -> float:
    """Memory that a value owns; what it shares with another value counts there.

    A norm's output counts with what the next part (under sequence parallelism: the norm) saves, the residual stream with
    what the norm saves, an output gradient with what waits for the weight gradient; a collective's buffer is one memory
    from partial sum to sum.
    """
    if value.phase == "S":
        return 0.0
    part, row, slicing = shapes.parts[value.part], shapes.rows[value.row], shapes.slicing
    whole = part.hidden * row.tokens * shapes.element_bytes
    if value.name == "saved":
        return _saved_bytes(value.part, part, value.row, shapes)
    if value.name == "rebuilt":
        return _core_bytes(part, value.row, shapes) + (0 if value.part in slicing.recompute_core else _input_bytes(part, value.row, shapes))
    if value.name == "mid" and value.phase == "B":
        return float((part.hidden * bool(part.mid) + part.inner) * row.tokens * shapes.element_bytes)
    if value.name == "residual" and value.phase == "B":
        return whole / shapes.replicas_share
    if value.name in ("gathered", "gathered_input", "all_gather in flight", "gather_input in flight"):
        return float(whole)
    if part.loss and value.phase == "F":
        return float(STATISTICS_BYTES * row.tokens)
    if value.name == "sum":
        return whole / slicing.cols / shapes.replicas_share
    if value.name in ("partial", "all_reduce in flight", "reduce_scatter in flight"):
        return whole / slicing.cols
    return 0.0


def _saved_bytes(position: int, part: PartShape, row: int, shapes: Shapes) -> float:
    """What forward keeps of a part for backward."""
    slicing, tokens = shapes.slicing, shapes.rows[row].tokens
    if not slicing.chain[position].sharded:
        unit = part.hidden * shapes.element_bytes
        if position + 1 in slicing.recompute_full:
            return unit * tokens / shapes.replicas_share
        return (unit * (1 + slicing.sequence_parallel) + part.kept_per_token) * tokens / shapes.replicas_share
    if position in slicing.recompute_full:
        return 0.0
    gathered_again = slicing.sequence_parallel and position > 0
    entered = 0.0 if gathered_again else _input_bytes(part, row, shapes)
    first = part.inner * tokens * shapes.element_bytes if part.mid else 0.0
    core = 0.0 if position in slicing.recompute_core else _core_bytes(part, row, shapes)
    return entered + first + core


def _input_bytes(part: PartShape, row: int, shapes: Shapes) -> float:
    return float(part.hidden * shapes.rows[row].tokens * shapes.element_bytes) if part.inner else 0.0


def _core_bytes(part: PartShape, row: int, shapes: Shapes) -> float:
    """The second GEMM's input, and of spelled-out attention the softmax and a byte that says what was kept of it."""
    scores = part.explicit_heads * shapes.rows[row].square
    return (part.mid * shapes.element_bytes + part.kept_per_token) * shapes.rows[row].tokens + scores * (shapes.element_bytes + 1)
