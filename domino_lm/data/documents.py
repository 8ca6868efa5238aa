"""From lines of JSON to the token ids of their documents, with the place of every fault."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from domino_lm.data.indexed import checked_cast
from domino_lm.data.tokenizer import Tokenizer

Array = npt.NDArray[Any]
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class PreprocessError(ValueError):
    """Input that cannot be made into token files. The message says where (file, line, byte), what, and the way out."""


class Block(NamedTuple):
    """Whole lines of the input, and where they begin in it."""

    data: bytes
    first_line: int
    offset_bytes: int


class EncodedKey(NamedTuple):
    """The documents of one block under one key, in the form that IndexedDatasetWriter.add_documents takes."""

    ids: Array
    lengths: Array
    sequences_per_document: Array
    longest: int


class EncodedBlock(NamedTuple):
    keys: list[EncodedKey]
    documents: int
    blank_lines: int
    first_blank_line: int
    size_bytes: int


@dataclass
class Encoder:
    """Encodes blocks; one lives in each worker."""

    tokenizer: Tokenizer
    dtype: np.dtype[Any]
    keys: tuple[str, ...]
    append_eod: bool
    path: str

    def __call__(self, block: Block) -> EncodedBlock:
        """Raises PreprocessError at the first bad line."""
        texts: list[list[str]] = [[] for _ in self.keys]
        counts: list[list[int]] = [[] for _ in self.keys]
        documents = blank_lines = first_blank_line = 0
        may_have_surrogates = SURROGATE_ESCAPE.search(block.data) is not None
        for line, offset, raw in _lines(block):
            if not raw.strip():
                blank_lines += 1
                first_blank_line = first_blank_line or line
                continue
            place = Place(self.path, line, offset)
            record = parse_line(raw, place)
            documents += 1
            for key, key_texts, key_counts in zip(self.keys, texts, counts, strict=True):
                strings = strings_of(record, key, place, check_surrogates=may_have_surrogates)
                key_texts.extend(strings)
                key_counts.append(len(strings))
        keys = [self._encode(*pair) for pair in zip(texts, counts, strict=True)]
        return EncodedBlock(keys, documents, blank_lines, first_blank_line, len(block.data))

    def _encode(self, texts: list[str], texts_per_document: list[int]) -> EncodedKey:
        """A text without tokens is no sequence; the end-of-document token joins the document's last sequence."""
        ids, lengths = self.tokenizer.encode_batch(texts)
        document_of_text = np.repeat(np.arange(len(texts_per_document)), texts_per_document)
        used = lengths > 0
        lengths, document_of_sequence = lengths[used], document_of_text[used]
        sequences = np.bincount(document_of_sequence, minlength=len(texts_per_document))
        if self.append_eod and len(lengths):
            assert self.tokenizer.eod is not None
            last = np.flatnonzero(np.diff(document_of_sequence, append=-1))
            ids = np.insert(ids, np.cumsum(lengths)[last], self.tokenizer.eod)
            lengths[last] += 1
        tokens = np.bincount(document_of_sequence, weights=lengths, minlength=1)
        return EncodedKey(checked_cast(ids, self.dtype), lengths, sequences, int(tokens.max()))


class Place(NamedTuple):
    """A line of the input: its number from 1, and the byte of the file at which it begins."""

    path: str
    line: int
    offset_bytes: int

    def fault(self, what: str, way_out: str, byte: int = 0) -> PreprocessError:
        return PreprocessError(f"{self.path}, line {self.line}, byte {self.offset_bytes + byte}: {what}; {way_out}.")


def parse_line(raw: bytes, place: Place) -> dict[str, Any]:
    """The JSON object on one line. Raises PreprocessError, which points at the byte where reading stopped."""
    if place.offset_bytes == 0 and raw.startswith(BYTE_ORDER_MARK):
        raise place.fault("the file begins with a byte order mark", "save it as UTF-8 without one (sed -i '1s/^\\xEF\\xBB\\xBF//' FILE)")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        bad = raw[error.start : error.start + 4].hex(" ")
        raise place.fault(f"not UTF-8 (bytes {bad})", "convert the file to UTF-8", error.start) from None
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise place.fault(
            f"not valid JSON ({error.msg})", "each line must hold one whole JSON object", len(text[: error.pos].encode())
        ) from None
    except (ValueError, RecursionError) as error:
        raise place.fault(f"not readable as JSON ({error})", "each line must hold one plain JSON object") from None
    if not isinstance(record, dict):
        raise place.fault(f"the line holds {_json_type(record)}, not an object", 'write {"text": "..."} on each line')
    return record


def strings_of(record: dict[str, Any], key: str, place: Place, check_surrogates: bool = True) -> list[str]:
    """The texts under ``key``: a string gives one, a list of strings one each."""
    if key not in record:
        names = ", ".join(map(repr, record)) or "none"
        raise place.fault(f"no key {key!r} (keys here: {names[:200]})", "give the right one with --json-keys, or mend the line")
    value = record[key]
    strings = value if isinstance(value, list) else [value]
    for string in strings:
        if not isinstance(string, str):
            inside = " in a list" if value is strings else ""
            raise place.fault(f"the value of {key!r} is {_json_type(string)}{inside}, not a string", "write text or a list of texts there")
        if check_surrogates:
            _refuse_surrogates(string, key, place)
    return strings


def _lines(block: Block) -> Iterator[tuple[int, int, bytes]]:
    """Number, byte offset and content of each line. Only a newline ends a line, as in JSON lines."""
    offset = block.offset_bytes
    for line, raw in enumerate(block.data.removesuffix(b"\n").split(b"\n"), block.first_line):
        yield line, offset, raw
        offset += len(raw) + 1


def _refuse_surrogates(string: str, key: str, place: Place) -> None:
    try:
        string.encode()
    except UnicodeEncodeError as error:
        code = ord(string[error.start])
        raise place.fault(
            f"the value of {key!r} holds half of a surrogate pair (\\u{code:04x}, character {error.start + 1})",
            "remove it or write the whole pair",
        ) from None


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]
