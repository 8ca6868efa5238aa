"""Chains without a model behind them."""

from __future__ import annotations

from domino_lm.schedule.ops import PartSpec


def transformer_chain(num_layers: int) -> tuple[PartSpec, ...]:
    """Embedding, then norm, attention, norm, MLP for each layer, then final norm and head: 4 L + 3 parts."""
    replicated = PartSpec(False)
    attention = PartSpec(True, "all_reduce", "all_reduce", couples_tokens=True)
    layer = (replicated, attention, replicated, PartSpec(True, "all_reduce", "all_reduce"))
    embedding, head = PartSpec(True, "all_reduce", None), PartSpec(True, "statistics", "all_reduce")
    return (embedding, *layer * num_layers, replicated, head)
