"""Input of the preprocessor as blocks of whole lines: files and globs, compressed or not, or standard input."""

import glob
import gzip
import io
import json
import os
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from domino_lm.data.tokenizers.tokenizer import in_groups

BLOCK_BYTES = 1 << 18
ROWS_PER_BLOCK = 512
MAX_LINE_BYTES = 1 << 30
_PLAIN_TEXT = frozenset(("string", "binary"))
STANDARD_INPUT = "-"
WILDCARDS = frozenset("*?[")


class PreprocessError(ValueError):
    """Input that cannot be made into token files. The message says where (file, line, byte), what, and the way out."""


@dataclass
class Block:
    """Whole lines of one file, and where they begin in it.

    ``unit`` is what a line was in the file: a line, or a row of a table, which has no byte offset. ``read_bytes`` is how
    much has been read on disk up to the end of this block, all files together.
    """

    path: str
    data: bytes
    first_line: int
    offset_bytes: int
    read_bytes: int
    unit: str = "line"

    def take(self) -> bytes:
        """The lines, which the block lets go of: one line may be most of the memory there is."""
        data, self.data = self.data, b""
        return data


def expand_inputs(words: Sequence[str]) -> list[str]:
    """Files that ``--input`` names, in order: wildcards are expanded, sorted, and leave hidden files out.

    Raises PreprocessError if a name finds nothing or is a folder.
    """
    paths: list[str] = []
    for word in words:
        if word != STANDARD_INPUT and not os.path.exists(word) and WILDCARDS & set(word):
            # glob skips hidden files by itself, but not those inside a folder that was named in full.
            found = sorted(path for path in glob.glob(word, recursive=True) if os.path.isfile(path))
            found = [path for path in found if not os.path.basename(path).startswith(".")]
            if not found:
                raise PreprocessError(f"--input {word}: no file has such a name.")
            paths += found
        else:
            paths.append(word)
    for path in paths:
        if path == STANDARD_INPUT:
            continue
        if not os.path.exists(path):
            raise PreprocessError(f"--input {path}: no such file.")
        if os.path.isdir(path):
            raise PreprocessError(f"--input {path} is a folder; give a file of JSON lines, or a pattern like '{path.rstrip('/')}/*.jsonl'.")
    doubled = [path for path, count in Counter(map(os.path.realpath, paths)).items() if count > 1]
    if doubled:
        raise PreprocessError(f"--input names {doubled[0]} more than once; its documents would be there twice: name each file once.")
    return paths


def size_on_disk(paths: Sequence[str]) -> int | None:
    """Bytes of all files; None if one of them has no size (standard input, pipes)."""
    if not all(os.path.isfile(path) for path in paths):
        return None
    return sum(os.path.getsize(path) for path in paths)


def read_blocks(
    paths: Sequence[str], keys: Sequence[str], size_bytes: int = BLOCK_BYTES, max_line_bytes: int = MAX_LINE_BYTES
) -> Iterator[Block]:
    """All lines of all files in order, in blocks of about ``size_bytes``.

    Raises PreprocessError if a file is damaged, or a line longer than ``max_line_bytes``: a small archive can hold one that does not end.
    """
    before = 0
    for path in paths:
        last = before
        blocks = _read_parquet(path, keys, max_line_bytes) if path.endswith(".parquet") else _read_file(path, size_bytes, max_line_bytes)
        for block in blocks:
            last = block.read_bytes = before + block.read_bytes
            yield block
        before = last


def _read_file(path: str, size_bytes: int, max_line_bytes: int) -> Iterator[Block]:
    with _open_raw(path) as raw:
        state = _state(os.fstat(raw.fileno()))
        source = _decompressed(path, raw)
        line, offset = 1, 0
        while True:
            try:
                data = source.read(size_bytes)
                if data and not data.endswith(b"\n"):
                    data += source.readline(max_line_bytes + 1)  # with its end, or one byte that is too many
            except (EOFError, gzip.BadGzipFile, zlib.error, _DamagedError) as error:
                kind = "gzip" if path.endswith(".gz") else "zstd"
                raise PreprocessError(
                    f"{path}, line {line}, byte {offset}: the {kind} file is damaged ({error}); compress it again."
                ) from error
            if not data:
                break
            _require_short_lines(data, path, line, offset, max_line_bytes)
            position = raw.tell() if raw.seekable() else offset + len(data)
            block = Block(path, data, line, offset, position)
            line += data.count(b"\n")
            offset += len(data)
            del data  # the block alone keeps it
            yield block
        _require_unchanged(path, state)


def _require_short_lines(data: bytes, path: str, line: int, offset: int, max_line_bytes: int) -> None:
    """Raise PreprocessError if a line of a block is too long; ``line`` and ``offset`` are where the block begins."""
    begin = 0
    while len(data) - begin > max_line_bytes:
        end = data.find(b"\n", begin)
        if (end if end >= 0 else len(data)) - begin > max_line_bytes:
            raise _too_long(f"{path}, line {line}, byte {offset + begin}", max_line_bytes)
        begin, line = end + 1, line + 1


def _too_long(where: str, max_line_bytes: int) -> PreprocessError:
    return PreprocessError(
        f"{where}: longer than --max-line-gib {max_line_bytes / 2**30:g}, as in an archive that was made to fill memory; split it, or raise "
        "the limit (a line needs about ten times its size in memory)."
    )


def _state(found: os.stat_result) -> tuple[int, int, int, int] | None:
    """Identity, size and time of a file, by which a write to it shows; None for anything but a regular file."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def _require_unchanged(path: str, before: tuple[int, int, int, int] | None) -> None:
    if path != STANDARD_INPUT and before is not None and (not os.path.exists(path) or _state(os.stat(path)) != before):
        raise PreprocessError(f"{path}: the file changed while it was read; run again when nothing writes to it.")


def _open_raw(path: str) -> IO[bytes]:
    if path == STANDARD_INPUT:
        if sys.stdin is None:
            raise PreprocessError("--input -: standard input is closed; pipe JSON lines into the tool, or name a file.")
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    return open(path, "rb")


def _decompressed(path: str, raw: IO[bytes]) -> IO[bytes]:
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]
    if path.endswith(".zst"):
        return io.BufferedReader(_ZstdFile(path, raw), BLOCK_BYTES)
    return raw


class _DamagedError(Exception):
    """Compressed data that ends early or cannot be read."""


class _ZstdFile(io.RawIOBase):
    """The content of a .zst file of any number of frames. Raises _DamagedError if the last one has no end."""

    def __init__(self, path: str, raw: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError:
            raise PreprocessError(f"{path}: reading .zst files needs the package zstandard: pip install zstandard.") from None
        self._library, self._raw = zstandard, raw
        self._frame: Any = None
        self._ready, self._unread = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            compressed = self._unread or self._raw.read(BLOCK_BYTES)
            self._unread = b""
            if not compressed:
                if self._frame is not None:
                    raise _DamagedError("it ends inside a frame")
                return 0
            self._decompress(compressed)
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self, compressed: bytes) -> None:
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        try:
            self._ready = self._frame.decompress(compressed)
        except self._library.ZstdError as error:
            raise _DamagedError(str(error)) from error
        if self._frame.eof:
            self._frame, self._unread = None, self._frame.unused_data


def _read_parquet(path: str, keys: Sequence[str], max_line_bytes: int) -> Iterator[Block]:
    """Rows as JSON lines, of the columns that ``keys`` name alone."""
    # pyarrow's default allocator keeps freed memory: the larger the file, the more.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise PreprocessError(f"{path}: reading .parquet files needs the package pyarrow: pip install pyarrow.") from None
    state, size, row = _state(os.stat(path)), os.path.getsize(path), 0
    try:
        # As dictionaries, since a file of a few bytes can say the same long text a million times.
        texts = [key for key, kind in _kinds(parquet.read_schema(path)).items() if key in keys and kind in _PLAIN_TEXT]
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=BLOCK_BYTES, read_dictionary=texts) as table:
            columns = _text_columns(path, table.schema_arrow, keys)
            total = table.metadata.num_rows
            for batch in table.iter_batches(_rows_per_batch(table.metadata), columns=columns):
                lines = (json.dumps(record, default=_text_of_bytes) + "\n" for record in _records(batch))
                for group in in_groups(lines, len, BLOCK_BYTES):  # rows may be of very different sizes
                    for number, text in enumerate(group, row + 1):
                        if len(text) > max_line_bytes:
                            raise _too_long(f"{path}, row {number}", max_line_bytes)
                    end = row + len(group)
                    yield Block(path, "".join(group).encode(), row + 1, 0, size * end // total, "row")
                    row = end
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise PreprocessError(f"{path}, row {row + 1}: the parquet file cannot be read ({reason}); write it again.") from error
    _require_unchanged(path, state)


def _kinds(schema: Any) -> dict[str, str]:
    """The type of each column, by its name."""
    return {field.name: str(field.type) for field in schema}


def _records(batch: Any) -> Iterator[dict[str, Any]]:
    """Rows one after the other, so that of equal texts only one is unpacked at a time."""
    for row in range(batch.num_rows):
        yield {name: batch.column(name)[row].as_py() for name in batch.schema.names}


def _text_columns(path: str, schema: Any, keys: Sequence[str]) -> list[str]:
    """The columns that ``keys`` name. Raises PreprocessError if one is missing or cannot hold text."""
    for key in keys:
        if schema.names.count(key) != 1:
            fault = "more than one" if key in schema.names else "no"
            names = ", ".join(map(repr, schema.names))[:200]
            raise PreprocessError(f"{path}: {fault} column {key!r} (columns here: {names}); give the right one with --json-keys.")
        kind = str(schema.field(key).type)
        if not any(word in kind for word in ("string", "binary", "null")) or "struct" in kind or "map" in kind:
            raise PreprocessError(f"{path}: the column {key!r} holds {kind}, not text; give the right one with --json-keys.")
    return list(dict.fromkeys(keys))


def _rows_per_batch(metadata: Any) -> int:
    """Rows that fill a block or so, by what the file says of their size."""
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return max(1, min(ROWS_PER_BLOCK, BLOCK_BYTES * max(metadata.num_rows, 1) // max(size, 1)))


def _text_of_bytes(value: Any) -> str:
    """Binary columns are read as UTF-8; invalid bytes become halves of surrogate pairs, which are refused later, by row."""
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} is not text")
    return value.decode(errors="surrogateescape")
