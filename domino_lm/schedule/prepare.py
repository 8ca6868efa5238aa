"""From settings to the plan that all ranks share, and the gradient buckets that it reduces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from domino_lm.config import ConfigError, ScheduleConfig
from domino_lm.model.parameter import Parameter
from domino_lm.model.stack import Stack
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.grads import GradientBuckets, split_into_buckets
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.plan import Plan, build_plan, cut, last_writers, reduce_gradients, wgrad_each_row


def prepare_plan(stack: Stack, mesh: ParallelMesh, schedule: ScheduleConfig, micro_batch_size: int) -> tuple[Plan, GradientBuckets]:
    """The plan of one micro-batch and the step's end, with gradient memory allocated in the order that it completes.

    Raises ConfigError, on every rank, where ranks would run different plans.
    """
    rows = schedule.rows(micro_batch_size, mesh.tp.size)
    plan = build_plan(stack.parts, cut(micro_batch_size, rows))
    wgrad_rows = schedule.domino_wgrad_rows or ("together" if mesh.device.type == "cuda" else "each")
    if wgrad_rows == "each":
        plan = wgrad_each_row(plan)
    bucket_size = schedule.ddp_bucket_size or max(40_000_000, 1_000_000 * mesh.dp.size)
    groups, writers = _group_by_last_write(stack, plan, bucket_size)
    gradients = GradientBuckets(groups, mesh.dp.size)
    plan = reduce_gradients(plan, writers, overlap=schedule.overlap_grad_reduce)
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


def _group_by_last_write(stack: Stack, plan: Plan, bucket_size: int) -> tuple[list[list[Parameter]], list[frozenset[int]]]:
    """Parameters in buckets, ordered by the op that writes their gradient last, and the parts that write into each bucket."""
    writers: dict[Parameter, set[int]] = defaultdict(set)
    for position, part in enumerate(stack.parts):
        for parameter in part.parameters():
            writers[parameter].add(position)
    last = last_writers(plan)
    ordered = sorted(writers, key=lambda parameter: max(last[part] for part in writers[parameter]))
    runs = split_into_buckets([parameter.numel() for parameter in ordered], bucket_size)
    groups = [[ordered[i] for i in run] for run in runs]
    return groups, [_union([writers[parameter] for parameter in group]) for group in groups]


def _union(sets: Sequence[set[int]]) -> frozenset[int]:
    return frozenset().union(*sets)
