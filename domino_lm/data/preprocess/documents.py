"""From lines of JSON to the token ids of their documents, with the place of every fault."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple

import numpy as np

from domino_lm.config.foreign_text import ForeignTextError, parse_json
from domino_lm.data.indexed import Array, checked_cast
from domino_lm.data.preprocess.inputs import Block, PreprocessError
from domino_lm.data.preprocess.sentences import SentenceSplitter
from domino_lm.data.tokenizers.tokenizer import Tokenizer, TokenizerError

OnError = Literal["stop", "skip", "replace"]
"""What happens to a bad line: it ends the run, is counted and left out, or has its invalid characters replaced."""

SHOWN_FAULTS = 5
"""Skipped lines that are shown in full; the others are counted."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FORMS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst", b"PAR1": ".parquet"}
"""First bytes of files that are no text, and the ending by which they are known."""
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
SURROGATE = re.compile("[\ud800-\udfff]")


class EncodedKey(NamedTuple):
    """The documents of one block under one key, in the form that IndexedDatasetWriter.add_documents takes."""

    ids: Array
    lengths: Array
    sequences_per_document: Array
    longest: int


@dataclass
class Findings:
    """Lines of one block that are not documents as they stand.

    A fault, in a block that is a context, ends everything unless faults are to be skipped: then all are counted, and the
    messages of the first kept. ``replaced`` counts the lines in which invalid characters were replaced.
    """

    skip: bool
    skipped: int = 0
    faults: list[str] = field(default_factory=list)
    replaced: int = 0
    blank_lines: int = 0
    first_blank_line: str = ""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not self.skip or not isinstance(error, PreprocessError):
            return False
        self.skipped += 1
        if self.skipped <= SHOWN_FAULTS:
            self.faults.append(str(error))
        return True


class EncodedBlock(NamedTuple):
    """What came of one block."""

    keys: list[EncodedKey]
    documents: int
    size_bytes: int
    read_bytes: int
    found: Findings


class _Documents:
    """Texts of the documents of one block: for each key their strings back to back, and how many belong to each document."""

    def __init__(self, keys: int) -> None:
        self.places: list[Place] = []
        self.texts: list[list[str]] = [[] for _ in range(keys)]
        self.counts: list[list[int]] = [[] for _ in range(keys)]

    def add(self, place: "Place", texts: Sequence[Sequence[str]]) -> None:
        self.places.append(place)
        for i, strings in enumerate(texts):
            self.texts[i].extend(strings)
            self.counts[i].append(len(strings))

    def __iter__(self) -> Iterator[tuple["Place", list[list[str]]]]:
        positions = [0] * len(self.texts)
        for i, place in enumerate(self.places):
            ends = [position + counts[i] for position, counts in zip(positions, self.counts, strict=True)]
            yield place, [texts[a:b] for texts, a, b in zip(self.texts, positions, ends, strict=True)]
            positions = ends


@dataclass
class Encoder:
    """Encodes blocks; one lives in each worker."""

    tokenizer: Tokenizer
    dtype: np.dtype[Any]
    keys: tuple[str, ...]
    append_eod: bool
    on_error: OnError = "stop"
    splitter: SentenceSplitter | None = None

    def __call__(self, block: Block) -> EncodedBlock:
        """Raises PreprocessError at the first bad line, unless bad lines are skipped. The block is empty then."""
        size_bytes, found = len(block.data), Findings(self.on_error == "skip")
        keys, documents = self._encode_all(self._read(block, found), found)
        return EncodedBlock(keys, len(documents.places), size_bytes, block.read_bytes, found)

    def _read(self, block: Block, found: Findings) -> _Documents:
        """Texts of the documents. Lines are gone before texts are encoded."""
        documents = _Documents(len(self.keys))
        may_have_surrogates = SURROGATE_ESCAPE.search(block.data) is not None
        for place, raw in _lines(block):
            if not raw.strip():
                found.blank_lines += 1
                found.first_blank_line = found.first_blank_line or f"{place.path}, {place.unit} {place.line}"
                continue
            with found:
                documents.add(place, self._document(raw, place, may_have_surrogates, found))
        return documents

    def _document(self, raw: bytes, place: "Place", check_surrogates: bool, found: Findings) -> list[list[str]]:
        """Texts of one line per key; a line that had to have characters replaced is counted."""
        try:
            return self._texts_of_keys(raw, place, check_surrogates, False)
        except PreprocessError:
            if self.on_error != "replace":
                raise
        texts = self._texts_of_keys(raw, place, check_surrogates, True)
        found.replaced += 1
        return texts

    def _texts_of_keys(self, raw: bytes, place: "Place", check_surrogates: bool, replace: bool) -> list[list[str]]:
        record = parse_line(raw, place, replace)
        texts = [strings_of(record, key, place, check_surrogates, replace) for key in self.keys]
        if self.splitter is None:
            return texts
        return [[sentence for string in strings for sentence in self.splitter.split(string)] for strings in texts]

    def _encode_all(self, documents: _Documents, found: Findings) -> tuple[list[EncodedKey], _Documents]:
        """Every key's documents; those that the tokenizer refuses are found one by one, and reported or left out."""
        try:
            return [self._encode(*pair) for pair in zip(documents.texts, documents.counts, strict=True)], documents
        except TokenizerError as error:
            kept = _Documents(len(self.keys))
            for place, texts in documents:
                with found:
                    self._refuse_untokenizable(place, texts)
                    kept.add(place, texts)
            if len(kept.places) == len(documents.places):
                raise PreprocessError(f"the tokenizer cannot encode a block of lines ({error})") from error
            return [self._encode(*pair) for pair in zip(kept.texts, kept.counts, strict=True)], kept

    def _refuse_untokenizable(self, place: "Place", texts: list[list[str]]) -> None:
        for key, strings in zip(self.keys, texts, strict=True):
            try:
                self.tokenizer.encode_batch(strings)
            except TokenizerError as error:
                raise place.fault(
                    f"the tokenizer cannot encode the value of {key!r} ({error})", "mend the line, or use another tokenizer"
                ) from None

    def _encode(self, texts: list[str], texts_per_document: list[int]) -> EncodedKey:
        """A text without tokens is no sequence; the end-of-document token joins the document's last sequence."""
        ids, lengths = self.tokenizer.encode_batch(texts)
        ids = checked_cast(ids, self.dtype)
        document_of_text = np.repeat(np.arange(len(texts_per_document)), texts_per_document)
        used = lengths > 0
        lengths, document_of_sequence = lengths[used], document_of_text[used]
        sequences = np.bincount(document_of_sequence, minlength=len(texts_per_document))
        if self.append_eod and len(lengths):
            assert self.tokenizer.eod is not None
            last = np.flatnonzero(np.diff(document_of_sequence, append=-1))
            ids = np.insert(ids, np.cumsum(lengths)[last], checked_cast(self.tokenizer.eod, self.dtype))
            lengths[last] += 1
        tokens = np.bincount(document_of_sequence, weights=lengths, minlength=1)
        return EncodedKey(ids, lengths, sequences, int(tokens.max()))


class Place(NamedTuple):
    """A line of the input: its number from 1, and the byte of the file at which it begins."""

    path: str
    line: int
    offset_bytes: int
    unit: str = "line"

    def fault(self, what: str, way_out: str, byte: int = 0) -> PreprocessError:
        where = f", byte {self.offset_bytes + byte}" if self.unit == "line" else ""
        return PreprocessError(f"{self.path}, {self.unit} {self.line}{where}: {what}; {way_out}.")


def parse_line(raw: bytes, place: Place, replace: bool = False) -> dict[str, Any]:
    """The JSON object on one line; ``replace`` puts U+FFFD for bytes that are not UTF-8.

    Raises PreprocessError, which points at the byte where reading stopped.
    """
    if place.offset_bytes == 0 and place.line == 1:
        _refuse_other_forms(raw, place)
    try:
        text = raw.decode(errors="replace" if replace else "strict")
    except UnicodeDecodeError as error:
        bad = raw[error.start : error.start + 4].hex(" ")
        raise place.fault(f"not UTF-8 (bytes {bad})", "convert the file to UTF-8, or use --on-error replace", error.start) from None
    try:
        record = parse_json(text, whole_numbers=False)
    except json.JSONDecodeError as error:
        raise place.fault(
            f"not valid JSON ({error.msg})", "each line must hold one whole JSON object", len(text[: error.pos].encode())
        ) from None
    except ForeignTextError as error:
        raise place.fault(f"not readable as JSON ({error})", "each line must hold one plain JSON object") from None
    if not isinstance(record, dict):
        raise place.fault(f"the line holds {_json_type(record)}, not an object", 'write {"text": "..."} on each line')
    return record


def _refuse_other_forms(raw: bytes, place: Place) -> None:
    """The kind of file that the first bytes show, if it is not plain UTF-8."""
    if raw.startswith(BYTE_ORDER_MARK):
        raise place.fault("the file begins with a byte order mark", "save it as UTF-8 without one (sed -i '1s/^\\xEF\\xBB\\xBF//' FILE)")
    for begin, ending in FORMS.items():
        if raw.startswith(begin):
            raise place.fault(f"these are the first bytes of a {ending} file", f"give it a name that ends in {ending}, or unpack it")


def strings_of(record: dict[str, Any], key: str, place: Place, check_surrogates: bool = True, replace: bool = False) -> list[str]:
    """The texts under ``key``: a string gives one, a list of strings one each; ``replace`` mends halves of surrogate pairs."""
    if key not in record:
        names = ", ".join(map(repr, record)) or "none"
        raise place.fault(f"no key {key!r} (keys here: {names[:200]})", "give the right one with --json-keys, or mend the line")
    value = record[key]
    strings = value if isinstance(value, list) else [value]
    for string in strings:
        if not isinstance(string, str):
            inside = " in a list" if value is strings else ""
            raise place.fault(f"the value of {key!r} is {_json_type(string)}{inside}, not a string", "write text or a list of texts there")
        if check_surrogates and not replace:
            _refuse_surrogates(string, key, place)
    if check_surrogates and replace:
        return [SURROGATE.sub("\ufffd", string) for string in strings]
    return strings


def _lines(block: Block) -> Iterator[tuple[Place, bytes]]:
    """Place and content of each line. Only a newline ends a line, as in JSON lines."""
    offset, line = block.offset_bytes, block.first_line
    lines = block.take().removesuffix(b"\n").split(b"\n")
    lines.reverse()
    while lines:
        raw = lines.pop()  # a line is kept no longer than it is needed
        yield Place(block.path, line, offset, block.unit), raw
        offset += len(raw) + 1
        line += 1


def _refuse_surrogates(string: str, key: str, place: Place) -> None:
    try:
        string.encode()
    except UnicodeEncodeError as error:
        code = ord(string[error.start])
        raise place.fault(
            f"the value of {key!r} holds half of a surrogate pair (\\u{code:04x}, character {error.start + 1})",
            "remove it, write the whole pair, or use --on-error replace",
        ) from None


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]
