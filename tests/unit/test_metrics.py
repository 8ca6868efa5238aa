"""Log lines and TensorBoard points are Megatron's, and say the truth about intervals."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from domino_lm.training.metrics import LogInterval, StepReport, TensorBoardLog, validation_line

REPORT = StepReport(
    iteration=1,
    consumed_samples=8,
    batch_size=8,
    loss_sum=5.349459171295166 * 240,
    tokens=240,
    learning_rate=8e-4,
    grad_norm=2.8561,
    skipped=False,
    seconds=0.0727,
)
NOW = datetime(2026, 11, 29, 17, 44, 31, 53224)


def line(*reports: StepReport) -> str:
    interval = LogInterval()
    for report in reports:
        interval.add(report)
    return interval.line(reports[-1], 20, NOW)


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def write(folder: Path, begin: int, end: int) -> None:
    log = TensorBoardLog.open(str(folder), begin, begin * 8)
    assert log is not None
    log.settings({"num_layers": 2})
    for iteration in range(begin + 1, end + 1):
        log.step(replace(REPORT, iteration=iteration, consumed_samples=iteration * 8))
    log.close()


def test_the_log_line_is_megatrons() -> None:
    assert line(REPORT) == (
        " [2026-11-29 17:44:31.053224] iteration        1/      20 | consumed samples:            8 | "
        "elapsed time per iteration (ms): 72.7 | learning rate: 8.000000E-04 | global batch size:     8 | lm loss: 5.349459E+00 | "
        "loss scale: 1.0 | grad norm: 2.856 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )


def test_the_logged_loss_weighs_every_token_of_the_interval_alike() -> None:
    assert "lm loss: 9.200000E+00" in line(replace(REPORT, loss_sum=2.0, tokens=1), replace(REPORT, loss_sum=90.0, tokens=9))


def test_the_mean_of_an_interval_holds_no_earlier_step() -> None:
    interval = LogInterval()
    interval.add(replace(REPORT, loss_sum=100.0, tokens=1))
    interval.clear()
    interval.add(replace(REPORT, loss_sum=3.0, tokens=1))
    assert "lm loss: 3.000000E+00" in interval.line(REPORT, 20, NOW)


def test_an_interval_without_a_counted_token_prints_a_zero_loss() -> None:
    assert "lm loss: 0.000000E+00" in line(replace(REPORT, loss_sum=0.0, tokens=0))


def test_a_skipped_step_is_counted_and_stays_out_of_the_loss() -> None:
    found = line(REPORT, replace(REPORT, loss_sum=float("nan"), skipped=True))
    assert "lm loss: 5.349459E+00" in found
    assert "number of skipped iterations:   1 |" in found


def test_validation_lines_are_megatrons() -> None:
    assert validation_line(2, 4.641648) == " validation loss at iteration 2 | lm loss value: 4.641648E+00 | lm loss PPL: 1.037151E+02 | "
    assert re.match(r" validation loss at iteration 3 on test set \| lm loss value: 1.0", validation_line(3, 1.0, "test"))
    assert f"{2.718281828459045**20:.6E}" in validation_line(1, 1e9)


def test_tensorboard_holds_megatrons_tags_and_steps(tmp_path: Path) -> None:
    write(tmp_path, 0, 3)
    found = points(tmp_path)
    plain = ["learning-rate", "batch-size", "lm loss", "grad-norm", "loss-scale"]
    assert sorted(found) == sorted([*plain, *(f"{tag} vs samples" for tag in plain), "iteration-time"])
    assert [step for step, _ in found["lm loss"]] == [1, 2, 3]
    assert [step for step, _ in found["lm loss vs samples"]] == [8, 16, 24]
    assert [step for step, _ in found["iteration-time"]] == [2, 3]


def test_a_resumed_run_leaves_each_point_once(tmp_path: Path) -> None:
    write(tmp_path, 0, 5)
    write(tmp_path, 3, 6)
    found = points(tmp_path)
    assert [step for step, _ in found["lm loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in found["lm loss vs samples"]] == [8, 16, 24, 32, 40, 48]


def test_settings_stand_in_tensorboard_as_texts(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    assert "num_layers/text_summary" in EventAccumulator(str(tmp_path)).Reload().Tags()["tensors"]


def test_validation_points_have_their_perplexity_and_both_axes(tmp_path: Path) -> None:
    log = TensorBoardLog.open(str(tmp_path / "new" / "folder"), 0, 0)
    assert log is not None
    log.validation(10, 80, 1.0)
    log.close()
    found = points(tmp_path / "new" / "folder")
    assert found["lm loss validation"] == [(10, 1.0)]
    assert found["lm loss validation vs samples"] == [(80, 1.0)]
    assert found["lm loss validation ppl"][0][1] == pytest.approx(2.71828, rel=1e-5)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="--tensorboard-dir .* cannot be written"):
        assert TensorBoardLog.open(str(tmp_path / "file"), 0, 0) is None
