"""From settings to the plan of a whole step: which cut, which passes, which gradient buckets. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from domino_lm.config.settings import ScheduleConfig
from domino_lm.schedule.cuts import Cut
from domino_lm.schedule.ops import ChainPart
from domino_lm.schedule.passes import (
    defer_wgrad,
    gather_parameters,
    last_writers,
    orthogonalize,
    pair_micro_batches,
    recompute,
    reduce_gradients,
)
from domino_lm.schedule.plan import Plan, build_plan


class Gradient(NamedTuple):
    """A gradient as the step's end sees it: of one parameter, or of all parameters of a part together."""

    parts: frozenset[int]
    """Parts of the chain that write it."""

    elements: int
    sharded: bool
    """Whether each tensor-parallel rank holds its own share of the parameter."""


class Buckets(NamedTuple):
    """Gradients that are reduced together, in the order in which they complete."""

    gradients: list[list[int]]
    parts: list[frozenset[int]]
    """Parts that write into each bucket."""

    replica: list[int]
    """Buckets of which each tensor-parallel rank holds one term of a sum; the last ones."""


def step_plan(
    chain: Sequence[ChainPart],
    schedule: ScheduleConfig,
    cut: Cut,
    gradients: Sequence[Gradient],
    data_parallel: int,
    whole_matrices: Sequence[int] = (),
) -> tuple[Plan, list[list[int]]]:
    """The plan of one micro-batch with the step's end, and the gradients of each bucket by their numbers.

    ``whole_matrices`` are the parts whose matrices the optimizer updates whole.
    """
    plan = compute_plan(chain, schedule, cut)
    buckets = bucket_gradients(plan, gradients, schedule.ddp_bucket_size or max(40_000_000, 1_000_000 * data_parallel))
    sharding = schedule.sharding if data_parallel > 1 else "no_shard"  # one replica has nobody to share with
    plan = reduce_gradients(plan, buckets.parts, schedule.overlap_grad_reduce, buckets.replica, sharding)
    plan = orthogonalize(plan, whole_matrices) if whole_matrices else plan
    return gather_parameters(plan, schedule.overlap_param_gather) if plan.slicing.zero else plan, buckets.gradients


def compute_plan(chain: Sequence[ChainPart], schedule: ScheduleConfig, cut: Cut) -> Plan:
    """Forward and backward of one micro-batch, without the step's end."""
    plan = build_plan(
        chain,
        cut.row_sizes,
        cut.cols,
        sequence_rows=cut.sequence_rows,
        sequence_parallel=cut.sequence_parallel,
        row_groups=2 if cut.pair == "row-groups" else 1,
    )
    if schedule.domino_defer_wgrad:
        plan = defer_wgrad(plan)
    if schedule.recompute_granularity is not None:
        plan = recompute(plan, **recomputed_parts(chain, schedule))
    return pair_micro_batches(plan) if cut.pair == "micro-batches" else plan


def recomputed_parts(chain: Sequence[ChainPart], schedule: ScheduleConfig) -> dict[str, list[int]]:
    """Which sharded parts keep less: all attention cores, or all parts of all layers (uniform) or of the first ones (block).

    Reduced outputs are kept, so no all-reduce is repeated; a uniform chunk of several layers is recomputed like single ones.
    """
    inner = range(2, len(chain) - 1, 2)
    attentions = [part for part in inner if chain[part].couples_tokens]
    if schedule.recompute_granularity == "selective":
        return {"core": attentions}
    if schedule.recompute_method == "block" and (schedule.recompute_num_layers or 0) < len(attentions):
        return {"full": [part for part in inner if part < attentions[schedule.recompute_num_layers or 0]]}
    return {"full": list(inner)}


def bucket_gradients(plan: Plan, gradients: Sequence[Gradient], bucket_size: int) -> Buckets:
    """Gradients in buckets of ``bucket_size`` elements or more, ordered by the op that writes each last.

    What one op writes last stays together, so that no more buckets than need be hold gradients of a part.
    """
    last, chain = last_writers(plan), plan.slicing.chain

    def written_last(index: int) -> int:
        return max(last[part] for part in gradients[index].parts)

    def partial(index: int) -> bool:  # what ranks hold alike is computed by each from its tokens, or from its share of the part
        gradient = gradients[index]
        return not gradient.sharded and (plan.slicing.sequence_parallel or chain[min(gradient.parts)].sharded)

    ordered = sorted(range(len(gradients)), key=written_last)
    buckets: list[list[int]] = []
    room = 0
    for _, together in groupby([index for index in ordered if not partial(index)], written_last):
        if room <= 0:
            buckets.append([])
            room = bucket_size
        buckets[-1] += (members := list(together))
        room -= sum(gradients[index].elements for index in members)
    summed = [index for index in ordered if partial(index)]
    replica = [len(buckets)] if summed else []
    buckets += [summed] if summed else []
    return Buckets(buckets, [frozenset().union(*(gradients[index].parts for index in bucket)) for bucket in buckets], replica)
