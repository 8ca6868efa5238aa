"""One form of a model's settings for all ways to spell the same model, so that they compare and print short."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from domino_lm.config.settings import ModelConfig
from domino_lm.model.families.transformer import Transformer

RESOLVED = {
    "ffn_hidden_size": "ffn_width",
    "kv_channels": "head_width",
    "num_query_groups": "query_groups",
    "max_position_embeddings": "position_rows",
}
"""Settings that may be left to others, and the property that holds their value then."""


def without_redundant_settings(model: ModelConfig) -> ModelConfig:
    """``model`` with each setting at its default that says no more than the default does, or that GPT or LLaMA does not read."""
    defaults: dict[str, Any] = {item.name: item.default for item in fields(ModelConfig)}
    for name, resolved in RESOLVED.items():
        shorter = replace(model, **{name: defaults[name]})
        model = shorter if getattr(model, resolved) == getattr(shorter, resolved) else model
    unread = Transformer(model).unread() if model.model is None else ()
    return replace(model, **{name: defaults[name] for name in unread})
