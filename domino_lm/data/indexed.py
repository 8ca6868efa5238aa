"""Token files on disk: a pair ``<prefix>.bin`` and ``<prefix>.idx``, byte for byte Megatron's format.

``.bin`` holds the token ids of all sequences back to back, without a header. ``.idx`` says where each begins; all
its numbers are little-endian and nothing is padded:

====================  ======  ==================================================================================
offset                bytes   what
====================  ======  ==================================================================================
0                     9       magic ``MMIDIDX`` and two NULs
9                     8       u64 version, always 1
17                    1       u8 code of the token type: 1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 6 f64, 7 f32, 8 u16
18                    8       u64 S, the number of sequences
26                    8       u64 D, the number of entries of the document index: documents + 1
34                    4 S     i32 length of each sequence, in tokens
34 + 4 S              8 S     i64 byte offset of each sequence in ``.bin``: the running sum of length * token size
34 + 12 S             8 D     i64 document index: entry k is the number of sequences in the first k documents
34 + 12 S + 8 D       S       i8 mode of each sequence; there only in multimodal files, which nothing but the size tells
====================  ======  ==================================================================================

An empty document has no sequence, only a repeated entry of the document index. A data set without any sequence is an
``.idx`` of 42 bytes and a ``.bin`` of 0.
"""

import hashlib
import os
import shutil
import struct
from array import array
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from domino_lm.data.drafts import Draft
from domino_lm.data.mapped import map_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, npt.DTypeLike] = dict(
    enumerate([np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16], start=1)
)
CHUNK = 1 << 20
COPY_BYTES = 1 << 24

Array = npt.NDArray[Any]


class IndexedDatasetError(ValueError):
    """A ``.bin``/``.idx`` pair that is missing, damaged, or cannot hold what was asked of it. The message names the file."""


def best_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """The token type Megatron writes: u16 for a known vocabulary below 65500, else i32."""
    if vocab_size is not None and vocab_size < 65500:
        return np.dtype(np.uint16)
    return np.dtype(np.int32)


def sequence_pointers(lengths: Array, itemsize: int, start: int = 0) -> npt.NDArray[np.int64]:
    """Byte offset of each sequence, int64 whatever the type of ``lengths``. ``start`` is the offset of the first one."""
    pointers = np.empty(len(lengths), np.int64)
    pointers[:1] = start
    np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
    pointers[1:] *= itemsize
    pointers[1:] += start
    return pointers


def checked_cast(ids: npt.ArrayLike, dtype: npt.DTypeLike) -> Array:
    """``ids`` as one array of ``dtype``. Raises IndexedDatasetError instead of wrapping an id that does not fit."""
    source, target = np.asarray(ids), np.dtype(dtype)
    if source.dtype == target or source.size == 0:
        return np.ascontiguousarray(source, dtype=target)
    if source.dtype.kind not in "iu" or target.kind not in "iu":
        raise IndexedDatasetError(f"token ids of type {source.dtype} cannot be stored as {target}; pass integers.")
    low, high, bounds = int(source.min()), int(source.max()), np.iinfo(target)
    if low < bounds.min or high > bounds.max:
        bad = low if low < bounds.min else high
        raise IndexedDatasetError(
            f"token id {bad} does not fit {target} ({bounds.min} to {bounds.max}); write with a wider type or check the tokenizer's vocabulary size."
        )
    return np.ascontiguousarray(source, dtype=target)


class IndexedDataset:
    """Read-only view of one ``.bin``/``.idx`` pair; both files are memory-mapped, without a descriptor.

    Opening proves that the two files belong together (sizes, lengths, offsets, document index), so that reading cannot
    fail later. A data set without sequences opens, with length 0. Arrays handed out stay valid after this object is
    gone. Raises IndexedDatasetError, which names the file, what is wrong and with which values.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = os.fspath(prefix)
        self.bin_path, self.idx_path = Path(self.prefix + ".bin"), Path(self.prefix + ".idx")
        self._require_files()
        try:
            self._open()
        except OSError as error:
            raise IndexedDatasetError(
                f"{error.filename or self.prefix}: cannot be read ({error.strerror or error}); check the permissions and the disk."
            ) from error

    def _open(self) -> None:
        self.dtype, sequences, entries, multimodal = self._read_header()
        index = map_file(self.idx_path)
        self.sequence_lengths: npt.NDArray[np.int32] = np.ndarray(sequences, "<i4", index, HEADER.size)
        self.sequence_pointers: npt.NDArray[np.int64] = np.ndarray(sequences, "<i8", index, HEADER.size + 4 * sequences)
        self.document_indices: npt.NDArray[np.int64] = np.ndarray(entries, "<i8", index, HEADER.size + 12 * sequences)
        self.sequence_modes: npt.NDArray[np.int8] | None = None
        """Mode of each sequence in a multimodal file, else None."""
        if multimodal:
            self.sequence_modes = np.ndarray(sequences, "i1", index, HEADER.size + 12 * sequences + 8 * entries)
        self._check_document_indices()
        self._check_sequences()
        self._tokens: Array = map_file(self.bin_path).view(self.dtype)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def identity(self) -> dict[str, Any]:
        """Names the pair by content: equal identities hold equal tokens."""
        with open(self.idx_path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        stats = [path.stat() for path in (self.bin_path, self.idx_path)]
        return {"idx_sha256": digest, "sizes_bytes": [s.st_size for s in stats], "mtimes_ns": [s.st_mtime_ns for s in stats]}

    def get(self, i: int, offset: int = 0, length: int | None = None) -> Array:
        """Tokens ``[offset, offset + length)`` of sequence ``i`` (to its end when ``length`` is None), without a copy.

        Raises IndexError outside the file or the sequence; a read never runs on into the next sequence.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"{self.bin_path}: sequence {i} is outside 0..{len(self) - 1}")
        total = int(self.sequence_lengths[i])
        if length is None:
            length = total - offset
        if offset < 0 or length < 0 or offset + length > total:
            raise IndexError(f"{self.bin_path}: tokens {offset}..{offset + length} are outside sequence {i}, which has {total}")
        begin = int(self.sequence_pointers[i]) // self.dtype.itemsize + offset
        return self._tokens[begin : begin + length]

    def _require_files(self) -> None:
        missing = [str(path) for path in (self.bin_path, self.idx_path) if not path.is_file()]
        if not missing:
            return
        stem, extension = os.path.splitext(self.prefix)
        hint = "make the pair with domino-lm-preprocess"
        if extension in (".bin", ".idx"):
            hint = f"give the prefix without its extension: {stem}"
        raise IndexedDatasetError(f"{' and '.join(missing)}: no such file; {hint}.")

    def _read_header(self) -> tuple[np.dtype[Any], int, int, bool]:
        """Token type, sequences, document index entries, and whether modes follow."""
        size = self.idx_path.stat().st_size
        with open(self.idx_path, "rb") as file:
            raw = file.read(HEADER.size)
        if not raw.startswith(MAGIC):
            raise self._fault(self.idx_path, "this is not an index of a token file (the magic MMIDIDX is missing)")
        if len(raw) < HEADER.size:
            raise self._fault(self.idx_path, f"{size} bytes, but the header alone has {HEADER.size}")
        _, version, code, sequences, entries = HEADER.unpack(raw)
        if version != VERSION:
            raise self._fault(self.idx_path, f"version {version} is unknown; only {VERSION} can be read")
        if code not in DTYPES:
            raise self._fault(self.idx_path, f"token type code {code} is unknown; codes are 1 to 8")
        expected = HEADER.size + 12 * sequences + 8 * entries
        multimodal = sequences > 0 and size == expected + sequences
        if size != expected and not multimodal:
            raise self._fault(
                self.idx_path, f"{size} bytes, but {sequences} sequences and {entries} document index entries need {expected}"
            )
        return np.dtype(DTYPES[code]).newbyteorder("<"), sequences, entries, multimodal

    def _check_document_indices(self) -> None:
        index, sequences = self.document_indices, len(self)
        if len(index) == 0 or index[0] != 0 or index[-1] != sequences:
            ends = "nothing" if len(index) == 0 else f"{index[0]} to {index[-1]}"
            raise self._fault(self.idx_path, f"the document index must run from 0 to {sequences}, the number of sequences; it holds {ends}")
        first = HEADER.size + 12 * sequences
        for start in range(0, len(index), CHUNK):
            part = self._read_index("<i8", first + 8 * start, min(CHUNK + 1, len(index) - start))
            if (part[1:] < part[:-1]).any():
                entry = start + 1 + int(np.argmax(part[1:] < part[:-1]))
                raise self._fault(self.idx_path, f"document index entry {entry} is smaller than the one before it")

    def _read_index(self, dtype: str, offset: int, count: int) -> Array:
        """Part of the index read as a file: what is read through the mapping stays in this process's memory."""
        return np.fromfile(self.idx_path, dtype, count, offset=offset)

    def _check_sequences(self) -> None:
        pointer, itemsize = 0, self.dtype.itemsize
        for start in range(0, len(self), CHUNK):
            count = min(CHUNK, len(self) - start)
            lengths = self._read_index("<i4", HEADER.size + 4 * start, count)
            if (lengths < 0).any():
                at = int(np.argmax(lengths < 0))
                raise self._fault(self.idx_path, f"sequence {start + at} has the negative length {lengths[at]}")
            expected = sequence_pointers(lengths, itemsize, pointer)
            found = self._read_index("<i8", HEADER.size + 4 * len(self) + 8 * start, count)
            wrong = found != expected
            if wrong.any():
                at = int(np.argmax(wrong))
                raise self._fault(
                    self.idx_path,
                    f"sequence {start + at} points to byte {found[at]}; by the lengths before it, it begins at {expected[at]}",
                )
            pointer = int(expected[-1]) + int(lengths[-1]) * itemsize
        size = self.bin_path.stat().st_size
        if size != pointer:
            raise self._fault(self.bin_path, f"{size} bytes, but the lengths in {self.idx_path} add up to {pointer}")

    def _fault(self, path: Path, what: str) -> IndexedDatasetError:
        return IndexedDatasetError(f"{path}: {what}; the pair is damaged or its halves do not belong together: make it again.")


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove folders that hold nothing, the innermost first."""
    with suppress(OSError):  # the first that holds something, and all above it, stay
        for folder in folders:
            folder.rmdir()


class IndexedDatasetWriter:
    """Writes one ``.bin``/``.idx`` pair as a stream; 12 bytes of memory per document and no Python object each.

    A context manager: leaving it well puts both files in place under their final names, ``.bin`` first; leaving it by
    an exception removes everything it wrote, folders that it made too. Until then both live beside the target under temporary names, so no
    reader can meet a half-written file. `prepare` writes all that is left to write, for callers that put several pairs in
    place together. The folder is made if it is missing. Raises BusyError while another process writes the same pair.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike, multimodal: bool = False) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in DTYPES.items() if np.dtype(known) == self.dtype]
        if not codes:
            raise IndexedDatasetError(f"{self.prefix}.bin: tokens cannot be stored as {self.dtype}; best_dtype gives the usual type.")
        self._code = codes[0]
        self._lengths = array("i")
        self._document_indices = array("q", [0])
        self._modes = array("b") if multimodal else None
        self.num_tokens = 0
        self._prepared = False
        folder = Path(self.prefix).parent
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        with ExitStack() as opened:
            opened.callback(_remove_empty, missing)
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise IndexedDatasetError(f"{self.prefix}: the folder for it cannot be made ({error}); choose another prefix.") from error
            self._drafts = []
            for extension in (".bin", ".idx"):
                self._drafts.append(Draft(Path(self.prefix + extension)))
                opened.callback(self._drafts[-1].discard)
            self._opened = opened.pop_all()
        self._bin, self._idx = (draft.file for draft in self._drafts)

    def add_document(self, ids: npt.ArrayLike, lengths: npt.ArrayLike | None = None) -> None:
        """Append one document: a single sequence, or sequences of the given lengths. No ids: an empty document."""
        ids = np.asarray(ids)
        if lengths is None:
            lengths = [len(ids)] if len(ids) else []
        self.add_documents(ids, lengths, [len(np.asarray(lengths))])

    def add_documents(
        self, ids: npt.ArrayLike, lengths: npt.ArrayLike, sequences_per_document: npt.ArrayLike, modes: npt.ArrayLike | None = None
    ) -> None:
        """Append many documents at once.

        ``ids`` holds their tokens back to back, ``lengths`` the tokens of each sequence, ``sequences_per_document`` the
        sequences of each document (0: empty), ``modes`` the mode of each sequence of a multimodal file. Raises IndexedDatasetError when these do not add up or an id does not
        fit the token type; nothing is appended then.
        """
        tokens = checked_cast(ids, self.dtype)
        lengths, counts = np.asarray(lengths, np.int64), np.asarray(sequences_per_document, np.int64)
        if (lengths < 0).any() or int(lengths.sum()) != tokens.size or (counts < 0).any() or int(counts.sum()) != lengths.size:
            raise IndexedDatasetError(
                f"{self.prefix}.bin: {tokens.size} tokens in sequences that add up to {lengths.sum()}, "
                f"{lengths.size} sequences in documents that add up to {counts.sum()}."
            )
        if (lengths > np.iinfo(np.int32).max).any():
            raise IndexedDatasetError(
                f"{self.prefix}.idx: a sequence of {lengths.max()} tokens does not fit the format's i32 lengths; cut it."
            )
        self._add_modes(modes, lengths.size)
        self._bin.write(tokens.data)
        before = len(self._lengths)
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self._document_indices.frombytes((before + np.cumsum(counts, dtype=np.int64)).tobytes())
        self.num_tokens += tokens.size

    def append(self, dataset: IndexedDataset) -> None:
        """Append all documents of another pair, which must have the same token type and, if one does, modes."""
        if dataset.dtype != self.dtype:
            raise IndexedDatasetError(f"{dataset.prefix}: tokens are {dataset.dtype}, but {self.prefix} is written as {self.dtype}.")
        self._add_modes(dataset.sequence_modes, len(dataset))
        begin = self._bin.tell()
        with open(dataset.bin_path, "rb") as source:
            shutil.copyfileobj(source, self._bin, COPY_BYTES)
        if self._bin.tell() - begin != dataset.num_tokens * self.dtype.itemsize:
            raise IndexedDatasetError(f"{dataset.bin_path}: the file changed while it was read; run again when nothing writes to it.")
        before = len(self._lengths)
        for start in range(0, len(dataset), CHUNK):
            self._lengths.frombytes(dataset.sequence_lengths[start : start + CHUNK].astype(np.int32).tobytes())
        for start in range(1, len(dataset.document_indices), CHUNK):
            self._document_indices.frombytes((before + dataset.document_indices[start : start + CHUNK]).tobytes())
        self.num_tokens += dataset.num_tokens

    def _add_modes(self, modes: npt.ArrayLike | None, sequences: int) -> None:
        if (self._modes is None) != (modes is None):
            given = "modes are given, but the file is not" if self._modes is None else "no modes are given, but the file is"
            raise IndexedDatasetError(f"{self.prefix}.idx: {given} multimodal; all its sequences have a mode, or none has.")
        if self._modes is not None:
            added = checked_cast(modes if modes is not None else [], np.int8)
            if added.size != sequences:
                raise IndexedDatasetError(f"{self.prefix}.idx: {added.size} modes for {sequences} sequences.")
            self._modes.frombytes(added.tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._opened:
            if kind is None:
                self.prepare()
                # An index of an earlier run must never stand beside the new tokens, not even for a moment.
                Path(self.prefix + ".idx").unlink(missing_ok=True)
                for draft in self._drafts:
                    draft.publish()

    def prepare(self) -> None:
        """Write the index and bring both files to the disk; nothing can be added then, and only renaming is left."""
        if self._prepared:
            return
        self._write_index(self._idx)
        for file in (self._bin, self._idx):
            file.flush()
            os.fsync(file.fileno())
        self._prepared = True

    def _write_index(self, index: Any) -> None:
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        documents = np.frombuffer(self._document_indices, np.int64)
        index.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(documents)))
        index.write(lengths.astype("<i4", copy=False).data)
        pointer = 0
        for start in range(0, len(lengths), CHUNK):
            part = lengths[start : start + CHUNK]
            pointers = sequence_pointers(part, self.dtype.itemsize, pointer)
            pointer = int(pointers[-1]) + int(part[-1]) * self.dtype.itemsize
            index.write(pointers.astype("<i8", copy=False).data)
        index.write(documents.astype("<i8", copy=False).data)
        if self._modes is not None:
            index.write(self._modes.tobytes())
