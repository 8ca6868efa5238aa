"""Merging: the documents of all pairs in order, and nothing half-written or doubled whatever the folder holds."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from domino_lm.data.indexed import IndexedDataset, IndexedDatasetError, IndexedDatasetWriter
from domino_lm.tools.merge_datasets import merge, pairs_in

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
    with pytest.raises(IndexedDatasetError, match=f"has no {extension} beside it"):
        pairs_in(str(folder))


def test_half_a_pair_is_refused_by_the_tool(folder: Path, tmp_path: Path) -> None:
    (folder / "a.idx").unlink()
    command = [sys.executable, str(TOOL), "--input", str(folder), "--output-prefix", str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stderr.count("\n"), "a.bin has no .idx beside it" in result.stderr) == (1, 1, True)


def test_a_folder_without_pairs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IndexedDatasetError, match="no pair of"):
        pairs_in(str(tmp_path))


def test_other_token_types_are_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    write(folder / "c", [[70000]], np.int32)
    with pytest.raises(IndexedDatasetError, match=r"holds int32 tokens, but .* holds uint16"):
        merge(pairs_in(str(folder))[0], str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_short_token_file_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "a.bin").write_bytes(b"\1\0")
    with pytest.raises(IndexedDatasetError, match=r"a\.bin: 2 bytes"):
        merge(pairs_in(str(folder))[0], str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_the_result_of_an_earlier_run_is_never_merged_into_itself(folder: Path) -> None:
    merge(pairs_in(str(folder))[0], str(folder / "out"))
    with pytest.raises(IndexedDatasetError, match="is one of the pairs to merge"):
        merge(pairs_in(str(folder))[0], str(folder / "out"))
    assert IndexedDataset(folder / "out").num_documents == 4


def test_pairs_with_and_without_modes_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(IndexedDatasetError, match="has no modes; leave --multimodal out"):
        merge(pairs_in(str(folder))[0], str(tmp_path / "out"), multimodal=True)


@pytest.mark.parametrize("moment", ["copying", "before the last rename"])
def test_a_killed_merge_leaves_nothing_that_opens_and_the_next_one_is_whole(folder: Path, tmp_path: Path, moment: str) -> None:
    patched = "shutil.copyfileobj" if moment == "copying" else "os.replace"
    program = (
        "import os, shutil, signal, sys\nfrom domino_lm.tools.merge_datasets import merge, pairs_in\n"
        f"real, calls = {patched}, []\n"
        "def deadly(*arguments):\n    calls.append(0)\n    real(*arguments)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"{patched} = deadly\nmerge(pairs_in(sys.argv[1])[0], sys.argv[2])\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(folder), str(tmp_path / "out")], cwd=TOOL.parents[1])
    assert killed.returncode == -9
    with pytest.raises(IndexedDatasetError, match=r"out\.idx: no such file"):
        IndexedDataset(tmp_path / "out")
    merge(pairs_in(str(folder))[0], str(tmp_path / "out"))
    assert (IndexedDataset(tmp_path / "out").num_tokens, sorted(path.name for path in tmp_path.iterdir())) == (
        3,
        ["in", "out.bin", "out.idx"],
    )


@pytest.mark.parametrize("extension", [".bin", ".idx"])
def test_an_output_that_is_a_link_to_an_input_is_refused(folder: Path, tmp_path: Path, extension: str) -> None:
    (tmp_path / f"out{extension}").symlink_to(folder / f"a{extension}")
    with pytest.raises(IndexedDatasetError, match="is one of the pairs to merge"):
        merge(pairs_in(str(folder))[0], str(tmp_path / "out"))
    assert IndexedDataset(folder / "a").num_tokens == 2


@pytest.mark.parametrize("now", [b"", b"\1\0\2\0\3\0"])
def test_a_pair_that_changes_while_it_is_merged_is_noticed(folder: Path, tmp_path: Path, now: bytes) -> None:
    dataset = IndexedDataset(folder / "a")
    (folder / "a.bin").unlink()
    (folder / "a.bin").write_bytes(now)
    with (
        pytest.raises(IndexedDatasetError, match=r"a\.bin: the file changed while it was read"),
        IndexedDatasetWriter(tmp_path / "out", np.uint16) as writer,
    ):
        writer.append(dataset)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_halves_that_were_swapped_are_refused(folder: Path, tmp_path: Path) -> None:
    a, b = ((folder / f"{name}.bin").read_bytes() for name in "ab")
    (folder / "a.bin").write_bytes(b)
    (folder / "b.bin").write_bytes(a)
    with pytest.raises(IndexedDatasetError, match=r"a\.bin: 2 bytes"):
        merge(pairs_in(str(folder))[0], str(tmp_path / "out"))


def test_a_full_disk_leaves_no_merged_pair(folder: Path, tmp_path: Path) -> None:
    program = (
        "import resource, runpy, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (2, 2))\n"
        f"sys.argv = ['x', '--input', {str(folder)!r}, '--output-prefix', {str(tmp_path / 'out')!r}]\n"
        f"sys.path[0] = {str(TOOL.parent)!r}\nrunpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (result.returncode, "File too large; free space" in result.stderr) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


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
