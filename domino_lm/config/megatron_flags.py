"""Megatron's flags that are no settings here: accepted if what they ask for is done anyway, else refused with a way out.

The table is ``megatron_flags.toml``, which is read when a flag is looked up. `arguments` classifies a command line by it, and
``--help-megatron`` and ``docs/megatron-flags.md`` are made from it. Nothing here imports torch.
"""

import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

MANY = -1
"""Number of words of a flag that takes all up to the next flag."""

REQUIRES: Mapping[str, tuple[str, object, str]] = {
    "--no-position-embedding": (
        "position_embedding_type",
        "rope",
        "models without positions are not there; give --position-embedding-type rope",
    ),
}
"""Flags that are accepted only if a setting has a value: the setting's name, the value, and what to do otherwise."""


@dataclass(frozen=True)
class MegatronFlag:
    """One flag: what becomes of it and why, how many words follow it, and which values are accepted although it is refused."""

    flag: str
    topic: str
    outcome: Literal["accepted", "refused"]
    why: str
    words: int = 0
    neutral: tuple[str, ...] = ()
    changes_model: bool = False
    """The model's arithmetic depends on it."""

    @property
    def is_family(self) -> bool:
        """Whether it stands for all flags that begin like it."""
        return self.flag.endswith("*")

    @property
    def argument(self) -> str:
        """Name of the value among the arguments that Megatron stores in its checkpoints."""
        return self.flag.removeprefix("--").replace("-", "_")

    def accepts(self, values: Sequence[str]) -> bool:
        """Whether the flag may stand in a command line with these values."""
        return self.outcome == "accepted" or (bool(self.neutral) and all(value in self.neutral for value in values))

    def is_off(self, value: object) -> bool:
        """Whether ``value`` of a stored argument asks for nothing."""
        return value is None or (str(value) in self.neutral if self.neutral else not value)

    def __str__(self) -> str:
        return self.flag + (f"={'|'.join(self.neutral)}" if self.neutral else "")


@cache
def megatron_flags() -> tuple[MegatronFlag, ...]:
    """The table, in its order."""
    from importlib.resources import files

    topics = tomllib.loads(files("domino_lm.config").joinpath("megatron_flags.toml").read_text(encoding="utf-8"))
    return tuple(
        _entry(text.strip(), topic=topic, outcome=outcome, why=why)
        for topic, outcomes in topics.items()
        for outcome, reasons in outcomes.items()
        for why, flags in reasons.items()
        for text in flags.split(",")
    )


def _entry(text: str, **common: Any) -> MegatronFlag:
    """A flag in the notation that the head of the table explains."""
    name, _, rest = text.partition(" ")
    flag, many = name.removesuffix("!"), rest.startswith("+") or name.endswith("*")
    neutral = tuple(rest.lstrip("+=").split("|")) if "=" in rest else ()
    words = MANY if many else 1 if neutral else int(rest or 0)
    return MegatronFlag(flag=flag, words=words, neutral=neutral, changes_model=name.endswith("!"), **common)


def find(flag: str) -> MegatronFlag | None:
    """The table's entry for ``flag``: its own, else that of its family."""
    entries = megatron_flags()
    own = next((entry for entry in entries if entry.flag == flag), None)
    return own or next((entry for entry in entries if entry.is_family and flag.startswith(entry.flag[:-1])), None)


def by_reason(entries: Sequence[MegatronFlag]) -> Mapping[str, list[MegatronFlag]]:
    """Flags under their common reason."""
    found: dict[str, list[MegatronFlag]] = {}
    for entry in entries:
        found.setdefault(entry.why, []).append(entry)
    return found


def help_text(width: int) -> str:
    """What ``--help-megatron`` prints: the flags of each topic and outcome, a paragraph per reason."""
    outcomes = {"accepted": "accepted without effect", "refused": "refused (a value after = is accepted)"}
    lines = []
    for outcome, title in outcomes.items():
        for topic in dict.fromkeys(entry.topic for entry in megatron_flags()):
            reasons = by_reason([entry for entry in megatron_flags() if (entry.topic, entry.outcome) == (topic, outcome)])
            lines += [f"{topic}, {title}:"] if reasons else []
            for why, entries in reasons.items():
                text = f"{', '.join(map(str, entries))}: {why}"
                lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def classify(words: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Sort words that the parser does not know: flags accepted, with the reason; flags refused, with the reason; the rest."""
    accepted, refused, unknown = [], [], []
    split = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for word, following in _with_following(split):
        entry = find(word) if word.startswith("--") else None
        if entry is None:
            unknown += [word, *following]
            continue
        count = len(following) if entry.words == MANY else entry.words
        values = following[:count]
        unknown += following[count:]
        text = f"{' '.join([word, *values])}: {entry.why}"
        if entry.accepts(values):
            accepted.append(text)
        else:
            refused.append(text + (f" (only {' or '.join(entry.neutral)} is accepted)" if entry.neutral else ""))
    return accepted, refused, unknown


def _with_following(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with the words up to the next one; words before the first flag one by one."""
    position = 0
    while position < len(words):
        end = position + 1
        if words[position].startswith("--"):
            while end < len(words) and not words[end].startswith("--"):
                end += 1
        yield words[position], list(words[position + 1 : end])
        position = end
