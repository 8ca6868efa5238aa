"""Token files: the format, what opening refuses, and what the writer leaves behind."""

import gc
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from domino_lm.data.indexed import IndexedDataset, IndexedDatasetError, IndexedDatasetWriter, best_dtype, sequence_pointers

DOCUMENTS = [[1, 2, 3], [], [4, 5], [6]]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Three sequences of 3, 2 and 1 tokens in four documents, the second of them empty."""
    with IndexedDatasetWriter(tmp_path / "data", np.uint16) as writer:
        for document in DOCUMENTS:
            writer.add_document(document)
    return str(tmp_path / "data")


def patch(path: str, offset: int, data: bytes) -> None:
    raw = bytearray(Path(path).read_bytes())
    raw[offset : offset + len(data)] = data
    Path(path).write_bytes(raw)


def read_back(prefix: str) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices
    return [[int(t) for i in range(bounds[k], bounds[k + 1]) for t in dataset.get(i)] for k in range(dataset.num_documents)]


def test_documents_come_back_as_written(prefix: str) -> None:
    assert read_back(prefix) == DOCUMENTS


def test_an_empty_document_has_no_sequence_but_a_document_index_entry(prefix: str) -> None:
    dataset = IndexedDataset(prefix)
    assert (len(dataset), dataset.document_indices.tolist()) == (3, [0, 1, 1, 2, 3])


def test_index_bytes_are_those_of_the_format(prefix: str) -> None:
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 5)
    expected += struct.pack("<3i", 3, 2, 1) + struct.pack("<3q", 0, 6, 10) + struct.pack("<5q", 0, 1, 1, 2, 3)
    assert Path(prefix + ".idx").read_bytes() == expected


@settings(max_examples=50, deadline=None)
@given(documents=st.lists(st.lists(st.lists(st.integers(-128, 127), min_size=1, max_size=4), max_size=3), max_size=6))
def test_one_call_for_many_documents_writes_what_single_calls_write(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]]
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    flat = [token for document in documents for sequence in document for token in sequence]
    with IndexedDatasetWriter(folder / "one", np.int8) as writer:
        writer.add_documents(flat, [len(s) for d in documents for s in d], [len(d) for d in documents])
    with IndexedDatasetWriter(folder / "many", np.int8) as writer:
        for document in documents:
            writer.add_document([token for sequence in document for token in sequence], [len(s) for s in document])
    for extension in (".bin", ".idx"):
        assert (folder / f"one{extension}").read_bytes() == (folder / f"many{extension}").read_bytes()


def test_a_data_set_without_sequences_opens_with_length_0(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "none", np.int32):
        pass
    dataset = IndexedDataset(tmp_path / "none")
    assert (len(dataset), dataset.num_tokens, (tmp_path / "none.idx").stat().st_size) == (0, 0, 42)


def test_arrays_stay_valid_after_the_data_set_is_gone(prefix: str) -> None:
    dataset = IndexedDataset(prefix)
    lengths, tokens = dataset.sequence_lengths, dataset.get(1)
    del dataset
    gc.collect()
    assert (lengths.tolist(), tokens.tolist()) == ([3, 2, 1], [4, 5])


def test_part_of_a_sequence_is_read(prefix: str) -> None:
    assert IndexedDataset(prefix).get(0, 1, 1).tolist() == [2]


@pytest.mark.parametrize(("i", "offset", "length"), [(3, 0, None), (-1, 0, None), (1, 0, 3), (1, 3, None), (1, -1, 1), (1, 0, -1)])
def test_reads_outside_a_sequence_are_refused(prefix: str, i: int, offset: int, length: int | None) -> None:
    with pytest.raises(IndexError, match=r"data\.bin"):
        IndexedDataset(prefix).get(i, offset, length)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        pytest.param(0, b"XX", "magic", id="magic"),
        pytest.param(9, struct.pack("<Q", 2), "version 2", id="version"),
        pytest.param(17, b"\x09", "code 9", id="token type unknown"),
        pytest.param(17, b"\x04", "points to byte 6; by the lengths before it, it begins at 12", id="token type changed"),
        pytest.param(18, struct.pack("<Q", 4), "bytes, but 4 sequences", id="sequence count"),
        pytest.param(34, struct.pack("<i", -3), "negative length -3", id="negative length"),
        pytest.param(34, struct.pack("<i", 1003), "sequence 1 points to byte 6", id="length too large"),
        pytest.param(42, struct.pack("<i", 5), "add up to 20", id="last length too large"),
        pytest.param(54, struct.pack("<q", 7), "sequence 1 points to byte 7", id="pointer off by one"),
        pytest.param(70, struct.pack("<q", 3), "from 0 to 3", id="document index begins at 3"),
        pytest.param(102, struct.pack("<q", 2), "from 0 to 3", id="document index ends early"),
        pytest.param(86, struct.pack("<q", 3), "entry 3 is smaller", id="document index falls"),
    ],
)
def test_a_damaged_index_is_refused_by_name(prefix: str, offset: int, data: bytes, message: str) -> None:
    patch(prefix + ".idx", offset, data)
    with pytest.raises(IndexedDatasetError, match=rf"data\.(idx|bin): .*{message}"):
        IndexedDataset(prefix)


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (0, "magic"),
        (5, "magic"),
        (30, "30 bytes, but the header alone has 34"),
        *((cut, f"{cut} bytes, but 3 sequences") for cut in (36, 60, 105)),
    ],
)
def test_a_truncated_index_is_refused_by_name(prefix: str, cut: int, message: str) -> None:
    path = Path(prefix + ".idx")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(IndexedDatasetError, match=rf"data\.idx: .*{message}"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("extension", [".bin", ".idx"])
def test_trailing_bytes_are_refused(prefix: str, extension: str) -> None:
    path = Path(prefix + extension)
    path.write_bytes(path.read_bytes() + b"\0\0")
    with pytest.raises(IndexedDatasetError, match=rf"data\{extension}: "):
        IndexedDataset(prefix)


@pytest.mark.parametrize("size", [0, 11])
def test_a_short_token_file_is_refused_on_opening(prefix: str, size: int) -> None:
    path = Path(prefix + ".bin")
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(IndexedDatasetError, match=rf"data\.bin: {size} bytes, but the lengths in .*data\.idx add up to 12"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("extension", [".bin", ".idx"])
def test_a_half_that_is_a_folder_or_of_another_pair_is_refused(prefix: str, extension: str, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "other", np.uint16) as writer:
        writer.add_documents([1, 2, 3, 4, 5, 6, 7], [3, 2, 2], [1, 1, 1])
    Path(prefix + extension).write_bytes(Path(f"{tmp_path}/other{extension}").read_bytes())
    with pytest.raises(IndexedDatasetError, match=r"data\.(bin|idx): "):
        IndexedDataset(prefix)
    Path(prefix + extension).unlink()
    Path(prefix + extension).mkdir()
    with pytest.raises(IndexedDatasetError, match=rf"data\{extension}: no such file"):
        IndexedDataset(prefix)


def test_a_file_that_cannot_be_read_is_named(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(IndexedDatasetError, match=r"data\.idx: cannot be read \(Permission denied\)"):
        IndexedDataset(prefix)


def test_modes_come_back_as_written(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.int32, multimodal=True) as writer:
        writer.add_documents([1, 2, 3], [1, 2], [2], modes=[0, 3])
    modes = IndexedDataset(tmp_path / "x").sequence_modes
    assert modes is not None
    assert modes.tolist() == [0, 3]


def test_a_file_without_modes_has_none(prefix: str) -> None:
    assert IndexedDataset(prefix).sequence_modes is None


@pytest.mark.parametrize(
    ("multimodal", "modes", "message"), [(False, [0], "not multimodal"), (True, None, "multimodal"), (True, [0, 0], "2 modes")]
)
def test_modes_that_do_not_fit_are_refused(tmp_path: Path, multimodal: bool, modes: list[int] | None, message: str) -> None:
    with pytest.raises(IndexedDatasetError, match=message), IndexedDatasetWriter(tmp_path / "x", np.int32, multimodal) as writer:
        writer.add_documents([1], [1], [1], modes=modes)


@pytest.mark.parametrize(("code", "dtype"), [(6, np.float64), (7, np.float32)])
def test_codes_6_and_7_are_double_and_single_precision(tmp_path: Path, code: int, dtype: type) -> None:
    with IndexedDatasetWriter(tmp_path / "x", dtype) as writer:
        writer.add_document(np.array([0.5, 2.0], dtype))
    assert ((tmp_path / "x.idx").read_bytes()[17], IndexedDataset(tmp_path / "x").get(0).tolist()) == (code, [0.5, 2.0])


def test_a_missing_half_is_named(prefix: str) -> None:
    Path(prefix + ".bin").unlink()
    with pytest.raises(IndexedDatasetError, match=r"data\.bin: no such file"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("extension", [".bin", ".idx"])
def test_a_prefix_with_its_extension_gets_a_hint(prefix: str, extension: str) -> None:
    with pytest.raises(IndexedDatasetError, match=f"without its extension: {prefix}"):
        IndexedDataset(prefix + extension)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize("token", [70000, -1, 65536])
def test_an_id_that_does_not_fit_is_refused_and_nothing_is_left(tmp_path: Path, token: int, kind: Callable[[list[int]], Any]) -> None:
    with (
        pytest.raises(IndexedDatasetError, match=rf"token id {token} does not fit uint16"),
        IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer,
    ):
        writer.add_document(kind([1, token]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("lengths", "counts"), [([2], [1]), ([3], [2]), ([4, -1], [2])])
def test_lengths_that_do_not_add_up_are_refused(tmp_path: Path, lengths: list[int], counts: list[int]) -> None:
    with pytest.raises(IndexedDatasetError, match="add up"), IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_documents([1, 2, 3], lengths, counts)


def test_a_failed_run_keeps_the_files_of_an_earlier_one(prefix: str) -> None:
    with pytest.raises(IndexedDatasetError), IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_documents([9, 70000], [1, 1], [1, 1])
    assert read_back(prefix) == DOCUMENTS


def test_nothing_stands_under_the_final_names_while_writing(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        writer.add_document([1])
        assert not any(path.suffix in (".bin", ".idx") for path in tmp_path.iterdir())


def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    program = (
        "import resource, sys, numpy as np\n"
        "from domino_lm.data.indexed import IndexedDatasetWriter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "with IndexedDatasetWriter(sys.argv[1], np.int32) as writer:\n"
        "    for _ in range(100): writer.add_document(np.zeros(1000, np.int32))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "x")], capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert "File too large" in run.stderr
    assert list(tmp_path.iterdir()) == []


def test_pointers_past_int32_stay_positive() -> None:
    assert sequence_pointers(np.array([2**31 - 100, 123], np.int32), 4).tolist() == [0, 8589934192]


def test_the_index_takes_less_than_40_bytes_a_document(tmp_path: Path) -> None:
    documents = 1_000_000
    with IndexedDatasetWriter(tmp_path / "small", np.uint16) as writer:
        tracemalloc.start()
        for _ in range(documents // 1000):
            writer.add_documents(np.ones(1000, np.uint16), np.ones(1000, np.int64), np.ones(1000, np.int64))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(IndexedDataset(tmp_path / "small")) == documents
    assert peak_bytes < 40 * documents


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65499, np.uint16), (65500, np.int32), (None, np.int32)])
def test_the_token_type_follows_the_vocabulary(vocab_size: int | None, dtype: type) -> None:
    assert best_dtype(vocab_size) == dtype
