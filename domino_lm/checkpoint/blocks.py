"""Sharded tensors on disk: a PyTorch distributed checkpoint with the keys and stacked shapes of Megatron's torch_dist format.

A key names one global tensor; the layers of a model share it, stacked along a leading dimension. Each rank writes and
reads blocks of it, so a checkpoint does not depend on the parallel sizes that it was saved with.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, _weights_only_unpickler
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.serialization import _load

from domino_lm.checkpoint.index import CheckpointError, DamagedError, first_line
from domino_lm.checkpoint.manifest import ReadableBytes, StoredFiles
from domino_lm.model.parameter import ParameterSpec
from domino_lm.parallel.collectives import Communicator

OPTIMIZER_PREFIX = "optimizer."
_FAULTS_SHOWN = 3


@dataclass(frozen=True)
class Block:
    """A rectangle of a global tensor, and the memory of this rank that holds it."""

    key: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Tensor  # a view with the rectangle's shape, stacked dimension included
    sharded: bool  # over TP: no other TP rank holds these values
    vocab_rows: int | None = None  # true rows if dimension 0 is the padded vocabulary
    owned: bool = False  # over DP: no other replica holds these values

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """What tells this block from all others."""
        return self.key, self.offsets


def blocks_of(spec: ParameterSpec, local: Tensor, tp: Communicator, prefix: str = "") -> Iterator[Block]:
    """Cut a rank's ``local`` tensor, of the parameter ``spec`` or of its shape, into blocks of the global tensor.

    One block, or one for each of ``spec.shard_blocks``. The key is the parameter's behind ``prefix``.
    """
    values = local.detach()
    if spec.shard_dim is None:
        yield _block(spec, prefix, [0] * len(spec.shape), values)
        return
    block_rows = spec.shape[spec.shard_dim] // spec.shard_blocks
    rows = block_rows // tp.size
    for block in range(spec.shard_blocks):
        offsets = [0] * len(spec.shape)
        offsets[spec.shard_dim] = block * block_rows + tp.rank * rows
        yield _block(spec, prefix, offsets, values.narrow(spec.shard_dim, block * rows, rows))


def _block(spec: ParameterSpec, prefix: str, offsets: list[int], values: Tensor) -> Block:
    global_shape = spec.shape
    if spec.layer is not None:
        global_shape = (spec.num_layers, *spec.shape)
        offsets, values = [spec.layer, *offsets], values.unsqueeze(0)
    return Block(prefix + spec.key, global_shape, tuple(offsets), values, spec.shard_dim is not None, spec.vocab_rows)


def blocks_of_range(
    spec: ParameterSpec, shape: Sequence[int], start: int, values: Tensor, tp: Communicator, prefix: str
) -> Iterator[Block]:
    """Blocks of ``values`` [n], the elements from ``start`` on of a flattened local tensor of ``shape``, that no other replica holds.

    Up to three rectangles, since the first and the last row may be partial, each again cut where ``spec.shard_blocks`` end.
    """
    assert len(shape) in (1, 2), f"a weight is a vector or a matrix, not {list(shape)}"
    stop, columns = start + values.numel(), shape[1] if len(shape) == 2 else 1
    edges = {start, stop, *(edge for edge in (-(-start // columns) * columns, stop // columns * columns) if start < edge < stop)}
    if spec.shard_blocks > 1:
        block = math.prod(shape) // spec.shard_blocks  # blocks lie along dimension 0
        edges |= {edge for edge in range(block, stop, block) if start < edge}
    for first, last in pairwise(sorted(edges)):
        yield _rectangle(spec, shape, first, values[first - start : last - start], tp, prefix)


def _rectangle(spec: ParameterSpec, shape: Sequence[int], first: int, values: Tensor, tp: Communicator, prefix: str) -> Block:
    """One block of ``values``, whole rows of a matrix or a piece of one row, from element ``first`` of a flattened local tensor on."""
    offsets, sizes = [first], [values.numel()]
    if len(shape) == 2:
        offsets = list(divmod(first, shape[1]))
        sizes = [values.numel() // shape[1], shape[1]] if values.numel() % shape[1] == 0 and offsets[1] == 0 else [1, values.numel()]
    dim = spec.shard_dim
    if dim is not None:
        rows = shape[dim] // spec.shard_blocks
        block, within = divmod(offsets[dim], rows)
        offsets[dim] = (block * tp.size + tp.rank) * rows + within
    return replace(_block(spec, prefix, offsets, values.view(sizes)), owned=True)


def place_of(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    """The `Block.place` that an entry of PyTorch's plans means."""
    return index.fqn, tuple(index.offset or ())


def plan_reads(folder: Path, metadata: Metadata, blocks: Sequence[Block], complete: bool = True) -> dict[str, list[ReadItem]]:
    """Work out which stored chunks fill ``blocks``, by key, without touching a value.

    Rows of a padded vocabulary may differ between ``blocks`` and the checkpoint, as long as it holds the true rows; all
    other shapes must be equal. If the blocks are a ``complete`` model, it may hold no other weights. Raises CheckpointError naming keys, what the run needs and what the checkpoint holds.
    """
    by_key: dict[str, list[Block]] = {}
    for block in blocks:
        by_key.setdefault(block.key, []).append(block)
    stored = metadata.state_dict_metadata
    faults, reads = [], {}
    for key, wanted in by_key.items():
        tensor = stored.get(key)
        found = tuple(tensor.size) if isinstance(tensor, TensorStorageMetadata) else None
        fault = shape_fault(wanted[0].global_shape, wanted[0].vocab_rows, found)
        if fault is None:
            assert isinstance(tensor, TensorStorageMetadata)
            reads[key] = create_read_items_for_chunk_list(key, tensor, list(_stored_parts(wanted, tensor)))
            fault = _hole(reads[key], _stored_parts(wanted, tensor))
        if fault is not None:
            faults.append((key, fault))
    for key in stored.keys() - by_key.keys() if complete else ():
        if isinstance(stored[key], TensorStorageMetadata) and not key.startswith(OPTIMIZER_PREFIX):
            faults.append((key, "the checkpoint holds it, the run has no such tensor"))
    if faults:
        raise CheckpointError(_misfit(folder, faults, stored))
    return reads


def shape_fault(needed: Sequence[int], vocab_rows: int | None, found: Sequence[int] | None) -> str | None:
    """Why a stored tensor of shape ``found`` (None: there is none) cannot fill one of shape ``needed``; None if it can.

    With ``vocab_rows`` dimension 0 is the padded vocabulary, of which the true rows have to be there.
    """
    if found is None:
        return f"the run needs {list(needed)}, the checkpoint has no such tensor"
    rows = "" if vocab_rows is None else f" with {vocab_rows} true vocabulary rows"
    if vocab_rows is None:
        fits = found == needed
    else:
        fits = len(found) == len(needed) and found[1:] == needed[1:] and found[0] >= vocab_rows
    return None if fits else f"the run needs {list(needed)}{rows}, the checkpoint holds {list(found)}"


def _stored_parts(blocks: Sequence[Block], tensor: TensorStorageMetadata) -> Iterator[ChunkStorageMetadata]:
    """The part of each block that the stored tensor reaches: fewer rows if its vocabulary was padded less."""
    for block in blocks:
        sizes = list(block.values.shape)
        if block.vocab_rows is not None:
            sizes[0] = min(sizes[0], tensor.size[0] - block.offsets[0])
            if sizes[0] <= 0:
                continue
        yield ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(sizes))


def _hole(items: Sequence[ReadItem], parts: Iterator[ChunkStorageMetadata]) -> str | None:
    """The parts that stored chunks do not fill exactly; None if they fill all."""
    filled: dict[tuple[int, ...], int] = {}
    for item in items:
        offsets = tuple(item.dest_index.offset or ())
        filled[offsets] = filled.get(offsets, 0) + math.prod(item.lengths)
    for part in parts:
        if filled.get(tuple(part.offsets), 0) != math.prod(part.sizes):
            return f"its stored chunks do not cover the block of size {list(part.sizes)} at {list(part.offsets)} exactly"
    return None


def misfit(where: Path, faults: Sequence[str]) -> str:
    """What is said of a checkpoint whose tensors are not those of the run's model; the first ``faults`` are shown."""
    more = f"; and {len(faults) - _FAULTS_SHOWN} more" if len(faults) > _FAULTS_SHOWN else ""
    return (
        f"{where}: the checkpoint does not fit this run's model, and nothing was loaded. {'; '.join(faults[:_FAULTS_SHOWN])}{more}. "
        "Give the model flags that the checkpoint was saved with (layers, sizes, heads, biases, tied or untied output, vocabulary)."
    )


def _misfit(folder: Path, faults: Sequence[tuple[str, str]], stored: Mapping[str, object]) -> str:
    if all(key.startswith(OPTIMIZER_PREFIX) for key, _ in faults):
        if not any(key.startswith(OPTIMIZER_PREFIX) for key in stored):
            return f"{folder}: the checkpoint holds no optimizer state; pass --no-load-optim to load the weights alone"
        by_parameter = any(key.startswith(f"{OPTIMIZER_PREFIX}state.") for key in stored)
        form = f"of other shapes than its weights ({faults[0][0]}: {faults[0][1]})" if by_parameter else "by gradient buckets"
        return (
            f"{folder}: the checkpoint holds optimizer state only {form}, which is not read; save it once more with Megatron's "
            "--dist-ckpt-optim-fully-reshardable, or pass --no-load-optim to load the weights alone"
        )
    return misfit(folder, [f"{key}: {fault}" for key, fault in faults])


def _tensor_in(archive: memoryview) -> Tensor:
    """The tensor in an archive of torch.save, read as data and not copied: what torch.load does with ``mmap``, of bytes in memory."""
    reader = torch._C.PyTorchFileReader(ReadableBytes(archive))  # type: ignore[call-overload]
    storage = torch.frombuffer(archive, dtype=torch.uint8).untyped_storage()
    return _load(reader, "cpu", _weights_only_unpickler, overall_storage=storage, encoding="utf-8")


@torch.no_grad()
def read_blocks(files: StoredFiles, metadata: Metadata, blocks: Sequence[Block], reads: Mapping[str, Sequence[ReadItem]]) -> None:
    """Fill ``blocks`` from ``files`` as `plan_reads` planned. No collective; tensors are read as data, never as code.

    Vocabulary rows that the checkpoint does not hold keep their values in weights, and are zero in optimizer moments.
    Raises DamagedError naming key and file if data cannot be read or is not what was written; blocks are half filled then.
    """
    values = {block.place: block.values for block in blocks}
    for block in blocks:
        if block.vocab_rows is not None and block.key.startswith(OPTIMIZER_PREFIX):
            block.values.zero_()
    places = [(metadata.storage_data[item.storage_index], item) for items in reads.values() for item in items]
    for place, item in sorted(places, key=lambda pair: (pair[0].relative_path, pair[0].offset)):  # each part of a file once
        try:
            stored = _tensor_in(files.part(place.relative_path, place.offset, place.length))
            target = narrow_tensor_by_index(values[place_of(item.dest_index)], item.dest_offsets, item.lengths)
            source = narrow_tensor_by_index(stored, item.storage_offsets, item.lengths)
            if source.shape != target.shape:
                raise ValueError(f"a tensor of size {list(stored.shape)}")
            target.copy_(source)
        except Exception as error:
            # Damaged bytes raise different errors in different layers.
            reason = first_line(error)
            raise DamagedError(f"{files.folder}: {item.dest_index.fqn} cannot be read from {place.relative_path}: {reason}") from error
