"""An independent, unsharded GPT and LLaMA, written for clarity alone; everything else is judged by it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from domino_lm.config.settings import ModelConfig

Weights = dict[str, Tensor]


def logits(w: Weights, m: ModelConfig, tokens: Tensor, approximate: str = "tanh") -> Tensor:
    """Logits [b, s, v] of ``tokens`` [b, s] under full weights by Megatron's names."""
    x = F.embedding(tokens, w["embedding.word_embeddings.weight"])
    if m.position_embedding_type == "learned_absolute":
        x = x + w["embedding.position_embeddings.weight"][: tokens.shape[1]]
    for layer in range(m.num_layers):
        p = f"decoder.layers.{layer}."
        n = norm(x, w, p + "input_layernorm", m)
        x = x + linear(attention(linear(n, w, p + "self_attention.linear_qkv"), m), w, p + "self_attention.linear_proj")
        n = norm(x, w, p + "pre_mlp_layernorm", m)
        h = linear(n, w, p + "mlp.linear_fc1")
        h = F.silu(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1] if m.swiglu else F.gelu(h, approximate=approximate)
        x = x + linear(h, w, p + "mlp.linear_fc2")
    table = w.get("output_layer.weight", w["embedding.word_embeddings.weight"])
    return norm(x, w, "decoder.final_layernorm", m) @ table.T


def token_losses(w: Weights, m: ModelConfig, tokens: Tensor, labels: Tensor, approximate: str = "tanh") -> Tensor:
    """Cross entropy [b, s] over the true vocabulary."""
    scores = logits(w, m, tokens, approximate)[..., : m.vocab_size]
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))


def norm(x: Tensor, w: Weights, name: str, m: ModelConfig) -> Tensor:
    gain = 1 + w[name + ".weight"] if m.apply_layernorm_1p else w[name + ".weight"]
    if m.normalization == "LayerNorm":
        return F.layer_norm(x, (m.hidden_size,), gain, w[name + ".bias"], m.norm_epsilon)
    return x * (x.pow(2).mean(-1, keepdim=True) + m.norm_epsilon).rsqrt() * gain


def attention(qkv: Tensor, m: ModelConfig) -> Tensor:
    """Causal attention of [b, s, (n + 2g) d], each group's query heads before its key and its value head."""
    b, s, _ = qkv.shape
    g, d, per_group = m.query_groups, m.head_width, m.num_attention_heads // m.query_groups
    qkv = qkv.view(b, s, g, per_group + 2, d)
    outputs = []
    for head in range(m.num_attention_heads):
        group = head // per_group
        q, k, v = qkv[:, :, group, head % per_group], qkv[:, :, group, -2], qkv[:, :, group, -1]  # [b, s, d]
        if m.position_embedding_type == "rope":
            q, k = turn(q, m), turn(k, m)
        scores = q @ k.transpose(1, 2) / d**0.5
        scores = scores + torch.full((s, s), -torch.inf, dtype=q.dtype).triu(1)
        outputs.append(scores.softmax(-1) @ v)
    return torch.cat(outputs, -1)


def turn(x: Tensor, m: ModelConfig) -> Tensor:
    """Channels i and i + d/2 are a plane, turned by position / stretch x base^(-2i/d)."""
    s, half = x.shape[1], x.shape[2] // 2
    stretch = m.rotary_seq_len_interpolation_factor or 1
    angle = torch.arange(s, dtype=x.dtype)[:, None] / stretch * m.rotary_base ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)
