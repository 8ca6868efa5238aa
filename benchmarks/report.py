"""Result files as a Markdown table and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import DEEPSPEED, MEGATRON, OURS, VARIANTS
from benchmarks.figures import PHASE_NAMES, PHASES
from domino_lm.schedule.render import write_png

MILLISECONDS = 1e3
FAMILY_NAMES = {"gpt": "GPT", "llama": "LLaMA"}
PROGRAM_NAMES = {OURS: "domino_lm", MEGATRON: "Megatron-core", DEEPSPEED: "DeepSpeed"}
COLOURS = {OURS: "#1f5a99", MEGATRON: "#8c8c8c", DEEPSPEED: "#c05a00"}
COLUMNS = {
    "fraction_of_optimum": "of its own optimum",
    "speedup": "speed-up over serial",
    "hidden_share": "hidden",
    "fraction_of_limit": "of the limit",
    "speedup_over_megatron": "over Megatron-core",
}


def markdown(results: Mapping[str, Any]) -> str:
    """Everything that was measured, forward / backward / step in each cell, as medians of ratios within a round."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Mapping[str, Any]) -> Iterator[str]:
    case, model, machine = results["case"], results["case"]["model"], results["machine"]
    yield f"# {FAMILY_NAMES[case['family']]}, hidden {model['hidden_size']}, {model['num_layers']} layers, TP {case['tensor_parallel']}, DP {case['data_parallel']}"
    yield ""
    yield (
        f"Sequence {model['seq_length']}, micro-batch {case['micro_batch_size']} x {case['micro_batches']}, vocabulary {model['vocab_size']}, fp32, "
        f"gloo. {machine['processor']}, {machine['cores']} cores, Linux {machine['kernel']}; torch {results['versions']['torch']}; "
        f"commit {results['commit'][:12]}{' with uncommitted changes' if results['uncommitted_changes'] else ''}; {results['started']}."
    )
    yield ""
    yield f"    {results['command']}"
    yield ""
    yield _numerics(results)
    for link in results["links"]:
        yield from _link_lines(link)


def _numerics(results: Mapping[str, Any]) -> str:
    """How closely the programs agree, in a sentence."""
    numerics = results["numerics"].values()
    loss, gradient = (max(each[figure] for each in numerics) for figure in ("loss_difference", "gradient_difference"))
    dispatch = results["dispatch_s_per_op"] * 1e6
    return f"All programs agree within {loss:.1e} in the loss and {gradient:.1e} in any gradient. Dispatch costs {dispatch:.1f} microseconds an op."


def _link_lines(link: Mapping[str, Any]) -> Iterator[str]:
    summary = link["summary"]
    variants, wire = summary["variants"], summary["wire_seconds"]
    yield ""
    yield f"## {link['gbit_per_s']:g} Gbit/s, MTU {link['mtu']}" + (f", {link['delay_ms']:g} ms" if link["delay_ms"] else "")
    yield ""
    if "tcp_bits_per_s" in link:
        yield (
            f"Measured: one TCP stream {link['tcp_bits_per_s'] / 1e9:.2f} Gbit/s, all-reduce busbw {link['all_reduce_busbw_bits_per_s'] / 1e9:.2f} Gbit/s. "
            f"{len(link['rounds'])} rounds; load average {link['load_average_before'][0]:.1f} before, {link['load_average_after'][0]:.1f} after. "
            f"Transport takes {summary['transport_cpu_s'] * MILLISECONDS:.0f} ms of CPU a step; the wire needs "
            f"{wire['F'] * MILLISECONDS:.0f} ms in forward, {wire['B'] * MILLISECONDS:.0f} ms in backward."
        )
        yield ""
    if link.get("auto"):
        yield f"Auto chose: {link['auto']['chosen']}."
        yield ""
    yield "| program | step, ms | forward / backward, ms | CPU, ms | " + " | ".join(COLUMNS.values()) + " |"
    yield "|---" * (4 + len(COLUMNS)) + "|"
    for name, figures in variants.items():
        program, _, variant = name.partition("/")
        label = f"{PROGRAM_NAMES[program]}: {VARIANTS[program][variant].label if variant in VARIANTS[program] else variant}"
        step = figures["seconds"]["step"]
        spread = f"{step[0] * MILLISECONDS:.0f} ({step[1] * MILLISECONDS:.0f} to {step[2] * MILLISECONDS:.0f})"
        phases = " / ".join(f"{figures['seconds'][p][0] * MILLISECONDS:.0f}" for p in PHASES[:2] if p in figures["seconds"])
        cpu = f"{figures['cpu_seconds']['step'][0] * MILLISECONDS:.0f}"
        yield f"| {label} | {spread} | {phases} | {cpu} | " + " | ".join(_cell(figures.get(column)) for column in COLUMNS) + " |"


def _cell(figure: Mapping[str, Sequence[float]] | None) -> str:
    """Forward / backward / **step** (quartiles of the step)."""
    if figure is None:
        return ""
    phases = [f"{figure[p][0]:.2f}" for p in PHASES[:2] if p in figure]
    step = figure["step"]
    return " / ".join([*phases, f"**{step[0]:.2f}** ({step[1]:.2f} to {step[2]:.2f})"])


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Each communicating variant's share of its own optimum, by link and phase; whiskers are quartiles. Needs matplotlib."""
    from matplotlib.figure import Figure

    links = [link for link in results["links"] if any("fraction_of_optimum" in f for f in link["summary"]["variants"].values())]
    if not links:
        return
    figure = Figure(figsize=(4.6 * len(PHASES), 3.4 * len(links)), dpi=110, layout="constrained")
    grid = figure.subplots(len(links), len(PHASES), squeeze=False, sharey=True)
    for row, link in zip(grid, links, strict=True):
        for axes, phase in zip(row, PHASES, strict=True):
            panel(axes, link, phase)
    handles = {label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9, handlelength=3)
    figure.suptitle(f"{case_title(results['case'])}\nshare of the same program's time without communication", fontsize=11)
    write_png(figure, path)


def case_title(case: Mapping[str, Any]) -> str:
    """Everything about a case by which pictures differ."""
    model = case["model"]
    return (
        f"{FAMILY_NAMES[case['family']]}, hidden {model['hidden_size']}, {model['num_layers']} layers, sequence {model['seq_length']}, "
        f"vocabulary {model['vocab_size']}, micro-batch {case['micro_batch_size']} x {case['micro_batches']}, "
        f"TP {case['tensor_parallel']}, DP {case['data_parallel']}"
    )


def panel(axes: Any, link: Mapping[str, Any], phase: str) -> None:
    """One line a variant, the same in every phase; a variant that overlaps phases has a bar for the step alone."""
    variants = {name: figures for name, figures in link["summary"]["variants"].items() if "fraction_of_optimum" in figures and _plain(name)}
    for height, (name, figures) in enumerate(variants.items()):
        if phase not in figures["fraction_of_optimum"]:
            axes.text(0.01, height, "overlaps forward and backward", va="center", color="gray", fontsize=8)
            continue
        middle, low, high = figures["fraction_of_optimum"][phase]
        axes.barh(height, middle, color=COLOURS[name.partition("/")[0]])
        axes.errorbar(middle, height, xerr=[[middle - low], [high - middle]], color="black", capsize=2, linewidth=1, label="quartiles")
        axes.text(0.01, height, f"{middle:.2f}", va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(variants)), [_label(name) for name in variants], fontsize=8)
    axes.set_ylim(len(variants) - 0.4, -0.6)
    axes.set_xlim(0, 1.08)
    axes.axvline(1, color="black", linewidth=0.8, label="1: all communication hidden")
    limits = link["summary"]["limit_s"]
    if limits is not None:
        optimum_s = link["summary"]["variants"][f"{OURS}/no_comm"]["seconds"][phase][0]
        axes.axvline(optimum_s / limits[phase], color=COLOURS[OURS], linestyle="--", linewidth=1, label="limit of our schedules")
        if phase == "step" and any("F" not in figures["fraction_of_optimum"] for figures in variants.values()):
            axes.axvline(
                optimum_s / limits["paired"], color=COLOURS[OURS], linestyle=":", linewidth=1, label="limit of paired micro-batches"
            )
    delay = f", {link['delay_ms']:g} ms" if link.get("delay_ms") else ""
    axes.set_title(f"{link['gbit_per_s']:g} Gbit/s{delay}, {PHASE_NAMES[phase]}", fontsize=9, loc="left")


def _plain(name: str) -> bool:
    program, _, variant = name.partition("/")
    return VARIANTS[program][variant].communicates


def _label(name: str) -> str:
    program, _, variant = name.partition("/")
    return f"{PROGRAM_NAMES[program]}: {VARIANTS[program][variant].label}"
