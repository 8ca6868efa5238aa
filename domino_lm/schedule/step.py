"""From schedule settings to a plan's compute: which cut, which passes. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence

from domino_lm.config.settings import ScheduleConfig
from domino_lm.schedule.ops import ChainPart
from domino_lm.schedule.passes import defer_wgrad, pair_micro_batches, recompute
from domino_lm.schedule.plan import Plan, build_plan, cut, wgrad_each_row


def compute_plan(chain: Sequence[ChainPart], schedule: ScheduleConfig, micro_batch_size: int, seq_length: int, tp_size: int) -> Plan:
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
    if schedule.domino_wgrad_rows == "each":
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
    attentions = [part for part in inner if chain[part].couples_tokens]
    if schedule.recompute_granularity == "selective":
        return {"core": attentions}
    if schedule.recompute_method == "block" and (schedule.recompute_num_layers or 0) < len(attentions):
        return {"full": [part for part in inner if part < attentions[schedule.recompute_num_layers or 0]]}
    return {"full": list(inner)}
