"""How a micro-batch is cut into rows and columns, and what can be cut: the only place that knows. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from domino_lm.config.settings import ConfigError, RunConfig, ScheduleConfig

SEQUENCE_ROWS = 4
"""Rows along the sequence unless --domino-row-slices says otherwise, if it has tokens for so many."""


class Uncut(NamedTuple):
    """A micro-batch before it is cut: [seq_length, micro_batch_size, hidden_size] on each of ``tensor_parallel`` ranks."""

    micro_batch_size: int
    seq_length: int
    hidden_size: int
    tensor_parallel: int

    @classmethod
    def of(cls, run: RunConfig) -> Uncut:
        """That of ``run``."""
        model = run.model
        return cls(run.training.micro_batch_size, model.seq_length, model.hidden_size, run.parallel.tensor_model_parallel_size)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Rows and columns of a micro-batch, and which pieces run in turn."""

    row_sizes: tuple[int, ...]
    """Sequences of each row, or its tokens with ``sequence_rows``."""

    cols: int = 1
    sequence_rows: bool = False
    sequence_parallel: bool = False
    """Tensor-parallel ranks share the tokens of replicated parts, so that rows along the sequence hold a multiple of them."""

    pair: Literal["micro-batches", "row-groups"] | None = None

    @property
    def rows(self) -> int:
        """Pieces along the batch or the sequence."""
        return len(self.row_sizes)

    @property
    def pieces(self) -> int:
        """Pieces that each collective of the uncut micro-batch becomes."""
        return self.rows * self.cols


def resolve_cut(schedule: ScheduleConfig, uncut: Uncut) -> Cut:
    """The cut that ``schedule`` asks for, defaults filled in. Raises ConfigError with all of `cut_faults`."""
    faults = list(cut_faults(schedule, uncut))
    if faults:
        raise ConfigError(" ".join(faults))
    rows, along, unit = _rows(schedule, uncut), row_dim(schedule, uncut), _unit(schedule, uncut)
    sequence_rows = rows > 1 and along == "sequence"
    return Cut(
        row_sizes=cut(uncut.seq_length, rows, unit) if sequence_rows else cut(uncut.micro_batch_size, rows),
        cols=schedule.domino_column_slices,
        sequence_rows=sequence_rows,
        sequence_parallel=schedule.sequence_parallel and uncut.tensor_parallel > 1,
        pair=schedule.domino_pair,
    )


def cut_faults(schedule: ScheduleConfig, uncut: Uncut) -> Iterator[str]:
    """Why ``uncut`` cannot be cut as ``schedule`` says: flags, values, and the way out behind a semicolon."""
    micro, length, hidden, tp = uncut
    rows, along, unit = _rows(schedule, uncut), row_dim(schedule, uncut), _unit(schedule, uncut)
    if along == "batch" and rows > micro:
        yield (
            f"--domino-row-slices {rows} asks for more rows than --micro-batch-size {micro} has sequences; use at most {micro}, "
            "or cut along the sequence with --domino-row-dim sequence."
        )
    if length % unit:
        yield f"--sequence-parallel cuts --seq-length {length} over {tp} ranks; make it a multiple of {tp}."
    elif along == "sequence" and rows > length // unit:
        yield f"{rows} rows along the sequence do not fit --seq-length {length}; use --domino-row-slices {length // unit} or fewer."
    if hidden % schedule.domino_column_slices:
        divisors = [str(n) for n in range(1, hidden + 1) if hidden % n == 0][:8]
        yield f"--domino-column-slices {schedule.domino_column_slices} does not divide --hidden-size {hidden}; use one of {', '.join(divisors)}."
    if schedule.domino_pair == "row-groups" and (along == "sequence" or rows < 2):
        yield (
            f"--domino-pair row-groups needs two groups of sequences, but --micro-batch-size {micro} gives {rows} row(s) along the "
            f"{along}; raise it to 2 or more, or use --domino-pair micro-batches."
        )


def resolved_schedule(schedule: ScheduleConfig, tensor_parallel: int) -> Literal["baseline", "domino"]:
    """The schedule that runs at this tensor-parallel size; one rank alone has nothing to hide."""
    if schedule.schedule in ("baseline", "domino"):
        return schedule.schedule
    return "domino" if tensor_parallel > 1 else "baseline"


def row_dim(schedule: ScheduleConfig, uncut: Uncut) -> Literal["batch", "sequence"]:
    """What rows are cut along."""
    return schedule.domino_row_dim or ("sequence" if uncut.micro_batch_size == 1 else "batch")


def _rows(schedule: ScheduleConfig, uncut: Uncut) -> int:
    """Rows asked for, or else the default, which always fits."""
    if schedule.domino_row_slices is not None:
        return schedule.domino_row_slices
    columns_alone = schedule.domino_row_dim is None and schedule.domino_column_slices > 1
    if columns_alone or resolved_schedule(schedule, uncut.tensor_parallel) == "baseline":
        return 1
    if row_dim(schedule, uncut) == "sequence":
        return max(1, min(SEQUENCE_ROWS, uncut.seq_length // _unit(schedule, uncut)))
    return min(4 if schedule.domino_pair == "row-groups" else 2, uncut.micro_batch_size)


def _unit(schedule: ScheduleConfig, uncut: Uncut) -> int:
    """Tokens that cannot be parted: under sequence parallelism every rank has one of them."""
    return uncut.tensor_parallel if schedule.sequence_parallel else 1


def cut(size: int, pieces: int, multiple: int = 1) -> tuple[int, ...]:
    """Sizes of ``pieces`` pieces of ``size`` that differ by one ``multiple`` at most, larger ones first.

    Raises ValueError if a piece would be empty or ``size`` is no multiple.
    """
    units = size // multiple
    if size % multiple or not 1 <= pieces <= units:
        raise ValueError(f"cannot cut {size} into {pieces} pieces of multiples of {multiple} that each hold something; use 1 to {units}")
    return tuple(multiple * (units // pieces + (i < units % pieces)) for i in range(pieces))
