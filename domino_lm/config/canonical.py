"""One form of a model's settings for all ways to spell the same model, so that they compare and print short."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from domino_lm.config.settings import ModelConfig

RESOLVED = {
    "ffn_hidden_size": "ffn_width",
    "kv_channels": "head_width",
    "num_query_groups": "query_groups",
    "max_position_embeddings": "position_rows",
}
"""Settings that may be left to others, and the property that holds their value then."""


def without_redundant_settings(model: ModelConfig) -> ModelConfig:
    """``model`` with each setting at its default that says no more than the default does, or that nothing reads."""
    defaults = {item.name: item.default for item in fields(ModelConfig)}
    values: dict[str, Any] = {name: getattr(model, name) for name in defaults}
    for name, resolved in RESOLVED.items():
        if getattr(model, resolved) == getattr(ModelConfig(**{**values, name: defaults[name]}), resolved):
            values[name] = defaults[name]
    unread = {
        "group_query_attention": model.query_groups == model.num_attention_heads,
        "num_query_groups": model.query_groups == model.num_attention_heads,
        "max_position_embeddings": model.position_embedding_type == "rope",
        "rotary_base": model.position_embedding_type != "rope",
        "rope_scaling_factor": not model.use_rope_scaling,
        "bias_gelu_fusion": model.swiglu,
    }
    return ModelConfig(**{**values, **{name: defaults[name] for name, is_unread in unread.items() if is_unread}})
