"""Settings as a TOML file: what ``--config`` reads, and what a run leaves beside its checkpoints. Nothing here imports torch."""

import difflib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from domino_lm.config.foreign_text import ForeignTextError, parse_toml
from domino_lm.config.neighbours import hint_of_neighbours
from domino_lm.config.schema import Setting, settings
from domino_lm.config.settings import ConfigError, RunConfig

CONFIG_NAME = "config.toml"
PRESET = "preset"


class ConfigFile(NamedTuple):
    """A TOML file of settings."""

    values: dict[str, object]
    """Flat field names and values, without wrong ones, and ``preset`` if it names one."""

    faults: list[str]
    """What is wrong with it; one for the whole file."""

    wrong: frozenset[str] = frozenset()
    """Names of settings with wrong values."""


def read_config(path: str | os.PathLike[str], gone: Collection[str] = ()) -> ConfigFile:
    """The settings of a TOML file.

    Keys are field names, with ``_`` or ``-``, at the top or in the table of their part (``[model]``, ``[training]``, ...).
    Settings that are ``gone`` are returned as the file has them.
    """
    try:
        tables = parse_toml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        return ConfigFile({}, [f"--config {path} cannot be read: {error.strerror}."])
    except (ForeignTextError, UnicodeDecodeError) as error:
        return ConfigFile({}, [f"--config {path} is not TOML: {error}."])
    known = {item.name: item for item in settings()}
    values: dict[str, object] = {}
    faults, wrong = [], set()
    for table, key, value in _entries(tables):
        name = key.replace("-", "_")
        unchecked = (table, name) == ("", PRESET) or name in gone
        fault = None if unchecked else _fault(table, key, value, known.get(name), list(known))
        if name in values:
            fault = f"{key} is given twice"
        if fault is None:
            values[name] = value
            continue
        faults.append(fault)
        if name in known:
            wrong.add(name)
    return ConfigFile(values, [f"--config {path}: {'; '.join(faults)}."] if faults else [], frozenset(wrong))


def config_text(run: RunConfig) -> str:
    """Every setting of ``run`` as TOML that `read_config` takes; one whose value is None is left out, which means the same."""
    lines = ["# Settings of one run, as they were resolved; --config with this file gives them again."]
    part = ""
    for item in settings():
        if item.part != part:
            part = item.part
            lines += ["", f"[{part}]"]
        value = item.of(run)
        if value is not None:
            lines.append(f"{item.name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def require_writable(folder: str, flag: str = "--save") -> None:
    """Make ``folder`` if it is missing, and a file in it for a moment: a run must not find out after hours. Raises ConfigError."""
    probe = Path(folder) / f".writable.tmp-{os.getpid()}"
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"{flag} {folder} cannot be written: {error.strerror}; give a folder that can.") from error


def save_config(run: RunConfig, folder: str) -> Path:
    """Write ``config.toml`` into ``folder``, made if it is missing; the file appears whole or not at all.

    Raises ConfigError if the folder cannot be written.
    """
    path = Path(folder) / CONFIG_NAME
    unfinished = path.with_name(f".{CONFIG_NAME}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(config_text(run), encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise ConfigError(f"--save {folder} cannot be written: {error.strerror}.") from error
    finally:
        if unfinished.is_file():
            unfinished.unlink()
    return path


def _entries(tables: Mapping[str, object], path: str = "") -> Iterator[tuple[str, str, object]]:
    """Tables, parted by dots, key and value of everything in the file."""
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{path}.{key}" if path else key)
        else:
            yield path, key, value


def _fault(table: str, key: str, value: object, setting: Setting | None, known: Sequence[str]) -> str | None:
    """What is wrong with one entry."""
    where = f"[{table}] {key}" if table else key
    if setting is None:
        near = difflib.get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.6)
        hint = hint_of_neighbours(f"{table}.{key}") or (f"nearest: {near[0]}" if near else "")
        return f"{where} is no setting" + (f" ({hint})" if hint else "")
    if table and setting.part != table:
        return f"{where} belongs into [{setting.part}]"
    if setting.many:
        fits = isinstance(value, list) and all(isinstance(item, setting.kind) for item in value)
        return None if fits else f"{where} must be a list of {setting.kind.__name__}, not {value!r}"
    if setting.choices is not None:
        return None if value in setting.choices else f"{where} must be one of {', '.join(setting.choices)}, not {value!r}"
    kinds = (int, float) if setting.kind is float else (setting.kind,)
    fits = isinstance(value, kinds) and isinstance(value, bool) == (setting.kind is bool)
    return None if fits else f"{where} must be {setting.kind.__name__}, not {value!r}"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value) if isinstance(value, str) else repr(value)
