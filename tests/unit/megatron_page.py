"""The page ``docs/megatron-flags.md``: what becomes of each flag of Megatron's, from the settings and the table of `megatron_flags`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from domino_lm.config.arguments import ALIASES, CONSTANT_FLAGS
from domino_lm.config.megatron_flags import REQUIRES, by_reason, megatron_flags
from domino_lm.config.schema import Setting, settings

INTRODUCTION = """\
# Megatron's flags

Every flag of Megatron-LM's pretraining of GPT models falls into one of three classes: it **works**, it is **accepted without effect** here, or
it is **refused** with the reason and what to do instead. A flag that stands in none of them is an error that names the nearest one that does.
`--dry-run` says all of this of a command line, and a run prints the flags that it accepts without effect under `ignored`.

A name that ends in `*` stands for all flags that begin so. A value behind `=` is accepted where the flag is refused with any other.
This page is made by `python tests/unit/test_arguments.py`.
"""

DOMINO_ONLY = frozenset(
    "--model --mask-padded-vocab --schedule --null-tokenizer-extra-eod --exit-samples --max-skipped-steps --metrics-file --peak-tflops "
    "--timeline --timeline-iteration --compile --compile-backend --cuda-graph --apex-optimizer --nccl-max-ctas "
    "--cuda-device-max-connections --keep-last --exit-on-save-failure --hang-timeout-seconds --tf32 --dump-on-nan".split()
)
"""Settings that Megatron does not have, beside those that begin with ``--domino-``."""


DIFFERENT_DEFAULTS = {
    "--fp8-recipe": ("delayed: scales from a history of earlier steps", "tensorwise: each tensor's scale from itself"),
    "--no-mask-padded-vocab": ("on: padded vocabulary rows take part in the softmax", "off: they do not"),
    "--overlap-grad-reduce": ("off", "on; the result is the same"),
    "--distributed-backend": ("nccl", "nccl on GPUs, else gloo"),
    "--check-for-nan-in-loss-and-grad": ("on: the first such step ends the run", "--max-skipped-steps of them are skipped"),
    "--tokenizer-type": ("none", "GPT2BPETokenizer if --vocab-file and --merge-file are given"),
}
"""Flags whose defaults are others than Megatron's: Megatron's, and ours."""


def page() -> str:
    """The whole page."""
    return "\n".join([INTRODUCTION, *_different(), *_works(), *_class("accepted"), *_class("refused")]) + "\n"


def is_ours(setting: Setting) -> bool:
    """Whether Megatron has no such flag."""
    return setting.flag.startswith("--domino-") or setting.flag in DOMINO_ONLY


def _different() -> Iterator[str]:
    yield "## Defaults that differ\n\n| flag | Megatron's default | here |\n|---|---|---|"
    for flag, (theirs, ours) in DIFFERENT_DEFAULTS.items():
        yield f"| `{flag}` | {theirs} | {ours} |"
    yield ""


def _works() -> Iterator[str]:
    found = settings()
    count = sum(not is_ours(item) for item in found)
    yield f"## They work: {count}\n"
    yield "As in Megatron, but for what the last column says of it. A flag that is on by default is turned off by `--no-...`.\n"
    yield "| flag | default | what it does |\n|---|---|---|"
    for item in found:
        if not is_ours(item):
            yield f"| {_names(item)} | {_default(item)} | {_cell(item.help)} |"
    yield "\nMegatron has no such flags as these, which `--help` explains:"
    yield ", ".join(f"`{item.flag}`" for item in found if is_ours(item)) + ".\n"


def _names(item: Setting) -> str:
    """A setting's spellings; one of a value of its own says which."""
    names = [item.flag, *ALIASES.get(item.name, [])]
    same = [flag for flag, (name, _) in CONSTANT_FLAGS.items() if name == item.name]
    return ", ".join(f"`{name}`" for name in [*names, *same])


def _default(item: Setting) -> str:
    if item.kind is bool:
        return "on" if item.default is True else "off"
    return "" if item.default in (None, ()) or not isinstance(item.default, str | int | float) else f"{item.default}"


def _class(outcome: Literal["accepted", "refused"]) -> Iterator[str]:
    rows = [row for row in megatron_flags() if row.outcome == outcome]
    titles = {"accepted": ("Accepted without effect", "why"), "refused": ("Refused", "why, and what to do")}
    title, column = titles[outcome]
    yield f"## {title}: {sum(not row.is_family for row in rows)}, and {sum(row.is_family for row in rows)} families\n"
    for topic in dict.fromkeys(row.topic for row in rows):
        reasons = by_reason([row for row in rows if row.topic == topic])
        yield f"### {topic}\n\n| flags | {column} |\n|---|---|"
        for why, members in reasons.items():
            needs = "; ".join(f"else: {REQUIRES[row.flag][2]}" for row in members if row.flag in REQUIRES)
            names = ", ".join(f"`{_cell(str(row))}`" for row in members)
            yield f"| {names} | {_cell(why)}{'; ' + needs if needs else ''} |"
        yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
