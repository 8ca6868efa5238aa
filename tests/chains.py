"""Chains of parts without a model behind them, and of ops that depend on each other."""

from __future__ import annotations

from domino_lm.schedule.ops import PartSpec, Value, dataflow
from domino_lm.simulate.simulator import Simulation


def transformer_chain(num_layers: int) -> tuple[PartSpec, ...]:
    """Embedding, then norm, attention, norm, MLP for each layer, then final norm and head: 4 L + 3 parts."""
    replicated = PartSpec(False)
    attention = PartSpec(True, "all_reduce", "all_reduce", couples_tokens=True)
    layer = (replicated, attention, replicated, PartSpec(True, "all_reduce", "all_reduce"))
    embedding, head = PartSpec(True, "all_reduce", None), PartSpec(True, "statistics", "all_reduce")
    return (embedding, *layer * num_layers, replicated, head)


def critical_path_s(step: Simulation) -> float:
    """The longest chain of dependent ops: the step on a machine with unlimited lanes."""
    ready: dict[Value, float] = {}
    longest = 0.0
    for op, time in zip(step.plan.ops, step.times, strict=True):
        flow = dataflow(op, step.plan.slicing)
        end_s = max([ready[value] for value in flow.inputs if value in ready], default=0.0) + time.compute_s + time.transfer_s
        ready |= dict.fromkeys(flow.outputs, end_s)
        longest = max(longest, end_s)
    return longest
