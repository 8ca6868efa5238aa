"""What must be the same on all ranks is compared as soon as it is known; whatever differs is said in one form."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from domino_lm.config.settings import ConfigError

Gather = Callable[[str], list[str]]
"""Every rank's text, in rank order; all ranks call it together."""

SHOWN_FACTS = 5
SHOWN_CHARACTERS = 60
ABSENT = "nothing"


class DisagreementError(ConfigError):
    """Ranks that differ in what must be the same; raised on all of them, with the same message."""


class Alike(NamedTuple):
    """Facts of one kind that must be the same on all ranks."""

    facts: Mapping[str, str]
    """What (a flag, a file, a library) and its value on this rank."""

    way_out: str
    """What to do if they differ, as the end of a sentence."""


def require_agreement(gather: Gather, kinds: Sequence[Alike]) -> None:
    """Raise DisagreementError, on every rank, if any fact of ``kinds`` differs between ranks.

    Hashes travel first, and the facts themselves only if those differ.
    """
    mine = json.dumps([dict(kind.facts) for kind in kinds])
    if len(set(gather(hashlib.sha256(mine.encode()).hexdigest()))) == 1:
        return
    found: list[list[dict[str, str]]] = [json.loads(text) for text in gather(mine)]
    lines = [line for number, kind in enumerate(kinds) for line in _differences([facts[number] for facts in found], kind.way_out)]
    if len(lines) == 1:
        raise DisagreementError(f"the ranks disagree on {lines[0]}")
    raise DisagreementError("\n".join(["the ranks disagree on:", *(f"  - {line}" for line in lines)]))


def _differences(found: Sequence[Mapping[str, str]], way_out: str) -> list[str]:
    """A line for each fact that is not the same in all of ``found``, which are in rank order; of many, the first ones."""
    names = dict.fromkeys(name for facts in found for name in facts)
    values = {name: [facts.get(name, ABSENT) for facts in found] for name in names}
    lines = [f"{name}: {values_by_ranks(each)}; {way_out}." for name, each in values.items() if len(set(each)) > 1]
    more = len(lines) - SHOWN_FACTS
    return lines if more <= 0 else [*lines[:SHOWN_FACTS], f"{more} more like the last one."]


def values_by_ranks(values: Sequence[str]) -> str:
    """Which ranks have which of ``values``, which are in rank order; long ones from shortly before they differ."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    shown = _shortened(list(ranks))
    return ", ".join(f"{text} on {ranks_text(each)}" for text, each in zip(shown, ranks.values(), strict=True))


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 0-2, 5`` for ascending ``ranks``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join('-'.join(map(str, run)) for run in runs)}"


def _shortened(values: Sequence[str]) -> list[str]:
    """``values``, each as a piece of at most SHOWN_CHARACTERS in which they still differ."""
    if max(map(len, values)) <= SHOWN_CHARACTERS:
        return list(values)
    same = next((i for i, letters in enumerate(zip(*values, strict=False)) if len(set(letters)) > 1), min(map(len, values)))
    begin = max(0, same - SHOWN_CHARACTERS // 3)
    pieces = [value[begin : begin + SHOWN_CHARACTERS] for value in values]
    return [
        f"{'...' if begin else ''}{piece}{'...' if begin + SHOWN_CHARACTERS < len(value) else ''}"
        for piece, value in zip(pieces, values, strict=True)
    ]
