"""A rank writes its blocks with several threads, each into a file of its own."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from domino_lm.checkpoint import writing
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.manifest import HashedWriter, Manifest
from tests.unit.test_checkpoint import TRACKER, Run


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thread is worth its file."""
    monkeypatch.setattr(writing, "_BYTES_PER_THREAD", 1)


@pytest.mark.usefixtures("small_files")
def test_a_large_share_is_written_by_several_threads_and_read_back_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrote, write = set(), HashedWriter.write

    def noted(file: HashedWriter, data: bytes) -> int:
        wrote.add(threading.get_ident())
        return write(file, data)

    monkeypatch.setattr(HashedWriter, "write", noted)
    saved, loaded = Run(), Run(seed=2, steps=0)
    path = saved.save(tmp_path)
    assert sorted(file.name for file in path.glob("*.distcp")) == [f"__0_{number}.distcp" for number in range(4)]
    assert len(wrote - {threading.get_ident()}) > 1
    manifest = Manifest.read(path)
    assert manifest is not None
    assert {f"__0_{number}.distcp" for number in range(4)} < manifest.files.keys()
    loaded.load(tmp_path)
    assert loaded.bits() == saved.bits()


@pytest.mark.usefixtures("small_files")
def test_what_one_of_the_threads_cannot_write_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Run().save(tmp_path)
    write = HashedWriter.write

    def full(file: HashedWriter, data: bytes) -> int:
        if str(file.name).endswith("__0_2.distcp"):
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(HashedWriter, "write", full)
    with pytest.raises(CheckpointError, match=r"__0_2.distcp: No space left on device"):
        Run().save(tmp_path, 40)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000020", TRACKER]


def test_shares_are_even_and_hold_everything_once() -> None:
    sizes = [5, 100, 3, 60, 40, 1, 2, 90]
    shares = writing._shares(sizes, 3)
    assert sorted(number for share in shares for number in share) == list(range(8))
    assert all(share == sorted(share) for share in shares)
    assert max(sum(sizes[n] for n in share) for share in shares) <= 110
    assert writing._shares(sizes, 1) == [list(range(8))]
    assert writing._shares([], 1) == []
