"""Curves are read from what a run wrote, and drawn; what holds none is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tensorboard.summary.writer import event_file_writer

from domino_lm.tools import plot_run
from domino_lm.tools.plot_run import RunCurvesError, distinct_names, main, read_run, running_mean, running_median
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


def test_each_validation_set_and_each_resume_is_read_from_event_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Files of one second are read in the order of this number as text, in which 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
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


def test_a_running_mean_has_no_bias_at_the_beginning() -> None:
    assert running_mean([4.0, 4.0, 4.0], 0.9) == pytest.approx([4.0, 4.0, 4.0])
    assert running_mean([0.0, 3.0], 0.5) == pytest.approx([0.0, 2.0])


def partial_run(path: Path) -> Path:
    """Losses alone, as another program may have written them."""
    path.write_text("".join(json.dumps({"iteration": i, "lm_loss": 5.0 / i}) + "\n" for i in range(1, 40)))
    return path


def test_what_a_run_does_not_hold_is_said_and_the_rest_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plot_run, "write_png", lambda figure, _: drawn.append(figure))
    runs = [str(path) for path in (metrics(tmp_path / "whole.jsonl"), partial_run(tmp_path / "part.jsonl"), tmp_path / "none.jsonl")]
    assert main([*runs, "--smoothing", "0.6"]) == 0
    error = capsys.readouterr().err.splitlines()
    assert error == [
        f"not drawn: {tmp_path}/none.jsonl holds no step of a run; give what --metrics-file or --tensorboard-dir wrote.",
        "not drawn: learning rate of the next step, which is not in part",
        "not drawn: gradient norm, before clipping, which is not in part",
        "not drawn: throughput, which is not in part",
        "not drawn: validation loss, which is not in part",
    ]
    assert main([runs[1]]) == 0
    assert [len([axes for axes in figure.axes if axes.axison]) for figure in drawn] == [4, 1]
    assert [axes.get_title("right") for axes in drawn[0].axes] == ["", "not in part", "not in part", "not in part"]
    assert drawn[0].legends[0].get_title().get_text() == "smoothed by 0.6; faint: as logged"
    assert main([runs[1], "--x", "samples"]) == 0  # an empty panel that says so
    assert drawn[2].axes[0].get_title("right") == "not in part"


def test_a_folder_is_known_by_its_metrics_file(tmp_path: Path) -> None:
    metrics(tmp_path / "metrics.jsonl")
    assert read_run(tmp_path).points("lm_loss", "iteration")[0] == (1, 9.0)


def test_event_files_hold_throughput_along_both_axes(tmp_path: Path) -> None:
    log = TensorBoardLog.open(str(tmp_path), 0, 0)
    assert log is not None
    log.step(replace(REPORT, iteration=2, consumed_samples=16))
    log.extras({"speed/tokens-per-second": 250.0, "speed/mfu": None}, 2)
    log.close()
    run = read_run(tmp_path)
    assert run.points("tokens_per_s", "iteration") == [(2, 250.0)]
    assert run.points("tokens_per_s", "samples") == [(16, 250.0)]


def test_a_run_that_goes_on_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path, states = tmp_path / "m.jsonl", iter([None, 10, 10, 20])

    def sleep(_: float) -> None:
        try:
            steps = next(states)
        except StopIteration:
            raise KeyboardInterrupt from None
        if steps is not None and not (path.exists() and len(path.read_text().splitlines()) == steps + 1):
            metrics(path, steps)

    monkeypatch.setattr(plot_run.time, "sleep", sleep)
    assert main([str(path), "--follow", "1", "--output", str(tmp_path / "run.png")]) == 0
    assert capsys.readouterr().out.count("run.png") == 2


@pytest.mark.parametrize("flags", ["--smoothing 1", "--follow 0"])
def test_smoothing_and_following_have_bounds(flags: str, tmp_path: Path) -> None:
    assert main([str(metrics(tmp_path / "m.jsonl")), *flags.split()]) == 2
