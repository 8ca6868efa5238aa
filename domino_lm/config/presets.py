"""Named models: `--preset NAME` stands for the flags below it, and an explicit flag wins over its preset.

A preset names no vocabulary, which is the tokenizer's. Nothing is dropped in any of them, and the learning rate falls along a
cosine, as it did in the published runs.
"""

BESIDE_THE_MODEL: dict[str, object] = {"lr_decay_style": "cosine"}
"""What every preset stands for that is no part of its model."""

DEBUG_RUN: dict[str, object] = {"lr": 1e-3, "micro_batch_size": 4, "train_iters": 100, "vocab_size": 1024}
"""What presets named debug-... stand for besides, if nothing else says it, so that one runs alone."""

_GPT: dict[str, object] = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
_LLAMA: dict[str, object] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def _gpt(layers: int, hidden: int, heads: int, seq_length: int = 2048) -> dict[str, object]:
    """A GPT of the published family's shape (Brown et al., 2020, table 2.1)."""
    return {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "seq_length": seq_length, **_GPT}


def _llama(layers: int, hidden: int, ffn: int | None, heads: int, groups: int, seq_length: int, base: float = 10000.0) -> dict[str, object]:
    """A LLaMA of the published family's shape (Touvron et al., 2023; Grattafiori et al., 2024)."""
    shape: dict[str, object] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": seq_length,
        **_LLAMA,
    }
    if ffn is not None:
        shape["ffn_hidden_size"] = ffn
    if groups != heads:
        shape |= {"group_query_attention": True, "num_query_groups": groups}
    return shape | {"rotary_base": base}


PRESETS: dict[str, dict[str, object]] = {
    "debug-gpt": _gpt(4, 128, 4, seq_length=128),
    "debug-llama": _llama(4, 128, None, 4, 2, seq_length=128),
    "gpt3-125m": _gpt(12, 768, 12),
    "gpt3-350m": _gpt(24, 1024, 16),
    "gpt3-1.3b": _gpt(24, 2048, 16),
    "gpt3-2.7b": _gpt(32, 2560, 32),
    "gpt3-6.7b": _gpt(32, 4096, 32),
    "gpt3-13b": _gpt(40, 5120, 40),
    "gpt3-30b": _gpt(48, 7168, 56),
    "llama2-7b": _llama(32, 4096, 11008, 32, 32, seq_length=4096),
    "llama2-13b": _llama(40, 5120, 13824, 40, 40, seq_length=4096),
    "llama2-70b": _llama(80, 8192, 28672, 64, 8, seq_length=4096),
    "llama3-8b": _llama(32, 4096, 14336, 32, 8, seq_length=8192, base=500000.0),
    "llama3-70b": _llama(80, 8192, 28672, 64, 8, seq_length=8192, base=500000.0),
}
