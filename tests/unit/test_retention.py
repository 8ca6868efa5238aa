"""What is removed from a folder of checkpoints, and what never is."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from domino_lm.checkpoint import retention, save_load
from domino_lm.checkpoint.folder import find_checkpoint
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.publish import publish
from domino_lm.checkpoint.retention import Retention, remove_leftovers, remove_replaced, saving_in
from tests.damage import cut, flip_bit
from tests.unit.test_checkpoint import DATA_FILE, MESH, STATE, TRACKER, Run

LEFTOVER = "iter_0000040.tmp-0123abcd"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Iterations 10 to 50."""
    folder, run = tmp_path_factory.mktemp("saved"), Run()
    for iteration in range(10, 60, 10):
        run.save(folder, iteration)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name.removeprefix("iter_00000") for path in folder.glob("iter_*"))


# --- leftovers


def test_a_save_removes_what_interrupted_ones_left(tmp_path: Path) -> None:
    shutil.copytree(Run().save(tmp_path), tmp_path / LEFTOVER)
    (tmp_path / f"{TRACKER}.0123abcd").write_text("40")
    Run().save(tmp_path, 60)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000020", "iter_0000060", TRACKER]


def test_a_start_leaves_alone_what_is_no_leftover(tmp_path: Path) -> None:
    others = ["iter_0000040", "iter_0000040.tmp", "iter_0000040.tmp-mine", "run.tmp-0123abcd", "notes.txt"]
    for name in others:
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(others)


def test_a_save_under_way_is_no_leftover(tmp_path: Path) -> None:
    with saving_in(tmp_path):
        (tmp_path / LEFTOVER).mkdir()
        remove_leftovers(tmp_path)
        with saving_in(tmp_path):  # another run's save does not wait
            assert (tmp_path / LEFTOVER).is_dir()
    remove_leftovers(tmp_path)
    assert not (tmp_path / LEFTOVER).exists()


def test_what_a_killed_save_leaves_is_removed(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with saving_in(tmp_path):
            (tmp_path / LEFTOVER).mkdir()
            time.sleep(60)
        os._exit(0)
    while not (tmp_path / LEFTOVER).exists():
        time.sleep(0.01)
    remove_leftovers(tmp_path)
    assert (tmp_path / LEFTOVER).exists()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    remove_leftovers(tmp_path)
    assert not (tmp_path / LEFTOVER).exists()


def test_a_checkpoint_that_was_moved_aside_comes_back(tmp_path: Path) -> None:
    path = Run().save(tmp_path)
    path.rename(tmp_path / "iter_0000020.tmp-0123abcd-old")
    (tmp_path / "iter_0000020.tmp-0123abcd").mkdir()
    remove_leftovers(tmp_path)
    assert find_checkpoint(tmp_path) == path
    assert names(tmp_path) == ["20"]


def test_without_locks_age_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(retention.fcntl, "flock", fail)
    (tmp_path / LEFTOVER).mkdir()
    remove_leftovers(tmp_path)
    assert (tmp_path / LEFTOVER).exists()
    os.utime(tmp_path / LEFTOVER, (0, time.time() - 2 * retention._ABANDONED_S))
    remove_leftovers(tmp_path)
    assert not (tmp_path / LEFTOVER).exists()


# --- older checkpoints


@pytest.mark.parametrize(
    ("keep_last", "retain_interval", "left"),
    [
        (1, None, ["50"]),
        (2, None, ["40", "50"]),
        (9, None, ["10", "20", "30", "40", "50"]),
        (None, 20, ["20", "40", "50"]),
        (2, 30, ["30", "40", "50"]),
    ],
)
def test_the_last_ones_and_multiples_stay(
    tmp_path: Path, saved: Path, keep_last: int | None, retain_interval: int | None, left: list[str]
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    remove_replaced(tmp_path, 50, Retention(keep_last, retain_interval))
    assert names(tmp_path) == left


def test_one_that_is_not_whole_counts_as_none_of_the_last(tmp_path: Path, saved: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    cut(tmp_path / "iter_0000040" / DATA_FILE)
    remove_replaced(tmp_path, 50, Retention(2))
    assert names(tmp_path) == ["30", "50"]


def test_the_one_loaded_from_newer_ones_and_megatrons_stay(tmp_path: Path, saved: Path) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    remove_replaced(tmp_path, 40, Retention(1, in_use=tmp_path / "iter_0000020"))
    assert names(tmp_path) == ["05", "20", "40", "50"]


def save(folder: Path, iteration: int, rule: Retention | None) -> Path:
    run = Run()
    return save_load.save_checkpoint(folder, iteration, run.stack, run.optimizer, STATE, MESH, "", rule)


def test_a_save_applies_the_rule_and_by_default_removes_nothing(tmp_path: Path) -> None:
    for iteration, rule, left in [(10, None, ["10"]), (20, Retention(), ["10", "20"]), (30, Retention(1), ["30"])]:
        save(tmp_path, iteration, rule)
        assert names(tmp_path) == left


def test_nothing_goes_if_the_newer_one_cannot_be_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10, None)

    def damaged(unfinished: Path, final: Path, tracked_as: str) -> None:
        publish(unfinished, final, tracked_as)
        flip_bit(final / DATA_FILE)

    monkeypatch.setattr(save_load, "publish", damaged)
    with pytest.raises(CheckpointError, match=f"{DATA_FILE} is damaged"):
        save(tmp_path, 20, Retention(1))
    assert names(tmp_path) == ["10", "20"]
