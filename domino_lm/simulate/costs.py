"""What each op of a plan works on, and `cost`, the only place that knows work."""

from dataclasses import dataclass
from typing import NamedTuple

from domino_lm.config.settings import ModelConfig
from domino_lm.model.families.lookup import family_of
from domino_lm.model.shapes import FP32_BYTES, MAIN_GRAD_BYTES, PartShape, Rank, Traffic
from domino_lm.schedule.ops import DP_LINK, Kind, Op, Slicing, concerns_matrices, is_gather
from domino_lm.schedule.plan import Plan
from domino_lm.simulate.hardware import CoreAttention, Gemm, Hardware, Pass
from domino_lm.simulate.links import Group, Transfer
from domino_lm.simulate.matrix_updates import MOMENTUM_BYTES, OWN_BYTES, WHOLE_BYTES, MatrixUpdates, matrix_elements

STEP_BYTES = 32
"""AdamW for one parameter: gradient, master weight and two moments read, three written, the weight written, in fp32."""

EXPLICIT_PASSES = {"F": 10, "B": 7}
"""Reads and writes of each score by the kernels that mask, normalise, hash, drop and scale it."""

PAIR_FLOPS = 4.0
"""For each query, key and channel: 2 for the score and 2 for the value."""

FLASH_BACKWARD_FLOPS = 2.5
"""Five products backward for two forward, since the scores are computed again (FlashAttention, arXiv 2205.14135)."""


class RowShape(NamedTuple):
    """A row of the micro-batch: ``sequences`` of ``length`` tokens, of which the first stands at ``offset``."""

    sequences: int
    length: int
    offset: int = 0

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.sequences * self.length

    @property
    def attended(self) -> float:
        """Query and key pairs under the causal mask."""
        return self.sequences * (self.length * self.offset + self.length * (self.length + 1) / 2)

    @property
    def square(self) -> float:
        """Query and key pairs, masked ones included."""
        return float(self.sequences * self.length * (self.offset + self.length))


@dataclass(frozen=True)
class Shapes:
    """What the ops of one plan work on."""

    parts: tuple[PartShape, ...]
    rows: tuple[RowShape, ...]
    slicing: Slicing
    element_bytes: int
    tensor_parallel: int
    exchanged_scatter: bool = False
    """Whether a reduce-scatter receives all shares beside those that it sends, as gloo's does."""

    data_parallel: int = 1
    """Ranks that the optimizer's work is shared out over, if the plan shares it."""

    masked: bool = False
    """Whether samples have attention masks, which fused kernels read as numbers of the model's type."""
    matrices: MatrixUpdates | None = None
    """How matrices are updated whole, if the plan does that."""

    @property
    def replicas_share(self) -> int:
        """Ranks that a replicated part's tokens are shared over: all of TP under sequence parallelism."""
        return self.tensor_parallel if self.slicing.sequence_parallel else 1

    @property
    def parameters(self) -> int:
        """Weights on one rank."""
        return sum(part.parameters for part in self.parts)

    @property
    def updated(self) -> float:
        """Weights that one rank updates."""
        return self.parameters / (self.data_parallel if self.slicing.zero else 1)

    @property
    def in_whole_matrices(self) -> int:
        """Weights on one rank that are updated as parts of whole matrices."""
        return sum(matrix_elements(self.parts[part]) for part in self.slicing.orthogonalized)

    def bucket_elements(self, bucket: int) -> float:
        """Weights in a gradient bucket; of buckets that share a part's, the shares are taken as equal."""
        return sum(self._share(part, bucket) for part in self.slicing.buckets[bucket])

    def _share(self, number: int, bucket: int) -> float:
        """Weights of a part that lie in ``bucket``: those that only the core of a sharded part uses are summed over ranks apart."""
        part, replica, buckets = self.parts[number], self.slicing.replica_buckets, self.slicing.buckets_of(number)
        apart = part.core_parameters if part.sharded and not replica.isdisjoint(buckets) else 0
        if apart and bucket in replica:
            return apart
        return (part.parameters - apart) / (len(buckets) - bool(apart))


class Work(NamedTuple):
    """What one op asks of the machine. ``transfer_bytes`` is the whole buffer of its collective, on ``link``."""

    gemms: tuple[Gemm, ...] = ()
    attention: CoreAttention | None = None
    passes: tuple[Pass, ...] = ()
    traffic: str = ""
    transfer_bytes: float = 0.0
    link: str = ""

    def seconds(self, hardware: Hardware) -> float:
        """Compute time on ``hardware``, nothing running beside it; a collective's op takes none."""
        device, size = hardware.device, hardware.element_bytes
        seconds = sum([device.gemm_s(gemm, size) for gemm in self.gemms]) + sum([device.pass_s(item) for item in self.passes])
        return seconds + (device.attention_s(self.attention) if self.attention is not None else 0.0)

    def transfer(self, hardware: Hardware, tp: Group, dp: Group) -> Transfer:
        """Time of its collective on ``hardware``."""
        return hardware.fabric.transfer(self.traffic, self.transfer_bytes, dp if self.link == DP_LINK else tp)

    @property
    def launches(self) -> int:
        """Kernels that the host enqueues."""
        kernels = len(self.gemms) + sum([item.launches for item in self.passes])
        return kernels + (self.attention is not None) + bool(self.traffic)


def shapes_of(
    model: ModelConfig,
    plan: Plan,
    tensor_parallel: int,
    hardware: Hardware,
    micro_batch_size: int,
    data_parallel: int = 1,
    masked: bool = False,
    matrices: MatrixUpdates | None = None,
) -> Shapes:
    """Shape records of ``plan`` on one of ``tensor_parallel`` x ``data_parallel`` ranks; ``masked`` if samples have attention masks.

    ``matrices`` says how the plan updates whole ones.
    """
    sizes = plan.slicing.row_sizes
    if plan.slicing.sequence_rows:
        offsets = [sum(sizes[:row]) for row in range(len(sizes))]
        rows = tuple(RowShape(micro_batch_size, size, offset) for size, offset in zip(sizes, offsets, strict=True))
    else:
        rows = tuple(RowShape(size, model.seq_length) for size in sizes)
    return Shapes(
        model_parts(model, tensor_parallel, hardware, masked),
        rows,
        plan.slicing,
        hardware.element_bytes,
        tensor_parallel,
        hardware.composes_kernels,
        data_parallel,
        masked,
        matrices,
    )


def model_parts(model: ModelConfig, tensor_parallel: int, hardware: Hardware, masked: bool = False) -> tuple[PartShape, ...]:
    """The model's chain, part by part, as one of ``tensor_parallel`` ranks of ``hardware`` holds it; ``masked`` if samples have attention masks."""
    repeats = not hardware.fused and (masked or hardware.element_bytes == FP32_BYTES)
    return family_of(model).shapes(Rank(tensor_parallel, hardware.element_bytes, hardware.fused, hardware.composes_kernels, repeats))


def cost(op: Op, shapes: Shapes) -> Work:
    """The work of ``op``. With `dataflow`, all that a simulator knows about ops.

    Raises ValueError on an op whose kind has no meaning in its phase.
    """
    if op.kind is Kind.WAIT:
        return Work()
    if op.phase == "S":
        return _step_cost(op, shapes)
    part = shapes.parts[op.part]
    row = shapes.rows[op.row]
    tokens, columns = row.tokens, part.hidden // shapes.slicing.cols
    match op.kind, op.phase:
        case (Kind.LOCAL, _) | (Kind.RECOMPUTE, "B") if not shapes.slicing.chain[op.part].sharded:
            return _local_cost(op, part, tokens / shapes.replicas_share, shapes)
        case (Kind.BODY, "F") | (Kind.RECOMPUTE, "B"):
            again = op.kind is Kind.RECOMPUTE and op.part in shapes.slicing.recompute_core
            gemms = (Gemm(tokens, part.inner, part.hidden),) if part.inner and not again else ()
            return Work(gemms, *_core(part, row, shapes.element_bytes, backward=False))
        case Kind.BODY, "B":
            gemms = (Gemm(tokens, part.mid, part.hidden),) if part.mid else ()
            return Work(gemms, *_core(part, row, shapes.element_bytes, backward=True))
        case Kind.TAIL, "F":
            gemms = (Gemm(tokens, columns, part.mid),) if part.mid else ()
            return Work(gemms, passes=_passes(part.tail_forward, tokens / shapes.slicing.cols))
        case Kind.TAIL, "B":
            return Work((Gemm(tokens, columns, part.inner),))
        case Kind.WGRAD, "B":
            return _wgrad_cost(part, tokens, shapes.element_bytes)
        case Kind.LOSS, "F":
            return Work(passes=_passes(part.loss, tokens))
        case Kind.START, _:
            return Work(traffic=shapes.slicing.collective(op).traffic, transfer_bytes=tokens * _travelling(op, part, shapes), link=op.lane)
    raise ValueError(f"{op} has no cost: {op.kind} does not exist in phase {op.phase}")


def _travelling(op: Op, part: PartShape, shapes: Shapes) -> float:
    """Bytes per token of the buffer that all ranks hold together before (reduce-scatter) or after (all-gather) it travelled."""
    collective = shapes.slicing.collective(op)
    if collective.bytes_per_token:
        return collective.bytes_per_token * shapes.tensor_parallel
    return part.hidden / (shapes.slicing.cols if collective.cut_by_columns else 1) * shapes.element_bytes * collective.size


def _local_cost(op: Op, part: PartShape, tokens: float, shapes: Shapes) -> Work:
    """A replicated part. Column blocks that do not arrive in one buffer are put side by side by a copy, as are those that leave backward."""
    if op.kind is Kind.RECOMPUTE:
        return Work(passes=_passes(part.rebuild, tokens))
    passes = _passes(part.core_forward if op.phase == "F" else part.core_backward, tokens)
    if shapes.slicing.cols > 1 and (op.phase == "B" or shapes.slicing.sequence_parallel):
        passes += (Pass("layout", 2 * tokens * part.hidden * shapes.element_bytes),)
    return Work(passes=passes)


def _step_cost(op: Op, shapes: Shapes) -> Work:
    """A bucket's reduction, the gather of its updated parameters, or the optimizer's step."""
    if concerns_matrices(op):
        return _matrix_cost(op, shapes)
    if op.kind is Kind.START:
        collective = shapes.slicing.collective(op)
        size = collective.size * (shapes.element_bytes if is_gather(op) else MAIN_GRAD_BYTES)
        return Work(traffic=collective.traffic, transfer_bytes=shapes.bucket_elements(op.part) * size, link=op.lane)
    if op.kind is Kind.STEP:
        return Work(passes=(Pass("step", (shapes.updated - shapes.in_whole_matrices) * STEP_BYTES, 10),))
    raise ValueError(f"{op} has no cost: {op.kind} does not exist in phase S")


def _matrix_cost(op: Op, shapes: Shapes) -> Work:
    """Matrices that are updated whole: their momentum, its gather in fp32, and on every rank the whole iteration.

    The iteration's products are priced at the training dtype's rate.
    """
    assert shapes.matrices is not None, "who plans updates of whole matrices says how they are made"
    if op.kind is Kind.MOMENTUM:
        return Work(passes=(Pass("step", shapes.in_whole_matrices * MOMENTUM_BYTES, 10),))
    part = shapes.parts[op.part]
    own = matrix_elements(part)
    whole = own * shapes.tensor_parallel
    if op.kind is Kind.START:
        return Work(traffic=shapes.slicing.collective(op).traffic, transfer_bytes=whole * MAIN_GRAD_BYTES, link=op.lane)
    return Work(shapes.matrices.gemms(part, shapes.tensor_parallel), passes=(Pass("step", whole * WHOLE_BYTES + own * OWN_BYTES, 10),))


def _wgrad_cost(part: PartShape, tokens: int, size: int) -> Work:
    """Both weight gradients; each WGRAD is a pass over the gradient memory too."""
    gemms = [Gemm(part.hidden, part.mid, tokens)] if part.mid else []
    gemms += [Gemm(part.inner, part.hidden, tokens)] if part.inner else []
    passes = _passes(part.wgrad, tokens)
    if part.wgrad_columns:
        passes += (Pass("accumulate", part.wgrad_columns * (size + 2 * MAIN_GRAD_BYTES), len(gemms)),)
    return Work(tuple(gemms), None, passes)


def _core(part: PartShape, row: RowShape, size: int, *, backward: bool) -> tuple[CoreAttention | None, tuple[Pass, ...]]:
    """Work between a part's GEMMs: attention, if it has any, and passes over memory."""
    passes = _passes(part.core_backward if backward else part.core_forward, row.tokens)
    if not part.attention_width:
        return None, passes
    pairs = row.square if part.explicit_heads else row.attended
    if part.explicit_heads:
        times = EXPLICIT_PASSES["B" if backward else "F"]
        passes += (Pass("scores", times * part.explicit_heads * row.square * size, times // 2),)
    flops_per_pair = PAIR_FLOPS * (FLASH_BACKWARD_FLOPS if backward else 1.0)
    flops = flops_per_pair * pairs * part.attention_width
    return CoreAttention(flops, row.offset + row.length, backward), passes


def _passes(traffic: tuple[Traffic, ...], tokens: float) -> tuple[Pass, ...]:
    return tuple(Pass(item.name, item.bytes_per_token * tokens, item.launches) for item in traffic)
