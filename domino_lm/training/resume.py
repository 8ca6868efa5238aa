"""Whether a checkpoint's model is the one of the run that loads it."""

from __future__ import annotations

from typing import Any

from domino_lm.config import ConfigError, ModelConfig

LEFT_OPEN_TO_RESUME = {
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "make_vocab_size_divisible_by",
    "mask_padded_vocab",  # the checkpoint knows which rows take part
    "seq_length",
}
"""Settings of a model that may change between a checkpoint and the run that resumes it."""


def refuse_other_model(mine: dict[str, Any], theirs: dict[str, Any], folder: str) -> None:
    """Raise ConfigError where the settings of two models differ in what their weights or their function hang on."""
    mine, theirs = spelt_out(mine), spelt_out(theirs)
    differing = [name for name in mine if name not in LEFT_OPEN_TO_RESUME and name in theirs and mine[name] != theirs[name]]
    if differing:
        words = ", ".join(f"--{name.replace('_', '-')} {theirs[name]} there, {mine[name]} here" for name in differing)
        raise ConfigError(f"--load {folder} holds another model: {words}. Give the flags that it was trained with.")


def spelt_out(model: dict[str, Any]) -> dict[str, Any]:
    """A model's settings, or some of them, with what defaults stand for in place of the defaults, so that they compare."""
    try:
        config = ModelConfig(**model)
    except TypeError:  # some of them, or those of another version
        return model
    resolved: dict[str, Any] = {
        "ffn_hidden_size": config.ffn_width,
        "kv_channels": config.head_width,
        "num_query_groups": config.query_groups,
    }
    resolved["group_query_attention"] = config.query_groups != config.num_attention_heads
    learned = config.position_embedding_type == "learned_absolute"
    resolved["max_position_embeddings"] = config.position_rows if learned else None
    return {**model, **resolved, "rotary_base": None if learned else config.rotary_base}
