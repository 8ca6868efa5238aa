"""What watches a run: a bar on a terminal, plain lines elsewhere, silence on all ranks but one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from domino_lm.config.arguments import parse_arguments
from domino_lm.parallel.collectives import Communicator
from domino_lm.schedule.render import draw
from domino_lm.schedule.timeline import Span, Timeline
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


def test_tensorboard_has_groups_beside_megatrons_tags_a_layout_hyperparameters_and_the_timeline(tmp_path: Path) -> None:
    run = parse_arguments(f"{FLAGS} --tensorboard-dir {tmp_path}/tb --peak-tflops 1 --lr 2e-3".split())
    watch = Watch(run, lambda line: None, Communicator.single(), CPU, total=4, begin=0, consumed_samples=0)
    for iteration in (1, 2):
        report = dataclasses.replace(REPORT, iteration=iteration, consumed_samples=8 * iteration, skipped=iteration == 2, exposed_s=0.02)
        watch.step(report, epoch=0.5 * iteration)
    draw(Timeline.of([Span("m0 bodyF2.0", "compute", 0.0, 1.0)]), tmp_path / "step.png")
    watch.timeline(str(tmp_path / "step.png"), 2)
    watch.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    found = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"] if "/" in tag}
    assert found["progress/epoch"] == [0.5, 1.0]
    assert found["progress/skipped-steps"] == [0.0, 1.0]
    assert found["progress/tokens-consumed"] == [8.0 * run.model.seq_length, 16.0 * run.model.seq_length]
    assert len(found["speed/tokens-per-second"]) == len(found["speed/mfu"]) == 1  # without the first step, which is start-up
    assert found["speed/exposed-communication"] == pytest.approx([0.02 / 0.0727] * 2)
    assert events.Images("timeline")[0].encoded_image_string == (tmp_path / "step.png").read_bytes()
    layout = layout_pb2.Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert layout.category[0].chart[0].title == "loss"
    charted = {tag.strip("^$") for group in layout.category for chart in group.chart for tag in chart.multiline.tag if "/" in tag}
    assert charted == set(found) - {"progress/tokens-consumed"}
    start = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert HParamsPluginData.FromString(start).session_start_info.hparams["lr"].number_value == 2e-3


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
