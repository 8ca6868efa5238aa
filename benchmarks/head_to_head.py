"""Ours against Megatron-core and DeepSpeed's Domino: same link, sizes, weights and tokens, in turn, in one run.

    python benchmarks/head_to_head.py                                  # GPT, hidden 512, 2, 1 and 0.5 Gbit/s, two ranks
    python benchmarks/head_to_head.py --family llama --gbit 1 --rounds 3
    python benchmarks/head_to_head.py --programs domino_lm --variants serial rows2 no_comm

Writes OUTPUT.json (everything measured), OUTPUT.md (a table) and OUTPUT.png (a picture). Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.case import AUTO, NO_COMM, OUR_VARIANTS, OURS, SERIAL, VARIANTS, Case, model_of, variants_of  # noqa: E402
from benchmarks.figures import Key, Turn, key, summarize  # noqa: E402
from benchmarks.gang import Gang, GangError  # noqa: E402
from benchmarks.peers import REQUIREMENTS, PeerError, install_peers  # noqa: E402
from benchmarks.report import draw, markdown  # noqa: E402
from benchmarks.shaped_network import LARGEST_MTU, Link, NetworkError, ShapedNetwork, bus_bandwidth  # noqa: E402
from domino_lm.config.settings import refuse  # noqa: E402
from domino_lm.model.families.lookup import family_of  # noqa: E402

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4
DISPATCH_STEPS = 200


class MismatchError(RuntimeError):
    """Programs that do not compute the same are not compared; the message says which differ and by how much."""


class Effort(NamedTuple):
    """How much is measured on each link."""

    rounds: int
    steps: int
    warm_up: int
    calibrate: bool = False


def main(arguments: list[str] | None = None) -> int:
    """Parse, measure every link, write the results; returns the exit status."""
    chosen = parser().parse_args(arguments)
    try:
        model = model_of(chosen.family, hidden=chosen.hidden, layers=chosen.layers, seq=chosen.seq, vocab=chosen.vocab)
        refuse(list(family_of(model).faults(chosen.tp)))
        case = Case(chosen.family, model, chosen.tp, chosen.dp, chosen.micro_batch_size, chosen.micro_batches)
        wanted = wanted_variants(case, chosen.programs, chosen.variants)
        if any(program != OURS for program in wanted):
            install_peers()
        results = describe(case, arguments if arguments is not None else sys.argv[1:])
        chosen.output.parent.mkdir(parents=True, exist_ok=True)
        links = [Link(gbit, chosen.mtu, chosen.delay_ms) for gbit in (chosen.gbit if case.ranks > 1 else chosen.gbit[:1])]
        compare(
            case,
            wanted,
            links,
            Effort(chosen.rounds, chosen.steps, chosen.warm_up, chosen.calibrate),
            results,
            chosen.output,
            chosen.timelines,
        )
    except (NetworkError, PeerError, GangError, MismatchError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(markdown(results))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--family", choices=("gpt", "llama"), default="gpt")
    made.add_argument("--hidden", type=int, default=512)
    made.add_argument("--layers", type=int, default=4)
    made.add_argument("--seq", type=int, default=256)
    made.add_argument("--vocab", type=int, default=512, help="a large vocabulary adds compute that no schedule changes")
    made.add_argument("--micro-batch-size", type=int, default=4)
    made.add_argument("--micro-batches", type=int, default=1, help="micro-batches of one step")
    made.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    made.add_argument("--dp", type=int, default=1, help="replicas")
    made.add_argument("--gbit", type=float, nargs="+", default=[2.0, 1.0, 0.5], help="rates of the link, measured one after another")
    made.add_argument("--mtu", type=int, default=LARGEST_MTU)
    made.add_argument("--delay-ms", type=float, default=0.0)
    made.add_argument("--rounds", type=int, default=7, help="turns that every variant gets on each link")
    made.add_argument("--steps", type=int, default=3, help="timed steps of a turn")
    made.add_argument("--warm-up", type=int, default=1, help="steps of a turn before the timed ones")
    made.add_argument(
        "--calibrate", action="store_true", help="time single kernels and all-reduces before each round, for predict_shaped.py"
    )
    made.add_argument("--programs", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    made.add_argument("--variants", nargs="+", help="ours to measure; serial and no_comm always are. Default: all but a few")
    made.add_argument("--timelines", nargs="+", choices=list(OUR_VARIANTS), default=[], help="ours to record one step of, on each link")
    made.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "head_to_head", help="results, without suffix")
    return made


def wanted_variants(case: Case, programs: Sequence[str], ours: Sequence[str] | None) -> dict[str, list[str]]:
    """What runs: our program always, since it makes the weights; raises ValueError for a name that it does not have."""
    wanted = {program: list(variants_of(program, case)) for program in VARIANTS if program in programs or program == OURS}
    unknown = sorted(set(ours or ()) - set(wanted[OURS]))
    if unknown:
        raise ValueError(f"--variants {' '.join(unknown)}: this case has {', '.join(wanted[OURS])}")
    named = {*ours, SERIAL, NO_COMM} if ours is not None else {name for name in wanted[OURS] if not OUR_VARIANTS[name].extra}
    wanted[OURS] = [name for name in wanted[OURS] if name in named]
    return {program: variants for program, variants in wanted.items() if variants}


def compare(
    case: Case,
    wanted: Mapping[str, Sequence[str]],
    links: Sequence[Link],
    effort: Effort,
    results: dict[str, Any],
    output: Path,
    recorded: Sequence[str] = (),
) -> None:
    """Start all programs side by side, check that they compute the same, measure every link; results are written after each.

    One more step of each ``recorded`` variant of ours is written as a timeline.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        network = stack.enter_context(ShapedNetwork(case.ranks, links[0]))
        gangs: dict[str, Gang] = {}
        for program in wanted:
            gangs[program] = stack.enter_context(Gang(network, program, folder))
        for gang in gangs.values():  # ours is the first, and saves the weights for the others
            gang.build(case)
        results["numerics"] = {}
        for link in links:
            network.shape(link)
            settled = gangs[OURS].call("settle")[0] if AUTO in wanted[OURS] else None
            unchecked = wanted if link is links[0] else {OURS: [AUTO] if settled else []}
            results["numerics"] |= check_numerics(gangs, unchecked, folder)
            measured = {"auto": settled, **measure_link(network, gangs, wanted, effort)}
            results["dispatch_s_per_op"] = max(gangs[OURS].call("dispatch_s", variant=SERIAL, steps=DISPATCH_STEPS))
            turns = [{name: Turn.of(answers) for name, answers in each["turns"].items()} for each in measured["rounds"]]
            also_paired = {key(OURS, AUTO)} if settled and settled["paired"] else set()
            summary = summarize(case, turns, link.bytes_per_s, os.cpu_count(), also_paired)
            results["links"].append({**asdict(link), **measured, "summary": summary})
            write(results, output)
            for variant in recorded:
                trace = output.with_name(f"{output.name}_{link.gbit_per_s:g}gbit_{variant}.json")
                gangs[OURS].call("record", variant=variant, trace=str(trace), about=f"{case.family}, {link}")


def check_numerics(gangs: Mapping[str, Gang], wanted: Mapping[str, Sequence[str]], folder: Path) -> dict[Key, dict[str, float]]:
    """Loss and gradients of every variant against our baseline's; raises MismatchError before anything is timed."""
    found: dict[Key, dict[str, float]] = {}
    reference = gangs[OURS].call("save", variant=SERIAL, folder=str(folder))
    for program, variants in wanted.items():
        for variant in variants:
            if not VARIANTS[program][variant].communicates:
                continue
            answers = gangs[program].call("check", variant=variant, folder=str(folder))
            loss = max(abs(a["loss"] - b["loss"]) for a, b in zip(answers, reference, strict=True))
            gradient = max(answer["gradient_difference"] for answer in answers)
            found[key(program, variant)] = {"loss_difference": loss, "gradient_difference": gradient}
            if not (loss <= LOSS_TOLERANCE and gradient <= GRADIENT_TOLERANCE):
                raise MismatchError(
                    f"{program} {variant} does not compute what our baseline does: the loss differs by {loss:.1e} (allowed {LOSS_TOLERANCE:g}), "
                    f"a gradient by {gradient:.1e} of its largest element (allowed {GRADIENT_TOLERANCE:g}); their times say nothing."
                )
    return found


def measure_link(network: ShapedNetwork, gangs: Mapping[str, Gang], wanted: Mapping[str, Sequence[str]], effort: Effort) -> dict[str, Any]:
    """Rounds on one link. Every round starts with another variant, so that none always follows the same one."""
    turns = [(program, variant) for program, variants in wanted.items() for variant in variants]
    measured: dict[str, Any] = {"load_average_before": os.getloadavg(), "rounds": []}
    if network.ranks > 1:
        measured["all_reduce_busbw_bits_per_s"] = bus_bandwidth(network)
        measured["tcp_bits_per_s"] = network.measure()
    for number in range(effort.rounds):
        start_s = time.monotonic()
        calibration = {"calibration": gangs[OURS].call("calibrate")[0]} if effort.calibrate else {}
        shift = number * len(turns) // effort.rounds
        order = turns[shift:] + turns[:shift]
        answers = {key(p, v): gangs[p].call("measure", variant=v, steps=effort.steps, warm_up=effort.warm_up) for p, v in order}
        measured["rounds"].append({**calibration, "order": [key(*turn) for turn in order], "turns": answers})
        print(f"{network.link}: round {number + 1} of {effort.rounds}, {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)
    measured["load_average_after"] = os.getloadavg()
    return measured


def describe(case: Case, arguments: Sequence[str]) -> dict[str, Any]:
    """What a reader needs to run this again."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return {
        "command": shlex.join(["python", "benchmarks/head_to_head.py", *arguments]),
        "commit": git("rev-parse", "--verify", "-q", "HEAD") or "none",
        "uncommitted_changes": bool(git("status", "--porcelain")),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": describe_machine(),
        "versions": {"torch": version("torch"), **{name: pin.split("==")[1] for name, pin in REQUIREMENTS.items()}},
        "case": asdict(case),
        "links": [],
    }


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory and kernel."""
    information = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in information if line.startswith("model name")), platform.processor())
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"processor": model, "cores": os.cpu_count(), "memory_gib": round(memory_bytes / 2**30, 1), "kernel": platform.release()}


def write(results: Mapping[str, Any], output: Path) -> None:
    """JSON, table and picture; each file appears whole."""
    for suffix, text in ((".json", json.dumps(results, indent=1)), (".md", markdown(results))):
        unfinished = output.with_name(output.name + suffix + ".tmp")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, output.with_name(output.name + suffix))
    draw(results, output.with_name(output.name + ".png"))


if __name__ == "__main__":
    sys.exit(main())
