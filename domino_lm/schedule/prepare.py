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
from domino_lm.schedule.passes import defer_wgrad, last_writers, pair_micro_batches, recompute, reduce_gradients
from domino_lm.schedule.ops import ChainPart
from domino_lm.schedule.plan import Plan, build_plan, cut, wgrad_each_row


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


def compute_plan(
    chain: Sequence[ChainPart], schedule: ScheduleConfig, micro_batch_size: int, seq_length: int, tp_size: int, wgrad_rows: str
) -> Plan:
    """Forward and backward of one micro-batch as ``schedule`` says, without the step's end."""
    rows = schedule.rows(micro_batch_size, tp_size)
    sequence_rows = rows > 1 and schedule.row_dim(micro_batch_size) == "sequence"
    sizes = cut(seq_length, rows, tp_size if schedule.sequence_parallel else 1) if sequence_rows else cut(micro_batch_size, rows)
    plan = build_plan(
        chain,
        sizes,
        schedule.domino_column_slices,
        sequence_rows=sequence_rows,
        sequence_parallel=schedule.sequence_parallel and tp_size > 1,
        row_groups=2 if schedule.domino_pair == "row-groups" else 1,
    )
    if wgrad_rows == "each":
        plan = wgrad_each_row(plan)
    if schedule.domino_defer_wgrad:
        plan = defer_wgrad(plan)
    if schedule.recompute_granularity is not None:
        plan = recompute(plan, **recomputed_parts(chain, schedule))
    return pair_micro_batches(plan) if schedule.domino_pair == "micro-batches" else plan


def recomputed_parts(chain: Sequence[ChainPart], schedule: ScheduleConfig) -> dict[str, list[int]]:
    """Which sharded parts keep less: all attention cores, or all parts of all layers (uniform) or of the first ones (block).

    Reduced outputs are kept, so no all-reduce is repeated; a uniform chunk of several layers is recomputed like single ones.
    """
    inner = range(2, len(chain) - 1, 2)
    if schedule.recompute_granularity == "selective":
        return {"core": [part for part in inner if chain[part].couples_tokens]}
    attentions = [part for part in inner if chain[part].couples_tokens]
    if schedule.recompute_method == "block" and (schedule.recompute_num_layers or 0) < len(attentions):
        return {"full": [part for part in inner if part < attentions[schedule.recompute_num_layers or 0]]}
    return {"full": list(inner)}


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
