"""Predict a training step on a machine that you do not have. No GPU, no torch: it takes a fraction of a second.

    domino-lm-simulate --preset gpt3-13b --hardware dgx-h100 --nodes 4 --micro-batch-size 4
    domino-lm-simulate --preset llama2-7b --hardware dgx-h100 --nodes 2 --tensor-model-parallel-size 16 --micro-batch-size 8 --compare
    domino-lm-simulate --preset gpt3-13b --hardware gb200-nvl72 --sweep sweep/gpt3-13b

All flags of training are understood; those below are added. Without --tensor-model-parallel-size, as many devices of a node as the
model's widths allow share it. --timeline FILE.json draws the predicted step; --print-plan prints its plan instead of predicting it.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

from domino_lm.config.arguments import Flags, build_parser, config_from_values, read_flags, sound_run, with_file_and_preset
from domino_lm.config.flag_parser import FlagParser
from domino_lm.config.foreign_text import int_of_flag, whole_number
from domino_lm.config.settings import ConfigError, RunConfig, ScheduleConfig
from domino_lm.launch.checks import run_faults, widest_tensor_parallel
from domino_lm.schedule.render import MissingMatplotlibError, draw
from domino_lm.simulate.hardware import HARDWARE, Hardware, find_hardware
from domino_lm.simulate.links import Fabric
from domino_lm.simulate.predict import (
    BASELINE,
    MFU_FORMULA,
    SCHEDULES,
    Prediction,
    Setting,
    obstacle,
    optimum,
    planned,
    predict,
    vocabulary_of,
)
from domino_lm.simulate.remarks import plan_text
from domino_lm.tools.sweep import Grid, plot, sweep, write_csv

PHASES = {"forward": "F", "backward": "B", "step": "S"}
NOT_ASKED_FOR: dict[str, object] = {"lr": 1.0, "train_iters": 1, "data_path": "(none)", "micro_batch_size": 1}
"""Settings that training insists on and a prediction does without."""


@dataclass(frozen=True)
class Asked:
    """What the command line wants."""

    run: RunConfig
    hardware: Hardware
    setting: Setting
    chosen: argparse.Namespace


def flag_parser() -> FlagParser:
    """Training's flags and ours."""
    parser = build_parser()
    parser.prog, parser.description = "domino-lm-simulate", __doc__
    group = parser.add_argument_group("simulation")
    group.add_argument("--hardware", default="dgx-h100", metavar="NAME|FILE.json", help=f"{', '.join(HARDWARE)}, or a calibration file")
    group.add_argument("--nodes", type=int_of_flag, default=1, help="NVLink domains; default 1")
    group.add_argument("--devices", type=int_of_flag, default=None, help="devices in all, instead of --nodes")
    group.add_argument("--json", action="store_true", default=False, help="print one JSON object")
    group.add_argument("--compare", action="store_true", default=False, help="predict every schedule")
    group.add_argument(
        "--sweep", type=Path, default=None, metavar="PREFIX", help="simulate a grid of layouts into PREFIX.csv and PREFIX.png"
    )
    for name, value in _grid_axes().items():
        text = f"comma-separated values for --sweep; default {','.join(map(str, value))}"
        group.add_argument(f"--sweep-{name.replace('_', '-')}", type=_numbers, default=None, metavar="N,N", help=text)
    group.add_argument("--processes", type=int_of_flag, default=os.cpu_count(), help="processes of --sweep; default: all CPUs")
    parser.set_defaults(print_plan=False, plan_layer=None)
    return parser


def parse_arguments(argv: Sequence[str]) -> Asked:
    """What the command line wants. Raises ConfigError."""
    return _resolve(read_flags(flag_parser(), argv))


def _resolve(flags: Flags) -> Asked:
    chosen = argparse.Namespace(**flags.values)
    hardware = find_hardware(chosen.hardware)
    node_size = hardware.fabric.node_size if isinstance(hardware.fabric, Fabric) else hardware.fabric.ranks
    devices = chosen.devices if chosen.devices is not None else chosen.nodes * node_size
    if devices < 1:
        raise ConfigError(f"{'--nodes' if chosen.devices is None else '--devices'} gives {devices} devices; give 1 or more.")
    given = with_file_and_preset(flags).values
    values = {**NOT_ASKED_FOR, "vocab_size": vocabulary_of(flags.values.get("preset", "")), **given}
    if "tensor_model_parallel_size" not in given and not flags.faults:
        values["tensor_model_parallel_size"] = widest_tensor_parallel(config_from_values(values), gcd(node_size, devices))
    run = sound_run(values, flags, lambda run: run_faults(run, devices))
    return Asked(run, hardware, Setting.of(run, devices, hardware), chosen)


def _grid_axes() -> dict[str, tuple[int, ...]]:
    return {name: value for name, value in asdict(Grid()).items() if isinstance(value, tuple)}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(whole_number(part) for part in text.split(","))


def as_values(step: Prediction, best: Prediction) -> dict[str, Any]:
    """What is printed of one prediction; times in seconds."""
    exposed = {f"exposed_{name}_s": step.exposed_s(phase) for name, phase in PHASES.items()}
    memory = {f"memory_{kind}_bytes": value for kind, value in asdict(step.memory).items()}
    return {
        "step_s": step.step_s,
        "tokens_per_s_per_device": step.tokens_per_s_per_device,
        "mfu": step.mfu,
        **exposed,
        **memory,
        "memory_total_bytes": step.memory.total,
        "fraction_of_optimum": best.step_s / step.step_s,
        "fraction_of_limit": step.over_step(lambda part: part.limit_s) / step.step_s,
    }


def describe(asked: Asked) -> str:
    """One line of what is simulated."""
    setting, model = asked.setting, asked.setting.model
    return (
        f"{model.num_layers} layers, hidden {model.hidden_size}, sequence {model.seq_length} on {setting.devices} x {asked.hardware.name}: "
        f"TP {setting.tensor_parallel} x DP {setting.data_parallel}, micro-batch {setting.micro_batch_size}, {setting.micro_batches} per step"
    )


def print_one(asked: Asked, step: Prediction, best: Prediction) -> None:
    """The prediction of one schedule for people."""
    memory, device = step.memory, asked.hardware.device
    slicing = step.shown.plan.slicing
    print(describe(asked))
    along = "the sequence" if slicing.sequence_rows else "the batch"
    print(
        f"schedule: {slicing.rows} row(s) along {along}, {slicing.cols} column(s){', sequence parallel' if slicing.sequence_parallel else ''}"
    )
    print(f"step               {step.step_s * 1e3:10.2f} ms   {step.tokens_per_s_per_device:,.0f} tokens/s/device")
    print(f"MFU                {step.mfu * 100:10.1f} %    of {device.peak_flops / 1e12:.4g} TFLOPS; {MFU_FORMULA}")
    for name, phase in PHASES.items():
        print(f"exposed, {name:<9} {step.exposed_s(phase) * 1e3:10.2f} ms   {step.exposed_s(phase) / step.step_s * 100:.1f} % of the step")
    print(
        f"optimum            {best.step_s * 1e3:10.2f} ms   without TP communication, uncut; this step reaches {best.step_s / step.step_s:.3f} of it"
    )
    kinds = ", ".join(f"{kind} {value / 2**30:.2f}" for kind, value in asdict(memory).items())
    fits = "fits" if memory.total <= device.memory_bytes else "DOES NOT FIT"
    print(f"memory per device  {memory.total / 2**30:10.2f} GiB  ({kinds}); {fits} into {device.memory_bytes / 2**30:.0f} GiB")


def compare(asked: Asked) -> dict[str, tuple[Prediction, Prediction]]:
    """Every schedule that the micro-batch allows, with its optimum; of the run's own, the data-parallel settings are kept."""
    own = asked.run.schedule

    def step(schedule: ScheduleConfig, serial: bool = False) -> tuple[Prediction, Prediction]:
        schedule = replace(schedule, ddp_bucket_size=own.ddp_bucket_size, overlap_grad_reduce=own.overlap_grad_reduce)
        return predict(asked.setting, schedule, serial=serial), optimum(asked.setting, schedule)

    allowed = {name: schedule for name, schedule in SCHEDULES.items() if not obstacle(asked.setting, schedule)}
    return {"serial": step(BASELINE, serial=True), **{name: step(schedule) for name, schedule in allowed.items()}}


def print_comparison(asked: Asked, found: dict[str, tuple[Prediction, Prediction]]) -> None:
    """One line per schedule."""
    serial, best = found["serial"]
    print(describe(asked))
    print(f"{'schedule':<28}{'step ms':>10}{'of optimum':>12}{'x serial':>10}{'exposed F':>11}{'B':>9}{'step':>9}{'activations':>13}")
    for name, (step, own) in found.items():
        exposed = [step.exposed_s(phase) * 1e3 for phase in PHASES.values()]
        print(
            f"{name:<28}{step.step_s * 1e3:>10.2f}{own.step_s / step.step_s:>12.3f}{serial.step_s / step.step_s:>10.3f}"
            f"{exposed[0]:>11.2f}{exposed[1]:>9.2f}{exposed[2]:>9.2f}{step.memory.activations / 2**30:>9.2f} GiB"
        )
    print(f"{'optimum':<28}{best.step_s * 1e3:>10.2f}{1:>12.3f}{serial.step_s / best.step_s:>10.3f}   without TP communication, uncut")


def run_sweep(asked: Asked) -> None:
    """Simulate the grid, write CSV and picture, print the best settings."""
    axes = {name: getattr(asked.chosen, f"sweep_{name}") for name in _grid_axes()}
    grid = Grid(**{name: value for name, value in axes.items() if value is not None}, micro_batches=asked.setting.micro_batches)
    points = sweep(asked.run.model, asked.hardware, grid, asked.chosen.processes)
    prefix: Path = asked.chosen.sweep
    prefix.parent.mkdir(parents=True, exist_ok=True)
    csv_path, picture = prefix.with_name(prefix.name + ".csv"), prefix.with_name(prefix.name + ".png")
    write_csv(points, csv_path)
    plot(points, f"{asked.run.model.num_layers} layers, hidden {asked.run.model.hidden_size}, {asked.hardware.name}", picture)
    print(f"{len(points)} points: {csv_path}, {picture}")
    for devices in grid.devices:
        fitting = [point for point in points if point.devices == devices and point.fits]
        if not fitting:
            print(f"{devices:>6} devices: nothing fits into memory")
            continue
        top = max(fitting, key=lambda point: point.tokens_per_s_per_device)
        print(
            f"{devices:>6} devices: TP {top.tensor_parallel} x DP {top.data_parallel}, {top.rows} x {top.cols} slices, micro-batch "
            f"{top.micro_batch_size}, sequence {top.seq_length}: {top.tokens_per_s_per_device:,.0f} tokens/s/device, MFU {top.mfu * 100:.1f} %"
        )


def write_timeline(asked: Asked, step: Prediction) -> None:
    """Trace and picture of the step, at most its first three micro-batches, beside each other as training writes them."""
    path = Path(asked.run.logging.timeline or "")
    trace = path.with_suffix(".json")
    shown = step.shown.timeline(f"predicted: {describe(asked)}")
    trace.parent.mkdir(parents=True, exist_ok=True)
    shown.write_trace(trace)
    draw(shown, path.with_suffix(".png"))
    print(f"timeline: {trace}, {path.with_suffix('.png')}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict what was asked for; returns the exit status."""
    try:
        asked = parse_arguments(sys.argv[1:] if argv is None else argv)
        if asked.chosen.sweep is not None:
            run_sweep(asked)
            return 0
        if asked.chosen.print_plan or asked.chosen.plan_layer is not None:
            print(plan_text(*planned(asked.setting, asked.run.schedule), asked.setting.micro_batches, asked.chosen.plan_layer))
            return 0
        step, best = predict(asked.setting, asked.run.schedule), optimum(asked.setting, asked.run.schedule)
        found = compare(asked) if asked.chosen.compare else {}
        if asked.chosen.json:
            values = {"setting": describe(asked), "mfu_formula": MFU_FORMULA, "peak_flops": asked.hardware.device.peak_flops}
            schedules = {name: as_values(*items) for name, items in found.items()}
            print(json.dumps({**values, **as_values(step, best), **({"schedules": schedules} if schedules else {})}, indent=1))
        elif found:
            print_comparison(asked, found)
        else:
            print_one(asked, step, best)
        if asked.run.logging.timeline is not None:
            write_timeline(asked, step)
    except (ConfigError, MissingMatplotlibError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
