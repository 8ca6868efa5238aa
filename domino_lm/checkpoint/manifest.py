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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import xxhash

from domino_lm.checkpoint.index import DamagedError, first_line, open_regular
from domino_lm.config.foreign_text import parse_json

MANIFEST_FILE = "domino_manifest.json"
BLOCK_BYTES = 1 << 24
_PIECE_BYTES = 1 << 20  # hashed while they are still in the processor's cache
_WINDOW_BLOCKS = 6  # tensors seldom end where blocks do: the last block moves to the front when the window is full


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
                values = parse_json(file.read().decode())
            if values.pop("hash") != _hash_of(values):
                raise ValueError("its own hash is another")
            if iteration_named(folder) not in (None, values["iteration"]):
                raise ValueError(f"it is that of iteration {values['iteration']}")
            return cls(
                **{**values, "files": {name: FileHashes(one["bytes"], tuple(one["blocks"])) for name, one in values["files"].items()}}
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
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

    ``verify`` False trusts all that has the right size. ``manifest`` stands for the one in the folder.
    """

    def __init__(self, folder: Path, verify: bool = True, manifest: Manifest | None = None) -> None:
        self.folder, self.manifest = folder, manifest or Manifest.read(folder)
        self.verify = verify and self.manifest is not None
        self.block_bytes = BLOCK_BYTES if self.manifest is None else self.manifest.block_bytes
        self._window, self._name, self._first, self._count = memoryview(bytearray()), "", 0, 0  # whole blocks of one file, in their order

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
        with open_regular(self.folder / name) as file:
            size = os.fstat(file.fileno()).st_size
        return bytes(self.part(name, 0, size))

    def check(self, name: str) -> None:
        """Read a whole file for its hashes alone. Raises as `read` does."""
        for number in range(len(self._files()[name].blocks)):
            self.part(name, number * self.block_bytes, 1)

    def check_others(self, than: tuple[str, ...]) -> None:
        """`check` all files that do not end so, unless sizes alone count."""
        for name in self._files() if self.verify else ():
            if not name.endswith(than):
                self.check(name)

    def part(self, name: str, offset: int, length: int) -> memoryview:
        """Bytes of a file, valid until the next call; parts in their order are read once. Raises as `read` does."""
        first, stop = offset // self.block_bytes, -(-(offset + length) // self.block_bytes)
        if name != self._name or not self._first <= first < self._first + self._count:
            self._name, self._first, self._count = name, first, 0
        with open_regular(self.folder / name) as file:
            if os.fstat(file.fileno()).st_size < offset + length:
                raise DamagedError(f"{name} ends before byte {offset + length}")
            if (stop - self._first) * self.block_bytes > len(self._window):
                self._move_to(first, stop)
            while self._first + self._count < stop:
                self._fill(file, self._first + self._count)
                self._count += 1
        begin = offset - self._first * self.block_bytes
        return self._window[begin : begin + length]

    def _move_to(self, first: int, stop: int) -> None:
        """Let the window begin with block ``first`` and have room up to ``stop``; what it holds from there on stays."""
        kept = self._window[(first - self._first) * self.block_bytes : self._count * self.block_bytes]
        needed = max(stop - first, _WINDOW_BLOCKS if stop - first > 1 else 1) * self.block_bytes
        window = self._window if needed <= len(self._window) else memoryview(bytearray(needed))
        window[: len(kept)] = kept
        self._window, self._first, self._count = window, first, len(kept) // self.block_bytes

    def _fill(self, file: io.FileIO, number: int) -> None:
        """Read block ``number`` to its place in the window, and compare its hash."""
        place = (number - self._first) * self.block_bytes
        target, done, digest = self._window[place : place + self.block_bytes], 0, xxhash.xxh3_64()
        file.seek(number * self.block_bytes)
        while done < len(target) and (count := file.readinto(target[done : done + _PIECE_BYTES])):
            if self.verify:
                digest.update(target[done : done + count])
            done += count
        if self.verify:
            known = self._files().get(self._name, FileHashes(0, ()))
            if [digest.hexdigest()] != list(known.blocks[number : number + 1]):
                begin = number * self.block_bytes
                raise DamagedError(f"{self._name} is damaged: bytes {begin} to {begin + done} are not those that were written")

    def _files(self) -> Mapping[str, FileHashes]:
        return {} if self.manifest is None else self.manifest.files


class ReadableBytes(io.RawIOBase):
    """Bytes as a file to read, without a copy of them."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._at = content, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Bytes from the begin."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """As of any file."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._content)}[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """As much as is left."""
        piece = self._content[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)
