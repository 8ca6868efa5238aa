"""Saving and resuming: one folder per iteration, complete or absent, and a file that names the latest.

::

    save/latest_checkpointed_iteration.txt    "20"
    save/iter_0000020/
        .metadata, __<rank>_0.distcp          tensors, as a PyTorch distributed checkpoint with Megatron's keys
        metadata.json, common.pt              what Megatron looks for to recognise the format; never read here
        state.json                            everything that is no tensor
    save/iter_0000020.tmp-<id>/               a save under way, or one that was interrupted; never loaded
"""

import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from domino_lm.checkpoint.blocks import Block, write_blocks
from domino_lm.checkpoint.folder import BACKEND_FILE, NATIVE_MARK, STATE_FILE, TRACKER_FILE, find_checkpoint, iteration_folder
from domino_lm.checkpoint.index import CheckpointError, missing_data, read_metadata
from domino_lm.checkpoint.megatron_distributed import COMMON_FILE
from domino_lm.checkpoint.megatron_state import CHECKPOINT_VERSION
from domino_lm.checkpoint.publish import publish, write_synced
from domino_lm.checkpoint.source import (
    FORMAT_VERSION,
    HasMoments,
    HasParameters,
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
    folder: Path | str, iteration: int, stack: HasParameters, optimizer: HasMoments | None, state: dict[str, Any], mesh: ParallelMesh
) -> Path:
    """Save weights, optimizer (unless None) and ``state`` (anything JSON holds) as ``iteration``, and return its folder.

    All ranks call this; each replica writes its share. The checkpoint appears under its name only once it is complete and
    on disk, and the tracker moves last. If any rank fails, all raise CheckpointError, and earlier checkpoints and the
    tracker stay as they were.
    """
    steps = 0 if optimizer is None else optimizer.step_count
    # On every rank, so that a state that JSON cannot hold fails before any file exists.
    text = native_record(iteration, vocab_size_of(stack), softmax_rows_of(stack), steps, state)
    final = iteration_folder(folder, iteration)
    unfinished = final.with_name(mesh.world.broadcast_object(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}"))
    try:
        _on_first_rank(mesh.world, lambda: unfinished.mkdir(parents=True))
        write_blocks(unfinished, _share(blocks_of_all(stack.parameters(), optimizer, mesh.tp), mesh), mesh.world)
        _on_first_rank(mesh.world, lambda: _complete_and_publish(unfinished, final, iteration, text))
    except CheckpointError as error:
        if mesh.world.rank == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(_save_failure(final, error)) from error
    return final


def load_checkpoint(
    folder: Path | str, stack: HasParameters, optimizer: HasMoments | None, mesh: ParallelMesh, iteration: int | None = None
) -> dict[str, Any] | None:
    """Fill weights and, if given, the optimizer from ``folder``, and return the saved state with its ``iteration``.

    Takes ``iteration``, or the latest complete one; returns None if ``folder`` holds no checkpoint at all. Reads what this
    program saved and Megatron's legacy and torch_dist formats. Parallel sizes and the padding of the vocabulary may differ
    from the saved ones; the vocabulary rows that took part in the checkpoint's softmax, and no others, keep doing so. All
    ranks call this; every rank has checked what it will read before any value changes. Raises CheckpointError on all ranks
    if any of them cannot load.
    """
    path = _on_first_rank(mesh.world, lambda: find_checkpoint(folder, iteration))
    if path is None:
        return None
    source = _on_every_rank(mesh.world, lambda: open_checkpoint(path, stack, optimizer, mesh.tp))
    _on_every_rank(mesh.world, source.fill)
    if optimizer is not None:
        optimizer.write_parameters()
        optimizer.step_count = source.record["optimizer_steps"]
    set_softmax_rows(stack, source.record["softmax_rows"], mesh.tp.rank)
    return {**source.record["state"], "iteration": source.record["iteration"]}


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


def _complete_and_publish(unfinished: Path, final: Path, iteration: int, record: str) -> None:
    """Add everything that is no tensor, check that all files are there, and rename the folder."""
    write_native_files(unfinished, iteration, record)
    faults = missing_data(unfinished, read_metadata(unfinished))
    if faults:
        raise CheckpointError(
            f"rank 0 does not see what other ranks wrote ({'; '.join(faults)}); the folder must be on storage that all nodes share"
        )
    publish(unfinished, final, str(iteration))


def native_record(iteration: int, vocab_size: int | None, softmax_rows: int | None, optimizer_steps: int, state: Any) -> str:
    """The content of ``state.json``: what `read_native_record` reads."""
    values = {"iteration": iteration, "vocab_size": vocab_size, "softmax_rows": softmax_rows, "optimizer_steps": optimizer_steps}
    return json.dumps({"format_version": FORMAT_VERSION, **values, "state": state}, indent=1)


def write_native_files(folder: Path, iteration: int, record: str) -> None:
    """Write what stands beside the tensors of a native checkpoint, synced.

    Without ``common.pt`` Megatron's core does not read the tensors; a key in it marks it as of a native checkpoint.
    """
    common = BytesIO()
    torch.save({"iteration": iteration, "checkpoint_version": CHECKPOINT_VERSION, NATIVE_MARK.decode(): STATE_FILE}, common)
    write_synced(folder / BACKEND_FILE, json.dumps(SHARDED_BACKEND).encode())
    write_synced(folder / COMMON_FILE, common.getvalue())
    write_synced(folder / STATE_FILE, record.encode())


def _save_failure(final: Path, error: CheckpointError) -> str:
    message = f"{final}: the checkpoint could not be saved: {error}. Earlier checkpoints and {TRACKER_FILE} are as they were."
    if not any(reason in message for reason in _OUT_OF_SPACE):
        return message
    leftovers = sorted(path.name for path in final.parent.glob("iter_*.tmp-*"))
    hint = f" (unfinished saves may go: {', '.join(leftovers)})" if leftovers else ""
    return f"{message} Make room there{hint}, or give --save a folder on another disk."


def _attempt(action: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """The result of ``action``, or its error, which the other ranks must learn before any rank raises."""
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
    """Run ``action`` everywhere; if it failed on any rank, every rank raises the first failure as CheckpointError."""
    result, failure = _attempt(action)
    for rank, other in enumerate(world.all_gather_object(failure)):
        if other is not None:
            raise CheckpointError(other if world.size == 1 else f"{other} (rank {rank})")
    return cast(Result, result)
