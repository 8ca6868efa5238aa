"""The calibration of this machine: complete, and near what it measured."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from domino_lm.parallel.collectives import Communicator
from domino_lm.simulate import calibrate
from domino_lm.simulate.hardware import Gemm, Hardware, MeasuredDevice, read_hardware
from domino_lm.simulate.predict import BASELINE, Setting, named_model, predict


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return calibrate.calibrate(Communicator.single(), torch.device("cpu"), "here")


def test_a_calibration_predicts_a_step_and_survives_its_file(hardware: Hardware, tmp_path: Path) -> None:
    hardware.write_json(tmp_path / "here.json")
    setting = Setting(model=named_model("debug-gpt"), hardware=read_hardware(tmp_path / "here.json"), tensor_parallel=1)
    assert predict(setting, BASELINE).step_s == predict(Setting(**{**vars(setting), "hardware": hardware}), BASELINE).step_s > 0


def test_every_pass_that_costs_name_has_a_measured_rate(hardware: Hardware) -> None:
    assert isinstance(hardware.device, MeasuredDevice)
    named = {"join", "norm", "norm_grad", "join_grad", "gelu", "gelu_grad", "swiglu", "swiglu_grad", "rotate", "layout", "softmax"}
    assert named | {"lookup", "lookup_grad", "bias_grad", "accumulate", "default"} <= set(hardware.device.pass_rates)
    assert all(rate > 0 for rate in hardware.device.pass_rates.values())


def test_a_gemm_of_another_shape_takes_about_what_is_predicted(hardware: Hardware) -> None:
    x, weight = torch.randn(768, 384), torch.randn(640, 384)
    samples = []
    for _ in range(30):
        start_s = time.thread_time()
        F.linear(x, weight)
        samples.append(time.thread_time() - start_s)
    assert hardware.device.gemm_s(Gemm(768, 640, 384), 4) == pytest.approx(sorted(samples)[8], rel=0.5)


def test_a_line_is_found_beside_outliers() -> None:
    points = [(size, 0.5 + 2.0 * size) for size in (1, 2, 4, 8, 16, 32)]
    points[1] = (2, 40.0)
    assert calibrate._line(points) == pytest.approx((0.5, 2.0))
