"""The cache of indices under many processes: one builds, the others wait, all get the same, and no node needs another's folder."""

import errno
import fcntl
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from domino_lm.data.drafts import Draft
from domino_lm.data.index_cache import IndexCache

SHAPES: dict[str, tuple[int, ...]] = {"order": (1000,)}
CONTEXT = multiprocessing.get_context("fork")


def cache(folder: Path) -> IndexCache:
    return IndexCache(folder, "train", {"data": 1}, SHAPES)


def build_slowly(folder: Path, log: Path) -> list[np.ndarray]:
    """Writes down that it was called."""
    with open(log, "a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(0.3)
    return [np.random.RandomState(5).permutation(1000)]


def ask(folder: Path, log: Path, out: Path) -> None:
    (order,) = cache(folder).load_or_build(lambda: build_slowly(folder, log))
    np.save(out / f"{os.getpid()}.npy", order)


def together(*arguments: Sequence[Path]) -> None:
    processes = [CONTEXT.Process(target=ask, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
        assert process.exitcode == 0


def test_one_process_builds_and_all_others_wait_for_it(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    together(*[(tmp_path / "cache", tmp_path / "log", tmp_path / "out")] * 6)
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    orders = [np.load(path).tobytes() for path in (tmp_path / "out").iterdir()]
    assert (len(orders), len(set(orders))) == (6, 1)


def test_builders_on_a_file_system_without_locks_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / "out").mkdir()
    together(*[(tmp_path / "cache", tmp_path / "log", tmp_path / "out")] * 3)
    assert len((tmp_path / "log").read_text().splitlines()) > 1
    assert len({np.load(path).tobytes() for path in (tmp_path / "out").iterdir()}) == 1
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".npy", ".lock"}


def test_what_a_killed_builder_left_is_removed(tmp_path: Path) -> None:
    def die(path: Path) -> None:
        Draft(path)
        os._exit(9)

    cache(tmp_path).load_or_build(lambda: [np.arange(1000)])
    path = next(tmp_path.glob("*.npy"))
    path.unlink()
    dying = CONTEXT.Process(target=die, args=(path,))
    dying.start()
    dying.join(30)
    assert len(list(tmp_path.glob("*.npy.tmp-*"))) == 1
    cache(tmp_path).load_or_build(lambda: [np.arange(1000)])
    assert list(tmp_path.glob("*.npy*")) == [path]


def test_nodes_with_folders_of_their_own_build_the_same(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    together(*[(tmp_path / f"node{i % 2}", tmp_path / f"log{i % 2}", tmp_path / "out") for i in range(4)])
    assert [len((tmp_path / f"log{i}").read_text().splitlines()) for i in range(2)] == [1, 1]
    assert len({np.load(path).tobytes() for path in (tmp_path / "out").iterdir()}) == 1


def test_a_builder_that_dies_does_not_hold_up_the_others(tmp_path: Path) -> None:
    def die() -> list[np.ndarray]:
        os._exit(9)

    dying = CONTEXT.Process(target=lambda: cache(tmp_path).load_or_build(die))
    dying.start()
    dying.join(30)
    (order,) = cache(tmp_path).load_or_build(lambda: [np.arange(1000)])
    assert order.tolist() == list(range(1000))


def test_a_fault_of_the_builder_comes_out_and_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> list[np.ndarray]:
        raise ValueError("cannot be built")

    with pytest.raises(ValueError, match="cannot be built"):
        cache(tmp_path).load_or_build(fail)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_a_cached_index_of_another_shape_is_named_and_built_again(tmp_path: Path) -> None:
    cache(tmp_path).load_or_build(lambda: [np.arange(1000)])
    np.save(next(tmp_path.glob("*.npy")), np.arange(7))
    with pytest.warns(UserWarning, match=r"its shape is \(7,\), not \(1000,\)"):
        (order,) = cache(tmp_path).load_or_build(lambda: [np.arange(1000)])
    assert len(order) == 1000
