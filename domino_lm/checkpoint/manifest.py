"""Sizes and hashes of a checkpoint's files: taken while they are written, compared while they are read.

::

    domino_manifest.json   {"hash", "run_id", "iteration", "layout", "block_bytes", "files": {NAME: {"bytes", "blocks": [xxh3 of each block]}}}

A block is hashed when a byte of it is wanted, so a rank verifies what it reads and nothing else. This finds faults of disks,
memory and copying; it is no protection from people who can write both file and manifest.
"""

import io
import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import xxhash

from domino_lm.checkpoint.index import DamagedError, first_line, open_regular

MANIFEST_FILE = "domino_manifest.json"
BLOCK_BYTES = 1 << 24
_PIECE_BYTES = 1 << 20  # hashed while they are still in the processor's cache
_KEPT_BLOCKS = 3  # a tensor's archive is read at both ends first


@dataclass(frozen=True)
class FileHashes:
    """What a file was when it was written."""

    bytes: int
    blocks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All files of a checkpoint but the manifest itself."""

    run_id: str
    iteration: int
    layout: dict[str, int]
    """Ranks that saved it: ``world``, ``tensor_parallel``, ``data_parallel``."""

    files: dict[str, FileHashes]
    block_bytes: int = field(default_factory=lambda: BLOCK_BYTES)

    def content(self) -> bytes:
        """The content of ``domino_manifest.json``."""
        values = asdict(self)
        return json.dumps({"hash": _hash_of(values), **values}, indent=0).encode()

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The manifest in ``folder``, or None if there is none. Raises DamagedError if it is not that of this checkpoint."""
        path = folder / MANIFEST_FILE
        if not os.path.lexists(path):
            return None
        try:
            with open_regular(path) as file:
                values = json.loads(file.read())
            if values.pop("hash") != _hash_of(values):
                raise ValueError("its own hash is another")
            if iteration_named(folder) not in (None, values["iteration"]):
                raise ValueError(f"it is that of iteration {values['iteration']}")
            return cls(
                **{**values, "files": {name: FileHashes(one["bytes"], tuple(one["blocks"])) for name, one in values["files"].items()}}
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{path}: not the manifest of this checkpoint, or damaged ({first_line(error)})") from error


def _hash_of(values: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values).encode())


def iteration_named(folder: Path) -> int | None:
    """The iteration in the name of a checkpoint's folder; None if it has another name."""
    match = re.fullmatch(r"iter_([0-9]{7,18})", folder.name)
    return int(match[1]) if match else None


class HashedWriter(io.BufferedWriter):
    """A new file that hashes what is written to it, front to back."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._size, self._blocks, self._hash = 0, list[str](), xxhash.xxh3_64()

    def write(self, data: Any, /) -> int:
        """Write and hash."""
        rest = memoryview(data).cast("B")
        while rest:
            piece = rest[: BLOCK_BYTES - self._size % BLOCK_BYTES]
            self._hash.update(piece)
            self._size, rest = self._size + len(piece), rest[len(piece) :]
            if self._size % BLOCK_BYTES == 0:
                self._blocks.append(self._hash.hexdigest())
                self._hash.reset()
        return super().write(data)

    def fileno(self) -> int:
        """Of the file, to which all is handed over first: who asks for it syncs."""
        self.flush()
        return super().fileno()

    def hashes(self) -> FileHashes:
        """Of all that was written."""
        return FileHashes(self._size, (*self._blocks, self._hash.hexdigest()) if self._size % BLOCK_BYTES else tuple(self._blocks))


def write_hashed(path: Path, content: bytes) -> FileHashes:
    """Write a file, and return its hashes once it is on disk."""
    with HashedWriter(path) as file:
        file.write(content)
        os.fsync(file.fileno())
        return file.hashes()


class StoredFiles:
    """The files of a checkpoint to read from; with a manifest, no byte is given out before its block is verified.

    ``verify`` False trusts all that has the right size.
    """

    def __init__(self, folder: Path, verify: bool = True) -> None:
        self.folder, self.manifest = folder, Manifest.read(folder)
        self.verify = verify and self.manifest is not None
        self.block_bytes = BLOCK_BYTES if self.manifest is None else self.manifest.block_bytes
        self.damage: DamagedError | None = None
        """What was found last; torch.load may bury it under an error of its own."""

        self._cache: OrderedDict[tuple[str, int], memoryview] = OrderedDict()

    def faults(self) -> list[str]:
        """One line for each file of the manifest that is absent, no plain file, or of another size."""
        found = []
        for name, hashes in self._files().items():
            try:
                with open_regular(self.folder / name) as file:
                    size = os.fstat(file.fileno()).st_size
                if size != hashes.bytes:
                    found.append(f"{name}: {size} bytes, the manifest says {hashes.bytes}")
            except OSError as error:
                found.append(f"{name}: {'missing' if isinstance(error, FileNotFoundError) else error.strerror}")
        return found

    def read(self, name: str) -> bytes:
        """A whole file. Raises DamagedError if it is not what the manifest says, OSError if it cannot be read."""
        with self.open(name) as file:
            return file.read()

    def check(self, name: str) -> None:
        """Read a whole file for its hashes alone. Raises as `read` does."""
        block = bytearray(self.block_bytes)
        with self.open(name) as file:
            while file.readinto(block):
                pass

    def open(self, name: str, offset: int = 0, length: int | None = None) -> "StoredFile":
        """The bytes of a file from ``offset`` on."""
        if self.verify and name not in self._files():
            raise DamagedError(f"{self.folder / name}: {MANIFEST_FILE} does not know this file")
        return StoredFile(self, open_regular(self.folder / name), name, offset, length)

    def block(self, file: io.FileIO, name: str, number: int) -> memoryview:
        """A verified block of a file."""
        if (name, number) not in self._cache:
            size = max(0, min(self.block_bytes, self._files()[name].bytes - number * self.block_bytes))
            if size == 0:
                return memoryview(b"")
            block = memoryview(bytearray(size))
            self.fill(file, name, number, block)
            self._cache[name, number] = block
            while len(self._cache) > _KEPT_BLOCKS:
                self._cache.popitem(last=False)
        self._cache.move_to_end((name, number))
        return self._cache[name, number]

    def fill(self, file: io.FileIO, name: str, number: int, target: memoryview) -> None:
        """Read a whole block into ``target`` and compare its hash. Raises DamagedError, naming file and bytes, if it differs."""
        digest, begin, done = xxhash.xxh3_64(), number * self.block_bytes, 0
        file.seek(begin)
        while done < len(target) and (count := file.readinto(target[done : done + _PIECE_BYTES])):
            digest.update(target[done : done + count])
            done += count
        if done < len(target) or digest.hexdigest() != self._files()[name].blocks[number]:
            self.damage = DamagedError(f"{name} is damaged: bytes {begin} to {begin + len(target)} are not those that were written")
            raise self.damage

    def _files(self) -> Mapping[str, FileHashes]:
        return {} if self.manifest is None else self.manifest.files


class StoredFile(io.RawIOBase):
    """A part of one file of `StoredFiles`, as torch.load reads it."""

    def __init__(self, files: StoredFiles, file: io.FileIO, name: str, offset: int, length: int | None) -> None:
        size = os.fstat(file.fileno()).st_size
        self._files, self._file, self._name, self._begin = files, file, name, offset
        self._length = size - offset if length is None else length
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Bytes from the part's begin."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """As of any file."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """As much as is left, whole blocks without a copy between. Raises DamagedError as `StoredFiles.fill` does."""
        wanted = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        done = 0
        while done < len(wanted):
            count = self._some(wanted[done:])
            if count == 0:
                break
            done += count
            self._at += count
        return done

    def _some(self, target: memoryview) -> int:
        at = self._begin + self._at
        if not self._files.verify:
            self._file.seek(at)
            return self._file.readinto(target) or 0
        number, inside = divmod(at, size := self._files.block_bytes)
        if inside == 0 and len(target) >= size:
            self._files.fill(self._file, self._name, number, target[:size])
            return size
        piece = self._files.block(self._file, self._name, number)[inside : inside + len(target)]
        target[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        """The file too."""
        self._file.close()
        super().close()
