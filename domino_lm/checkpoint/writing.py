"""Writing sharded tensors: all ranks plan together which blocks each writes, and then each writes its files alone.

::

    __<rank>_<number>.distcp    archives of torch.save, one for each block, end to end; one file for each writer thread
    .metadata                   PyTorch's index of them all, which rank 0 writes last
"""

import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.serialization import get_crc32_options, set_crc32_options

from domino_lm.checkpoint.agreement import on_every_rank, on_first_rank
from domino_lm.checkpoint.blocks import Block
from domino_lm.checkpoint.index import METADATA_FILE
from domino_lm.checkpoint.manifest import FileHashes, HashedWriter, write_hashed
from domino_lm.parallel.collectives import Communicator

_MOST_THREADS = 4
_BYTES_PER_THREAD = 1 << 26
"""Less than this is written by one thread, into one file."""

Content = Tensor | bytes


@dataclass(frozen=True)
class WritePlan:
    """What the ranks write of a checkpoint: the same at every save of a run."""

    rank: int
    sizes: tuple[int, ...]
    """Bytes of each block or object that this rank writes, in the order of the plan."""

    metadata: Metadata | None = None
    """PyTorch's index, without the places of its parts; on rank 0 alone."""

    parts: tuple[tuple[MetadataIndex, ...], ...] = ()
    """What every rank writes, in its order; on rank 0 alone."""


@dataclass(frozen=True)
class Written:
    """The files that a rank wrote, synced, and where each part of its plan lies: file, first byte, bytes."""

    files: dict[str, FileHashes]
    places: tuple[tuple[str, int, int], ...]

    def content(self) -> bytes:
        """As JSON, for another process to read."""
        return json.dumps([{name: [one.bytes, one.blocks] for name, one in self.files.items()}, self.places]).encode()

    @classmethod
    def read(cls, content: bytes) -> Self:
        """What `content` gave."""
        files, places = json.loads(content)
        hashes = {name: FileHashes(size, tuple(blocks)) for name, (size, blocks) in files.items()}
        return cls(hashes, tuple((name, begin, size) for name, begin, size in places))


def write_blocks(
    folder: Path,
    blocks: Sequence[Block],
    world: Communicator,
    objects: Mapping[str, bytes] | None = None,
    resolve: Callable[[Block], Tensor] | None = None,
) -> dict[str, FileHashes]:
    """Write every rank's ``blocks`` into ``folder``, synced; all ranks call this, each with blocks that no other writes.

    Returns the hashes of the files that this rank wrote.

    ``objects`` are bytes under keys of their own. ``resolve`` gives each block's values when its turn comes, so that they
    need not be in memory together; planning takes shapes and types from the block. Raises CheckpointError on all ranks
    if any of them fails.
    """
    objects = objects or {}
    plan = plan_writes(blocks, world, objects)
    contents: list[Callable[[], Content]] = [partial(resolve, block) if resolve else block.values.detach for block in blocks]
    contents += [partial(bytes, content) for content in objects.values()]
    written = on_every_rank(world, lambda: write_files(folder, plan, contents, threads=1 if resolve else _MOST_THREADS))
    of_all = world.gather_object(written)
    index = on_first_rank(world, lambda: write_index(folder, plan, of_all or []))
    return written.files | ({METADATA_FILE: index} if world.rank == 0 else {})


def plan_writes(blocks: Sequence[Block], world: Communicator, objects: Mapping[str, bytes] | None = None) -> WritePlan:
    """Plan one part for each of this rank's blocks, then objects; all ranks call this.

    Raises CheckpointError on all ranks unless the blocks of all of them tile every global tensor.
    """
    objects = objects or {}
    items = [*map(_write_item, blocks), *(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in objects)]
    plans = world.gather_object(SavePlan(items))
    found: list[tuple[list[SavePlan], Metadata]] = []
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    on_first_rank(world, lambda: found.append(planner.create_global_plan(plans or [])))
    mine = WritePlan(world.rank, (*(block.values.nbytes for block in blocks), *map(len, objects.values())))
    for of_all, metadata in found:
        return replace(mine, metadata=metadata, parts=tuple(tuple(item.index for item in plan.items) for plan in of_all))
    return mine


def _write_item(block: Block) -> WriteItem:
    offsets = torch.Size(block.offsets)
    return WriteItem(
        index=MetadataIndex(block.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, block.values.shape),
            properties=TensorProperties(dtype=block.values.dtype),
            size=torch.Size(block.global_shape),
        ),
    )


def write_files(folder: Path, plan: WritePlan, contents: Sequence[Callable[[], Content]], threads: int = _MOST_THREADS) -> Written:
    """Write what ``plan`` says of this rank into ``folder``, and return once it is on disk. No collective.

    ``contents`` give each part when its turn comes, tensors on any device; with several ``threads`` some at a time. Raises
    OSError naming the file; what other threads had begun is whole or failed then.
    """
    shares = _shares(plan.sizes, min(threads, sum(plan.sizes) // _BYTES_PER_THREAD + 1))
    names = [f"__{plan.rank}_{number}.distcp" for number in range(len(shares))]
    with ThreadPoolExecutor(max(len(shares), 1)) as pool:
        written = list(pool.map(lambda name, share: _write_file(folder / name, [contents[n] for n in share]), names, shares))
    places = {number: place for share, (_, at) in zip(shares, written, strict=True) for number, place in zip(share, at, strict=True)}
    files = {name: hashes for name, (hashes, _) in zip(names, written, strict=True)}
    return Written(files, tuple(places[number] for number in range(len(contents))))


def _shares(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The numbers of ``sizes`` in up to ``count`` shares of about as many bytes, each in rising order; none is empty."""
    shares: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]) if count > 1 else range(len(sizes)):
        least = filled.index(min(filled))
        shares[least].append(number)
        filled[least] += sizes[number]
    return [sorted(share) for share in shares if share]


@contextmanager
def _without_crc() -> Iterator[None]:
    """torch.save without its own check sums on this thread: they cost as much as all the rest, and the manifest has better ones."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


def _write_file(path: Path, contents: Sequence[Callable[[], Content]]) -> tuple[FileHashes, list[tuple[str, int, int]]]:
    """One file, end to end and synced: its hashes, and the place of each content."""
    places = []
    try:
        with _without_crc(), HashedWriter(path) as file:
            for content in contents:
                begin = file.tell()
                _write_content(file, content())
                places.append((path.name, begin, file.tell() - begin))
            os.fsync(file.fileno())
            return file.hashes(), places
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write_content(file: HashedWriter, content: Content) -> None:
    if isinstance(content, bytes):
        file.write(content)
        return
    tensor = content.detach().cpu()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()  # torch.save writes all of a storage
    try:
        torch.save(tensor, file)
    except RuntimeError as error:
        # torch.save buries the reason, a full disk say, under a failed check of its own.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def write_index(folder: Path, plan: WritePlan, written: Sequence[Written]) -> FileHashes:
    """Write ``.metadata``, synced, from what every rank has ``written``; ``plan`` is rank 0's."""
    assert plan.metadata is not None, "rank 0 has the metadata"
    places = {
        part: _StorageInfo(*place)
        for parts, one in zip(plan.parts, written, strict=True)
        for part, place in zip(parts, one.places, strict=True)
    }
    metadata = replace(plan.metadata, storage_data=places, storage_meta=None, version=CURRENT_DCP_VERSION)
    return write_hashed(folder / METADATA_FILE, pickle.dumps(metadata))
