"""The parts of a GPT or LLaMA, with Megatron's names, shapes and initial values of their weights."""

import math

from domino_lm.config.settings import ModelConfig
from domino_lm.model.attention import Attention
from domino_lm.model.embedding import Embedding
from domino_lm.model.head import Head
from domino_lm.model.mlp import GatedMlp, GeluMlp
from domino_lm.model.norm import NormPart
from domino_lm.model.parameter import Parameter, ParameterFactory, Weights
from domino_lm.model.part import ShardedPart
from domino_lm.model.rope import rotation_table
from domino_lm.model.stack import Stack


class TransformerBuilder:
    """Makes the parts of ``model`` as the rank that ``make`` serves holds them; the bias of a row-parallel linear goes to the norm behind it."""

    def __init__(self, model: ModelConfig, make: ParameterFactory) -> None:
        self.model = model
        self.tp = make.tp
        self.weights = Weights(model, make, "decoder.layers")
        self.output_std = model.init_method_std / math.sqrt(2 * model.num_layers)
        self.rotation = None
        if model.position_embedding_type == "rope":
            factor = model.rope_scaling_factor if model.use_rope_scaling else None
            stretch = model.rotary_seq_len_interpolation_factor
            self.rotation = rotation_table(model.seq_length, model.head_width, model.rotary_base, make.dtype, make.device, factor, stretch)

    def stack(self) -> Stack:
        """The whole chain."""
        model = self.model
        table = self.weights.vocabulary("embedding.word_embeddings.weight")
        learned = model.position_embedding_type == "learned_absolute"
        positions = self.weights.table("embedding.position_embeddings.weight", model.position_rows) if learned else None
        bias, blocks = None, []
        for layer in range(model.num_layers):
            attention, mlp = self._attention(layer), self._mlp(layer)
            attention_norm = self._norm(layer, "input_layernorm", "self_attention.linear_qkv", bias, positions)
            bias, positions = self._bias(layer, "self_attention.linear_proj.bias"), None
            mlp_norm = self._norm(layer, "pre_mlp_layernorm", "mlp.linear_fc1", bias)
            bias = self._bias(layer, "mlp.linear_fc2.bias")
            blocks += [(attention_norm, attention), (mlp_norm, mlp)]
        final_norm = self._norm(None, "final_layernorm", None, bias, positions)
        head_table = self.weights.vocabulary("output_layer.weight") if model.untie_embeddings_and_output_weights else table
        head = Head(self.tp, head_table, model.vocab_size if model.mask_padded_vocab else None)
        return Stack(Embedding(self.tp, table), blocks, final_norm, head)

    def _attention(self, layer: int) -> Attention:
        model = self.model
        groups, width, heads = model.query_groups, model.head_width, model.num_attention_heads
        rows, turn = (heads + 2 * groups) * width, (heads // groups * width, width, width)
        return Attention(
            self.tp,
            self.weights.matrix("self_attention.linear_qkv.weight", (rows, model.hidden_size), 0, layer, matrix_rows=turn),
            self.weights.matrix("self_attention.linear_proj.weight", (model.hidden_size, heads * width), 1, layer, std=self.output_std),
            self._bias(layer, "self_attention.linear_qkv.bias", rows),
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
        w_in = self.weights.matrix("mlp.linear_fc1.weight", (rows, model.hidden_size), 0, layer, blocks=blocks)
        w_out = self.weights.matrix("mlp.linear_fc2.weight", (model.hidden_size, model.ffn_width), 1, layer, std=self.output_std)
        b_in = self._bias(layer, "mlp.linear_fc1.bias", rows, blocks)
        if model.swiglu:
            return GatedMlp(self.tp, w_in, w_out, b_in)
        return GeluMlp(self.tp, w_in, w_out, b_in, approximate=model.gelu_approximation)

    def _norm(
        self, layer: int | None, name: str, fused_into: str | None, branch_bias: Parameter | None, positions: Parameter | None = None
    ) -> NormPart:
        """A norm; Megatron's checkpoints keep it under the linear layer that its kernels fuse it into."""
        model = self.model

        def weight(field: str, value: float) -> Parameter:
            path = f"{name}.{field}" if layer is not None else f"decoder.{name}.{field}"
            return self.weights.vector(path, model.hidden_size, value, layer, key=f"{fused_into}.layer_norm_{field}")

        return NormPart(
            weight("weight", 0.0 if model.apply_layernorm_1p else 1.0),
            weight("bias", 0.0) if model.normalization == "LayerNorm" else None,
            epsilon=model.norm_epsilon,
            dropout=model.hidden_dropout,
            site=f"before {name}" if layer is None else f"layer {layer} before {name}",
            branch_bias=branch_bias,
            positions=positions,
            weight_less_1=model.apply_layernorm_1p,
        )

    def _bias(self, layer: int, name: str, sharded_rows: int | None = None, blocks: int = 1) -> Parameter | None:
        """A bias: cut over ranks with its column-parallel matrix, or whole after a row-parallel one."""
        if not self.model.add_bias_linear:
            return None
        if sharded_rows is None:
            return self.weights.vector(name, self.model.hidden_size, layer=layer)
        return self.weights.vector(name, sharded_rows, layer=layer, shard_dim=0, shard_blocks=blocks)
