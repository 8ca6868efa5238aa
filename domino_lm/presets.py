"""Named models: `--preset NAME` stands for the flags below it, and an explicit flag wins over its preset."""

from __future__ import annotations

PRESETS: dict[str, dict[str, object]] = {
    "debug-gpt": {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 128,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
    "debug-llama": {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "seq_length": 128,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
}
