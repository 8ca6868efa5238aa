"""What watches a run: a bar on a terminal, plain lines elsewhere, silence on all ranks but one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from domino_lm.config.arguments import parse_arguments
from domino_lm.parallel.collectives import Communicator
from domino_lm.simulate.hardware import HARDWARE
from domino_lm.watch.progress import ProgressBar
from domino_lm.watch.watch import Watch, mfu_basis, peak_flops
from tests.unit.test_metrics import REPORT

CPU = torch.device("cpu")
FLAGS = "--preset debug-gpt --vocab-size 100 --lr 1e-3 --micro-batch-size 2 --train-iters 2 --log-interval 1"


def watched(flags: str, rank: int = 0) -> None:
    world = Communicator.single()
    world.rank = rank
    watch = Watch(parse_arguments(f"{FLAGS} {flags}".split()), print, world, CPU, total=2, begin=0, consumed_samples=0)
    for iteration in (1, 2):
        watch.step(dataclasses.replace(REPORT, iteration=iteration, consumed_samples=8 * iteration))
    watch.close()


def test_a_terminal_shows_a_bar_with_loss_and_speed_beside_the_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ProgressBar, "fits", staticmethod(lambda: True))
    watched("")
    shown = capsys.readouterr()
    assert len(re.findall(r"^ \[.*\] iteration +\d/ +2 \|", shown.out, re.M)) == 2
    assert "1/2" in shown.err
    assert "loss 5.3495, " in shown.err


def test_a_file_gets_plain_lines_and_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    watched("")
    shown = capsys.readouterr()
    assert shown.out.count("iteration        ") == 2
    assert shown.out.count("   tokens/s: ") == 2
    assert shown.err == ""


def test_other_ranks_are_silent_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched(f"--metrics-file {tmp_path}/m.jsonl --tensorboard-dir {tmp_path}/tb", rank=1)
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("driver", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
        ("NVIDIA B200", "dgx-b200"),
        ("NVIDIA GB200", "gb200-nvl72"),
    ],
)
def test_mfu_of_a_run_and_of_its_prediction_divide_by_the_same_peak(driver: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: driver)
    narrow, wide = (parse_arguments(f"{FLAGS} {flags}".split()) for flags in ("--bf16", ""))
    found = peak_flops(narrow, torch.device("cuda"))
    assert found == HARDWARE[machine].device.peak_flops
    assert found > 5 * (peak_flops(wide, torch.device("cuda")) or found)


def test_mfu_names_its_peak_and_formula_or_why_it_is_not_there() -> None:
    unknown, given = (parse_arguments(f"{FLAGS} {flags}".split()) for flags in ("", "--peak-tflops 2.5"))
    assert peak_flops(unknown, CPU) is None
    assert mfu_basis(unknown, CPU) == "MFU n/a: the peak of this cpu is not known; --peak-tflops names it"
    assert peak_flops(given, CPU) == 2.5e12
    assert "2.5 TFLOP/s a rank (--peak-tflops); 6 x GEMM weights" in mfu_basis(given, CPU)
