"""GPT and LLaMA: attention and MLP in turn, in the forms that settings choose. Nothing here imports torch until weights are built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from domino_lm.config.settings import ModelConfig
from domino_lm.model.family import Family, divisors, either
from domino_lm.model.shapes import PartShape, Rank, Traffic, embedding_shape, head_shape, norm_shape, sharded_shape

if TYPE_CHECKING:
    from domino_lm.model.parameter import ParameterFactory
    from domino_lm.model.stack import Stack

RESOLVED = {
    "ffn_hidden_size": "ffn_width",
    "kv_channels": "head_width",
    "num_query_groups": "query_groups",
    "max_position_embeddings": "position_rows",
}
"""Settings that may be left to others, and the property that holds their value then."""


class Transformer(Family):
    """Learned positions or RoPE, LayerNorm or RMSNorm, GELU or SwiGLU, biases or none, grouped queries or not."""

    def stack(self, make: ParameterFactory) -> Stack:
        from domino_lm.model.families.transformer_stack import TransformerBuilder

        return TransformerBuilder(self.config, make).stack()

    def shapes(self, rank: Rank) -> tuple[PartShape, ...]:
        model, norm = self.config, norm_shape(self.config, rank)
        learned = model.position_rows * model.hidden_size if model.position_embedding_type == "learned_absolute" else 0
        no_bias = model.hidden_size * model.add_bias_linear  # the embedding has none to hand on
        first = norm._replace(parameters=norm.parameters + learned - no_bias)
        layers = (norm, self._attention(rank), norm, self._mlp(rank)) * model.num_layers
        return (embedding_shape(model, rank), first, *layers[1:], norm, head_shape(model, rank))

    def faults(self, tensor_parallel: int) -> Iterator[str]:
        yield from super().faults(tensor_parallel)
        model, tp = self.config, tensor_parallel
        heads, groups, split = model.num_attention_heads, model.query_groups, f"--tensor-model-parallel-size {tp}"
        if not model.group_query_attention and model.num_query_groups not in (1, heads):
            yield f"--num-query-groups {groups} needs --group-query-attention; add it."
        if heads % groups:
            yield f"--num-query-groups {groups} does not divide --num-attention-heads {heads}; use {either(divisors(heads))}."
        elif groups % tp and heads % tp == 0:
            yield f"{split} does not divide --num-query-groups {groups}; use a size of {either(divisors(groups))}."
        if model.ffn_width < 1:
            yield f"--hidden-size {model.hidden_size} with --swiglu gives an MLP of width 0; give --ffn-hidden-size."
        elif model.ffn_width % tp:
            yield f"{split} does not divide the MLP width {model.ffn_width}; give --ffn-hidden-size a multiple of {tp}."
        if model.rotary_seq_len_interpolation_factor is not None and model.position_embedding_type != "rope":
            yield "--rotary-seq-len-interpolation-factor divides RoPE's positions; give --position-embedding-type rope, or leave it out."
        if model.use_rope_scaling and model.position_embedding_type != "rope":
            yield "--use-rope-scaling scales RoPE's frequencies; give --position-embedding-type rope, or leave it out."
        if model.position_embedding_type == "rope":
            if model.head_width % 2:
                yield f"--position-embedding-type rope turns channels in pairs, but a head has {model.head_width}; use an even --kv-channels."
        elif model.seq_length > model.position_rows:
            yield (
                f"--seq-length {model.seq_length} is longer than the position table of --max-position-embeddings {model.position_rows}; "
                f"use at least {model.seq_length}."
            )

    def unread(self) -> dict[str, str]:
        model, rope = self.config, self.config.position_embedding_type == "rope"
        idle = (
            ("max_position_embeddings", rope, "RoPE has no table of positions"),
            ("rotary_base", not rope, "positions are learned"),
            ("rotary_seq_len_interpolation_factor", not rope, "positions are learned"),
            ("rope_scaling_factor", not model.use_rope_scaling, "RoPE's frequencies are not scaled"),
            (
                "bias_gelu_fusion",
                model.swiglu or not model.add_bias_linear,
                "--swiglu has no GELU, and there is none to fuse without biases",
            ),
            ("openai_gelu", model.swiglu, "--swiglu has no GELU"),
            ("group_query_attention", model.query_groups == model.num_attention_heads, "each query head has its own keys and values"),
            ("num_query_groups", model.query_groups == model.num_attention_heads, "each query head has its own keys and values"),
        )
        return {name: why for name, nothing, why in idle if nothing}

    def describe(self) -> str:
        model = self.config
        kind = f"{model.normalization}, {'SwiGLU' if model.swiglu else 'GELU'} of width {model.ffn_width}"
        heads = f"{model.num_attention_heads} heads of {model.head_width}, {model.query_groups} query groups"
        tied = "" if model.untie_embeddings_and_output_weights else ", output tied to the embedding"
        return (
            f"{model.num_layers} layers, hidden {model.hidden_size}, {heads}, {kind}, {model.position_embedding_type} positions, "
            f"vocabulary {model.vocab_size}{tied}"
        )

    def _attention(self, rank: Rank) -> PartShape:
        model, t = self.config, rank.tensor_parallel
        size, width = rank.element_bytes, model.head_width
        mid = model.num_attention_heads * width // t  # heads that t does not divide are cut all the same, as an estimate
        grouped = max(model.query_groups * width // t, width)  # fewer groups than ranks are replicated
        inner = mid + 2 * grouped
        rotated = 2 * (mid + grouped) * size
        rotate = (Traffic("rotate", rotated if rank.fused else 3 * rotated, 2 if rank.fused else 10),)
        turn = rotate if model.position_embedding_type == "rope" else ()
        layout = () if rank.fused else (Traffic("layout", 2 * (inner + mid) * size, 3),)
        explicit = model.attention_dropout > 0
        return sharded_shape(
            "attention",
            model,
            rank,
            inner=inner,
            mid=mid,
            attention_width=mid,
            explicit_heads=mid // width if explicit else 0,
            core_forward=turn + layout,
            core_backward=turn + layout,
            autograd_bytes_per_token=_copied_heads(mid, grouped, bool(turn), explicit, rank) * size,
            backward_per_token=(5 * mid if turn else mid + 2 * inner) * size,
        )

    def _mlp(self, rank: Rank) -> PartShape:
        model, t = self.config, rank.tensor_parallel
        size, mid = rank.element_bytes, model.ffn_width // t
        inner = mid * (2 if model.swiglu else 1)
        name = "swiglu" if model.swiglu else "gelu"
        kernels = 1 if rank.fused or not model.swiglu else 2
        return sharded_shape(
            "MLP",
            model,
            rank,
            inner=inner,
            mid=mid,
            core_forward=(Traffic(name, (inner + mid) * size, kernels),),
            core_backward=(Traffic(f"{name}_grad", (2 * inner + mid) * size, kernels),),
            autograd_bytes_per_token=0 if rank.fused or not model.swiglu else mid * size,  # silu(gate)
            backward_per_token=(4 * mid if model.swiglu else mid + inner) * size,
        )


def _copied_heads(mid: int, grouped: int, turned: bool, explicit: bool, rank: Rank) -> int:
    """Width of what autograd keeps beside the first GEMM's output: heads turned by RoPE, repeated, or copied to form the scores."""
    if explicit:
        return 3 * mid
    if (rank.composes_kernels or rank.repeats_heads) and grouped < mid:
        return (3 if turned else 2) * mid
    return mid + grouped if turned and not rank.fused else 0


def without_redundant_settings(model: ModelConfig) -> ModelConfig:
    """``model`` with each setting at its default that says no more than the default does, or that GPT or LLaMA does not read."""
    defaults: dict[str, Any] = {item.name: item.default for item in fields(ModelConfig)}
    for name, resolved in RESOLVED.items():
        shorter = replace(model, **{name: defaults[name]})
        model = shorter if getattr(model, resolved) == getattr(shorter, resolved) else model
    tanh, biases = model.gelu_approximation == "tanh", model.add_bias_linear
    if model.rotary_seq_len_interpolation_factor == 1:
        model = replace(model, rotary_seq_len_interpolation_factor=None)
    model = replace(model, bias_gelu_fusion=tanh or not biases, openai_gelu=tanh and not biases)
    unread = Transformer(model).unread() if model.model is None else ()
    return replace(model, **{name: defaults[name] for name in unread})
