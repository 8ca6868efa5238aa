"""DeepSpeed's Domino transformer as a rank process, between Megatron-core's embedding and head.

DeepSpeed releases the layers alone; the package's own examples put a fork of Megatron around them.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import Case
from benchmarks.programs.cuda_on_cpu import CommunicationSwitch, answer_on_cpu
from benchmarks.programs.megatron import join_groups, transformer_config
from benchmarks.programs.rank import Program, serve, weight_file

MODES = {"inter": "on", "intra": "on", "blocking": "blocking", "no_comm": "off"}
# Names within a layer, ours (and Megatron's) to DeepSpeed's.
LAYER_NAMES = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "linear_fc1",
    "mlp.linear_fc2": "linear_fc2",
}


class DominoProgram(Program):
    """GPT with as many query groups as heads: what the released layers support."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        import deepspeed
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import ColumnParallelLinear, VocabParallelEmbedding

        self.switch = CommunicationSwitch()
        join_groups(case)
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        model = case.model
        config = transformer_config(model, case.tensor_parallel)
        vocabulary = model.padded_vocab_size(case.tensor_parallel)
        self.embedding = VocabParallelEmbedding(vocabulary, model.hidden_size, init_method=config.init_method, config=config)
        self.positions = torch.nn.Embedding(model.position_rows, model.hidden_size)
        self.head = ColumnParallelLinear(
            model.hidden_size,
            vocabulary,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_weight_param_allocation=True,
        )
        self.transformer = _transformer(case, parallel_state)
        self.batches = self.samples()
        self.position_ids = torch.arange(model.seq_length)

    def load(self, folder: Path) -> None:
        weights = torch.load(weight_file(folder, self.rank % self.case.tensor_parallel), weights_only=True)
        own = self._parameters()
        assert own.keys() == weights.keys(), f"weights differ in their names: {sorted(own.keys() ^ weights.keys())}"
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])

    def step(self, variant: str) -> Tensor:
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        transformer = self.transformer
        intra = variant == "intra"
        transformer._forward_impl = transformer.intra_layer_overlap_forward if intra else transformer.inter_layer_overlap_forward
        self.switch.mode = MODES[variant]
        for parameter in self._parameters().values():
            parameter.grad = None
        total = torch.zeros(())
        for number, (tokens, labels) in enumerate(self.batches):
            hidden_states = self.embedding(tokens) + self.positions(self.position_ids)  # [b, s, h]
            hidden_states = transformer(hidden_states.transpose(0, 1).contiguous(), None)  # [s, b, h]
            logits, _ = self.head(hidden_states, weight=self.embedding.weight)  # [s, b, v/t]
            losses = vocab_parallel_cross_entropy(logits, labels.t().contiguous())  # [s, b]
            loss = losses.mean() / len(self.batches)
            self.clock.enter("B")
            loss.backward()
            if number < len(self.batches) - 1:
                self.clock.enter("F")
            total += loss.detach()
        if self.case.data_parallel > 1:
            self._reduce_over_replicas()
        return total

    def gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self._parameters().items()}

    def _reduce_over_replicas(self) -> None:
        """One all-reduce of all gradients after backward; the released layers bring no data parallelism of their own."""
        from megatron.core import parallel_state

        grads = [parameter.grad for parameter in self._parameters().values()]
        flat = torch._utils._flatten_dense_tensors(grads).div_(self.case.data_parallel)
        torch.distributed.all_reduce(flat, group=parallel_state.get_data_parallel_group())
        for grad, reduced in zip(grads, torch._utils._unflatten_dense_tensors(flat, grads), strict=True):
            grad.copy_(reduced)

    def _parameters(self) -> dict[str, Any]:
        named: dict[str, Any] = {
            "embedding.word_embeddings.weight": self.embedding.weight,
            "embedding.position_embeddings.weight": self.positions.weight,
        }
        for number, layer in enumerate(self.transformer.layers):
            for ours, theirs in LAYER_NAMES.items():
                module = layer.get_submodule(theirs)
                named |= {f"decoder.layers.{number}.{ours}.{kind}": parameter for kind, parameter in module.named_parameters()}
        norm = self.transformer.final_layernorm
        return named | {f"decoder.final_layernorm.{kind}": parameter for kind, parameter in norm.named_parameters()}


def _transformer(case: Case, groups: Any) -> Any:
    from deepspeed.runtime.domino.transformer import DominoTransformer, ModelType

    model = case.model
    settings = SimpleNamespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_width,
        num_attention_heads=model.num_attention_heads,
        kv_channels=model.head_width,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layernorm_epsilon=model.norm_epsilon,
        add_bias_linear=model.add_bias_linear,
        gated_linear_unit=False,
        apply_residual_connection_post_layernorm=False,
        domino_intra_layer_overlap=False,
        params_dtype=torch.float32,
        perform_initialization=False,
        init_method=None,
        output_layer_init_method=None,
    )
    return DominoTransformer(settings, groups, None, ModelType.encoder_or_decoder)


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    answer_on_cpu()
    serve(DominoProgram)
