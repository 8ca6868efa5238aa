"""From rounds of measured steps to the figures that are reported. No torch, no processes: numbers in, numbers out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.case import MEGATRON, NO_COMM, OURS, SERIAL, VARIANTS, Case

PHASES = ("F", "B", "step")
# A core counts as ours alone while it is busy for at most this times the CPU that our process took.
QUIET_RATIO = 1.05
PHASE_NAMES = {"F": "forward", "B": "backward", "step": "step"}

# A run of a variant: "program/variant".
Key = str


def key(program: str, variant: str) -> Key:
    """How a program's variant is called in result files."""
    return f"{program}/{variant}"


@dataclass(frozen=True)
class Turn:
    """One variant's turn in a round, a step: seconds by phase, seconds that the rank's core was busy, CPU of the process."""

    seconds: Mapping[str, float]
    busy_s: float
    cpu_s: float

    @classmethod
    def of(cls, answers: Sequence[Mapping[str, Any]]) -> Turn:
        """From what every rank measured: the median step of each rank, averaged over ranks.

        Ranks that communicate end together; where they do not, the slowest one is no part of the optimum.
        """
        forward = fmean(median(answer["forward_s"]) for answer in answers)
        backward = fmean(median(answer["backward_s"]) for answer in answers)
        step = fmean(median(f + b for f, b in zip(a["forward_s"], a["backward_s"], strict=True)) for a in answers)
        busy, cpu = (fmean(answer[name] for answer in answers) for name in ("core_busy_s", "process_cpu_s"))
        return cls({"F": forward, "B": backward, "step": step}, busy, cpu)


Round = Mapping[Key, Turn]


class Spread(NamedTuple):
    """A figure over rounds."""

    median: float
    low: float  # first quartile
    high: float  # third quartile

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Quartiles by linear interpolation; one value is its own spread."""
        ordered = sorted(values)

        def at(share: float) -> float:
            position = share * (len(ordered) - 1)
            below = int(position)
            above = min(below + 1, len(ordered) - 1)
            return ordered[below] + (position - below) * (ordered[above] - ordered[below])

        return cls(at(0.5), at(0.25), at(0.75))


def within_rounds(rounds: Sequence[Round], figure: Callable[[Round], float]) -> Spread:
    """A ratio formed within each round, so that what slows a whole round down drops out; then over rounds."""
    return Spread.of(figure(turns) for turns in rounds)


def transport_cpu_s(rounds: Sequence[Round]) -> float:
    """CPU seconds a step that collectives take on each rank's core: the least that one of our variants spends above the optimum.

    The least, since a variant may also spend on its cut, and one that waits finds a colder core each time. What the core does
    counts, since the kernel moves packets in interrupts that no process is charged for. Where other programs use the cores
    too, which shows in the steps without communication, only the process's own time is known.
    """
    optimum = key(OURS, NO_COMM)
    sending = [name for name in rounds[0] if name.startswith(key(OURS, "")) and VARIANTS[OURS][name.partition("/")[2]].communicates]
    if not sending:
        return 0.0
    quiet = median(turns[optimum].busy_s / turns[optimum].cpu_s for turns in rounds) < QUIET_RATIO

    def above_optimum(name: Key) -> float:
        both = [(turns[name], turns[optimum]) for turns in rounds]
        return median(some.busy_s - least.busy_s if quiet else some.cpu_s - least.cpu_s for some, least in both)

    return max(0.0, min(above_optimum(name) for name in sending))


def limits_s(case: Case, rounds: Sequence[Round], bytes_per_s: float) -> dict[str, float]:
    """The shortest time that any order can reach: either the core or the link is busy all the time.

    "F" and "B" bound a phase; "step" is their sum, for steps that run all forward before all backward; "paired" bounds
    steps in which the two overlap. The transport's CPU is divided between the phases by the bytes that they send.
    """
    compute = {phase: median(turns[key(OURS, NO_COMM)].seconds[phase] for turns in rounds) for phase in "FB"}
    sent = {phase: case.wire_bytes(phase) for phase in "FB"}
    total = sum(sent.values())
    transport_s = transport_cpu_s(rounds)
    cpu = {phase: compute[phase] + (transport_s * sent[phase] / total if total else 0.0) for phase in "FB"}
    phases = {phase: max(cpu[phase], sent[phase] / bytes_per_s) for phase in "FB"}
    return {**phases, "step": sum(phases.values()), "paired": max(sum(cpu.values()), total / bytes_per_s)}


def summarize(
    case: Case, rounds: Sequence[Round], bytes_per_s: float, cores: int | None = None, also_paired: Collection[Key] = ()
) -> dict[str, Any]:
    """Every variant's figures, by phase; ratios of a variant to itself are left out.

    ``also_paired`` names variants that turned out to overlap forward and backward.

    There is no limit to compare with where nothing is sent, where replicas send gradients too, or where more ranks than
    ``cores`` take turns on them.
    """
    bounded = case.tensor_parallel > 1 and case.data_parallel == 1 and case.ranks <= (cores or case.ranks)
    limits = limits_s(case, rounds, bytes_per_s) if bounded else None
    return {
        "transport_cpu_s": transport_cpu_s(rounds),
        "wire_seconds": {phase: case.wire_bytes(phase) / bytes_per_s for phase in "FB"},
        "limit_s": limits,
        "variants": {name: _variant_figures(name, rounds, limits, case.ranks > 1, name in also_paired) for name in rounds[0]},
    }


def _variant_figures(
    name: Key, rounds: Sequence[Round], limits: Mapping[str, float] | None, sends: bool, paired: bool
) -> dict[str, dict[str, Spread]]:
    program, _, variant = name.partition("/")
    about = VARIANTS[program][variant]
    paired = paired or about.paired
    phases = ("step",) if paired else PHASES
    figures: dict[str, dict[str, Spread]] = {
        "seconds": {p: Spread.of(turns[name].seconds[p] for turns in rounds) for p in phases},
        "cpu_seconds": {"step": Spread.of(turns[name].cpu_s for turns in rounds)},
    }

    def ratios(figure: str, above: Key) -> None:
        if above in rounds[0] and above != name:
            figures[figure] = {p: _ratio(rounds, above, name, p) for p in phases}

    ratios("fraction_of_optimum", key(program, about.optimum))
    ratios("speedup_over_megatron", key(MEGATRON, "default"))
    serial, optimum = key(OURS, SERIAL), key(OURS, NO_COMM)
    if program == OURS and about.communicates and serial in rounds[0]:
        ratios("speedup", serial)
        if name != serial and sends:
            figures["hidden_share"] = {p: _hidden(rounds, serial, name, optimum, p) for p in phases}
        if limits is not None:
            bound = {p: limits["paired" if paired else p] for p in phases}
            figures["fraction_of_limit"] = {p: Spread.of(bound[p] / turns[name].seconds[p] for turns in rounds) for p in phases}
    return figures


def _ratio(rounds: Sequence[Round], above: Key, below: Key, phase: str) -> Spread:
    return within_rounds(rounds, lambda turns: turns[above].seconds[phase] / turns[below].seconds[phase])


def _hidden(rounds: Sequence[Round], serial: Key, name: Key, optimum: Key, phase: str) -> Spread:
    """Share of the communication's time that no longer shows; differences of medians, since a round's may be near zero."""

    def seconds(which: Key) -> float:
        return median(turns[which].seconds[phase] for turns in rounds)

    communication_s = seconds(serial) - seconds(optimum)

    def share(turns: Round) -> float:
        return (turns[serial].seconds[phase] - turns[name].seconds[phase]) / communication_s

    return within_rounds(rounds, share)
