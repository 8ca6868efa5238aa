"""Flags of tools, made from the fields of the settings that they fill in."""

import argparse
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

from domino_lm.config.arguments import add_setting
from domino_lm.config.data import TokenizerConfig
from domino_lm.config.schema import NO_DEFAULT, Setting, settings, settings_of

Config = TypeVar("Config")


def add_flags(group: Any, items: Iterable[Setting]) -> None:
    """Add flags to a parser or a group of it; those of settings without a default are required."""
    for item in items:
        default = argparse.SUPPRESS if item.kind is bool or item.default is NO_DEFAULT else item.default
        add_setting(group, item, default=default, required=item.default is NO_DEFAULT)


def add_tokenizer_flags(group: Any, required: bool = False) -> None:
    """Add training's flags for a tokenizer, and ``--vocab-size``."""
    kind, *others = settings_of(TokenizerConfig)
    add_flags(group, [replace(kind, default=NO_DEFAULT) if required else kind, *others])
    add_flags(group, [item for item in settings() if item.name == "vocab_size"])


def take(flags: dict[str, Any], config_class: type[Config], **others: Any) -> Config:
    """Takes the fields of ``config_class`` out of parsed ``flags``, and makes one of them and of ``others``."""
    names = [item.name for item in fields(config_class) if item.name in flags]  # type: ignore[arg-type]
    given = {name: flags.pop(name) for name in names}
    return config_class(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}, **others)
