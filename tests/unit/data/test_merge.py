"""Merging: the documents of all pairs in order, and nothing half-written or doubled whatever the folder holds."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from domino_lm.data.indexed import IndexedDataset, IndexedDatasetError, IndexedDatasetWriter
from domino_lm.data.merge import MergeError, merge, pairs_in

TOOL = Path(__file__).parents[3] / "tools" / "merge_datasets.py"


def write(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> str:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "b", [[3], []])
    write(tmp_path / "in" / "a", [[], [1, 2]])
    return tmp_path / "in"


def test_documents_stand_in_the_order_of_the_names(folder: Path, tmp_path: Path) -> None:
    merged = merge(pairs_in(str(folder))[0], str(tmp_path / "out"))
    assert ([merged.get(i).tolist() for i in range(2)], merged.document_indices.tolist()) == ([[1, 2], [3]], [0, 0, 1, 2, 2])


def test_other_files_are_named_and_hidden_ones_passed_over(folder: Path) -> None:
    (folder / "README").write_text("")
    (folder / ".DS_Store").write_text("")
    assert [Path(prefix).name for prefix in pairs_in(str(folder))[0]] == ["a", "b"]
    assert pairs_in(str(folder))[1] == ["README"]


@pytest.mark.parametrize("extension", [".bin", ".idx"])
def test_half_a_pair_is_refused(folder: Path, extension: str) -> None:
    (folder / f"a{extension}").unlink()
    with pytest.raises(MergeError, match=f"has no {extension} beside it"):
        pairs_in(str(folder))


def test_a_folder_without_pairs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MergeError, match="no pair of"):
        pairs_in(str(tmp_path))


def test_other_token_types_are_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    write(folder / "c", [[70000]], np.int32)
    with pytest.raises(MergeError, match=r"holds int32 tokens, but .* holds uint16"):
        merge(pairs_in(str(folder))[0], str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_short_token_file_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "a.bin").write_bytes(b"\1\0")
    with pytest.raises(IndexedDatasetError, match=r"a\.bin: 2 bytes"):
        merge(pairs_in(str(folder))[0], str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_the_result_of_an_earlier_run_is_never_merged_into_itself(folder: Path) -> None:
    merge(pairs_in(str(folder))[0], str(folder / "out"))
    with pytest.raises(MergeError, match="is one of the pairs to merge"):
        merge(pairs_in(str(folder))[0], str(folder / "out"))
    assert IndexedDataset(folder / "out").num_documents == 4


def test_pairs_with_and_without_modes_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(IndexedDatasetError, match="has no modes; leave --multimodal out"):
        merge(pairs_in(str(folder))[0], str(tmp_path / "out"), multimodal=True)


def test_the_tool_takes_a_bare_name(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(TOOL), "--input", str(folder), "--output-prefix", "merged"], capture_output=True, text=True, cwd=folder.parent
    )
    assert (result.returncode, result.stdout) == (0, "merged.bin and .idx: 4 documents, 3 tokens of 2 pairs\n")


def test_the_tool_prints_one_line_for_a_fault(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(TOOL), "--input", str(tmp_path / "no"), "--output-prefix", "x"], capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (1, f"error: --input {tmp_path}/no: no such folder.\n")
