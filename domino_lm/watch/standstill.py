"""Which rank a job waits for, from what is known of each: a judgement, and the table that tells it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from domino_lm.parallel.agreement import ranks_text
from domino_lm.parallel.progress import Cell, Cells, Stage
from domino_lm.watch.hang_timeout import HangTimeout

Named = Callable[[int, int, int], tuple[str, Sequence[int] | None]]
"""Name of an op, and the ranks that a rank waits for in it if it is a wait; takes rank, template and position."""

MS = 1e-3
PROCESSES = {"": "its process is gone", "T": "its process is stopped", "t": "its process is stopped", "D": "its process waits for a device"}


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One rank as a watcher sees it."""

    rank: int
    stage: Stage
    step: int
    template: int
    op: int
    count: int
    still_s: float
    """Since its main thread last moved."""

    still_limit_s: float
    silent_s: float
    """Since its process last showed that it can run."""

    silent_limit_s: float
    ended: bool = False
    process: str = "S"
    """The kernel's letter for it, of this node; S elsewhere."""

    @classmethod
    def of(cls, rank: int, cells: Cells, silent_s: float, timeout: HangTimeout, process: str = "S") -> Seen:
        """From a rank's cells and what this watcher knows of its process; limits hold where it is, not where it last beat."""
        return cls(
            rank=rank,
            stage=Stage(cells[Cell.STAGE]),
            step=cells[Cell.STEP],
            template=cells[Cell.TEMPLATE],
            op=cells[Cell.OP],
            count=cells[Cell.COUNT],
            still_s=cells[Cell.STILL_MS] * MS + silent_s,
            still_limit_s=timeout.still_s(cells),
            silent_s=silent_s,
            silent_limit_s=timeout.silent_s(cells),
            ended=bool(cells[Cell.ENDED]),
            process=process,
        )

    @property
    def gone(self) -> bool:
        """It has died, without leaving."""
        return not self.ended and self.process == ""

    @property
    def cannot_run(self) -> bool:
        """It has died, or has not shown for too long that it runs."""
        return self.gone or (not self.ended and self.silent_s >= self.silent_limit_s > 0)

    @property
    def place(self) -> tuple[int, int, int, int, int]:
        """How far it has come; the smaller, the further behind."""
        return self.step, self.stage, self.template, self.op, self.count


def at_fault(ranks: Sequence[Seen], named: Named) -> list[Seen]:
    """Whom the others wait for; empty while nobody has stood still for too long.

    Ranks that cannot run come first, then those that stand still outside a wait. If all wait, it is for the ones
    furthest behind, or if all are at one place for messages that do not arrive: then for all.
    """
    dead = [seen for seen in ranks if seen.cannot_run]
    if dead:
        return dead
    running = [seen for seen in ranks if not seen.ended]
    late = [seen for seen in running if seen.still_s >= seen.still_limit_s > 0]
    own = [seen for seen in late if _works(seen, named)]
    if own or len(late) < len(running):
        return own
    behind = min((seen.place for seen in late), default=None)
    return [seen for seen in late if seen.place == behind]


def _works(seen: Seen, named: Named) -> bool:
    """Whether it does something of its own: not a wait, nor a stage in which ranks wait for each other."""
    if seen.stage is Stage.STEP:
        return named(seen.rank, seen.template, seen.op)[1] is None
    return seen.stage in (Stage.DATA, Stage.OUTPUT)


def report(ranks: Sequence[Seen], fault: Sequence[Seen], named: Named, setting: str, killed: bool = True) -> str:
    """A line that says who stands still where, and a table of all ranks, those alike in one row."""
    first = fault[0]
    numbers = [seen.rank for seen in fault]
    alone = len(fault) < sum(not seen.ended for seen in ranks)
    stand = "stands still" if len(fault) == 1 else "stand still"
    how = PROCESSES.get(first.process, "") or ("it does not run" if first.cannot_run else "")
    what = f"{ranks_text(numbers)} {stand} in {_where(first, named)}{f' ({how})' if how and len(fault) == 1 else ''}"
    if first.gone:
        what = f"{ranks_text(numbers)} died in {_where(first, named)}: killed, out of memory, or ended by a library"
    elif not alone:
        what = f"all ranks wait in {_where(first, named)}, for messages that do not arrive"
    lines = [f"{what}, iteration {first.step}{'' if first.gone else f', since {first.still_s:.0f} s ({setting})'}; the run ends."]
    rows: dict[tuple[str, str, str], list[int]] = {}
    for seen in ranks:
        rows.setdefault((str(seen.step), _where(seen, named), _remark(seen, numbers, alone, named, killed)), []).append(seen.rank)
    table = [("rank", "iteration", "in", "since it moved, and why"), *((_short(each), *row) for row, each in rows.items())]
    widths = [max(len(row[column]) for row in table) for column in range(3)]
    return "\n".join([*lines, *("  " + "  ".join([*map(str.ljust, row[:3], widths), row[3]]) for row in table)])


def _where(seen: Seen, named: Named) -> str:
    return named(seen.rank, seen.template, seen.op)[0] if seen.stage is Stage.STEP else str(seen.stage)


def _remark(seen: Seen, fault: Sequence[int], alone: bool, named: Named, killed: bool) -> str:
    """What a row says of a rank."""
    if seen.ended:
        return "has left"
    if seen.gone:
        return PROCESSES[""]
    since = f"{seen.still_s:.0f} s"
    if seen.rank in fault and alone:
        process = PROCESSES.get(seen.process)
        why = f"{process or 'does not run'}{', is killed' if killed else ''}" if seen.cannot_run else process or "stands still"
        return f"{since}, {why}"
    members = named(seen.rank, seen.template, seen.op)[1] if seen.stage is Stage.STEP else None
    awaited = [rank for rank in fault if rank != seen.rank and (members is None or rank in members)]
    if not alone or not awaited:
        awaited = [rank for rank in members or () if rank != seen.rank]
    return f"{since}, waits for {ranks_text(awaited)}" if awaited else since


def _short(ranks: Sequence[int]) -> str:
    return ranks_text(ranks).partition(" ")[2]


def table_of(cells: Mapping[int, Cells], silent_s: Mapping[int, float], processes: Mapping[int, str], timeout: HangTimeout) -> list[Seen]:
    """Every rank as it is seen, from its cells, how long it has been silent, and its process if that is of this node."""
    return [Seen.of(rank, each, silent_s.get(rank, 0.0), timeout, processes.get(rank, "S")) for rank, each in cells.items()]
