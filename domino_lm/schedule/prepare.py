"""From settings to the plan that all ranks share, and the gradient buckets that it reduces."""

from __future__ import annotations

from collections import defaultdict

from domino_lm.config import ConfigError, ScheduleConfig
from domino_lm.model.parameter import Parameter
from domino_lm.model.stack import Stack
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.grads import GradientBuckets, split_into_buckets
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.compose import compute_plan
from domino_lm.schedule.passes import last_writers, reduce_gradients
from domino_lm.schedule.plan import Plan


def prepare_plan(
    stack: Stack, mesh: ParallelMesh, schedule: ScheduleConfig, micro_batch_size: int, seq_length: int
) -> tuple[Plan, GradientBuckets]:
    """The plan of one micro-batch and the step's end, with gradient memory allocated in the order that it completes.

    Raises ConfigError, on every rank, where ranks would run different plans.
    """
    wgrad_rows = schedule.domino_wgrad_rows or ("together" if mesh.device.type == "cuda" else "each")
    plan = compute_plan(stack.parts, schedule, micro_batch_size, seq_length, mesh.tp.size, wgrad_rows)
    bucket_size = schedule.ddp_bucket_size or max(40_000_000, 1_000_000 * mesh.dp.size)
    groups, writers, replica_buckets = _group_by_last_write(stack, plan, bucket_size, mesh.tp.size)
    gradients = GradientBuckets(groups, mesh.dp.size)
    plan = reduce_gradients(plan, writers, schedule.overlap_grad_reduce, replica_buckets)
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
    and the buckets, last in order, whose gradients tensor-parallel ranks hold parts of."""
    writers: dict[Parameter, set[int]] = defaultdict(set)
    for position, part in enumerate(stack.parts):
        for parameter in part.parameters():
            writers[parameter].add(position)

    def partial_over_tp(parameter: Parameter) -> bool:
        replicated_part = not stack.parts[min(writers[parameter])].sharded
        return tp_size > 1 and parameter.spec.shard_dim is None and (plan.slicing.sequence_parallel or not replicated_part)

    last = last_writers(plan)
    ordered = sorted(writers, key=lambda parameter: max(last[part] for part in writers[parameter]))
    whole, partial = ([p for p in ordered if partial_over_tp(p) is wanted] for wanted in (False, True))
    groups = [[whole[i] for i in run] for run in split_into_buckets([p.numel() for p in whole], bucket_size)]
    replica_buckets = [len(groups)] if partial else []
    groups += [partial] if partial else []
    return groups, [frozenset().union(*(writers[p] for p in group)) for group in groups], replica_buckets
