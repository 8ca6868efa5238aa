"""Text that others wrote, parsed within limits: one rule for every file of JSON or TOML and for every number that is read."""

import argparse
import json
import re
import tomllib
from collections.abc import Callable
from typing import Any

MOST_NESTED = 64
"""Containers inside each other, or parts of a TOML key. What reads them may call itself for each."""

LARGEST = 2**63 - 1
"""The largest whole number, and less its sign the least."""

_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*+"|\'[^\'\n]*+\'')
_LONG_KEY = re.compile(rf"(?<![\w-])[\w-]++(?:[ \t]*+\.[ \t]*+[\w-]++){{{MOST_NESTED}}}")
_SHOWN = 20


class ForeignTextError(ValueError):
    """Text that is not what it has to be, or is beyond a limit. The message says what is wrong, in one line."""


def parse_json(text: str, *, whole_numbers: bool = True, **how: Any) -> Any:
    """The value that a JSON text holds; ``how`` goes to `json.loads`.

    ``whole_numbers`` holds them to LARGEST; without it those that nobody reads may be larger. Raises ForeignTextError for text that is
    beyond a limit; json.JSONDecodeError, which knows the place, for text that is not JSON; and what functions of ``how`` raise.
    """
    value = _within_limits(lambda: json.loads(text, **how), json.JSONDecodeError)
    if whole_numbers or text.count("[") + text.count("{") > MOST_NESTED:  # most lines of data need no look
        _check(value, whole_numbers)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ForeignTextError, also for text that is not TOML."""
    if found := _LONG_KEY.search(_STRING.sub("_", text)):
        raise ForeignTextError(f"the key {found[0][:_SHOWN]}... has more than {MOST_NESTED} parts")
    try:
        tables: dict[str, Any] = _within_limits(lambda: tomllib.loads(text), tomllib.TOMLDecodeError)
    except tomllib.TOMLDecodeError as error:
        raise ForeignTextError(str(error)) from error
    _check(tables, True)
    return tables


def whole_number(text: str) -> int:
    """A whole number that fits 64 bits, of a flag or a word of a file. Raises ForeignTextError."""
    if re.fullmatch(r"\s*[+-]?[0-9_]+\s*", text) is None:
        raise ForeignTextError(f"{_start_of(text)!r} is not a whole number")
    if len(text) > 2 * len(str(LARGEST)):
        raise ForeignTextError(f"{_start_of(text)} has {len(text)} characters; {LARGEST} is the largest whole number")
    try:
        value = int(text)
    except ValueError:
        raise ForeignTextError(f"{_start_of(text)!r} is not a whole number") from None
    if abs(value) > LARGEST:
        raise ForeignTextError(f"{_start_of(text)} is too large; {LARGEST} is the largest whole number")
    return value


def int_of_flag(text: str) -> int:
    """`whole_number` as argparse asks for types of flags. Raises argparse.ArgumentTypeError."""
    try:
        return whole_number(text)
    except ForeignTextError as error:
        raise argparse.ArgumentTypeError(f"invalid int value: {error}") from None


def _within_limits(parse: Callable[[], Any], knows_place: type[ValueError]) -> Any:
    """What ``parse`` returns. Its own error passes; Python's limits of recursion and digits become ForeignTextError."""
    try:
        return parse()
    except RecursionError:
        raise ForeignTextError(f"nested deeper than {MOST_NESTED} levels") from None
    except knows_place:
        raise
    except ValueError as error:
        if "digits" not in str(error):
            raise
        raise ForeignTextError(f"a whole number is larger than {LARGEST}") from None


def _check(value: Any, whole_numbers: bool) -> None:
    """Raise ForeignTextError if a parsed value is beyond a limit. Goes level by level, since calls would nest as deep as the value."""
    level, depth = [value], 0
    while level:
        if whole_numbers and any(isinstance(each, int) and abs(each) > LARGEST for each in level):
            raise ForeignTextError(f"a whole number is larger than {LARGEST}")
        containers = [each for each in level if isinstance(each, dict | list)]
        depth += bool(containers)
        if depth > MOST_NESTED:
            raise ForeignTextError(f"nested deeper than {MOST_NESTED} levels")
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]


def _start_of(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
