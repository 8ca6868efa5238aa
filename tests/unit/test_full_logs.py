"""A disk that fills under the logs of a run: one warning for each log, nothing half-made left behind, and training goes on."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from unittest import mock

import pytest

from domino_lm.watch import tensorboard
from domino_lm.watch.metrics_file import MetricsFile, read_lines
from domino_lm.watch.tensorboard import TensorBoardLog
from tests.full_disk import files_of_at_most
from tests.unit.test_metrics import REPORT


@pytest.mark.parametrize("size_bytes", [0, 2000])
def test_tensorboard_warns_once_and_its_thread_prints_nothing(tmp_path: Path, size_bytes: int, capfd: pytest.CaptureFixture[str]) -> None:
    with files_of_at_most(size_bytes), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        log = TensorBoardLog.open(str(tmp_path), 0, 0)
        for _ in range(2000):
            if log is not None:
                log.step(REPORT)
        if log is not None:
            log.close()
    assert len(said) == 1, [str(warning.message) for warning in said]
    assert "File too large" in str(said[0].message)
    assert capfd.readouterr().err == ""


def test_other_threads_still_say_what_failed(capfd: pytest.CaptureFixture[str]) -> None:
    import threading

    told: list[object] = []
    with mock.patch.object(threading, "excepthook", told.append):
        tensorboard.silence_writer()
        tensorboard.silence_writer()
        thread = threading.Thread(target=os.stat, args=("/no such file",))
        thread.start()
        thread.join()
    assert len(told) == 1


def test_a_metrics_file_that_cannot_be_rewritten_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile.open(str(path), 0)
    assert first is not None
    for iteration in range(1, 30):
        first.write({"iteration": iteration})
    first.close()
    before = read_lines(path)
    with files_of_at_most(50), pytest.warns(UserWarning, match="cannot be written") as said:
        assert MetricsFile.open(str(path), 20) is None
    assert len(said) == 1
    assert read_lines(path) == before
    assert os.listdir(tmp_path) == [path.name]


def test_a_metrics_file_that_is_full_warns_once(tmp_path: Path) -> None:
    with files_of_at_most(50), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        file = MetricsFile.open(str(tmp_path / "metrics.jsonl"), 0)
        assert file is not None
        for iteration in range(1, 30):
            file.write({"iteration": iteration})
        file.close()
    assert len(said) == 1


def test_events_that_cannot_be_trimmed_stay_as_they_are(tmp_path: Path) -> None:
    log = TensorBoardLog.open(str(tmp_path), 0, 0)
    assert log is not None
    for _ in range(20):
        log.step(REPORT)
    log.close()
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    with files_of_at_most(50), pytest.raises(OSError):
        tensorboard.drop_later_points(str(tmp_path), REPORT.iteration - 1, 0)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
