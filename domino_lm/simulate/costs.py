"""What each op of a plan works on: shape records from a model's settings, and `cost`, the only place that knows work.

s sequence, b sequences in a row, h hidden, f ffn, n heads, g key and value heads, d head width, v vocabulary, t TP size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from domino_lm.config.settings import ModelConfig
from domino_lm.schedule.ops import DP_LINK, Kind, Op, Slicing, is_gather
from domino_lm.schedule.plan import Plan
from domino_lm.simulate.hardware import CoreAttention, Gemm, Hardware, Pass
from domino_lm.simulate.links import Group, Transfer

MAIN_GRAD_BYTES = 4
FP32_BYTES = 4
STEP_BYTES = 32
"""AdamW for one parameter: gradient, master weight and two moments read, three written, the weight written, in fp32."""

EXPLICIT_PASSES = {"F": 10, "B": 7}
"""Reads and writes of each score by the kernels that mask, normalise, hash, drop and scale it."""

PAIR_FLOPS = 4.0
"""For each query, key and channel: 2 for the score and 2 for the value."""

FLASH_BACKWARD_FLOPS = 2.5
"""Five products backward for two forward, since the scores are computed again (FlashAttention, arXiv 2205.14135)."""


class Traffic(NamedTuple):
    """A bandwidth-bound piece of a part: bytes it moves for each token, in how many kernels."""

    name: str
    bytes_per_token: float
    launches: int = 1


class PartShape(NamedTuple):
    """Everything that `cost` asks of a part of the chain, as one rank holds it.

    A sharded part is ``[tokens, hidden] -> [tokens, inner] -> core -> [tokens, mid] -> [tokens, hidden]``; a width of 0 means
    that there is no such GEMM.
    """

    hidden: int
    inner: int = 0
    mid: int = 0
    attention_width: int = 0
    """Query heads x head width / t; 0 where the core is no attention."""

    explicit_heads: int = 0
    """Query heads / t where the scores are spelled out, since dropout needs them; 0 for fused attention."""

    core_forward: tuple[Traffic, ...] = ()
    core_backward: tuple[Traffic, ...] = ()
    tail_forward: tuple[Traffic, ...] = ()
    wgrad: tuple[Traffic, ...] = ()
    loss: tuple[Traffic, ...] = ()
    rebuild: tuple[Traffic, ...] = ()
    """A replicated part computed again from the residual stream that it keeps."""

    kept_per_token: int = 0
    """Bytes a token that a part without recomputation keeps for backward, beside the input and the output of its core; of the head,
    what it keeps until the loss."""

    graph_per_token: int = 0
    """Bytes a token that autograd keeps besides, which backward of the part frees and recompute builds again."""

    backward_per_token: int = 0
    """Bytes a token that backward of the core has in hand at once, the result included."""

    parameters: int = 0
    """Weights of this rank whose gradients this part owns (a tied table counts where it first occurs)."""

    wgrad_columns: int = 0
    """Weight-gradient elements that one WGRAD adds into."""


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
    """Ranks that the optimizer's work is shared out over, where the plan shares it."""

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

    def bucket_elements(self, bucket: int) -> float:
        """Weights in a gradient bucket; where several share a part's, the shares are taken as equal."""
        return sum(self.parts[part].parameters / len(self.slicing.buckets_of(part)) for part in self.slicing.buckets[bucket])


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
    model: ModelConfig, plan: Plan, tensor_parallel: int, hardware: Hardware, micro_batch_size: int, data_parallel: int = 1
) -> Shapes:
    """Shape records of ``plan`` on one of ``tensor_parallel`` x ``data_parallel`` ranks."""
    sizes = plan.slicing.row_sizes
    if plan.slicing.sequence_rows:
        offsets = [sum(sizes[:row]) for row in range(len(sizes))]
        rows = tuple(RowShape(micro_batch_size, size, offset) for size, offset in zip(sizes, offsets, strict=True))
    else:
        rows = tuple(RowShape(size, model.seq_length) for size in sizes)
    return Shapes(
        model_parts(model, tensor_parallel, hardware),
        rows,
        plan.slicing,
        hardware.element_bytes,
        tensor_parallel,
        hardware.composes_kernels,
        data_parallel,
    )


def model_parts(model: ModelConfig, tensor_parallel: int, hardware: Hardware) -> tuple[PartShape, ...]:
    """The chain of `transformer_chain`, part by part."""
    block = (
        _norm(model, hardware),
        _attention(model, tensor_parallel, hardware),
        _norm(model, hardware),
        _mlp(model, tensor_parallel, hardware),
    )
    no_bias = model.hidden_size * model.add_bias_linear  # the embedding has none to hand on
    first = block[0]._replace(parameters=block[0].parameters + _position_parameters(model) - no_bias)
    layers = (first, *(block * model.num_layers)[1:])
    return (_embedding(model, tensor_parallel, hardware), *layers, _norm(model, hardware), _head(model, tensor_parallel, hardware))


def _norm(model: ModelConfig, hardware: Hardware) -> PartShape:
    """Reads branch and residual, writes the sum and its norm; in eager PyTorch each step is a pass of its own."""
    unit = model.hidden_size * hardware.element_bytes
    bias, dropout = model.add_bias_linear, model.hidden_dropout > 0
    forward: tuple[Traffic, ...] = (Traffic("norm", 4 * unit, 2),)
    backward: tuple[Traffic, ...] = (Traffic("norm_grad", 6 * unit, 3),)
    if not hardware.fused:
        joins, returns = 3 + 2 * bias + 4 * dropout, 3 + bias + 3 * dropout
        forward = Traffic("join", joins * unit, 1 + bias + 2 * dropout), Traffic("norm", 2 * unit)
        backward = Traffic("norm_grad", 3 * unit, 2), Traffic("join_grad", returns * unit, 1 + bias + dropout)
    weights = model.hidden_size * (1 + (model.normalization == "LayerNorm") + bias)
    composed = 0
    if hardware.composes_kernels and model.normalization == "RMSNorm":  # the normalised stream in fp32, of narrower ones the stream too
        composed = FP32_BYTES * model.hidden_size * (1 + (hardware.element_bytes < FP32_BYTES))
    return PartShape(
        model.hidden_size,
        core_forward=forward,
        core_backward=backward,
        rebuild=(Traffic("norm", 2 * unit),),
        kept_per_token=model.hidden_size * dropout,  # a byte of mask
        graph_per_token=composed,
        parameters=weights,
    )


def _attention(model: ModelConfig, t: int, hardware: Hardware) -> PartShape:
    size, width = hardware.element_bytes, model.head_width
    mid = model.num_attention_heads * width // t  # heads that t does not divide are cut all the same, as an estimate
    grouped = max(model.query_groups * width // t, width)  # fewer groups than ranks are replicated
    inner = mid + 2 * grouped
    rotated = 2 * (mid + grouped) * size
    rotate = (Traffic("rotate", rotated if hardware.fused else 3 * rotated, 2 if hardware.fused else 10),)
    turn = rotate if model.position_embedding_type == "rope" else ()
    layout = () if hardware.fused else (Traffic("layout", 2 * (inner + mid) * size, 3),)
    explicit = model.attention_dropout > 0
    return PartShape(
        hidden=model.hidden_size,
        inner=inner,
        mid=mid,
        attention_width=mid,
        explicit_heads=mid // width if explicit else 0,
        core_forward=turn + layout,
        core_backward=turn + layout,
        graph_per_token=_copied_heads(mid, grouped, bool(turn), explicit, hardware) * size,
        backward_per_token=(5 * mid if turn else mid + 2 * inner) * size,
        parameters=(inner + mid) * model.hidden_size + inner * model.add_bias_linear,
        wgrad_columns=(inner + mid) * model.hidden_size,
        wgrad=_bias_grad(inner, model, size),
    )


def _copied_heads(mid: int, grouped: int, turned: bool, explicit: bool, hardware: Hardware) -> int:
    """Width of what autograd keeps beside the first GEMM's output: heads turned by RoPE, repeated, or copied to form the scores."""
    if explicit:
        return 3 * mid
    if hardware.composes_kernels and grouped < mid:
        return (3 if turned else 2) * mid
    return mid + grouped if turned and not hardware.fused else 0


def _mlp(model: ModelConfig, t: int, hardware: Hardware) -> PartShape:
    size, mid = hardware.element_bytes, model.ffn_width // t
    inner = mid * (2 if model.swiglu else 1)
    name = "swiglu" if model.swiglu else "gelu"
    kernels = 1 if hardware.fused or not model.swiglu else 2
    return PartShape(
        hidden=model.hidden_size,
        inner=inner,
        mid=mid,
        core_forward=(Traffic(name, (inner + mid) * size, kernels),),
        core_backward=(Traffic(f"{name}_grad", (2 * inner + mid) * size, kernels),),
        graph_per_token=0 if hardware.fused or not model.swiglu else mid * size,  # silu(gate)
        backward_per_token=(4 * mid if model.swiglu else mid + inner) * size,
        parameters=(inner + mid) * model.hidden_size + inner * model.add_bias_linear,
        wgrad_columns=(inner + mid) * model.hidden_size,
        wgrad=_bias_grad(inner, model, size),
    )


def _bias_grad(inner: int, model: ModelConfig, size: int) -> tuple[Traffic, ...]:
    return (Traffic("bias_grad", inner * size),) if model.add_bias_linear else ()


def _embedding(model: ModelConfig, t: int, hardware: Hardware) -> PartShape:
    unit = model.hidden_size * hardware.element_bytes
    return PartShape(
        hidden=model.hidden_size,
        tail_forward=(Traffic("lookup", 4 * unit, 2),),
        core_backward=(Traffic("lookup_grad", 2 * unit),),
        wgrad=(Traffic("lookup_grad", unit + 2 * model.hidden_size * MAIN_GRAD_BYTES),),
        parameters=vocabulary_rows(model, t) * model.hidden_size,
    )


def _head(model: ModelConfig, t: int, hardware: Hardware) -> PartShape:
    rows, size = vocabulary_rows(model, t), hardware.element_bytes
    return PartShape(
        hidden=model.hidden_size,
        inner=rows,
        core_forward=(Traffic("softmax", rows * (size + 5 * 4), 5),),  # to fp32, maximum, exponentials, their sum
        loss=(Traffic("softmax", rows * (2 * 4 + 4 + size), 3),),
        kept_per_token=rows * 4,  # exponentials, fp32
        parameters=rows * model.hidden_size if model.untie_embeddings_and_output_weights else 0,
        wgrad_columns=rows * model.hidden_size,
    )


def vocabulary_rows(model: ModelConfig, tensor_parallel: int) -> int:
    """Rows of the table on one rank, padding included."""
    return model.padded_vocab_size(tensor_parallel) // tensor_parallel


def _position_parameters(model: ModelConfig) -> int:
    return model.position_rows * model.hidden_size if model.position_embedding_type == "learned_absolute" else 0


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
    """Bytes a token of the buffer that all ranks hold together before (reduce-scatter) or after (all-gather) it travelled."""
    collective = shapes.slicing.collective(op)
    if collective.bytes_per_token:
        return collective.bytes_per_token * shapes.tensor_parallel
    return part.hidden / (shapes.slicing.cols if collective.cut_by_columns else 1) * shapes.element_bytes * collective.size


def _local_cost(op: Op, part: PartShape, tokens: float, shapes: Shapes) -> Work:
    """A replicated part; column blocks are put side by side by a copy where they do not come in one buffer, or go back."""
    if op.kind is Kind.RECOMPUTE:
        return Work(passes=_passes(part.rebuild, tokens))
    passes = _passes(part.core_forward if op.phase == "F" else part.core_backward, tokens)
    if shapes.slicing.cols > 1 and (op.phase == "B" or shapes.slicing.sequence_parallel):
        passes += (Pass("layout", 2 * tokens * part.hidden * shapes.element_bytes),)
    return Work(passes=passes)


def _step_cost(op: Op, shapes: Shapes) -> Work:
    """A bucket's reduction, the gather of its updated parameters, or the optimizer's step."""
    if op.kind is Kind.START:
        collective = shapes.slicing.collective(op)
        size = collective.size * (shapes.element_bytes if is_gather(op) else MAIN_GRAD_BYTES)
        return Work(traffic=collective.traffic, transfer_bytes=shapes.bucket_elements(op.part) * size, link=op.lane)
    if op.kind is Kind.STEP:
        return Work(passes=(Pass("step", shapes.updated * STEP_BYTES, 10),))
    raise ValueError(f"{op} has no cost: {op.kind} does not exist in phase S")


def _wgrad_cost(part: PartShape, tokens: int, size: int) -> Work:
    """Both weight gradients; each WGRAD is a pass over the gradient memory too."""
    gemms = [Gemm(part.hidden, part.mid, tokens)] if part.mid else []
    gemms += [Gemm(part.inner, part.hidden, tokens)] if part.inner else []
    passes = _passes(part.wgrad, tokens)
    if part.wgrad_columns:
        passes += (Pass("accumulate", part.wgrad_columns * (size + 2 * MAIN_GRAD_BYTES), len(gemms)),)
    return Work(tuple(gemms), None, passes)


def _core(part: PartShape, row: RowShape, size: int, *, backward: bool) -> tuple[CoreAttention | None, tuple[Pass, ...]]:
    """What stands between a part's GEMMs: attention, where there is one, and passes over memory."""
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
