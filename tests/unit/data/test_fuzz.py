"""Readers on random and damaged bytes: they refuse by one of our errors or read on soundly; they never crash, hang or grow.

FUZZ_EXAMPLES in the environment sets how many inputs each test tries.
"""

import gzip
import os
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from domino_lm.data.indexed import DTYPES, HEADER, MAGIC, IndexedDataset, IndexedDatasetError, IndexedDatasetWriter
from domino_lm.data.preprocess.documents import Encoder, OnError
from domino_lm.data.preprocess.inputs import PreprocessError, read_blocks
from domino_lm.data.tokenizers.null_tokenizer import NullTokenizer
from domino_lm.data.tokenizers.tokenizer import Ids, Lengths, flatten

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "100"))
fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
SMALL = st.integers(0, 6)
WIDE = st.one_of(SMALL, st.integers(0, 2**64 - 1), st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1]))


@st.composite
def indices(draw: st.DrawFn) -> bytes:
    """An index whose header and arrays are mostly of the right kind."""
    sequences, entries = draw(WIDE), draw(WIDE)
    header = HEADER.pack(
        draw(st.sampled_from([MAGIC, MAGIC, MAGIC, b"MMIDIDX\0\1"])),
        draw(st.sampled_from([1, 1, 1, 2])),
        draw(st.integers(0, 9)),
        sequences,
        entries,
    )
    lengths = draw(st.lists(st.integers(-2, 5) | st.integers(-(2**31), 2**31 - 1), max_size=6))
    wide = draw(st.lists(st.integers(-1, 20) | st.integers(-(2**63), 2**63 - 1), max_size=14))
    body = struct.pack(f"<{len(lengths)}i{len(wide)}q", *lengths, *wide)
    return header + body + draw(st.binary(max_size=6))


def mutated(draw: st.DrawFn, data: bytes) -> bytes:
    """A valid file with a few bytes changed, cut off or added."""
    changed = bytearray(data)
    for position, value in draw(st.lists(st.tuples(st.integers(0, max(len(data) - 1, 0)), st.integers(0, 255)), max_size=3)):
        if changed:
            changed[position] = value
    end = draw(st.integers(0, len(changed)) | st.just(len(changed)))
    return bytes(changed[:end]) + draw(st.just(b"") | st.binary(max_size=9))


def open_and_read(prefix: Path) -> None:
    """Opens a pair; what opens must be readable to the last token, and must be what the format says."""
    fault = None
    try:
        dataset = IndexedDataset(prefix)
    except IndexedDatasetError as error:
        fault = str(error)
    if fault is not None:
        assert str(prefix) in fault
        return
    assert np.dtype(DTYPES[(prefix.with_suffix(".idx")).read_bytes()[17]]).itemsize == dataset.dtype.itemsize
    assert sum(len(dataset.get(i)) for i in range(len(dataset))) == dataset.num_tokens
    assert dataset.document_indices[-1] == len(dataset)
    assert (np.diff(dataset.document_indices) >= 0).all()


@fuzz
@given(index=indices() | st.binary(max_size=80), tokens=st.binary(max_size=24))
def test_any_index_is_refused_or_sound(tmp_path: Path, index: bytes, tokens: bytes) -> None:
    (tmp_path / "x.idx").write_bytes(index)
    (tmp_path / "x.bin").write_bytes(tokens)
    open_and_read(tmp_path / "x")


@fuzz
@given(data=st.data())
def test_a_damaged_pair_is_refused_or_sound(tmp_path: Path, data: st.DataObject) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        for document in ([1, 2, 3], [], [4], [5, 6]):
            writer.add_document(document)
    for extension in (".idx", ".bin"):
        path = tmp_path / f"x{extension}"
        path.write_bytes(mutated(data.draw, path.read_bytes()))
    open_and_read(tmp_path / "x")


class Bytes:
    """Each byte of a text is an id."""

    vocab_size, eod, pad, uses_threads = 257, 256, None, False

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Any) -> tuple[Ids, Lengths]:
        return flatten([self.encode(text) for text in texts])

    def decode(self, ids: Any) -> str:
        return bytes(ids).decode()

    def identity(self) -> dict[str, str]:
        return {}


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "a", ""]), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Lines of JSON, most of them with a text, some damaged."""
    import json

    parts = []
    for value in draw(st.lists(st.fixed_dictionaries({"text": st.text(max_size=12) | JSON}) | JSON, max_size=5)):
        line = json.dumps(value, ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass")
        parts.append(mutated(draw, line) if draw(st.integers(0, 3)) == 0 else line)
    return draw(st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\r"])).join(parts) + draw(st.sampled_from([b"", b"\n"]))


def encode_file(path: Path, on_error: OnError, tokenizer: Any) -> None:
    """Encodes all blocks; what comes out must add up, and what is refused must name the file."""
    encoder = Encoder(tokenizer, np.dtype(np.uint16), ("text",), True, on_error)
    fault = None
    try:
        for block in read_blocks([str(path)], ("text",), size_bytes=16):
            encoded = encoder(block)
            (key,) = encoded.keys
            assert int(key.lengths.sum()) == key.ids.size
            assert int(key.sequences_per_document.sum()) == key.lengths.size
            assert len(key.sequences_per_document) == encoded.documents
            assert on_error == "skip" or encoded.found.skipped == 0
    except PreprocessError as error:
        fault = str(error)
    if fault is not None:
        assert str(path) in fault
        assert on_error != "skip" or "damaged" in fault


@fuzz
@given(content=lines() | st.binary(max_size=60), on_error=st.sampled_from(["stop", "skip", "replace"]), numbers=st.booleans())
def test_any_lines_are_refused_by_name_or_encoded(tmp_path: Path, content: bytes, on_error: OnError, numbers: bool) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    encode_file(tmp_path / "x.jsonl", on_error, NullTokenizer(100) if numbers else Bytes())


@fuzz
@given(data=st.data(), kind=st.sampled_from(["gz", "zst"]))
def test_any_compressed_file_is_refused_by_name_or_encoded(tmp_path: Path, data: st.DataObject, kind: str) -> None:
    content = b'{"text": "some text"}\n' * 30
    if kind == "zst":
        compressed = pytest.importorskip("zstandard").ZstdCompressor().compress(content)
    else:
        compressed = gzip.compress(content)
    path = tmp_path / f"x.jsonl.{kind}"
    path.write_bytes(mutated(data.draw, compressed))
    encode_file(path, "stop", Bytes())


@pytest.mark.parametrize("depth", [900, 100_000])
@pytest.mark.parametrize("bracket", ["[", '{"a":'])
def test_nesting_without_end_is_refused(tmp_path: Path, depth: int, bracket: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": ' + bracket * depth)
    before = sys.getrecursionlimit()
    encode_file(tmp_path / "x.jsonl", "stop", Bytes())
    assert sys.getrecursionlimit() == before
