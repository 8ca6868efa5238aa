"""Memory of activations: walks a plan with the sizes of the values that are alive. Nothing here imports torch.

Compared with the live bytes of real steps by ``tests/distributed/test_memory.py``.
"""

from collections.abc import Iterable

from domino_lm.model.shapes import FP32_BYTES, PartShape
from domino_lm.schedule.collectives import STATISTICS_BYTES
from domino_lm.schedule.ops import Flow, Kind, Op, Value, dataflow
from domino_lm.simulate.costs import Shapes

SCORES_AT_WORK = 2
"""Further tensors of all scores that spelled-out attention has in hand at once, in either direction."""


def peak_activations(ops: Iterable[Op], shapes: Shapes) -> float:
    """Largest sum of the values alive around any op, and of what the op needs itself; a value dies with the op that reads it last.

    Micro-batches may follow each other: a value written again is another one.
    """
    ops = list(ops)
    flows = [dataflow(op, shapes.slicing) for op in ops]
    last_uses = _last_uses(flows)
    sizes: dict[Value, float] = {}
    alive = peak = 0.0
    for position, (op, flow) in enumerate(zip(ops, flows, strict=True)):
        before = alive
        for value in flow.outputs:
            sizes[value] = value_bytes(value, shapes)
            alive += sizes[value]
        change = context_change(op, shapes)
        if change:
            saved = Value("saved", "F", op.part, op.row, 0, op.micro)
            sizes[saved] += change
            alive += change
        alive -= sum(sizes.pop(value) for value in last_uses.get(position, ()))
        peak = max(peak, alive, before + workspace_bytes(op, shapes))
    return peak


def _last_uses(flows: list[Flow]) -> dict[int, list[Value]]:
    """Values that no op after each position reads; what was written before the first op is left out."""
    written_at: dict[Value, int] = {}
    last_use: dict[tuple[Value, int], int] = {}
    for position, flow in enumerate(flows):
        for value in flow.inputs:
            if value in written_at:
                last_use[value, written_at[value]] = position
        for value in flow.outputs:
            written_at[value] = position
            last_use[value, position] = position
    dying: dict[int, list[Value]] = {}
    for (value, _), position in last_use.items():
        dying.setdefault(position, []).append(value)
    return dying


def value_bytes(value: Value, shapes: Shapes) -> float:
    """Memory that a value owns when it is written; what it shares with another value counts there.

    A norm's output counts with what the next part (under sequence parallelism: the norm) saves, the residual stream with
    what the norm saves, an output gradient with what waits for the weight gradient; a collective's buffer is one memory
    from partial sum to sum. What the head keeps until the loss counts with its statistics, since the loss turns it into the gradient.
    """
    if value.phase == "S":
        return 0.0
    part, row, slicing = shapes.parts[value.part], shapes.rows[value.row], shapes.slicing
    whole = float(part.hidden * row.tokens * shapes.element_bytes)
    if value.name == "saved":
        return _saved_bytes(value.part, part, value.row, shapes)
    if value.name == "mid" and value.phase == "B":
        return float((part.hidden * bool(part.mid) + part.inner) * row.tokens * shapes.element_bytes)
    if value.name == "residual" and value.phase == "B":
        return whole / shapes.replicas_share
    if value.name in ("gathered", "gathered_input", "all_gather in flight", "gather_input in flight"):
        return whole
    if part.loss and value.phase == "F":
        return float((STATISTICS_BYTES + part.kept_per_token) * row.tokens)
    if value.name == "sum":
        return whole / slicing.cols / shapes.replicas_share
    if value.name == "reduce_scatter in flight":
        return whole * (1 + shapes.exchanged_scatter)
    if value.name in ("partial", "all_reduce in flight"):
        return whole / slicing.cols
    return 0.0


def context_change(op: Op, shapes: Shapes) -> float:
    """By how much an op changes what its part and row have saved: recompute adds to it, backward of a core frees what only it needs."""
    if op.phase != "B" or op.kind not in (Kind.RECOMPUTE, Kind.BODY):
        return 0.0
    part, slicing = shapes.parts[op.part], shapes.slicing
    if not slicing.chain[op.part].sharded:
        return part.autograd_bytes_per_token * shapes.rows[op.row].tokens / shapes.replicas_share
    if not part.mid:
        return 0.0
    first, graph = _first_bytes(part, op.row, shapes), _graph_bytes(part, op.row, shapes)
    if op.kind is Kind.BODY:
        return -(first + graph)
    core = _core_bytes(part, op.row, shapes) + graph
    return core if op.part in slicing.recompute_core else core + first + _input_bytes(op.part, part, op.row, shapes)


def workspace_bytes(op: Op, shapes: Shapes) -> float:
    """Memory that an op takes beside what was alive before it, if it exceeds what the op leaves: gradients on their way through a core."""
    if op.phase == "S" or op.kind not in (Kind.BODY, Kind.RECOMPUTE, Kind.LOSS):
        return 0.0
    part, row, size = shapes.parts[op.part], shapes.rows[op.row], shapes.element_bytes
    if part.loss:
        return float(part.inner * row.tokens * size) if size < FP32_BYTES else 0.0  # logits beside their exponentials in fp32
    scores = SCORES_AT_WORK * part.explicit_heads * row.square * max(size, FP32_BYTES)
    if op.kind is Kind.BODY and op.phase == "B":
        return scores + part.backward_per_token * row.tokens
    return scores + _graph_bytes(part, op.row, shapes)


def _saved_bytes(position: int, part: PartShape, row: int, shapes: Shapes) -> float:
    """What forward keeps of a part for backward."""
    slicing, tokens = shapes.slicing, shapes.rows[row].tokens
    if not slicing.chain[position].sharded:
        unit = part.hidden * shapes.element_bytes
        again = position + 1 in slicing.recompute_full
        kept = unit + part.kept_per_token + (0 if again else unit * slicing.sequence_parallel + part.autograd_bytes_per_token)
        return kept * tokens / shapes.replicas_share
    if position in slicing.recompute_full:
        return 0.0
    core = 0.0 if position in slicing.recompute_core else _core_bytes(part, row, shapes) + _graph_bytes(part, row, shapes)
    return _input_bytes(position, part, row, shapes) + _first_bytes(part, row, shapes) + core


def _input_bytes(position: int, part: PartShape, row: int, shapes: Shapes) -> float:
    """The first GEMM's input; under sequence parallelism it is gathered again for the weight gradient, and counts there."""
    gathered_again = shapes.slicing.sequence_parallel and position > 0
    return float(part.hidden * shapes.rows[row].tokens * shapes.element_bytes) if part.inner and not gathered_again else 0.0


def _first_bytes(part: PartShape, row: int, shapes: Shapes) -> float:
    """The first GEMM's output, which backward of the core needs; the head's is in `value_bytes`."""
    return float(part.inner * shapes.rows[row].tokens * shapes.element_bytes) if part.mid else 0.0


def _core_bytes(part: PartShape, row: int, shapes: Shapes) -> float:
    """The second GEMM's input, which lives until the weight gradient."""
    return float(part.mid * shapes.element_bytes * shapes.rows[row].tokens)


def _graph_bytes(part: PartShape, row: int, shapes: Shapes) -> float:
    """What autograd keeps of the core: of spelled-out attention the softmax (in fp32), the same after dropout, and a byte that says what
    was kept of each score; of fused attention under a mask that mask, which all heads share, in the model's type."""
    if shapes.masked and part.attention_width and not part.explicit_heads:
        return part.autograd_bytes_per_token * shapes.rows[row].tokens + shapes.rows[row].square * shapes.element_bytes
    scores = part.explicit_heads * shapes.rows[row].square
    size = shapes.element_bytes
    return part.autograd_bytes_per_token * shapes.rows[row].tokens + scores * (max(size, FP32_BYTES) + size + 1)
