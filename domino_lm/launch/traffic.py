"""What one training step sends between ranks, as bytes: enough to say what a link means for its time."""

from dataclasses import replace
from typing import NamedTuple

from domino_lm.config.batch_plan import data_parallel_size, global_batch_size
from domino_lm.config.settings import RunConfig
from domino_lm.simulate.costs import model_parts
from domino_lm.simulate.hardware import HARDWARE

UNKNOWN_VOCABULARY = 50_000
"""Stands for that of a tokenizer which nothing has read yet."""


class Traffic(NamedTuple):
    """Bytes that each rank all-reduces in a step."""

    tensor_bytes: float
    """Activations and their gradients, within a tensor-parallel group."""

    gradient_bytes: float
    """Gradients of weights, between replicas."""


def traffic_of(run: RunConfig, world_size: int) -> Traffic:
    """The traffic of ``run`` on ``world_size`` ranks, its largest batch if batches grow; the same for every schedule.

    A layer all-reduces its activations, [s, b, h], twice forward and twice backward, and twice more if it is recomputed whole.
    """
    tensor_parallel, replicas = run.parallel.tensor_model_parallel_size, data_parallel_size(run, world_size)
    passes = 6 if run.schedule.recompute_granularity == "full" else 4
    samples = global_batch_size(run, world_size) / replicas
    activations = samples * run.model.seq_length * run.model.hidden_size * run.precision.element_bytes
    model = replace(run.model, vocab_size=run.model.vocab_size or UNKNOWN_VOCABULARY)
    held = sum(part.parameters for part in model_parts(model, tensor_parallel, HARDWARE["dgx-h100"]))
    return Traffic(
        passes * run.model.num_layers * activations if tensor_parallel > 1 else 0.0,
        float(held * run.precision.gradient_bytes) if replicas > 1 else 0.0,
    )
