"""The report of a step that is not finite, as ``--dump-on-nan`` writes it and ``domino-lm-verify --replay`` reads and prints it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from domino_lm.config.foreign_text import parse_json
from domino_lm.config.settings import ConfigError
from domino_lm.schedule.inspection import Finding, Statistics
from domino_lm.schedule.ops import Slicing

REPORT_FILE = "report.json"
READ = ("iteration", "loss", "grad_norm", "loss_scale", "softmax_rows", "steps_before", "ranks", "replicas", "weights_of_replica", "first")
"""What a replay needs of it."""


class RankSamples(NamedTuple):
    """A rank's place in the layout, and the numbers of the samples of each of its micro-batches in the training set."""

    dp: int
    tp: int
    samples: list[list[int]]


def origin_of(findings: Sequence[Finding | None]) -> int | None:
    """The rank whose op came first; None if every output of all ranks was finite.

    Ranks run the same plan, and a value passes to another one in a collective behind the op that made it.
    """
    found = [(finding.place, rank) for rank, finding in enumerate(findings) if finding is not None]
    return min(found)[1] if found else None


def describe(findings: Sequence[Finding | None], ranks: Sequence[RankSamples], slicing: Slicing, **step: Any) -> dict[str, Any]:
    """The content of ``report.json``: ``step`` as it is, the first op of all ranks, and every replica's samples."""
    origin = origin_of(findings)
    first: dict[str, Any] | None = None
    if origin is not None and (found := findings[origin]) is not None:
        place = ranks[origin]
        first = {"rank": origin, "data_parallel_rank": place.dp, "tensor_parallel_rank": place.tp, **asdict(found)}
        if found.micro_batch is not None and found.row is not None:
            first |= samples_of_row(slicing, found.row, place.samples[found.micro_batch])
    texts = {name: str(value) for name, value in step.items() if isinstance(value, float) and not math.isfinite(value)}
    return {
        **step,
        **texts,
        "ranks": len(ranks),
        "replicas": len({place.dp for place in ranks}),
        "weights_of_replica": 0 if origin is None else ranks[origin].dp,
        "first": first,
        "first_on_each_rank": [None if finding is None else finding.op for finding in findings],
        "samples_of_replicas": [place.samples for place in ranks if place.tp == 0],
    }


def samples_of_row(slicing: Slicing, row: int, samples: list[int]) -> dict[str, list[int]]:
    """Which of a micro-batch's ``samples`` a row holds, and if it is a stretch of all of them, its first and last token."""
    begin = sum(slicing.row_sizes[:row])
    end = begin + slicing.row_sizes[row]
    return {"samples": samples, "tokens": [begin, end - 1]} if slicing.sequence_rows else {"samples": samples[begin:end]}


def report_text(report: Mapping[str, Any]) -> str:
    """A report in lines: the op, the samples, statistics of what the op read and put out."""
    step = f"step {report['iteration']} (loss {report['loss']}, gradient norm {report['grad_norm']}) was not finite"
    first = report["first"]
    if first is None:
        return (
            f"{step}; run again on the same weights and samples it was: the fault has passed, as one of the hardware does, "
            "and lies neither in the data nor in the weights"
        )
    place = (
        "at the step's end" if first["row"] is None else f"part {first['part']}, row {first['row']} of micro-batch {first['micro_batch']}"
    )
    where = f"{first['op']} ({first['name']}, {place}) on rank {first['rank']}, from element {list(first['element'])} on"
    lines = [f"{step}; the first output that is not is that of {where}"]
    if "samples" in first:
        tokens = f", tokens {first['tokens'][0]} to {first['tokens'][1]}" if "tokens" in first else ""
        lines.append(f"  samples {', '.join(map(str, first['samples']))}{tokens}")
    for kind in ("inputs", "outputs", "weights"):
        lines += [f"  {kind.removesuffix('s'):7} {name}: {Statistics(**value)}" for name, value in first[kind].items()]
    return "\n".join([*lines, f"  among   {', '.join(first['around'])}"])


def read_report(folder: Path) -> dict[str, Any]:
    """The report of the dump in ``folder``. Raises ConfigError if there is no whole one."""
    try:
        found = parse_json((folder / REPORT_FILE).read_text(encoding="utf-8"))
        missing = [name for name in READ if name not in found]
        report_text(found)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"--replay {folder}: no whole dump of --dump-on-nan lies there ({type(error).__name__}: {error}).") from error
    if missing:
        raise ConfigError(f"--replay {folder}: {REPORT_FILE} does not say {', '.join(missing)}.")
    return dict(found)


def newest_dump(folder: Path) -> Path:
    """``folder`` if it is a dump, else the newest of those in it."""
    inside = sorted(folder.glob(f"iter_*/{REPORT_FILE}"), key=lambda path: path.stat().st_mtime)
    return folder if (folder / REPORT_FILE).exists() or not inside else inside[-1].parent
