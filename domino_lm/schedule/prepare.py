"""The plan that all ranks share, and memory for the gradients that it reduces."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from domino_lm.config.settings import ScheduleConfig
from domino_lm.model.parameter import Parameter
from domino_lm.model.stack import Stack
from domino_lm.parallel.agreement import DisagreementError, values_by_ranks
from domino_lm.parallel.buckets import GradientBuckets
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.cuts import Uncut, resolve_cut
from domino_lm.schedule.plan import Plan
from domino_lm.schedule.step import Gradient, step_plan

SHOWN_HASH = 12


def prepare_plan(
    stack: Stack,
    mesh: ParallelMesh,
    schedule: ScheduleConfig,
    micro_batch_size: int,
    seq_length: int,
    gradient_dtype: torch.dtype | None = None,
    whole_matrices: Sequence[int] = (),
) -> tuple[Plan, GradientBuckets]:
    """The plan of one micro-batch and the step's end, with gradient memory allocated in the order that it completes.

    Gradients are in ``gradient_dtype``, by default in fp32, or float64 for float64 models. Under the distributed optimizer
    parameters move into flat buffers here: take views of their memory afterwards. ``whole_matrices`` are the parts whose matrices
    the optimizer updates whole.
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
    plan, buckets = step_plan(stack.parts, schedule, cut, records, mesh.dp.size, whole_matrices)
    parameters = list(writers)
    groups = [[parameters[index] for index in bucket] for bucket in buckets]
    gradients = GradientBuckets(groups, mesh.dp, plan.slicing.sharding, gradient_dtype)
    compare_plans(plan, mesh.world)
    return plan, gradients


def compare_plans(plan: Plan, world: Communicator) -> None:
    """Make sure that every rank is about to issue the same ops; a difference would hang in a collective.

    Raises DisagreementError on every rank, with the first op that differs.
    """
    digests = world.all_gather_object(plan.digest())
    if len(set(digests)) == 1:
        return
    texts = [text.splitlines() for text in world.all_gather_object(str(plan))]
    longest = max(map(len, texts))
    ops = [[*text, *["no further op"] * (longest - len(text))] for text in texts]
    position = next((i for i, each in enumerate(zip(*ops, strict=True)) if len(set(each)) > 1), None)
    if position is None:
        what, values = "the cut of the micro-batch", [digest[:SHOWN_HASH] for digest in digests]
    else:
        what, values = f"op {position} of the plan", [each[position] for each in ops]
    raise DisagreementError(f"the ranks disagree on {what}: {values_by_ranks(values)}; start every rank with the same flags and version.")
