"""The collectives of plans: what each passes, what arrives, whether columns cut it, and how large its buffer is.

A `Slicing` holds the table that its plan is written in; `parallel.collectives` starts them, `simulate.links` prices their traffic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

STATISTICS_BYTES = 3 * 4
"""A token's maximum, sum of exponentials and target logit, in fp32."""

Traffic = Literal["all_reduce", "reduce_scatter", "all_gather"]


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One way in which ranks exchange a value: a START sends it, a WAIT hands over what arrived."""

    name: str

    passes: Literal["partial", "statistics", "input", "saved_input", "gradients", "parameters", "momentum"]
    """``partial``: a partial sum of its part; ``statistics``: what the head's body returns; ``input``: what enters the part next; ``saved_input``: the part's input once more, for its
    weight gradient or to recompute it; ``gradients``, ``parameters``: those of a bucket, in phase S; ``momentum``: that of a part's matrices, in phase S."""

    arrives: str
    """Name of the value that its wait writes."""

    traffic: Traffic
    """Whose bytes it moves."""

    cut_by_columns: bool = False
    """Whether each column block travels by itself."""

    scattered: str | None = None
    """What stands in its place under sequence parallelism."""

    size: float = 1.0
    """Bytes of the whole buffer, relative to the value that it carries: below 1 if it is compressed."""

    bytes_per_token: int = 0
    """Bytes per token and rank of a buffer that is none of the model's activations; 0 if it is one."""

    @property
    def of_bucket(self) -> bool:
        """Whether it belongs to the step's end."""
        return self.passes in ("gradients", "parameters", "momentum")


ALL_REDUCE = Collective(
    name="all_reduce", passes="partial", arrives="sum", traffic="all_reduce", cut_by_columns=True, scattered="reduce_scatter"
)
REDUCE_SCATTER = Collective(name="reduce_scatter", passes="partial", arrives="sum", traffic="reduce_scatter", cut_by_columns=True)
ALL_GATHER = Collective(name="all_gather", passes="input", arrives="gathered", traffic="all_gather")
GATHER_INPUT = Collective(name="gather_input", passes="saved_input", arrives="gathered_input", traffic="all_gather")
STATISTICS = Collective(name="statistics", passes="statistics", arrives="sum", traffic="all_gather", bytes_per_token=STATISTICS_BYTES)
REPLICA_SUM = Collective(name="replica_sum", passes="gradients", arrives="summed", traffic="all_reduce")
BUCKET_SUM = Collective(name="all_reduce", passes="gradients", arrives="reduced", traffic="all_reduce")
BUCKET_SCATTER = Collective(name="reduce_scatter", passes="gradients", arrives="reduced", traffic="reduce_scatter")
BUCKET_GATHER = Collective(name="all_gather", passes="parameters", arrives="weights", traffic="all_gather")
MOMENTUM_GATHER = Collective(name="gather_momentum", passes="momentum", arrives="momentum of all ranks", traffic="all_gather")

STANDARD = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, GATHER_INPUT, STATISTICS, REPLICA_SUM, BUCKET_SUM, BUCKET_SCATTER, BUCKET_GATHER)
"""Partial sums leave by all-reduce, or reduce-scatter under sequence parallelism, where tokens are gathered when they enter a part; the
head's statistics are exchanged per token; ``replica_sum`` sums gradients of replicated weights over tensor-parallel ranks.

Plans of optimizers that update whole matrices add ``gather_momentum``, over tensor-parallel ranks.
"""
