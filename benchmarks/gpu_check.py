#!/usr/bin/env python3
"""What one GPU can say about this program, in eight minutes: is it right there, how fast, and does overlap come as predicted.

    make gpu-check                                      # on a machine with a GPU
    python benchmarks/gpu_check.py --rehearse           # the same with tiny sizes on a CPU, which says nothing about GPUs

Sections: correctness of every schedule in float64, float32 and bf16, of compiled, captured and 8-bit kernels; MFU of slices of
GPT-3 and LLaMA; host overhead with and without torch.compile and CUDA graphs; overlap with an emulated link that takes as
long as tensor parallelism over eight GPUs would, measured against predicted; CUDA_DEVICE_MAX_CONNECTIONS and stream
priority; memory. Each section stops where its time is up and says what it left out. Prints one table; on a GPU also writes
JSON and Markdown to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.emulated_link import FreeLink, Link
from benchmarks.gpu_bench import REHEARSAL, Bench, Row, known_hardware, release
from benchmarks.gpu_correctness import correctness
from benchmarks.gpu_slice import Case, Slice, Timing, in_turn, predicted_bytes, predicted_s, synchronize
from domino_lm.config.kernels import KernelConfig
from domino_lm.config.settings import ConfigError
from domino_lm.model.families.lookup import family_of
from domino_lm.schedule.ops import TP_LINK, Kind
from domino_lm.schedule.recorder import Recorder
from domino_lm.schedule.timeline import Timeline
from domino_lm.simulate.predict import BASELINE, SCHEDULES

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
BUDGET_S = {"correctness": 90, "MFU": 100, "overhead": 90, "overlap": 80, "connections": 90}
"""Together with start-up eight minutes."""

CUTS = ("serial", "baseline", "rows 2", "columns 2", "2 x 2")


Section = Callable[[Bench, float], Iterator[Row]]


def mfu(bench: Bench, deadline_s: float) -> Iterator[Row]:
    """Model FLOPs over the peak, forward and backward without an optimizer, on one rank, where cutting can only cost."""
    for family in ("gpt3-13b", "llama2-13b"):
        for seq_length, size in ((2048, 4), (4096, 2)):
            if time.monotonic() > deadline_s:
                yield Row("MFU", f"{family} slice, sequence {seq_length}", "out of time", "skipped")
                continue
            case = bench.case(family, seq_length, 1, size)
            stack = case.stack()
            for name in ("baseline", "rows 2"):
                release(bench.device)
                one = Slice(case, stack, SCHEDULES[name])
                timing = in_turn({name: one}, bench.rounds, deadline_s=deadline_s)[name]
                flops = family_of(case.model).flops_per_token() * case.tokens
                peak = bench.hardware.device.peak_flops
                text = (
                    f"{timing.step_s * 1e3:.2f} ms, {case.tokens / timing.step_s:,.0f} tokens/s, {flops / timing.step_s / 1e12:.2f} TFLOP/s"
                )
                text += "" if bench.rehearse else f", MFU {flops / timing.step_s / peak:.1%} of {peak / 1e12:.0f}"
                what = f"{family} slice, sequence {case.model.seq_length}, micro-batch {size}"
                yield Row("MFU", f"{what}, {name}", text)
                yield memory_row(bench, case, one, name, what)
                del one


def memory_row(bench: Bench, case: Case, one: Slice, name: str, what: str) -> Row:
    """Peak of one step against the formula, both without an optimizer."""
    expected = predicted_bytes(case, SCHEDULES[name])
    if bench.device.type != "cuda":
        return Row("memory", f"{what}, {name}", f"predicted {expected / GIB:.4f} GiB; only a GPU's is measured")
    torch.cuda.reset_peak_memory_stats(bench.device)
    one.step()
    synchronize(bench.device)
    found = torch.cuda.max_memory_allocated(bench.device)
    return Row("memory", f"{what}, {name}", f"{found / GIB:.2f} GiB, predicted {expected / GIB:.2f} ({found / expected - 1:+.1%})")


def overhead(bench: Bench, deadline_s: float) -> Iterator[Row]:
    """A rank's share of eight, whose kernels are short, without any link: what the host costs."""
    case = bench.case("gpt3-13b", 2048, 8, 2)
    backend = "aot_eager" if bench.rehearse else "inductor"
    kinds = {
        "eager": KernelConfig(),
        "compiled": KernelConfig(compile=True, compile_backend=backend),
        "CUDA graph": KernelConfig(cuda_graph=True),
        "compiled, CUDA graph": KernelConfig(compile=True, compile_backend=backend, cuda_graph=True),
        "fp8": KernelConfig(fp8_format="hybrid"),
        "fp8, compiled, CUDA graph": KernelConfig(fp8_format="hybrid", compile=True, compile_backend=backend, cuda_graph=True),
    }
    for name, kernels in kinds.items():
        for cut in ("baseline", "rows 2"):
            what = f"rank of 8, {cut}, {name}"
            if time.monotonic() > deadline_s:
                yield Row("overhead", what, "out of time", "skipped")
                continue
            release(bench.device)
            try:
                one = Slice(case, case.stack(), SCHEDULES[cut], FreeLink(), kernels)
            except ConfigError as error:
                yield Row("overhead", what, str(error).split(";")[0], "skipped")
                continue
            timing = in_turn({what: one}, bench.rounds, warmups=5, deadline_s=deadline_s)[what]
            yield Row("overhead", what, f"{timing.step_s * 1e3:.2f} ms a step, of which the host issues for {timing.host_s * 1e3:.2f}")
            del one


def overlap(bench: Bench, deadline_s: float) -> Iterator[Row]:
    """Schedules on an emulated link, in turn, with the simulator's word for each."""
    case = bench.case("gpt3-13b", 2048, 8, 4)
    link = bench.link()
    timings, exposed = overlapped(bench, case, link, CUTS, deadline_s)
    free_s, serial_s = timings["no communication"].step_s, timings["serial"].step_s
    predicted_free_s = predicted_s(case, BASELINE, free=(TP_LINK,))
    yield Row("overlap", "no communication", f"{free_s * 1e3:.2f} ms, predicted {predicted_free_s * 1e3:.2f}")
    for name in CUTS:
        step_s, guess_s = timings[name].step_s, predicted_s(case, SCHEDULES.get(name, BASELINE), serial=name == "serial")
        hidden = (serial_s - step_s) / max(serial_s - free_s, 1e-9)
        text = (
            f"{step_s * 1e3:.2f} ms, predicted {guess_s * 1e3:.2f}; {free_s / step_s:.3f} of the optimum, predicted "
            f"{predicted_free_s / guess_s:.3f}; {hidden:.0%} hidden; {exposed[name] * 1e3:.2f} ms of waiting in a recorded step"
        )
        yield Row("overlap", name, text)


def overlapped(bench: Bench, case: Case, link: Link, names: Sequence[str], deadline_s: float) -> tuple[dict[str, Timing], dict[str, float]]:
    """Steps of each schedule on ``link`` and of the baseline without any, and how long compute stood waiting in one that is recorded."""
    slices = {"no communication": Slice(case, case.stack(), BASELINE, FreeLink())}
    slices |= {name: Slice(case, case.stack(), SCHEDULES.get(name, BASELINE), link, serial=name == "serial") for name in names}
    timings = in_turn(slices, bench.rounds, deadline_s=deadline_s)
    exposed = {}
    for name in names:
        recorder = Recorder.on(bench.device)
        slices[name].executor.run_step([slices[name].batch], 0, recorder)
        synchronize(bench.device)
        timeline = Timeline.of(recorder.spans)
        exposed[name] = sum(span.duration_s for span in timeline.spans if span.op.kind is Kind.WAIT)
    return timings, exposed


def connections(bench: Bench, deadline_s: float) -> Iterator[Row]:
    """Overlap under 1, 8 and 32 hardware queues, each in a process of its own, and with the link's stream at high priority."""
    for queues in (1,) if bench.rehearse else (1, 8, 32):
        left_s = deadline_s - time.monotonic()
        if left_s < 5:
            yield Row("connections", f"{queues} queue(s)", "out of time", "skipped")
            continue
        command = [sys.executable, __file__, "--child", *(["--rehearse"] if bench.rehearse else [])]
        environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": str(queues)}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=left_s, check=True)
            for priority, step_s in json.loads(done.stdout.splitlines()[-1]).items():
                yield Row("connections", f"{queues} queue(s), {priority} priority, rows 2", f"{step_s * 1e3:.2f} ms")
        except subprocess.TimeoutExpired:
            yield Row("connections", f"{queues} queue(s)", "out of time", "skipped")
        except subprocess.CalledProcessError as error:
            yield Row("connections", f"{queues} queue(s)", (error.stderr.strip().splitlines() or ["failed"])[-1], "FAULT")


def child(bench: Bench) -> None:
    """What `connections` runs: prints step times by priority."""
    case, found = bench.case("gpt3-13b", 2048, 8, 4), {}
    for name, priority in (("usual", 0), ("high", -1)):
        one = Slice(case, case.stack(), SCHEDULES["rows 2"], bench.link(priority))
        found[name] = in_turn({name: one}, bench.rounds)[name].step_s
    print(json.dumps(found))


SECTIONS: dict[str, Section] = {
    "correctness": correctness,
    "MFU": mfu,
    "overhead": overhead,
    "overlap": overlap,
    "connections": connections,
}


def run(bench: Bench, names: Sequence[str], show: Callable[[Row], None]) -> list[Row]:
    """Every section within its time; one that fails is a row, and the next one goes on."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        show(row)

    for name in names:
        release(bench.device)
        deadline_s = time.monotonic() + BUDGET_S[name]
        try:
            for row in SECTIONS[name](bench, deadline_s):
                add(row)
        except Exception as error:  # a section must not take the others with it
            where = traceback.extract_tb(error.__traceback__)[-1]
            first = str(error).splitlines()[0] if str(error) else ""
            add(Row(name, f"{Path(where.filename).name}:{where.lineno}", f"{type(error).__name__}: {first}", "FAULT"))
    return rows


def machine(bench: Bench) -> dict[str, str]:
    """What the results belong to."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    about = {
        "device": torch.cuda.get_device_name(bench.device) if bench.device.type == "cuda" else REHEARSAL,
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda or torch.version.hip),
        "predictions of": bench.hardware.name,
        "commit": (git.stdout.strip() or "none") + (" with uncommitted changes" if changed.stdout.strip() else ""),
        "command": " ".join(["python", "benchmarks/gpu_check.py", *sys.argv[1:]]),
        "started": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    if bench.device.type == "cuda":
        about["memory"] = f"{torch.cuda.get_device_properties(bench.device).total_memory / GIB:.0f} GiB"
    return about


def markdown(about: dict[str, str], rows: Sequence[Row]) -> str:
    """The table as a document."""
    lines = [f"# GPU check: {about['device']}", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += ["| section | what | found | |", "|---|---|---|---|"]
    lines += [f"| {row.section} | {row.what} | {row.found} | {row.verdict} |" for row in rows]
    return "\n".join(lines) + "\n"


def write_results(folder: Path, about: dict[str, str], rows: Sequence[Row]) -> list[Path]:
    """JSON and Markdown, named after the device."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / ("gpu_check_" + "".join(c if c.isalnum() else "_" for c in about["device"].lower()).strip("_"))
    paths = [stem.with_suffix(".json"), stem.with_suffix(".md")]
    paths[0].write_text(json.dumps({"machine": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(about, rows), encoding="utf-8")
    return paths


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 0 where nothing is at fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on a CPU, to try the script itself")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--output", type=Path, help="folder for results (on a GPU benchmarks/results, in a rehearsal none)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    own = parser.parse_args(argv)
    if not own.rehearse and not torch.cuda.is_available():
        print("error: no GPU is visible to PyTorch; --rehearse tries the script itself on the CPU.", file=sys.stderr)
        return 2
    device = torch.device("cpu") if own.rehearse else torch.device("cuda", torch.cuda.current_device())
    bench = Bench(device, own.rehearse, known_hardware(device))
    if own.child:
        child(bench)
        return 0
    about = machine(bench)
    for key, value in about.items():
        print(f"{key:14} {value}", flush=True)
    rows = run(bench, own.sections, lambda row: print(f"{row.section:12} {row.verdict:7} {row.what}: {row.found}", flush=True))
    folder = own.output or (None if own.rehearse else ROOT / "benchmarks" / "results")
    if folder is not None:
        print("wrote " + " and ".join(map(str, write_results(folder, about, rows))))
    if own.rehearse:
        print(REHEARSAL)
    return int(any(row.verdict == "FAULT" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
