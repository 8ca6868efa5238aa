"""Which checkpoint a folder holds: its kind, the iteration to take, and whether all of it is there."""

import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from domino_lm.checkpoint.index import METADATA_FILE, CheckpointError, DamagedError, missing_data, open_regular, read_metadata
from domino_lm.checkpoint.manifest import MANIFEST_FILE, StoredFiles, iteration_named
from domino_lm.checkpoint.record import STATE_FILE, read_native_record

Kind = Literal["native", "megatron-legacy", "megatron-torch_dist", "hf"]

TRACKER_FILE = "latest_checkpointed_iteration.txt"
BACKEND_FILE = "metadata.json"
LEGACY_FILE = "model_optim_rng.pt"
NATIVE_MARK = b"domino_lm_state"
"""A key in the ``common.pt`` of native checkpoints, which tells one that has lost ``state.json`` from Megatron's."""
_NO_TRACKER = f"there is no {TRACKER_FILE}"
_RELEASE = "release"


def iteration_folder(folder: Path | str, iteration: int) -> Path:
    """Where the checkpoint of ``iteration`` lies in ``folder``."""
    return Path(folder) / f"iter_{iteration:07d}"


def detect_kind(folder: Path | str) -> Kind:
    """The kind of the checkpoint in ``folder``, which holds a tracker and iterations, or is the checkpoint itself.

    Raises CheckpointError if there is none, naming what was looked for.
    """
    path = find_checkpoint(folder)
    kind = None if path is None else kind_of(path)
    if kind is None:
        raise CheckpointError(
            f"{folder}: no checkpoint found. Looked for {TRACKER_FILE} with its iter_ folder, {STATE_FILE} or {METADATA_FILE} (native and "
            f"torch_dist), mp_rank_00/{LEGACY_FILE} (Megatron's legacy format), and config.json with .safetensors files (Hugging Face)."
        )
    return kind


def kind_of(path: Path) -> Kind | None:
    """The kind of checkpoint that lies in ``path`` itself, complete or not; None if it holds none."""
    if not path.is_dir():
        return None
    if any(os.path.lexists(path / name) for name in (STATE_FILE, MANIFEST_FILE)):
        return "native"
    if any(path.glob("mp_rank_*")):
        return "megatron-legacy"
    if (path / METADATA_FILE).is_file() or (path / BACKEND_FILE).is_file():
        return "native" if _is_marked_native(path) else "megatron-torch_dist"
    if (path / "config.json").is_file() and any(path.glob("*.safetensors*")):
        return "hf"
    return None


class Found(NamedTuple):
    """A checkpoint to take."""

    path: Path
    instead_of: str = ""
    """Why it is not the one that the tracker names; empty if it is."""


def find_checkpoint(folder: Path | str, iteration: int | None = None) -> Path | None:
    """The folder that `locate` finds; a warning says if it is not the tracker's."""
    found = locate(folder, iteration)
    if found is not None and found.instead_of:
        warnings.warn(found.instead_of, stacklevel=2)
    return None if found is None else found.path


def locate(
    folder: Path | str, iteration: int | None = None, damaged: Mapping[Path, str] | None = None, verify: bool = True
) -> Found | None:
    """The checkpoint to take: of ``iteration``, or the latest whole one; None if ``folder`` holds none.

    The latest is the tracker's, or the newest whole one before it (of all, if the tracker names none); ``folder`` may be the
    checkpoint itself. Those in ``damaged`` do not count, for the reason that it gives; ``verify`` is that of `incomplete`.
    Raises DamagedError if checkpoints exist and not one of them is whole.
    """
    folder, damaged = Path(folder), damaged or {}
    if iteration is not None:
        return Found(iteration_folder(folder, iteration))
    if not os.path.lexists(folder / TRACKER_FILE) and kind_of(folder) is not None:
        return Found(folder)
    tracked, complaint = _tracked(folder)
    iterations = iterations_in(folder)
    if tracked is not None:
        fault = damaged.get(tracked) or incomplete(tracked, verify)
        if fault is None:
            return Found(tracked)
        complaint = f"{TRACKER_FILE} names {_spoken(tracked)}, but {fault}"
        if tracked.name != _RELEASE:
            iterations = [other for other in iterations if other < int(tracked.name.removeprefix("iter_"))]
    for other in iterations:
        path = iteration_folder(folder, other)
        fault = damaged.get(path) or incomplete(path, verify)
        if fault is None:
            return Found(path, f"{folder}: {complaint}. Taking iteration {other}, the newest whole one")
        complaint = f"{complaint}; {fault}"
    if tracked is None and complaint == _NO_TRACKER and not iterations:
        return None
    raise DamagedError(f"{folder}: {complaint}, and no other checkpoint there is whole. Load from another folder, or start anew")


def incomplete(path: Path, verify: bool = True) -> str | None:
    """Why the checkpoint in ``path`` cannot be loaded; None if all of its files are there, and what is not tensors is what was written.

    ``verify`` False compares sizes alone.
    """
    if not path.is_dir():
        return f"the folder {path.name} does not exist"
    kind = kind_of(path)
    if kind is None:
        return f"{path.name} is not complete: neither {STATE_FILE} nor {METADATA_FILE} nor mp_rank_00/{LEGACY_FILE} is there"
    if kind == "hf":
        return None
    faults = _legacy_faults(path) if kind == "megatron-legacy" else _distributed_faults(path, kind, verify)
    return f"{path.name} is not complete: {'; '.join(faults)}" if faults else None


def _distributed_faults(path: Path, kind: Kind, verify: bool) -> list[str]:
    """What a checkpoint of PyTorch's lacks, and what in a native one is not as its manifest says."""
    try:
        files = StoredFiles(path, verify)
        faults = files.faults()
        if kind == "native" and not (path / STATE_FILE).is_file():
            faults.append(f"{STATE_FILE}: missing")
        elif kind == "native" and not faults:
            files.check_others(than=(".distcp",))  # these are verified as they are read
            read_native_record(files)
        return list(dict.fromkeys([*faults, *missing_data(path, read_metadata(path, files.read))]))
    except DamagedError as error:
        return [str(error)]


def _legacy_faults(path: Path) -> list[str]:
    names = sorted(entry.name for entry in path.glob("mp_rank_*"))
    pipeline = [name for name in names if not re.fullmatch(r"mp_rank_[0-9]{2,}", name)]
    if pipeline:
        way_out = "save it with Megatron's --ckpt-format torch_dist, or at --pipeline-model-parallel-size 1"
        return [f"{pipeline[0]}: saved with pipeline parallelism (or experts), which is not read from this format; {way_out}"]
    expected = [f"mp_rank_{rank:02d}" for rank in range(len(names))]
    return [f"{name}/{LEGACY_FILE}: missing" for name in expected if not (path / name / LEGACY_FILE).is_file()]


def _is_marked_native(path: Path) -> bool:
    try:
        with open_regular(path / "common.pt") as file:
            return NATIVE_MARK in file.read(4096)
    except OSError:
        return False


def _spoken(path: Path) -> str:
    return _RELEASE if path.name == _RELEASE else f"iteration {int(path.name.removeprefix('iter_'))}"


def _tracked(folder: Path) -> tuple[Path | None, str]:
    """The folder that the tracker names, or None and why it names none."""
    try:
        with open_regular(folder / TRACKER_FILE) as file:
            text = file.read(1024).decode(errors="replace").strip()
    except FileNotFoundError:
        return None, _NO_TRACKER
    except OSError as error:
        return None, f"{TRACKER_FILE} cannot be read ({error.strerror})"
    if text == _RELEASE:
        return folder / _RELEASE, ""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        return None, f"{TRACKER_FILE} holds {text[:40]!r}, not the number of an iteration"
    return iteration_folder(folder, int(text)), ""


def iterations_in(folder: Path) -> list[int]:
    """Iterations that have a folder, complete or not, newest first; unfinished saves do not count."""
    named = map(iteration_named, folder.iterdir() if folder.is_dir() else ())
    return sorted((iteration for iteration in named if iteration is not None), reverse=True)
