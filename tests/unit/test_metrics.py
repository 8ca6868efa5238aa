"""Log lines and TensorBoard points are Megatron's, and say the truth about intervals."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from domino_lm.watch.metrics import LogInterval, RunRate, SpeedScale, StepReport, validation_line
from domino_lm.watch.metrics_file import MetricsFile, read_lines
from domino_lm.watch.tensorboard import TensorBoardLog
from domino_lm.watch.wandb_log import WandbLog

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


SCALE = SpeedScale(seq_length=30, flops_per_token=1e9, ranks=2, peak_flops=1e13)


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


def test_the_loss_scale_is_told_in_the_line_and_in_tensorboard(tmp_path: Path) -> None:
    assert "| loss scale: 65536.0 | grad norm" in line(replace(REPORT, loss_scale=65536.0))
    log = TensorBoardLog.open(str(tmp_path), 0, 0)
    assert log is not None
    log.step(replace(REPORT, loss_scale=65536.0))
    log.close()
    assert points(tmp_path)["loss-scale"] == [(1, 65536.0)]


def test_an_interval_of_skipped_steps_alone_prints_no_loss() -> None:
    found = line(replace(REPORT, skipped=True, loss_sum=float("nan")), replace(REPORT, skipped=True, grad_norm=float("inf")))
    assert "lm loss" not in found
    assert "| global batch size:     8 | loss scale: 1.0 |" in found
    assert "number of skipped iterations:   2 |" in found


def test_first_and_last_loss_are_those_of_steps_that_counted() -> None:
    rate = RunRate()
    skipped = replace(REPORT, skipped=True, loss_sum=float("nan"))
    for report in (skipped, replace(REPORT, loss_sum=480.0), replace(REPORT, loss_sum=240.0), skipped):
        rate.add(report)
    assert (rate.first_loss, rate.last_loss, rate.steps) == (2.0, 1.0, 4)


def test_an_overflow_is_skipped_and_no_nan_iteration() -> None:
    found = line(replace(REPORT, skipped=True, grad_norm=float("inf")))
    assert "number of skipped iterations:   1 | number of nan iterations:   0 |" in found


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


def test_settings_stand_in_tensorboard_as_one_text(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    events = EventAccumulator(str(tmp_path)).Reload()
    texts = [tag for tag in events.Tags()["tensors"] if tag.endswith("/text_summary")]
    assert texts == ["settings/text_summary"]
    assert events.Tensors(texts[0])[0].tensor_proto.string_val == [b"| setting | value |\n|---|---|\n| num_layers | 2 |"]


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


def test_asked_for_numbers_stand_where_megatron_puts_them() -> None:
    interval = LogInterval(SCALE, log_throughput=True)
    report = replace(REPORT, num_zeros=2, params_norm=38.1031, seconds=0.1)
    interval.add(report)
    found = interval.line(report, 20, NOW)
    assert "| elapsed time per iteration (ms): 100.0 | throughput per GPU (TFLOP/s/GPU): 1.2 | learning rate" in found
    assert "| grad norm: 2.856 | num zeros: 2.0 | params norm: 38.103 | number of skipped" in found


def test_the_speed_line_says_tokens_waits_memory_and_mfu() -> None:
    interval = LogInterval(SCALE)
    interval.add(replace(REPORT, seconds=0.1))
    interval.add(replace(REPORT, seconds=0.1, data_seconds=0.002, exposed_s=0.025))
    assert interval.speed_line(2**29) == (
        "   tokens/s: 2,400 | exposed communication: 25.0% of a step | waiting for data: 1.0 ms per step | memory: 0.50 GiB | MFU: 12.0%"
    )


def test_an_exposed_share_says_its_step_beside_one_that_took_far_longer() -> None:
    interval = LogInterval(SCALE)
    interval.add(replace(REPORT, iteration=9, seconds=93.1))
    interval.add(replace(REPORT, iteration=10, seconds=0.1, exposed_s=0.025))
    assert "exposed communication: 25.0% of a step (of iteration 10; 9 took 93.1 s, and was not looked into) |" in interval.speed_line(0)


def test_without_a_known_peak_or_a_recorded_step_the_speed_line_says_so() -> None:
    interval = LogInterval(replace(SCALE, peak_flops=None))
    interval.add(REPORT)
    assert "exposed communication: n/a" in interval.speed_line(0)
    assert interval.speed_line(0).endswith("MFU: n/a")


def test_tensorboard_holds_what_was_asked_for(tmp_path: Path) -> None:
    log = TensorBoardLog.open(str(tmp_path), 0, 0, world_size=2)
    assert log is not None
    log.step(replace(REPORT, num_zeros=7, params_norm=38.5), throughput=1.5)
    log.close()
    found = points(tmp_path)
    assert (found["num-zeros"], found["params-norm"], found["world-size"]) == ([(1, 7.0)], [(1, 38.5)], [(1, 2.0)])
    assert found["num-zeros vs samples"] == [(8, 7.0)]
    assert found["throughput"] == [(1, 1.5)]


def test_a_resumed_metrics_file_holds_each_step_once(tmp_path: Path) -> None:
    path = str(tmp_path / "new" / "metrics.jsonl")
    for begin, end in [(0, 5), (3, 6)]:
        file = MetricsFile.open(path, begin)
        assert file is not None
        for iteration in range(begin + 1, end + 1):
            file.write({"iteration": iteration, "run": begin})
        file.close()
    assert [line["iteration"] for line in read_lines(path)] == [1, 2, 3, 4, 5, 6]
    assert [line["run"] for line in read_lines(path)] == [0, 0, 0, 3, 3, 3]


def test_a_number_that_is_not_finite_is_null_in_the_metrics_file(tmp_path: Path) -> None:
    file = MetricsFile.open(str(tmp_path / "metrics.jsonl"), 0)
    assert file is not None
    file.write({"iteration": 1, "lm_loss": float("nan")})
    file.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [{"iteration": 1, "lm_loss": None}]


def test_a_metrics_file_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="--metrics-file .* cannot be written"):
        assert MetricsFile.open(str(tmp_path), 0) is None


def test_wandb_that_is_not_installed_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.warns(UserWarning, match="pip install wandb"):
        assert WandbLog.open("project", None, None, {}) is None


class FakeWandb:
    """What of the wandb package is used, kept in memory."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.opened: dict[str, object] = {}
        self.finished = False

    def init(self, **settings: object) -> FakeWandb:
        self.opened = settings
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_wandb_gets_settings_and_the_values_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = WandbLog.open("project", "name", None, {"num_layers": 2})
    assert log is not None
    log.log({"lm loss": 1.0, "params-norm": None}, 3)
    log.close()
    assert fake.opened == {"project": "project", "name": "name", "dir": None, "config": {"num_layers": 2}}
    assert fake.logged == [(3, {"lm loss": 1.0})]
    assert fake.finished


def test_the_real_wandb_keeps_an_offline_run_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    log = WandbLog.open("project", "name", str(tmp_path / "new"), {"num_layers": 2, "data_path": ("a", "b"), "split": None})
    assert log is not None
    log.log({"lm loss": 1.0, "params-norm": None}, 3)
    log.log({"lm loss validation-0": 1.0}, 3)
    log.close()
    assert list((tmp_path / "new").rglob("run-*.wandb"))
