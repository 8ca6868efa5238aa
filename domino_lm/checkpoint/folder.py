"""Which checkpoint a folder holds: its kind, the iteration to take, and whether all of it is there."""

import re
import warnings
from pathlib import Path
from typing import Literal

from domino_lm.checkpoint.index import METADATA_FILE, CheckpointError, missing_data, read_metadata

Kind = Literal["native", "megatron-legacy", "megatron-torch_dist", "hf"]

TRACKER_FILE = "latest_checkpointed_iteration.txt"
STATE_FILE = "state.json"
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
    if (path / STATE_FILE).is_file():
        return "native"
    if any(path.glob("mp_rank_*")):
        return "megatron-legacy"
    if (path / METADATA_FILE).is_file() or (path / BACKEND_FILE).is_file():
        return "native" if _is_marked_native(path) else "megatron-torch_dist"
    if (path / "config.json").is_file() and any(path.glob("*.safetensors*")):
        return "hf"
    return None


def find_checkpoint(folder: Path | str, iteration: int | None = None) -> Path | None:
    """The folder of the checkpoint to take: of ``iteration``, or the latest complete one; None if ``folder`` holds none.

    The latest is the tracker's, or with a warning the newest complete one; ``folder`` may be the checkpoint itself.
    Raises CheckpointError if checkpoints exist and not one of them is complete.
    """
    folder = Path(folder)
    if iteration is not None:
        return iteration_folder(folder, iteration)
    if not (folder / TRACKER_FILE).exists() and kind_of(folder) is not None:
        return folder
    tracked, complaint = _tracked(folder)
    if tracked is not None:
        fault = incomplete(tracked)
        if fault is None:
            return tracked
        complaint = f"{TRACKER_FILE} names {_spoken(tracked)}, but {fault}"
    iterations = _iterations(folder)
    for other in iterations:
        if incomplete(iteration_folder(folder, other)) is None:
            warnings.warn(f"{folder}: {complaint}. Taking iteration {other}, the newest complete one", stacklevel=2)
            return iteration_folder(folder, other)
    if tracked is None and complaint == _NO_TRACKER and not iterations:
        return None
    raise CheckpointError(f"{folder}: {complaint}, and no other checkpoint there is complete. Load from another folder, or start anew")


def incomplete(path: Path) -> str | None:
    """Why the checkpoint in ``path`` cannot be loaded; None if all of its files are there."""
    if not path.is_dir():
        return f"the folder {path.name} does not exist"
    kind = kind_of(path)
    if kind is None:
        return f"{path.name} is not complete: neither {STATE_FILE} nor {METADATA_FILE} nor mp_rank_00/{LEGACY_FILE} is there"
    if kind == "hf":
        return None
    faults = _legacy_faults(path) if kind == "megatron-legacy" else _distributed_faults(path, kind)
    return f"{path.name} is not complete: {'; '.join(faults)}" if faults else None


def _distributed_faults(path: Path, kind: Kind) -> list[str]:
    try:
        faults = missing_data(path, read_metadata(path))
    except CheckpointError as error:
        return [str(error)]
    if kind == "native" and not (path / STATE_FILE).is_file():
        faults.append(f"{STATE_FILE}: missing")
    return faults


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
        return NATIVE_MARK in (path / "common.pt").read_bytes()[:4096]
    except OSError:
        return False


def _spoken(path: Path) -> str:
    return _RELEASE if path.name == _RELEASE else f"iteration {int(path.name.removeprefix('iter_'))}"


def _tracked(folder: Path) -> tuple[Path | None, str]:
    """The folder that the tracker names, or None and why it names none."""
    try:
        text = (folder / TRACKER_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None, _NO_TRACKER
    except OSError as error:
        return None, f"{TRACKER_FILE} cannot be read ({error.strerror})"
    if text == _RELEASE:
        return folder / _RELEASE, ""
    if not re.fullmatch(r"[0-9]+", text):
        return None, f"{TRACKER_FILE} holds {text[:40]!r}, not the number of an iteration"
    return iteration_folder(folder, int(text)), ""


def _iterations(folder: Path) -> list[int]:
    """Iterations that have a folder, complete or not, newest first; unfinished saves do not count."""
    matches = [re.fullmatch(r"iter_([0-9]{7,})", entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]) for match in matches if match), reverse=True)
