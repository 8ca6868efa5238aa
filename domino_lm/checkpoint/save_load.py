"""Saving and resuming: one folder per iteration, complete or absent, and a file that names the latest.

::

    save/latest_checkpointed_iteration.txt    "20"
    save/iter_0000020/
        .metadata, __<rank>_0.distcp          tensors, as a PyTorch distributed checkpoint with Megatron's keys
        metadata.json, common.pt              what Megatron looks for to recognise the format; never read here
        state.json                            everything that is no tensor
        domino_manifest.json                  size and hashes of all these files
    save/iter_0000020.tmp-<id>/               a save under way, or one that was interrupted; never loaded
"""

import errno
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from domino_lm.checkpoint.blocks import Block, write_blocks
from domino_lm.checkpoint.folder import BACKEND_FILE, NATIVE_MARK, TRACKER_FILE, iteration_folder, locate
from domino_lm.checkpoint.index import CheckpointError, DamagedError
from domino_lm.checkpoint.manifest import MANIFEST_FILE, Manifest, StoredFiles, write_hashed
from domino_lm.checkpoint.megatron_distributed import COMMON_FILE
from domino_lm.checkpoint.megatron_state import CHECKPOINT_VERSION
from domino_lm.checkpoint.owner import TakenError
from domino_lm.checkpoint.publish import publish, write_synced
from domino_lm.checkpoint.record import STATE_FILE, native_record
from domino_lm.checkpoint.retention import Retention, remove_replaced, saving_in
from domino_lm.checkpoint.source import (
    HasMoments,
    HasParameters,
    Source,
    blocks_of_all,
    open_checkpoint,
    set_softmax_rows,
    softmax_rows_of,
    vocab_size_of,
)
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh

SHARDED_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_OUT_OF_SPACE = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))

Result = TypeVar("Result")


def save_checkpoint(
    folder: Path | str,
    iteration: int,
    stack: HasParameters,
    optimizer: HasMoments | None,
    state: dict[str, Any],
    mesh: ParallelMesh,
    run_id: str = "",
    retention: Retention | None = None,
    may_save: Callable[[], None] | None = None,
) -> Path:
    """Save weights, optimizer (unless None) and ``state`` (anything JSON holds) as ``iteration``, and return its folder.

    ``run_id`` says in the manifest who saved it; older ones that ``retention`` does not keep are removed once it has been
    read back. Rank 0 calls ``may_save`` before anything in ``folder`` changes; it raises TakenError if nothing may. All ranks call
    this; each replica writes its share. The checkpoint appears under its name only once it is complete and on disk, and the
    tracker moves last. If any rank fails, all raise CheckpointError, and earlier checkpoints and the tracker stay as they were.
    """
    steps = 0 if optimizer is None else optimizer.step_count
    # On every rank, so that a state that JSON cannot hold fails before any file exists.
    text = native_record(iteration, vocab_size_of(stack), softmax_rows_of(stack), steps, state)
    final = iteration_folder(folder, iteration)
    unfinished = final.with_name(mesh.world.broadcast_object(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}"))
    allowed = may_save or (lambda: None)
    layout = {"world": mesh.world.size, "tensor_parallel": mesh.tp.size, "data_parallel": mesh.dp.size}
    with saving_in(final.parent) if mesh.world.rank == 0 else nullcontext():
        try:
            _on_first_rank(mesh.world, lambda: _begin(unfinished, allowed))
            written = write_blocks(unfinished, _share(blocks_of_all(stack.parameters(), optimizer, mesh.tp), mesh), mesh.world)
            hashes = {name: one for each in mesh.world.all_gather_object(written) for name, one in each.items()}
            manifest = Manifest(run_id=run_id, iteration=iteration, layout=layout, files=hashes)
            _on_first_rank(mesh.world, lambda: _complete_and_publish(unfinished, final, manifest, text, allowed))
        except CheckpointError as error:
            if mesh.world.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            if isinstance(error, TakenError):
                raise
            raise CheckpointError(_save_failure(final, error)) from error
        if retention is not None and (retention.keep_last or retention.retain_interval):
            _on_every_rank(mesh.world, lambda: _read_back(final, written))
            _on_first_rank(mesh.world, lambda: _tidy(final.parent, iteration, retention, allowed))
    return final


def load_checkpoint(
    folder: Path | str,
    stack: HasParameters,
    optimizer: HasMoments | None,
    mesh: ParallelMesh,
    iteration: int | None = None,
    verify: bool = True,
) -> dict[str, Any] | None:
    """Fill weights and, if given, the optimizer from ``folder``, and return the saved state with its ``iteration``.

    Takes ``iteration``, or the latest whole one, with one warning if that is not the latest; returns None if ``folder``
    holds no checkpoint at all. Reads what this program saved and Megatron's legacy and torch_dist formats. Parallel sizes and
    the padding of the vocabulary may differ from the saved ones; the vocabulary rows that took part in the checkpoint's
    softmax, and no others, keep doing so. With ``verify`` every byte is compared with the manifest on its way; a checkpoint
    without one loads with a warning. All ranks call this; every rank has checked that the checkpoint fits before any value
    changes. Raises CheckpointError on all ranks if any of them cannot load; values may be of a damaged checkpoint then.
    """
    damaged: dict[Path, str] = {}
    while True:
        found = _on_first_rank(mesh.world, lambda: locate(folder, iteration, damaged, verify))
        if found is None:
            return None
        try:
            source = _fill(found.path, stack, optimizer, mesh, verify)
            break
        except DamagedError as error:
            if iteration is not None or found.path in damaged or found.path == Path(folder):
                raise
            damaged[found.path] = str(error)
    if found.instead_of:
        warnings.warn(found.instead_of, stacklevel=2)
    if verify and not source.verified:
        warnings.warn(
            f"{found.path} has no manifest, as older and other programs write it: damage inside its tensors cannot be found", stacklevel=2
        )
    if optimizer is not None:
        optimizer.write_parameters()
        optimizer.step_count = source.record["optimizer_steps"]
    set_softmax_rows(stack, source.record["softmax_rows"], mesh.tp.rank)
    return {**source.record["state"], "iteration": source.record["iteration"]}


def _fill(path: Path, stack: HasParameters, optimizer: HasMoments | None, mesh: ParallelMesh, verify: bool) -> Source:
    """Open the checkpoint in ``path`` on every rank, and read it once all ranks know that it fits."""
    source = _on_every_rank(mesh.world, lambda: open_checkpoint(path, stack, optimizer, mesh.tp, verify))
    _on_every_rank(mesh.world, source.fill)
    return source


def _share(blocks: Sequence[Block], mesh: ParallelMesh) -> list[Block]:
    """What this rank writes: all that no other replica holds, and an even share of the bytes that replicas hold alike.

    Only TP rank 0 writes what every TP rank holds whole.
    """
    mine, written = [], [0] * mesh.dp.size
    for block in blocks:
        if not block.sharded and mesh.tp.rank != 0:
            continue
        if block.owned:
            mine.append(block)
        else:
            replica = written.index(min(written))
            written[replica] += block.values.nbytes
            if replica == mesh.dp.rank:
                mine.append(block)
    return mine


def _begin(unfinished: Path, allowed: Callable[[], None]) -> None:
    allowed()
    unfinished.mkdir(parents=True)


def _tidy(folder: Path, newest: int, retention: Retention, allowed: Callable[[], None]) -> None:
    allowed()
    remove_replaced(folder, newest, retention)


def _complete_and_publish(unfinished: Path, final: Path, manifest: Manifest, record: str, allowed: Callable[[], None]) -> None:
    """Add everything that is no tensor, check that all files are there, and rename the folder."""
    write_native_files(unfinished, record, manifest)
    faults = StoredFiles(unfinished, verify=False).faults()
    if faults:
        raise CheckpointError(
            f"rank 0 does not see what other ranks wrote ({'; '.join(faults)}); the folder must be on storage that all nodes share"
        )
    allowed()
    publish(unfinished, final, str(manifest.iteration))


def _read_back(path: Path, names: Iterable[str]) -> None:
    """Raise DamagedError if files that this rank wrote are not what was written."""
    files = StoredFiles(path)
    for name in names:
        files.check(name)


def write_native_files(folder: Path, record: str, manifest: Manifest) -> None:
    """Write what stands beside the tensors of a native checkpoint, synced; ``manifest`` knows the files of the tensors.

    Without ``common.pt`` Megatron's core does not read the tensors; a key in it marks it as of a native checkpoint.
    """
    common = BytesIO()
    torch.save({"iteration": manifest.iteration, "checkpoint_version": CHECKPOINT_VERSION, NATIVE_MARK.decode(): STATE_FILE}, common)
    contents = {BACKEND_FILE: json.dumps(SHARDED_BACKEND).encode(), COMMON_FILE: common.getvalue(), STATE_FILE: record.encode()}
    hashes = {name: write_hashed(folder / name, content) for name, content in contents.items()}
    write_synced(folder / MANIFEST_FILE, replace(manifest, files=manifest.files | hashes).content())


def _save_failure(final: Path, error: CheckpointError) -> str:
    message = f"{final}: the checkpoint could not be saved: {error}. Earlier checkpoints and {TRACKER_FILE} are as they were."
    if not any(reason in message for reason in _OUT_OF_SPACE):
        return message
    leftovers = sorted(path.name for path in final.parent.glob("iter_*.tmp-*"))
    hint = f" (unfinished saves may go: {', '.join(leftovers)})" if leftovers else ""
    return f"{message} Make room there{hint}, or give --save a folder on another disk."


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, CheckpointError | None]:
    """The result of ``action``, or its error, which the other ranks must learn before any rank raises."""
    try:
        return action(), None
    except CheckpointError as error:
        return None, type(error)(str(error))
    except OSError as error:
        return None, CheckpointError(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        return None, CheckpointError(f"{type(error).__name__}: {error}")


def _on_first_rank(world: Communicator, action: Callable[[], Result]) -> Result:
    """Run ``action`` on rank 0; every rank gets its result, or raises its failure, a CheckpointError."""
    result, failure = world.broadcast_object(_attempt(action) if world.rank == 0 else None)
    if failure is not None:
        raise failure
    return cast(Result, result)


def _on_every_rank(world: Communicator, action: Callable[[], Result]) -> Result:
    """Run ``action`` everywhere; if it failed on any rank, every rank raises the first failure, a CheckpointError.

    One that no other checkpoint mends comes before damage.
    """
    result, failure = _attempt(action)
    failures = [(rank, other) for rank, other in enumerate(world.all_gather_object(failure)) if other is not None]
    for rank, other in sorted(failures, key=lambda failed: isinstance(failed[1], DamagedError)):
        raise type(other)(str(other) if world.size == 1 else f"{other} (rank {rank})")
    return cast(Result, result)
