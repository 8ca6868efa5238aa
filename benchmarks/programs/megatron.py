"""Megatron-core as a rank process: its GPT model from local, unfused layers, in its own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import MEGATRON, VARIANTS, Case
from benchmarks.programs.cuda_on_cpu import CommunicationSwitch, answer_on_cpu
from benchmarks.programs.rank import Program, serve, weight_file
from domino_lm.config.settings import ModelConfig


class MegatronProgram(Program):
    """Gradients stay in ``grad``, which costs Megatron less than its gradient buffers, unless replicas need those."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.switch = CommunicationSwitch()
        join_groups(case)
        self.model = build_model(case.model, case.tensor_parallel)
        self.replicated: Any = _replicate(self.model) if case.data_parallel > 1 else None
        self.batches = self.samples()
        seq = case.model.seq_length
        self.positions = torch.arange(seq).expand(case.micro_batch_size, seq).contiguous()
        self.mask = torch.ones(1, 1, seq, seq, dtype=torch.bool).triu(1)

    def load(self, folder: Path) -> None:
        weights = torch.load(weight_file(folder, self.rank % self.case.tensor_parallel), weights_only=True)
        own = {name: value for name, value in self.model.state_dict().items() if isinstance(value, Tensor)}
        assert own.keys() == weights.keys(), f"weights differ in their names: {sorted(own.keys() ^ weights.keys())}"
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(weights[name])

    def step(self, variant: str) -> Tensor:
        self.switch.mode = "on" if VARIANTS[MEGATRON][variant].communicates else "off"
        if self.replicated is None:
            self.model.zero_grad(set_to_none=True)
        else:
            self.replicated.zero_grad_buffer()
        total = torch.zeros(())
        for number, (tokens, labels) in enumerate(self.batches):
            model = self.model if self.replicated is None else self.replicated
            if self.replicated is not None:
                self.replicated.is_last_microbatch = number == len(self.batches) - 1
            loss = model(tokens, self.positions, self.mask, labels=labels).mean() / len(self.batches)  # of [b, s]
            self.clock.enter("B")
            loss.backward()
            if number < len(self.batches) - 1:
                self.clock.enter("F")
            total += loss.detach()
        if self.replicated is not None:
            self.replicated.finish_grad_sync()
        return total

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad if self.replicated is None else p.main_grad for name, p in self.model.named_parameters()}


def join_groups(case: Case) -> None:
    """Megatron's process groups over the ranks of this gang, and its random states."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=case.tensor_parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(case.seed)


def transformer_config(model: ModelConfig, tensor_parallel: int) -> Any:
    """Megatron's settings for the model: fp32, nothing dropped, nothing fused."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_width,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.query_groups,
        tensor_model_parallel_size=tensor_parallel,
        normalization=model.normalization,
        layernorm_epsilon=model.norm_epsilon,
        add_bias_linear=model.add_bias_linear,
        gated_linear_unit=model.swiglu,
        activation_func=F.silu if model.swiglu else F.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )


def build_model(model: ModelConfig, tensor_parallel: int) -> Any:
    """Megatron's GPTModel with the layers that need no Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    return GPTModel(
        config=transformer_config(model, tensor_parallel),
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=model.normalization),
        vocab_size=model.padded_vocab_size(tensor_parallel),
        max_sequence_length=model.position_rows,
        position_embedding_type=model.position_embedding_type,
        rotary_base=int(model.rotary_base),
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        parallel_output=True,
    )


def _replicate(model: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=False)
    return DistributedDataParallel(model.config, config, model)


if __name__ == "__main__":
    answer_on_cpu()
    serve(MegatronProgram)
