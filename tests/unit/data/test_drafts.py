"""Files in the making: whole under their final name or not there, one writer at a time, nothing left of a killed one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from domino_lm.data.drafts import BusyError, Draft, draft_suffix
from domino_lm.data.indexed import IndexedDataset, IndexedDatasetError, IndexedDatasetWriter

ROOT = Path(__file__).parents[3]
OLD, NEW = [[7], [8, 9]], [[1, 2, 3], [], [4]]


def write(prefix: Path, documents: list[list[int]] = NEW) -> None:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add_document(document)


def content(prefix: Path) -> list[bytes]:
    return [Path(f"{prefix}{extension}").read_bytes() for extension in (".bin", ".idx")]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_second_writer_of_the_same_pair_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as first:
        first.add_documents([1, 2, 3, 4], [3, 1], [1, 0, 1])
        with pytest.raises(BusyError, match=r"x\.bin\.tmp-.* is being written by another process"):
            IndexedDatasetWriter(tmp_path / "x", np.uint16)
    assert names(tmp_path) == ["x.bin", "x.idx"]
    assert content(tmp_path / "x") == content_of_new(tmp_path)


def content_of_new(folder: Path) -> list[bytes]:
    write(folder / "expected")
    return content(folder / "expected")


def test_a_draft_of_another_process_that_is_alive_is_respected(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib\nfrom domino_lm.data.drafts import Draft\n"
        "draft = Draft(pathlib.Path(sys.argv[1])); print('ready', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "x")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        before = names(tmp_path)
        with pytest.raises(BusyError):
            Draft(tmp_path / "x")
        assert names(tmp_path) == before
        other.kill()
    draft = Draft(tmp_path / "x")
    assert names(tmp_path) == [f"x{draft_suffix()}"]
    draft.discard()


def test_what_a_killed_writer_on_another_machine_left_goes_when_it_is_old(tmp_path: Path) -> None:
    left = ["x.tmp-elsewhere-1", "x.tmp-elsewhere-2", "x.tmp-notes", "y.tmp-elsewhere-1"]
    for name in left:
        (tmp_path / name).write_bytes(b"")
    os.utime(tmp_path / left[0], (1, 1))
    Draft(tmp_path / "x").discard()
    assert names(tmp_path) == left[1:]


KILLED = """
import os, pathlib, signal, sys
from tests.unit.data.test_drafts import write
name, number = sys.argv[2], int(sys.argv[3])
module = pathlib.Path if name == "unlink" else os
real, calls = getattr(module, name), 0
def deadly(*arguments, **options):
    global calls
    calls += 1
    if calls > number:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **options)
setattr(module, name, deadly)
write(pathlib.Path(sys.argv[1]))
"""


@pytest.mark.parametrize(("call", "number"), [("fsync", 0), ("fsync", 1), ("unlink", 0), ("replace", 0), ("replace", 1), ("unlink", 1)])
def test_a_writer_killed_at_any_moment_of_its_end_never_leaves_halves_that_open_as_one(tmp_path: Path, call: str, number: int) -> None:
    expected = content_of_new(tmp_path)
    write(tmp_path / "x", OLD)
    old = content(tmp_path / "x")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "x"), call, str(number)], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    if (tmp_path / "x.idx").exists():
        assert content(tmp_path / "x") in (old, expected)
    else:
        with pytest.raises(IndexedDatasetError, match=r"x\.idx: no such file"):
            IndexedDataset(tmp_path / "x")
    write(tmp_path / "x")
    assert (content(tmp_path / "x"), names(tmp_path)) == (expected, ["expected.bin", "expected.idx", "x.bin", "x.idx"])
