"""From settings to the plan that all ranks share, and the gradient buckets that it reduces."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby

import torch

from domino_lm.config.settings import ConfigError, ScheduleConfig
from domino_lm.model.parameter import Parameter
from domino_lm.model.stack import Stack
from domino_lm.parallel.buckets import GradientBuckets, split_into_buckets
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.passes import gather_parameters, last_writers, reduce_gradients
from domino_lm.schedule.plan import Plan
from domino_lm.schedule.step import compute_plan


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
    parameters move into flat buffers here: views of their memory are to be taken afterwards.
    Raises ConfigError, on every rank, where ranks would run different plans.
    """
    plan = compute_plan(stack.parts, schedule, micro_batch_size, seq_length, mesh.tp.size)
    bucket_size = schedule.ddp_bucket_size or max(40_000_000, 1_000_000 * mesh.dp.size)
    groups, writers, replica_buckets = _group_by_last_write(stack, plan, bucket_size, mesh.tp.size)
    gradients = GradientBuckets(groups, mesh.dp, schedule.sharding, gradient_dtype)
    plan = reduce_gradients(plan, writers, schedule.overlap_grad_reduce, replica_buckets, gradients.sharding)
    if gradients.sharded:
        plan = gather_parameters(plan, schedule.overlap_param_gather)
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


def _group_by_last_write(
    stack: Stack, plan: Plan, bucket_size: int, tp_size: int
) -> tuple[list[list[Parameter]], list[frozenset[int]], list[int]]:
    """Parameters in buckets, ordered by the op that writes their gradient last; the parts that write into each bucket;
    and the buckets, last in order, whose gradients tensor-parallel ranks hold parts of.

    What one op writes last stays together, so that no more buckets than need be hold gradients of a part.
    """
    writers: dict[Parameter, set[int]] = defaultdict(set)
    for position, part in enumerate(stack.parts):
        for parameter in part.parameters():
            writers[parameter].add(position)

    def partial_over_tp(parameter: Parameter) -> bool:
        replicated_part = not stack.parts[min(writers[parameter])].sharded
        return tp_size > 1 and parameter.spec.shard_dim is None and (plan.slicing.sequence_parallel or not replicated_part)

    last = last_writers(plan)

    def written_last(parameter: Parameter) -> int:
        return max(last[part] for part in writers[parameter])

    ordered = sorted(writers, key=written_last)
    whole, partial = ([p for p in ordered if partial_over_tp(p) is wanted] for wanted in (False, True))
    together = [list(parameters) for _, parameters in groupby(whole, written_last)]
    runs = split_into_buckets([sum(p.numel() for p in parameters) for parameters in together], bucket_size)
    groups = [[p for i in run for p in together[i]] for run in runs]
    replica_buckets = [len(groups)] if partial else []
    groups += [partial] if partial else []
    return groups, [frozenset().union(*(writers[p] for p in group)) for group in groups], replica_buckets
