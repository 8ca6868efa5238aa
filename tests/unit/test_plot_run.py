"""Curves are read from what a run wrote, and drawn; what holds none is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from domino_lm.tools.plot_run import RunCurvesError, distinct_names, main, read_run, running_median
from domino_lm.watch.metrics_file import MetricsFile
from domino_lm.watch.tensorboard import TensorBoardLog
from tests.unit.test_metrics import REPORT, replace


def metrics(path: Path, steps: int = 30) -> Path:
    file = MetricsFile.open(str(path), 0)
    assert file is not None
    for i in range(1, steps + 1):
        values = {"lm_loss": 9.0 / i, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_s": 100.0 + i}
        file.write({"iteration": i, "consumed_samples": 8 * i, **values})
    file.write({"iteration": 20, "consumed_samples": 160, "split": "valid", "validation_loss": 0.5})
    file.close()
    return path


def test_a_metrics_file_gives_its_steps_along_both_axes(tmp_path: Path) -> None:
    run = read_run(metrics(tmp_path / "m.jsonl"))
    assert run.points("lm_loss", "iteration")[:2] == [(1, 9.0), (2, 4.5)]
    assert run.points("lm_loss", "samples")[:2] == [(8, 9.0), (16, 4.5)]
    assert run.points("validation_loss", "samples") == [(160, 0.5)]


def test_event_files_give_the_same_curves(tmp_path: Path) -> None:
    log = TensorBoardLog.open(str(tmp_path), 0, 0)
    assert log is not None
    for i in (1, 2):
        log.step(replace(REPORT, iteration=i, consumed_samples=8 * i))
    log.close()
    run = read_run(tmp_path)
    assert run.points("grad_norm", "samples") == [(8, pytest.approx(2.8561)), (16, pytest.approx(2.8561))]


def test_each_validation_set_and_each_resume_is_read_from_a_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    file = MetricsFile.open(str(path), 0)
    assert file is not None
    for i in (1, 2, 3):
        file.write({"iteration": i, "consumed_samples": 8 * i, "batch_size": 8, "lm_loss": 1.0, "resumed": i == 3})
    for number in (0, 1):
        file.write({"iteration": 2, "consumed_samples": 16, "split": f"valid-{number}", "validation_loss": 5.0 + number})
    file.close()
    run = read_run(path)
    assert [(name, run.points(name, "iteration")) for name in run.evaluations] == [
        ("validation_loss-0", [(2, 5.0)]),
        ("validation_loss-1", [(2, 6.0)]),
    ]
    assert (run.resumed_at("iteration"), run.resumed_at("samples")) == ([2], [16])
    assert main([str(path), "--output", str(tmp_path / "a.png")]) == 0


def test_each_validation_set_and_each_resume_is_read_from_event_files(tmp_path: Path) -> None:
    for begin in (0, 2):
        log = TensorBoardLog.open(str(tmp_path), begin, 8 * begin)
        assert log is not None
        log.settings({"lr": 1.0})
        for i in (begin + 1, begin + 2):
            log.step(replace(REPORT, iteration=i, consumed_samples=8 * i))
        log.validation(begin + 2, 8 * (begin + 2), 4.0, "-0")
        log.validation(begin + 2, 8 * (begin + 2), 5.0, "-1")
        log.close()
    run = read_run(tmp_path)
    assert [(name, run.points(name, "samples")) for name in run.evaluations] == [
        ("validation_loss-0", [(16, 4.0), (32, 4.0)]),
        ("validation_loss-1", [(16, 5.0), (32, 5.0)]),
    ]
    assert (run.resumed_at("iteration"), run.resumed_at("samples")) == ([2], [16])


def test_several_runs_are_drawn_into_one_picture(tmp_path: Path) -> None:
    runs = [str(metrics(tmp_path / name / "metrics.jsonl")) for name in ("a", "b")]
    output = tmp_path / "curves.png"
    assert main([*runs, "--output", str(output)]) == 0
    width, height = struct.unpack(">II", output.read_bytes()[16:24])
    assert width > 1000
    assert height > 600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "curves.png"]


@pytest.mark.parametrize("content", ["", '{"no": "step"}\n', "not json\n"])
def test_a_file_without_steps_is_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text(content)
    with pytest.raises(RunCurvesError, match=r"m\.jsonl holds no step"):
        read_run(tmp_path / "m.jsonl")


def test_a_missing_run_ends_with_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl holds no step" in capsys.readouterr().err


def test_runs_are_named_by_what_tells_them_apart() -> None:
    assert distinct_names([Path("runs/a/metrics.jsonl"), Path("runs/b/metrics.jsonl")]) == ["a", "b"]


def test_a_running_median_passes_over_a_single_outlier() -> None:
    assert running_median([1.0, 1.0, 50.0, 1.0, 1.0], width=3) == [1.0, 1.0, 1.0, 1.0, 1.0]
