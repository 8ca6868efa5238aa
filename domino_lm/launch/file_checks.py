"""Refuses files that are not there and folders that cannot be written, before torch is loaded. Nothing here imports torch."""

import os
from collections.abc import Iterator
from pathlib import Path

from domino_lm.config.settings import ConfigError, RunConfig, refuse
from domino_lm.data.indices import DatasetError
from domino_lm.data.splits import sources_of
from domino_lm.simulate.hardware import Hardware, find_hardware


def check_files(run: RunConfig) -> None:
    """Raise ConfigError naming everything on this node's disks that ``run`` needs and that is not there; `checks.check_run` came before."""
    refuse(list(file_faults(run)))


def file_faults(run: RunConfig) -> Iterator[str]:
    """Files that are missing and folders that cannot be, one line each."""
    try:
        sources = sources_of(run.data)
        blends = [blend for blend in (sources.blend, *sources.per_split.values()) if blend is not None]
    except DatasetError:  # a fault of the settings, which names no files
        blends = []
    for prefix in dict.fromkeys(prefix for blend in blends for prefix in blend.prefixes):
        missing = [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").is_file()]
        stem, end = os.path.splitext(prefix)
        way_out = f"give the prefix without its extension: {stem}" if end in (".bin", ".idx") else "domino-lm-preprocess makes them"
        if missing:
            yield f"the data {prefix} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not there; {way_out}."
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        path = getattr(run.tokenizer, name)
        if path is not None and not Path(path).exists():
            yield f"--{name.replace('_', '-')} {path}: no such file; --tokenizer-type {run.tokenizer.tokenizer_type} cannot do without it."
    for flag, folder in (("--save", run.checkpoint.save), ("--data-cache-path", run.data.data_cache_path)):
        if folder is not None:
            yield from _folder_fault(flag, Path(folder))
    yield from _calibration_faults(run.schedule.domino_calibration)


def known_machine(given: str | None) -> Hardware | None:
    """The machine that ``--domino-calibration`` names, or that its file holds; None if it is still to be measured. Raises ConfigError."""
    if given is None or (given.endswith(".json") and not Path(given).exists()):
        return None
    try:
        return find_hardware(given)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--hardware", "--domino-calibration")) from error


def _folder_fault(flag: str, folder: Path) -> Iterator[str]:
    """Why ``folder`` can neither be made nor written."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        yield f"{flag} {folder} cannot be a folder, since {existing} is a file; give another one."
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{flag} {folder} cannot be written: no permission in {existing}; give a folder that can."


def _calibration_faults(given: str | None) -> Iterator[str]:
    """A calibration that is damaged, or that cannot be written if it does not exist."""
    if given is None:
        return
    try:
        machine = known_machine(given)
    except ConfigError as error:
        yield str(error)
        return
    folder = Path(given).absolute().parent
    if machine is None:
        yield from _folder_fault("--domino-calibration", folder)
        if not folder.is_dir():
            yield f"--domino-calibration {given} would be written into a folder that is not there; make it first."
