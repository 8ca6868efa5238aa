"""Saving and resuming: one folder an iteration, complete or absent, and a file that names the latest.

::

    save/latest_checkpointed_iteration.txt    "20"
    save/iter_0000020/
        .metadata, __<rank>_0.distcp          tensors, as a PyTorch distributed checkpoint with Megatron's keys
        metadata.json                         what Megatron looks for to recognise the format
        state.json                            everything that is no tensor
    save/iter_0000020.tmp-<id>/               a save under way, or one that was interrupted; never loaded
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from domino_lm.parallel.collectives import Communicator
from domino_lm.training.sharded_tensors import OPTIMIZER_PREFIX, Block, blocks_of, plan_reads, read_blocks, write_blocks
from domino_lm.training.stored_metadata import CheckpointError, missing_data, read_metadata

if TYPE_CHECKING:
    from domino_lm.model.parameter import Parameter
    from domino_lm.parallel.mesh import ParallelMesh
    from domino_lm.training.optimizer import Optimizer

FORMAT_VERSION = 1
TRACKER_FILE = "latest_checkpointed_iteration.txt"
STATE_FILE = "state.json"
SHARDED_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_BACKEND_FILE = "metadata.json"
_OUT_OF_SPACE = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_NO_TRACKER = f"there is no {TRACKER_FILE}"

Result = TypeVar("Result")


class HasParameters(Protocol):
    """A model, as far as a checkpoint knows it."""

    def parameters(self) -> Sequence[Parameter]:
        """Every storage once, in the same order on every rank."""


def iteration_folder(folder: Path | str, iteration: int) -> Path:
    """Where the checkpoint of ``iteration`` lies in ``folder``."""
    return Path(folder) / f"iter_{iteration:07d}"


def save_checkpoint(
    folder: Path | str, iteration: int, stack: HasParameters, optimizer: Optimizer, state: dict[str, Any], mesh: ParallelMesh
) -> Path:
    """Save weights, optimizer and ``state`` (anything JSON holds) as ``iteration``, and return its folder.

    All ranks call this; each replica writes its share. The checkpoint appears under its name only once it is complete and
    on disk, and the tracker moves last. Where any rank fails, all raise CheckpointError, and earlier checkpoints and the
    tracker stay as they were.
    """
    record = {
        "format_version": FORMAT_VERSION,
        "iteration": iteration,
        "vocab_size": _vocab_size(stack),
        "optimizer_steps": optimizer.step_count,
        "state": state,
    }
    text = json.dumps(record, indent=1)  # on every rank, so that a state that JSON cannot hold fails before any file exists
    final = iteration_folder(folder, iteration)
    unfinished = final.with_name(mesh.world.broadcast_object(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}"))
    try:
        _on_first_rank(mesh.world, lambda: unfinished.mkdir(parents=True))
        write_blocks(unfinished, _share(_blocks(stack.parameters(), optimizer, mesh.tp), mesh), mesh.world)
        _on_first_rank(mesh.world, lambda: _publish(unfinished, final, text))
    except CheckpointError as error:
        if mesh.world.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(_save_failure(final, error)) from error
    return final


def load_checkpoint(
    folder: Path | str, stack: HasParameters, optimizer: Optimizer | None, mesh: ParallelMesh, iteration: int | None = None
) -> dict[str, Any] | None:
    """Fill weights and, where given, the optimizer from ``folder``, and return the saved state with its ``iteration``.

    Takes ``iteration``, or the latest complete one; returns None where ``folder`` holds no checkpoint at all. Parallel
    sizes and the padding of the vocabulary may differ from the saved ones. All ranks call this; every rank has checked
    what it will read before any value changes. Raises CheckpointError on all ranks where any of them cannot load.
    """
    if iteration is None:
        iteration = _on_first_rank(mesh.world, lambda: latest_iteration(folder))
        if iteration is None:
            return None
    path = iteration_folder(folder, iteration)
    blocks = _blocks(stack.parameters(), optimizer, mesh.tp)
    record, metadata, reads = _on_every_rank(mesh.world, lambda: _check(path, stack, blocks))
    _on_every_rank(mesh.world, lambda: read_blocks(path, metadata, blocks, reads))
    if optimizer is not None:
        optimizer.step_count = record["optimizer_steps"]
    return {**record["state"], "iteration": record["iteration"]}


def latest_iteration(folder: Path | str) -> int | None:
    """The iteration to resume from: the tracker's, or with a warning the newest complete one; None where there is none.

    Raises CheckpointError where checkpoints exist and not one of them is complete.
    """
    tracked, complaint = _tracked_iteration(Path(folder))
    if tracked is not None:
        fault = _incomplete(iteration_folder(folder, tracked))
        if fault is None:
            return tracked
        complaint = f"{TRACKER_FILE} names iteration {tracked}, but {fault}"
    for other in _iterations(Path(folder)):
        if _incomplete(iteration_folder(folder, other)) is None:
            warnings.warn(f"{folder}: {complaint}. Taking iteration {other}, the newest complete one", stacklevel=2)
            return other
    if tracked is None and complaint == _NO_TRACKER and not _iterations(Path(folder)):
        return None
    raise CheckpointError(f"{folder}: {complaint}, and no other checkpoint there is complete. Load from another folder, or start anew")


def _tracked_iteration(folder: Path) -> tuple[int | None, str]:
    """The number in the tracker, or None and why there is none."""
    try:
        text = (folder / TRACKER_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None, _NO_TRACKER
    except OSError as error:
        return None, f"{TRACKER_FILE} cannot be read ({error.strerror})"
    if not re.fullmatch(r"[0-9]+", text):
        return None, f"{TRACKER_FILE} holds {text[:40]!r}, not the number of an iteration"
    return int(text), ""


def _iterations(folder: Path) -> list[int]:
    """Iterations that have a folder, complete or not, newest first; unfinished saves do not count."""
    matches = [re.fullmatch(r"iter_([0-9]{7,})", entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def _incomplete(path: Path) -> str | None:
    """Why the checkpoint in ``path`` cannot be resumed from; None where all of its data is there."""
    if not path.is_dir():
        return f"the folder {path.name} does not exist"
    try:
        faults = missing_data(path, read_metadata(path))
    except CheckpointError as error:
        return str(error)
    if not (path / STATE_FILE).is_file():
        faults.append(f"{STATE_FILE}: missing (this program writes one; checkpoints of others must be converted)")
    return f"{path.name} is not complete: {'; '.join(faults)}" if faults else None


def _check(path: Path, stack: HasParameters, blocks: Sequence[Block]) -> tuple[dict[str, Any], Any, Any]:
    """The record, index and reads of the checkpoint in ``path``, once everything about them has proved to fit."""
    fault = _incomplete(path)
    if fault is not None:
        raise CheckpointError(f"{path.parent}: {fault}. Take another iteration")
    record = _read_record(path / STATE_FILE)
    metadata = read_metadata(path)
    reads = plan_reads(path, metadata, blocks)
    saved, current = record["vocab_size"], _vocab_size(stack)
    if saved != current:
        raise CheckpointError(
            f"{path}: the checkpoint was saved with a vocabulary of {saved} tokens, this run has {current}, and nothing was loaded. "
            "Give the tokenizer (or --vocab-size) that it was trained with."
        )
    return record, metadata, reads


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        version = record["format_version"]
        if version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: written in format version {version}, this program reads up to {FORMAT_VERSION}; "
                "use the version of the program that saved it, or a newer one"
            )
        missing = {"iteration", "vocab_size", "optimizer_steps", "state"} - record.keys()
        if missing:
            raise KeyError(", ".join(sorted(missing)))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not the state of a checkpoint, or damaged ({error}); take another checkpoint") from error
    return dict(record)


def _vocab_size(stack: HasParameters) -> int | None:
    """The true vocabulary of a model; None where no parameter has vocabulary rows."""
    return next((p.spec.vocab_rows for p in stack.parameters() if p.spec.vocab_rows is not None), None)


def _blocks(parameters: Sequence[Parameter], optimizer: Optimizer | None, tp: Communicator) -> list[Block]:
    """Everything tensor-like that this rank holds, in the same order on every rank."""
    blocks = [block for parameter in parameters for block in blocks_of(parameter.spec, parameter, tp)]
    if optimizer is None:
        return blocks
    for name, moments in (("exp_avg", optimizer.exp_avg), ("exp_avg_sq", optimizer.exp_avg_sq)):
        for parameter, moment in zip(optimizer.parameters, moments, strict=True):
            blocks.extend(blocks_of(parameter.spec, moment, tp, prefix=f"{OPTIMIZER_PREFIX}state.{name}."))
    return blocks


def _share(blocks: Sequence[Block], mesh: ParallelMesh) -> list[Block]:
    """What this rank writes: replicas share the bytes evenly, and only TP rank 0 writes what every TP rank holds whole."""
    mine, written = [], [0] * mesh.dp.size
    for block in blocks:
        if block.sharded or mesh.tp.rank == 0:
            replica = written.index(min(written))
            written[replica] += block.values.nbytes
            if replica == mesh.dp.rank:
                mine.append(block)
    return mine


def _publish(unfinished: Path, final: Path, record: str) -> None:
    """Complete the folder, give it its name, and only then let the tracker name it."""
    _write_synced(unfinished / _BACKEND_FILE, json.dumps(SHARDED_BACKEND))
    _write_synced(unfinished / STATE_FILE, record)
    faults = missing_data(unfinished, read_metadata(unfinished))
    if faults:
        raise CheckpointError(
            f"rank 0 does not see what other ranks wrote ({'; '.join(faults)}); the folder must be on storage that all nodes share"
        )
    _sync_folder(unfinished)
    tracker = final.with_name(TRACKER_FILE)
    new_tracker = tracker.with_name(f"{TRACKER_FILE}.{unfinished.name.rpartition('-')[2]}")
    try:
        _write_synced(new_tracker, str(int(final.name.removeprefix("iter_"))))
        _replace_folder(unfinished, final)
        os.replace(new_tracker, tracker)
    finally:
        new_tracker.unlink(missing_ok=True)
    _sync_folder(final.parent)


def _replace_folder(unfinished: Path, final: Path) -> None:
    """Rename ``unfinished`` to ``final``; a checkpoint of that name makes way, and comes back where the renaming fails."""
    if not final.exists():
        unfinished.rename(final)
        return
    old = unfinished.with_name(f"{unfinished.name}-old")
    final.rename(old)
    try:
        unfinished.rename(final)
    except OSError:
        old.rename(final)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Bring a folder's list of names to disk, where the file system can."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def _save_failure(final: Path, error: CheckpointError) -> str:
    message = f"{final}: the checkpoint could not be saved: {error}. Earlier checkpoints and {TRACKER_FILE} are as they were."
    if not any(reason in message for reason in _OUT_OF_SPACE):
        return message
    leftovers = sorted(path.name for path in final.parent.glob("iter_*.tmp-*"))
    hint = f" (unfinished saves may go: {', '.join(leftovers)})" if leftovers else ""
    return f"{message} Make room there{hint}, or give --save a folder on another disk."


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """The result of ``action``, or what went wrong: other ranks must hear of it before anyone raises."""
    try:
        return action(), None
    except CheckpointError as error:
        return None, str(error)
    except OSError as error:
        return None, f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _on_first_rank(world: Communicator, action: Callable[[], Result]) -> Result:
    """Run ``action`` on rank 0; every rank gets its result, or raises its failure as CheckpointError."""
    result, failure = world.broadcast_object(_attempt(action) if world.rank == 0 else None)
    if failure is not None:
        raise CheckpointError(failure)
    return cast(Result, result)


def _on_every_rank(world: Communicator, action: Callable[[], Result]) -> Result:
    """Run ``action`` everywhere; where it failed on any rank, every rank raises the first failure as CheckpointError."""
    result, failure = _attempt(action)
    for rank, other in enumerate(world.all_gather_object(failure)):
        if other is not None:
            raise CheckpointError(other if world.size == 1 else f"{other} (rank {rank})")
    return cast(Result, result)
