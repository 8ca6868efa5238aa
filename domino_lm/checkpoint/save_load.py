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
from typing import Any, NamedTuple

import torch

from domino_lm.checkpoint.agreement import on_every_rank, on_first_rank
from domino_lm.checkpoint.blocks import Block
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
from domino_lm.checkpoint.writing import write_blocks
from domino_lm.parallel.mesh import ParallelMesh

SHARDED_BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_OUT_OF_SPACE = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


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
    allowed = may_save or (lambda: None)
    new = new_checkpoint(folder, iteration, stack, optimizer, state, mesh, run_id)
    with saving_in(new.final.parent) if mesh.world.rank == 0 else nullcontext():
        try:
            on_first_rank(mesh.world, lambda: begin(new.unfinished, allowed))
            written = write_blocks(new.unfinished, share_of(blocks_of_all(stack.parameters(), optimizer, mesh.tp), mesh), mesh.world)
            hashes = {name: one for each in mesh.world.all_gather_object(written) for name, one in each.items()}
            manifest = replace(new.manifest, files=hashes)
            on_first_rank(mesh.world, lambda: complete_and_publish(new.unfinished, new.final, manifest, new.record, allowed))
        except CheckpointError as error:
            if mesh.world.rank == 0:
                shutil.rmtree(new.unfinished, ignore_errors=True)
            raise save_failure(new.final, error) from error
        if retention is not None and retention.removes:
            on_every_rank(mesh.world, lambda: _read_back(new.final, written))
            on_first_rank(mesh.world, lambda: tidy(new.final.parent, iteration, retention, allowed))
    return new.final


class NewCheckpoint(NamedTuple):
    """A save that begins: what is known before its first tensor is written, on every rank."""

    unfinished: Path
    final: Path
    record: str
    """The content of ``state.json``."""

    manifest: Manifest
    """Without files."""


def new_checkpoint(
    folder: Path | str,
    iteration: int,
    stack: HasParameters,
    optimizer: HasMoments | None,
    state: dict[str, Any],
    mesh: ParallelMesh,
    run_id: str,
) -> NewCheckpoint:
    """Name what is to be saved; all ranks call this. A state that JSON cannot hold fails here, before any file exists."""
    steps = 0 if optimizer is None else optimizer.step_count
    record = native_record(iteration, vocab_size_of(stack), softmax_rows_of(stack), steps, state)
    final = iteration_folder(folder, iteration)
    unfinished = final.with_name(mesh.world.broadcast_object(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}"))
    layout = {"world": mesh.world.size, "tensor_parallel": mesh.tp.size, "data_parallel": mesh.dp.size}
    return NewCheckpoint(unfinished, final, record, Manifest(run_id=run_id, iteration=iteration, layout=layout, files={}))


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
        found = on_first_rank(mesh.world, lambda: locate(folder, iteration, damaged, verify))
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
    source = on_every_rank(mesh.world, lambda: open_checkpoint(path, stack, optimizer, mesh.tp, verify))
    on_every_rank(mesh.world, source.fill)
    return source


def share_of(blocks: Sequence[Block], mesh: ParallelMesh) -> list[Block]:
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


def begin(unfinished: Path, allowed: Callable[[], None]) -> None:
    """Make the folder that a save is written to, if it is ``allowed``."""
    allowed()
    unfinished.mkdir(parents=True)


def tidy(folder: Path, newest: int, retention: Retention, allowed: Callable[[], None]) -> None:
    """Remove what ``newest`` replaces, if it is ``allowed``."""
    allowed()
    remove_replaced(folder, newest, retention)


def complete_and_publish(unfinished: Path, final: Path, manifest: Manifest, record: str, allowed: Callable[[], None]) -> None:
    """Add everything that is no tensor, check that all files are there, and rename the folder, if it is still ``allowed``."""
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


def save_failure(final: Path, error: CheckpointError) -> CheckpointError:
    """What is said of a save that failed, with a way out; a TakenError speaks for itself."""
    if isinstance(error, TakenError):
        return error
    message = f"{final}: the checkpoint could not be saved: {error}. Earlier checkpoints and {TRACKER_FILE} are as they were."
    if not any(reason in message for reason in _OUT_OF_SPACE):
        return CheckpointError(message)
    leftovers = sorted(path.name for path in final.parent.glob("iter_*.tmp-*"))
    hint = f" (unfinished saves may go: {', '.join(leftovers)})" if leftovers else ""
    return CheckpointError(f"{message} Make room there{hint}, or give --save a folder on another disk.")
