#!/usr/bin/env python3
"""Tables behind docs/when-domino-pays.md: when slicing pays, which split, how many slices, and against what.

    python benchmarks/when_domino_pays.py       # writes benchmarks/results/when_domino_pays.md

Everything is predicted from datasheets (domino_lm.simulate.hardware); nothing is fitted, nothing is measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from domino_lm.config.settings import ModelConfig, ScheduleConfig
from domino_lm.model.families.lookup import family_of
from domino_lm.schedule.cuts import resolve_cut
from domino_lm.schedule.ops import COMPUTE, TP_LINK, Kind
from domino_lm.schedule.step import compute_plan
from domino_lm.simulate.costs import shapes_of
from domino_lm.simulate.hardware import HARDWARE, Hardware
from domino_lm.simulate.links import Group
from domino_lm.simulate.memory import memory_of
from domino_lm.simulate.predict import BASELINE, SCHEDULES, Setting, named_model, obstacle, optimum, predict, sliced
from domino_lm.simulate.simulator import simulate

RESULTS = Path(__file__).resolve().parent / "results"
BEST_KNOWN = ("baseline", "rows 2", "columns 2", "columns 4", "2 x 2")
PAIRS = ("baseline", "rows 2", "row groups", "paired", "rows 2, paired")
H100 = HARDWARE["dgx-h100"]


def setting_of(name: str, gpus: int, batch: int, seq_length: int, hardware: Hardware = H100) -> Setting:
    """One micro-batch, tensor-parallel over all GPUs."""
    return Setting(model=named_model(name, seq_length=seq_length), hardware=hardware, tensor_parallel=gpus, micro_batch_size=batch)


def fractions(setting: Setting, names: Sequence[str] = BEST_KNOWN) -> dict[str, float]:
    """Share of the optimum of each schedule that the micro-batch allows."""
    best = optimum(setting).step_s
    allowed = {name: SCHEDULES[name] for name in names if not obstacle(setting, SCHEDULES[name])}
    return {name: best / predict(setting, schedule).step_s for name, schedule in allowed.items()}


def table(title: str, head: Sequence[str], rows: Iterator[Sequence[object]]) -> str:
    """A Markdown table under a heading."""
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def by_nodes() -> Iterator[Sequence[object]]:
    """Node counts."""
    for name in ("gpt3-13b", "llama2-70b"):
        for gpus in (2, 4, 8, 16, 32):
            found = fractions(setting_of(name, gpus, 4, 2048))
            yield name, gpus, *(found[key] for key in BEST_KNOWN), max(found.values()) / found["baseline"]


def by_batch() -> Iterator[Sequence[object]]:
    """Micro-batch and sequence on one node."""
    for gpus in (8, 16):
        for batch, seq_length in ((1, 1024), (1, 2048), (1, 8192), (2, 1024), (2, 4096), (8, 1024), (8, 4096)):
            setting = setting_of("gpt3-13b", gpus, batch, seq_length)
            found = fractions(setting)
            sequence = fractions(setting, ["sequence rows 2"])
            yield gpus, batch, seq_length, *(found.get(key, "") for key in BEST_KNOWN), *sequence.values()


def by_hidden() -> Iterator[Sequence[object]]:
    """Width, four layers of GPT on one node."""
    for hidden in (1024, 2048, 4096, 8192, 12288):
        shape = ModelConfig(
            num_layers=4, hidden_size=hidden, num_attention_heads=hidden // 128, seq_length=2048, vocab_size=50257, attention_dropout=0.0
        )
        setting = Setting(model=shape, hardware=H100, tensor_parallel=8, micro_batch_size=4)
        found = fractions(setting)
        yield hidden, *(found[key] for key in BEST_KNOWN), max(found.values()) / found["baseline"]


def by_slices() -> Iterator[Sequence[object]]:
    """Number of rows."""
    counts = (1, 2, 3, 4, 8)
    for gpus in (8, 16, 32):
        for batch, seq_length in ((8, 512), (8, 2048), (8, 8192)):
            setting = setting_of("gpt3-13b", gpus, batch, seq_length)
            best = optimum(setting).step_s
            yield gpus, batch, seq_length, *(best / predict(setting, sliced(n)).step_s for n in counts)


def what_remains() -> Iterator[Sequence[object]]:
    """Where two rows lose time against the optimum, in shares of the optimum."""
    for gpus in (8, 16, 32):
        for batch, seq_length in ((2, 2048), (8, 2048)):
            setting = setting_of("gpt3-13b", gpus, batch, seq_length)
            best, plan = optimum(setting).step_s, sliced(2)
            ours, calm = predict(setting, plan), predict(replace(setting, hardware=H100.without_contention()), plan)
            silent = predict(setting, plan, free=(TP_LINK,))
            parts = (silent.step_s - best, calm.exposed_s("F"), calm.exposed_s("B"), ours.step_s - calm.step_s)
            link = ours.shown.busy_s(TP_LINK, "F"), ours.shown.busy_s(COMPUTE, "F")
            yield gpus, batch, best / ours.step_s, *(part / best for part in parts), link[0] / link[1]


def against_others() -> Iterator[Sequence[object]]:
    """Ways to use a cluster at sequence 4096: tokens/s/GPU."""
    for name, gpus, sequences in (
        ("llama2-7b", 64, 128),
        ("llama2-7b", 64, 1024),
        ("llama2-7b", 1024, 1024),
        ("llama2-13b", 64, 1024),
        ("llama2-13b", 1024, 1024),
        ("llama2-13b", 4096, 1024),
        ("llama2-70b", 512, 1024),
        ("llama2-70b", 4096, 1024),
    ):
        model = named_model(name, seq_length=4096)
        ways = [data_parallel_alone(model, gpus, sequences), fully_sharded(model, gpus, sequences)]
        ways += [tensor_parallel_step(model, gpus, sequences, schedule) for schedule in (BASELINE, sliced(2))]
        yield name, gpus, sequences, *ways


def data_parallel_alone(model: ModelConfig, gpus: int, sequences: int) -> str:
    """A replica a GPU, micro-batches of one sequence."""
    if sequences < gpus:
        return "fewer sequences than GPUs"
    setting = Setting(model=model, hardware=H100, tensor_parallel=1, data_parallel=gpus, micro_batches=sequences // gpus)
    step = predict(setting, BASELINE)
    return _throughput(step.tokens_per_s_per_device, step.memory.total)


def tensor_parallel_step(model: ModelConfig, gpus: int, sequences: int, schedule: ScheduleConfig) -> str:
    """TP 8 on each node, replicas across, micro-batches of two sequences; the optimizer is cut over replicas in memory only."""
    replicas = gpus // 8
    if sequences < 2 * replicas:
        return "fewer than two sequences a replica"
    batches = sequences // replicas // 2
    setting = Setting(model=model, hardware=H100, tensor_parallel=8, data_parallel=replicas, micro_batch_size=2, micro_batches=batches)
    step = predict(setting, schedule)
    memory = step.memory
    return _throughput(step.tokens_per_s_per_device, memory.weights + memory.gradients + memory.optimizer / replicas + memory.activations)


def _throughput(tokens_per_s: float, memory_bytes: float) -> str:
    fits = memory_bytes <= H100.device.memory_bytes
    return f"{tokens_per_s:,.0f}" + ("" if fits else f" (needs {memory_bytes / 2**30:.0f} GiB)")


def fully_sharded(model: ModelConfig, gpus: int, sequences: int) -> str:
    """FSDP, by an estimate: each part's weights (bf16) are gathered behind the part before, forward and backward of every
    micro-batch; gradients are reduce-scattered behind backward of the last. Contention is left out."""
    if sequences < gpus:
        return "fewer sequences than GPUs"
    setting = Setting(model=model, hardware=H100, tensor_parallel=1, data_parallel=gpus, micro_batches=sequences // gpus)
    plan = compute_plan(family_of(model).chain, BASELINE, resolve_cut(BASELINE, setting.uncut))
    shapes = shapes_of(setting.model, plan, 1, setting.hardware, 1)
    step = simulate(plan, shapes, setting.hardware)
    group = Group(setting.devices, min(setting.devices, 8))
    fabric = setting.hardware.fabric

    def travel_s(part: int, collective: str) -> float:
        return fabric.transfer(collective, shapes.parts[part].parameters * 2, group).seconds

    compute = {phase: [0.0] * len(shapes.parts) for phase in "FB"}
    for op, time in zip(plan.ops, step.times, strict=True):
        compute[op.phase][op.part] += time.compute_s
    owners = [part for part, shape in enumerate(shapes.parts) if shape.parameters > 1e6]
    near = {part: [part, part - 1] if part else [part] for part in owners}  # a part computes together with the norm before it
    forward_s = sum(max(sum(compute["F"][p] for p in near[part]), travel_s(part, "all_gather")) for part in owners)
    backward = {part: sum(compute["B"][p] for p in near[part]) for part in owners}
    each_s = forward_s + sum(max(backward[part], travel_s(part, "all_gather")) for part in owners)
    last_s = forward_s + sum(max(backward[part], travel_s(part, "all_gather") + travel_s(part, "reduce_scatter")) for part in owners)
    tokens_per_s = setting.tokens / ((setting.micro_batches - 1) * each_s + last_s) / setting.devices
    memory = memory_of(plan.ops, shapes)
    cut_over_gpus = (memory.weights + memory.gradients + memory.optimizer) / gpus
    return _throughput(tokens_per_s, cut_over_gpus + 2 * 2 * max(shape.parameters for shape in shapes.parts) + memory.activations)


def by_hardware() -> Iterator[Sequence[object]]:
    """Machines."""
    for machine, gpus in (
        ("dgx-a100", 8),
        ("dgx-a100", 16),
        ("dgx-h100", 8),
        ("dgx-h100", 16),
        ("dgx-h200", 8),
        ("mi300x", 8),
        ("dgx-b200", 8),
        ("dgx-b200", 16),
        ("gb200-nvl72", 8),
        ("gb200-nvl72", 16),
        ("gb200-nvl72", 32),
    ):
        setting = setting_of("llama2-70b", gpus, 4, 4096, HARDWARE[machine])
        found = fractions(setting)
        yield machine, gpus, *(found[key] for key in BEST_KNOWN), max(found.values()) / found["baseline"]


def micro_batch_one() -> Iterator[Sequence[object]]:
    """One sequence: what can be cut, and what that leaves."""
    for gpus in (8, 16):
        for seq_length in (2048, 8192, 32768):
            setting = setting_of("gpt3-13b", gpus, 1, seq_length)
            yield gpus, seq_length, *fractions(setting, ["baseline", "columns 2", "sequence rows 2", "sequence rows 4"]).values()


def pairing() -> Iterator[Sequence[object]]:
    """A step of eight micro-batches, and the activations that it holds."""
    for gpus in (8, 16, 32):
        for batch in (2, 4):
            setting = replace(setting_of("gpt3-13b", gpus, batch, 2048), micro_batches=8)
            best = optimum(setting).step_s
            found = {name: predict(setting, SCHEDULES[name]) for name in PAIRS if not obstacle(setting, SCHEDULES[name])}
            more = found["paired"].memory.activations / found["baseline"].memory.activations
            yield gpus, batch, *(best / found[name].step_s if name in found else "" for name in PAIRS), more


def sequence_parallel() -> Iterator[Sequence[object]]:
    """Sequence parallelism, against its own optimum and the time of the baseline without it."""
    for gpus in (8, 16, 32):
        setting = setting_of("gpt3-13b", gpus, 4, 2048)
        plain = predict(setting, BASELINE)
        for name in ("baseline, sequence parallel", "rows 2, sequence parallel"):
            step = predict(setting, SCHEDULES[name])
            own = optimum(setting, SCHEDULES[name]).step_s / step.step_s
            yield gpus, name, own, plain.step_s / step.step_s, step.memory.activations / plain.memory.activations


def recomputing() -> Iterator[Sequence[object]]:
    """Full recomputation: what it adds to the step, and what of that its place before the waits takes back."""
    for gpus in (8, 16, 32):
        setting = setting_of("gpt3-13b", gpus, 4, 2048)
        best = optimum(setting).step_s
        for name, config in (("baseline", sliced(1)), ("rows 2", sliced(2))):
            again = replace(config, recompute_granularity="full")
            plain, step = predict(setting, config), predict(setting, again)
            compute_s = sum(
                time.compute_s for op, time in zip(step.shown.plan.ops, step.shown.times, strict=True) if op.kind is Kind.RECOMPUTE
            )
            added = step.step_s - plain.step_s
            memory = step.memory.activations / plain.memory.activations
            yield gpus, name, compute_s / best, added / best, 1 - added / compute_s, memory


def main() -> int:
    """Write all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "when_domino_pays.md")
    chosen = parser.parse_args()
    splits = list(BEST_KNOWN)
    tables = [
        table(
            "Nodes: micro-batch 4, sequence 2048, TP over all GPUs of DGX-H100", ["model", "GPUs", *splits, "best / baseline"], by_nodes()
        ),
        table("Batch and sequence: GPT-3 13B", ["GPUs", "micro-batch", "sequence", *splits, "2 sequence rows"], by_batch()),
        table("Width: four GPT layers, TP 8, micro-batch 4, sequence 2048", ["hidden", *splits, "best / baseline"], by_hidden()),
        table("Rows: GPT-3 13B", ["GPUs", "micro-batch", "sequence", "1", "2", "3", "4", "8"], by_slices()),
        table(
            "What two rows leave: GPT-3 13B, sequence 2048, losses as shares of the optimum",
            [
                "GPUs",
                "micro-batch",
                "of optimum",
                "smaller kernels",
                "exposed forward",
                "exposed backward",
                "contention",
                "link / compute, forward",
            ],
            what_remains(),
        ),
        table(
            "Against data parallelism: DGX-H100, sequence 4096, tokens/s/GPU",
            ["model", "GPUs", "sequences a step", "DP alone", "FSDP (estimate)", "TP 8 x DP, baseline", "TP 8 x DP, two rows"],
            against_others(),
        ),
        table("Machines: LLaMA-2 70B, micro-batch 4, sequence 4096", ["machine", "GPUs", *splits, "best / baseline"], by_hardware()),
        table(
            "Micro-batch 1: GPT-3 13B",
            ["GPUs", "sequence", "baseline", "columns 2", "2 sequence rows", "4 sequence rows"],
            micro_batch_one(),
        ),
        table(
            "Pairing: GPT-3 13B, sequence 2048, eight micro-batches",
            ["GPUs", "micro-batch", *PAIRS, "activations, paired / baseline"],
            pairing(),
        ),
        table(
            "Sequence parallelism: GPT-3 13B, micro-batch 4, sequence 2048",
            ["GPUs", "schedule", "of its optimum", "speed-up over the baseline without", "activations / baseline's"],
            sequence_parallel(),
        ),
        table(
            "Full recomputation: GPT-3 13B, micro-batch 4, sequence 2048, shares of the optimum",
            ["GPUs", "schedule", "compute again", "added to the step", "hidden", "activations / without"],
            recomputing(),
        ),
    ]
    text = (
        "# When Domino pays: predicted\n\nMade by `python benchmarks/when_domino_pays.py`. Cells are shares of the optimum (the uncut step without\ntensor-parallel communication) unless the heading says otherwise.\n\n"
        + "\n".join(tables)
    )
    chosen.output.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
