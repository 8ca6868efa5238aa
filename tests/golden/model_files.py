"""Reads the files in `model/`: what Megatron itself computed for three tiny models, on CPU in fp32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import torch

from domino_lm.config.settings import ModelConfig
from domino_lm.model.stack import Stack
from domino_lm.parallel.collectives import Communicator

FOLDER = Path(__file__).parent / "model"


def load_arrays(name: str) -> dict[str, Any]:
    """Tensors of ``model/<name>.npz``; a key ``grads/decoder...`` in the file becomes ``["grads"]["decoder..."]``."""
    tree: dict[str, Any] = {}
    with numpy.load(FOLDER / f"{name}.npz", allow_pickle=False) as arrays:
        for path in arrays.files:
            *folders, leaf = path.split("/")
            branch = tree
            for folder in folders:
                branch = branch.setdefault(folder, {})
            branch[leaf] = torch.from_numpy(arrays[path])
    return tree


def load_curves(name: str) -> dict[str, Any]:
    """Lists of 20 values (``lm_loss``, ``grad_norm``, ``lr_used``, ``lr_logged``) of ``model/<name>.json`` and its settings."""
    curves: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return curves


GPT = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    seq_length=32,
    vocab_size=128,
    ffn_hidden_size=256,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    make_vocab_size_divisible_by=64,
)
LLAMA = replace(
    GPT,
    ffn_hidden_size=176,
    group_query_attention=True,
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
GOLDEN_MODELS = {"gpt": GPT, "gpt_erf": replace(GPT, bias_gelu_fusion=False), "llama": LLAMA}


def load_weights(stack: Stack, weights: dict[str, torch.Tensor], tp: Communicator) -> None:
    """Put full weights by Megatron's names into a model, this rank's part of each."""
    for parameter in stack.parameters():
        parameter.data.copy_(parameter.spec.shard(weights[parameter.spec.name], tp.rank, tp.size))
