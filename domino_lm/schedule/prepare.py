"""The plan that all ranks share, and memory for the gradients that it reduces."""

from __future__ import annotations

from collections import defaultdict

import torch

from domino_lm.config.settings import ConfigError, ScheduleConfig
from domino_lm.model.parameter import Parameter
from domino_lm.model.stack import Stack
from domino_lm.parallel.buckets import GradientBuckets
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.cuts import Uncut, resolve_cut
from domino_lm.schedule.plan import Plan
from domino_lm.schedule.step import Gradient, step_plan


def prepare_plan(
    stack: Stack,
    mesh: ParallelMesh,
    schedule: ScheduleConfig,
    micro_batch_size: int,
    seq_length: int,
    gradient_dtype: torch.dtype | None = None,
) -> tuple[Plan, GradientBuckets]:
    """The plan of one micro-batch and the step's end, with gradient memory allocated in the order that it completes.

    Gradients are in ``gradient_dtype``, by default in fp32, or float64 for float64 models. Under the distributed optimizer
    parameters move into flat buffers here: take views of their memory afterwards.
    Raises ConfigError, on every rank, if the micro-batch cannot be cut so, or if ranks would run different plans.
    """
    cut = resolve_cut(schedule, Uncut(micro_batch_size, seq_length, stack.embedding.weight.shape[1], mesh.tp.size))
    writers: dict[Parameter, set[int]] = defaultdict(set)
    for position, part in enumerate(stack.parts):
        for parameter in part.parameters():
            writers[parameter].add(position)
    records = [
        Gradient(frozenset(parts), parameter.numel(), mesh.tp.size == 1 or parameter.spec.shard_dim is not None)
        for parameter, parts in writers.items()
    ]
    plan, buckets = step_plan(stack.parts, schedule, cut, records, mesh.dp.size)
    parameters = list(writers)
    groups = [[parameters[index] for index in bucket] for bucket in buckets]
    gradients = GradientBuckets(groups, mesh.dp, plan.slicing.sharding, gradient_dtype)
    compare_plans(plan, mesh.world)
    return plan, gradients


def compare_plans(plan: Plan, world: Communicator) -> None:
    """Make sure that every rank is about to issue the same ops; a difference would hang in a collective.

    Raises ConfigError on every rank, with the first op that differs.
    """
    digests = world.all_gather_object(plan.digest())
    if len(set(digests)) == 1:
        return
    texts = [text.splitlines() for text in world.all_gather_object(str(plan))]
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    longest = max(len(texts[0]), len(texts[other]))
    first, second = ([*text, *["(no further op)"] * (longest - len(text))] for text in (texts[0], texts[other]))
    position = next((i for i in range(longest) if first[i] != second[i]), None)
    where = "the cut of the micro-batch" if position is None else f"op {position}: {first[position]!r} against {second[position]!r}"
    raise ConfigError(
        f"rank 0 and rank {other} would run different plans; they differ in {where}. Start every rank with the same flags and version."
    )
