"""Shape records: what planner, cost model and memory estimate know of a model's parts. Nothing here imports torch.

s sequence, b sequences in a row, h hidden, f ffn, n heads, g key and value heads, d head width, v vocabulary, t TP size.
"""

from typing import Any, NamedTuple

from domino_lm.config.settings import ModelConfig

MAIN_GRAD_BYTES = FP32_BYTES = 4


class Rank(NamedTuple):
    """A rank and its kernels, as far as the shapes of what it holds depend on them."""

    tensor_parallel: int = 1  # ranks t that share each sharded part's matrices
    element_bytes: int = 4  # of an activation: 2 for bf16, 4 for fp32
    fused: bool = False  # bias, dropout and residual add are one kernel each way; False: eager PyTorch
    composes_kernels: bool = False  # RMSNorm and grouped heads consist of smaller kernels, whose results are kept, as on CPUs
    repeats_heads: bool = False  # grouped heads are repeated elsewhere too, as on GPUs in fp32 and under attention masks


class Traffic(NamedTuple):
    """A memory-bound piece of a part: bytes that it moves per token, in how many kernels."""

    name: str
    bytes_per_token: float
    launches: int = 1


class PartShape(NamedTuple):
    """A part of the chain as one rank holds it: how it joins its neighbours, and all that its costs and its memory depend on.

    A sharded part is ``[tokens, hidden] -> [tokens, inner] -> core -> [tokens, mid] -> [tokens, hidden]``; a width of 0 means
    that there is no such GEMM. The functions below make the common ones.
    """

    name: str  # what people call it
    hidden: int
    forward_collective: str | None = None  # all_reduce, or statistics after a head; None after a replicated part
    backward_collective: str | None = None  # all_reduce, or None if no gradient goes further down
    couples_tokens: bool = False  # a token's output depends on earlier tokens
    inner: int = 0
    mid: int = 0
    attention_width: int = 0  # query heads x head width / t; 0 if the core is no attention
    explicit_heads: int = 0  # query heads / t if the scores are spelled out, since dropout needs them; 0 for fused attention
    core_forward: tuple[Traffic, ...] = ()
    core_backward: tuple[Traffic, ...] = ()
    tail_forward: tuple[Traffic, ...] = ()
    wgrad: tuple[Traffic, ...] = ()
    loss: tuple[Traffic, ...] = ()
    rebuild: tuple[Traffic, ...] = ()  # a replicated part computed again from the residual stream that it keeps
    kept_per_token: int = 0  # bytes kept for backward beside input and output of the core; by a head until the loss
    autograd_bytes_per_token: int = 0  # bytes that autograd keeps besides; backward frees them, recompute builds them again
    backward_per_token: int = 0  # bytes that backward of the core has in hand at once, the result included
    parameters: int = 0  # weights of this rank whose gradients the part owns; a tied table counts where it first occurs
    core_parameters: int = 0  # those among them that only the core uses; every rank of a sharded part holds them whole
    wgrad_columns: int = 0  # weight-gradient elements that one WGRAD adds into

    @property
    def sharded(self) -> bool:
        """Whether the part's matrices are cut over the tensor-parallel group."""
        return self.forward_collective is not None

    @property
    def core_weights(self) -> bool:
        """Whether the core has weights of its own."""
        return self.core_parameters > 0


def sharded_shape(name: str, model: ModelConfig, rank: Rank, *, inner: int, mid: int, core_parameters: int = 0, **core: Any) -> PartShape:
    """Two GEMMs of local widths ``inner`` and ``mid`` around a core; ``core`` has further fields. The first has a bias if all linears do."""
    matrices, bias = (inner + mid) * model.hidden_size, inner * model.add_bias_linear
    return PartShape(
        name,
        model.hidden_size,
        "all_reduce",
        "all_reduce",
        couples_tokens=bool(core.get("attention_width")),
        inner=inner,
        mid=mid,
        parameters=matrices + bias + core_parameters,
        core_parameters=core_parameters,
        wgrad_columns=matrices,
        wgrad=(Traffic("bias_grad", inner * rank.element_bytes),) if bias else (),
        **core,
    )


def norm_shape(model: ModelConfig, rank: Rank) -> PartShape:
    """Reads branch and residual, writes the sum and its norm; in eager PyTorch each step is a pass of its own."""
    unit = model.hidden_size * rank.element_bytes
    bias, dropout = model.add_bias_linear, model.hidden_dropout > 0
    forward: tuple[Traffic, ...] = (Traffic("norm", 4 * unit, 2),)
    backward: tuple[Traffic, ...] = (Traffic("norm_grad", 6 * unit, 3),)
    if not rank.fused:
        joins, returns = 3 + 2 * bias + 4 * dropout, 3 + bias + 3 * dropout
        forward = Traffic("join", joins * unit, 1 + bias + 2 * dropout), Traffic("norm", 2 * unit)
        backward = Traffic("norm_grad", 3 * unit, 2), Traffic("join_grad", returns * unit, 1 + bias + dropout)
    composed = 0
    if rank.composes_kernels and model.normalization == "RMSNorm":  # the normalised stream in fp32, of narrower ones the stream too
        composed = FP32_BYTES * model.hidden_size * (1 + (rank.element_bytes < FP32_BYTES))
    return PartShape(
        "norm",
        model.hidden_size,
        core_forward=forward,
        core_backward=backward,
        rebuild=(Traffic("norm", 2 * unit),),
        kept_per_token=model.hidden_size * dropout,  # a byte of mask
        autograd_bytes_per_token=composed,
        parameters=model.hidden_size * (1 + (model.normalization == "LayerNorm") + bias),
    )


def embedding_shape(model: ModelConfig, rank: Rank) -> PartShape:
    """A look-up in the table of the vocabulary, which ranks share by rows."""
    unit = model.hidden_size * rank.element_bytes
    return PartShape(
        "embedding",
        model.hidden_size,
        "all_reduce",
        tail_forward=(Traffic("lookup", 4 * unit, 2),),
        core_backward=(Traffic("lookup_grad", 2 * unit),),
        wgrad=(Traffic("lookup_grad", unit + 2 * model.hidden_size * MAIN_GRAD_BYTES),),
        parameters=_vocabulary_rows(model, rank) * model.hidden_size,
    )


def head_shape(model: ModelConfig, rank: Rank, core_tensors: int = 0) -> PartShape:
    """Logits of this rank's share of the vocabulary, and their cross entropy; a table that is tied counts with the embedding.

    ``core_tensors`` is how many further tensors of all logits a core keeps until the loss, its input and output included.
    """
    rows, size, core = _vocabulary_rows(model, rank), rank.element_bytes, core_tensors
    return PartShape(
        "head",
        model.hidden_size,
        "statistics",
        "all_reduce",
        inner=rows,
        core_forward=(Traffic("softmax", rows * (size + 5 * 4 + core * 8), 5 + core),),  # to fp32, maximum, exponentials, sum
        loss=(Traffic("softmax", rows * (2 * 4 + 4 + size + core * 8), 3 + core),),
        kept_per_token=rows * 4 * (1 + core),  # exponentials, fp32
        parameters=rows * model.hidden_size if model.untie_embeddings_and_output_weights else 0,
        wgrad_columns=rows * model.hidden_size,
    )


def _vocabulary_rows(model: ModelConfig, rank: Rank) -> int:
    """Rows of the table on one rank, padding included."""
    return model.padded_vocab_size(rank.tensor_parallel) // rank.tensor_parallel
