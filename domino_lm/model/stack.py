"""A model as the chain of its parts, and the two families that flags describe."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from domino_lm.config.settings import ModelConfig
from domino_lm.model.attention import Attention
from domino_lm.model.batch import MicroBatch, Row
from domino_lm.model.embedding import Embedding
from domino_lm.model.head import Head
from domino_lm.model.mlp import GatedMlp, GeluMlp
from domino_lm.model.norm import NormPart
from domino_lm.model.parameter import Parameter, ParameterFactory, ParameterSpec
from domino_lm.model.part import Part, ShardedPart
from domino_lm.model.rope import rotation_table
from domino_lm.parallel.collectives import Communicator


class Stack:
    """An alternating chain: embedding, then norm and sharded part in turn, then final norm and head."""

    def __init__(self, embedding: Embedding, blocks: Sequence[tuple[NormPart, ShardedPart]], final_norm: NormPart, head: Head) -> None:
        self.embedding = embedding
        self.blocks = tuple(blocks)
        self.final_norm = final_norm
        self.head = head

    @property
    def parts(self) -> tuple[Part, ...]:
        """The chain, sharded parts at even positions."""
        return (self.embedding, *(part for block in self.blocks for part in block), self.final_norm, self.head)

    def parameters(self) -> list[Parameter]:
        """Every weight once, a tied one where it first occurs, along the chain."""
        return list(dict.fromkeys(parameter for part in self.parts for parameter in part.parameters()))

    def forward(self, batch: MicroBatch) -> Tensor:
        """Loss of every token [s, b] through plain autograd, nothing dropped: evaluation, and what plans are judged by."""
        return self.forward_row(batch.whole())

    def forward_row(self, row: Row) -> Tensor:
        """Loss of every token [s, b] of a row, with dropout where the row has a key for it."""
        return self.head.forward(self.hidden_states(row), row)

    def hidden_states(self, row: Row) -> Tensor:
        """The head's input [s, b, h]."""
        branch, residual = self.embedding.forward(row), None
        for norm, sharded in self.blocks:
            normed, residual = norm.forward(branch, residual, row)
            branch = sharded.forward(normed, row)
        return self.final_norm.forward(branch, residual, row)[0]


def build_stack(
    model: ModelConfig,
    tp: Communicator,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Stack:
    """The GPT or LLaMA that ``model`` describes, as ``tp.rank`` holds it, with initial weights from ``seed``."""
    return stack_of(model, ParameterFactory(tp, seed, dtype, device))


def stack_of(model: ModelConfig, factory: ParameterFactory) -> Stack:
    """The same from parameters that ``factory`` makes."""
    return _Builder(model, factory).stack()


class _Builder:
    """Names, shapes and initial values of the weights, by Megatron's conventions."""

    def __init__(self, model: ModelConfig, factory: ParameterFactory) -> None:
        self.model = model
        self.factory = factory
        self.tp = factory.tp
        self.output_std = model.init_method_std / math.sqrt(2 * model.num_layers)
        self.rotation = None
        if model.position_embedding_type == "rope":
            factor = model.rope_scaling_factor if model.use_rope_scaling else None
            self.rotation = rotation_table(model.seq_length, model.head_width, model.rotary_base, factory.dtype, factory.device, factor)

    def stack(self) -> Stack:
        model = self.model
        table = self._vocabulary("embedding.word_embeddings.weight")
        positions, bias, blocks = self._positions(), None, []
        for layer in range(model.num_layers):
            attention, mlp = self._attention(layer), self._mlp(layer)
            attention_norm = self._norm(layer, "input_layernorm", "self_attention.linear_qkv", bias, positions)
            bias, positions = self._vector(layer, "self_attention.linear_proj.bias"), None
            mlp_norm = self._norm(layer, "pre_mlp_layernorm", "mlp.linear_fc1", bias)
            bias = self._vector(layer, "mlp.linear_fc2.bias")
            blocks += [(attention_norm, attention), (mlp_norm, mlp)]
        final_norm = self._norm(None, "final_layernorm", None, bias, positions)
        head_table = self._vocabulary("output_layer.weight") if model.untie_embeddings_and_output_weights else table
        head = Head(self.tp, head_table, model.vocab_size if model.mask_padded_vocab else None)
        return Stack(Embedding(self.tp, table), blocks, final_norm, head)

    def _attention(self, layer: int) -> Attention:
        model = self.model
        groups, width, heads = model.query_groups, model.head_width, model.num_attention_heads
        rows = (heads + 2 * groups) * width
        return Attention(
            self.tp,
            self._matrix(layer, "self_attention.linear_qkv.weight", (rows, model.hidden_size), 0, model.init_method_std),
            self._matrix(layer, "self_attention.linear_proj.weight", (model.hidden_size, heads * width), 1, self.output_std),
            self._vector(layer, "self_attention.linear_qkv.bias", rows),
            groups=groups,
            head_width=width,
            rotation=self.rotation,
            seq_length=model.seq_length,
            dropout=model.attention_dropout,
            site=f"layer {layer} attention",
        )

    def _mlp(self, layer: int) -> ShardedPart:
        model, blocks = self.model, 2 if self.model.swiglu else 1
        rows = blocks * model.ffn_width
        w_in = self._matrix(layer, "mlp.linear_fc1.weight", (rows, model.hidden_size), 0, model.init_method_std, blocks)
        w_out = self._matrix(layer, "mlp.linear_fc2.weight", (model.hidden_size, model.ffn_width), 1, self.output_std)
        b_in = self._vector(layer, "mlp.linear_fc1.bias", rows, blocks)
        if model.swiglu:
            return GatedMlp(self.tp, w_in, w_out, b_in)
        return GeluMlp(self.tp, w_in, w_out, b_in, approximate="tanh" if model.bias_gelu_fusion else "none")

    def _norm(
        self, layer: int | None, name: str, fused_into: str | None, branch_bias: Parameter | None, positions: Parameter | None = None
    ) -> NormPart:
        """A norm; Megatron's checkpoints keep it under the linear layer that its kernels fuse it into."""

        def weight(field: str, value: float) -> Parameter:
            path = f"decoder.{name}.{field}" if layer is None else f"decoder.layers.{layer}.{name}.{field}"
            key = path if layer is None else f"decoder.layers.{fused_into}.layer_norm_{field}"
            return self.factory.constant(self._spec(path, key, layer, (self.model.hidden_size,)), value)

        return NormPart(
            weight("weight", 1.0),
            weight("bias", 0.0) if self.model.normalization == "LayerNorm" else None,
            epsilon=self.model.norm_epsilon,
            dropout=self.model.hidden_dropout,
            site=f"before {name}" if layer is None else f"layer {layer} before {name}",
            branch_bias=branch_bias,
            positions=positions,
        )

    def _positions(self) -> Parameter | None:
        if self.model.position_embedding_type != "learned_absolute":
            return None
        name = "embedding.position_embeddings.weight"
        shape = (self.model.position_rows, self.model.hidden_size)
        return self.factory.normal(ParameterSpec(name=name, key=name, shape=shape), self.model.init_method_std)

    def _vocabulary(self, name: str) -> Parameter:
        shape = (self.model.padded_vocab_size(self.tp.size), self.model.hidden_size)
        spec = ParameterSpec(name=name, key=name, shape=shape, shard_dim=0, vocab_rows=self.model.vocab_size)
        return self.factory.normal(spec, self.model.init_method_std)

    def _matrix(self, layer: int, name: str, shape: tuple[int, int], shard_dim: int, std: float, blocks: int = 1) -> Parameter:
        path = f"decoder.layers.{layer}.{name}"
        return self.factory.normal(self._spec(path, f"decoder.layers.{name}", layer, shape, shard_dim, blocks), std)

    def _vector(self, layer: int, name: str, sharded_rows: int | None = None, blocks: int = 1) -> Parameter | None:
        """A bias: cut over ranks with its column-parallel matrix, or whole after a row-parallel one."""
        if not self.model.add_bias_linear:
            return None
        shape = (self.model.hidden_size if sharded_rows is None else sharded_rows,)
        shard_dim = None if sharded_rows is None else 0
        path = f"decoder.layers.{layer}.{name}"
        return self.factory.constant(self._spec(path, f"decoder.layers.{name}", layer, shape, shard_dim, blocks), 0.0)

    def _spec(
        self, name: str, key: str, layer: int | None, shape: tuple[int, ...], shard_dim: int | None = None, shard_blocks: int = 1
    ) -> ParameterSpec:
        return ParameterSpec(
            name=name,
            key=key,
            layer=layer,
            num_layers=self.model.num_layers,
            shape=shape,
            shard_dim=shard_dim,
            shard_blocks=shard_blocks,
        )
