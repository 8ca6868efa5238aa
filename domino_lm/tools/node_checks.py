"""Whether the nodes of a job are fit for it: all ranks check together and get the same report."""

import platform
import shutil
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

from domino_lm.launch.rank_facts import source_facts, sources_hash
from domino_lm.launch.shared_folder import PATIENCE_S, unshared
from domino_lm.launch.traffic import Traffic
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh

GIB, GB = 2**30, 1e9
PINGS, SMALL_ROUNDS, LARGE_ROUNDS = 8, 20, 5
LARGE_BYTES = {"cuda": 256 * 2**20, "cpu": 4 * 2**20}
SLOW_SHARE = 0.5
"""A group below this share of the median of its kind is reported."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What counts as fit."""

    shared: tuple[str, ...] = ()
    """Folders that all ranks must see."""

    min_free_gib: float = 10.0
    max_clock_offset_s: float = 1.0
    min_gbytes_per_s: float = 0.0
    """Bus bandwidth below which a tensor-parallel group is a fault."""

    traffic: Traffic | None = None
    """What a step of the run sends."""

    patience_s: float = PATIENCE_S
    """How long a network file system may take to show another node's file."""


@dataclass
class Report:
    """Rows of the table, and the faults among them."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, what: str, found: str, fault: str | None = None, warning: bool = False) -> None:
        """A row; ``fault`` says what is wrong with it."""
        self.rows.append((what, "FAULT" if fault else "look" if warning else "ok", found))
        if fault:
            self.faults.append(fault)

    def __str__(self) -> str:
        width = max(len(what) for what, _, _ in self.rows)
        return "\n".join(f"{what:{width}}  {verdict:5}  {found}" for what, verdict, found in self.rows)


def own_facts(device: torch.device) -> dict[str, str]:
    """What must be equal on all ranks."""
    facts = {
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "domino_lm": _package_version(),
        "its sources": sources_hash(source_facts()),
        "CUDA": str(torch.version.cuda or torch.version.hip or "none"),
        "NCCL": "none",
        "device": "CPU",
    }
    if device.type == "cuda":
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["device"] = torch.cuda.get_device_name(device)
    return facts


def _package_version() -> str:
    try:
        return version("domino-lm")
    except PackageNotFoundError:
        return "not installed"


def check(
    mesh: ParallelMesh,
    limits: Limits,
    facts: Callable[[torch.device], dict[str, str]] = own_facts,
    stage: Callable[[str], None] = lambda name: None,
) -> Report:
    """Every check, in order, on every rank of ``mesh``; all ranks get the same report. ``stage`` is called with the name of each."""
    report = Report()
    world = mesh.world
    for name, run in (
        ("layout", lambda: _layout(report, mesh)),
        ("versions", lambda: _versions(report, world, facts(mesh.device))),
        ("clocks", lambda: _clocks(report, world, limits)),
        ("reachability", lambda: _reach(report, mesh)),
        ("bandwidth", lambda: _bandwidth(report, mesh, limits)),
        ("shared folders", lambda: _shared(report, world, limits)),
        ("free disk", lambda: _disk(report, world, limits)),
    ):
        stage(name)
        run()
    return report


def _layout(report: Report, mesh: ParallelMesh) -> None:
    """Nodes, devices, and whether tensor-parallel groups stay inside nodes."""
    mine = (socket.gethostname(), str(mesh.device), mesh.tp.rank, mesh.dp.rank)
    found = mesh.world.all_gather_object(mine)
    hosts = list(dict.fromkeys(host for host, *_ in found))
    counts = {host: sum(other == host for other, *_ in found) for host in hosts}
    report.add("ranks", f"{len(found)} on {len(hosts)} node(s): {', '.join(f'{host} ({n})' for host, n in counts.items())}")
    if len(set(counts.values())) > 1:
        report.add("ranks per node", "differ", warning=True)
    devices = [(host, device) for host, device, *_ in found if device != "cpu"]
    twice = next((place for place in devices if devices.count(place) > 1), None)
    if twice:
        report.add("devices", "shared", f"{twice[0]}: several ranks use {twice[1]}; start at most one rank a GPU (LOCAL_RANK).")
    spread = [replica for replica in range(mesh.dp.size) if len({host for host, _, _, dp in found if dp == replica}) > 1]
    crossing = f", {len(spread)} of them across nodes: slow" if spread else ", each inside a node" if len(hosts) > 1 else ""
    report.add("groups", f"{mesh.dp.size} tensor-parallel group(s) of {mesh.tp.size}{crossing}", warning=bool(spread))


def _versions(report: Report, world: Communicator, mine: dict[str, str]) -> None:
    found = world.all_gather_object((socket.gethostname(), mine))
    for name, first in found[0][1].items():
        other = next((rank for rank, (_, facts) in enumerate(found) if facts.get(name) != first), None)
        if other is None:
            report.add(name, first)
            continue
        host, facts = found[other]
        fault = (
            f"{name} differs: {first} on {found[0][0]} (rank 0), {facts.get(name)} on {host} (rank {other}); install the same everywhere."
        )
        report.add(name, f"{first} / {facts.get(name)}", fault)


def _clocks(report: Report, world: Communicator, limits: Limits) -> None:
    """Offset of every rank's clock from rank 0's, by the fastest of some pings."""
    offsets = [world.broadcast_object(_ping(world, other)) for other in range(1, world.size)]
    if not offsets:
        report.add("clocks", "one rank")
        return
    rank, offset = max(enumerate(offsets, start=1), key=lambda one: abs(one[1]))
    fault = (
        f"the clock of rank {rank} is {offset:+.1f} s off rank 0's (--max-clock-offset-seconds "
        f"{limits.max_clock_offset_s:g}); synchronise the nodes' clocks, or logs and file times of a run will mislead."
    )
    found = f"within {abs(offset) * 1e3:.1f} ms of rank 0"
    report.add("clocks", found, fault if abs(offset) > limits.max_clock_offset_s else None)


def _ping(world: Communicator, other: int) -> float:
    """How far the clock of rank ``other`` is ahead of rank 0's; only rank 0's answer counts."""
    buffer = torch.zeros(1, dtype=torch.float64)
    best = (float("inf"), 0.0)
    for _ in range(PINGS):
        if world.rank == 0:
            sent_s = time.time()
            dist.send(buffer, other)
            dist.recv(buffer, other)
            back_s = time.time()
            best = min(best, (back_s - sent_s, float(buffer) - (sent_s + back_s) / 2))
        elif world.rank == other:
            dist.recv(buffer, 0)
            buffer.fill_(time.time())
            dist.send(buffer, 0)
    return best[1]


def _reach(report: Report, mesh: ParallelMesh) -> None:
    """Every rank sends its number to every other one."""
    size = mesh.world.size
    if size == 1:
        report.add("reachability", "one rank")
        return
    sent = torch.full((size,), float(mesh.world.rank), device=mesh.device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    right = received.tolist() == [float(rank) for rank in range(size)]
    wrong = [rank for rank, ok in enumerate(mesh.world.all_gather_object(right)) if not ok]
    fault = f"rank(s) {', '.join(map(str, wrong))} received other numbers than were sent; look at the network." if wrong else None
    report.add("reachability", f"all {size * (size - 1)} pairs", fault)


def _bandwidth(report: Report, mesh: ParallelMesh, limits: Limits) -> None:
    """Latency of a small and bus bandwidth of a large all-reduce of every group, its slowest rank's, and what they mean for a step."""
    slowest_rates = {}
    for name, group in (("TP", mesh.tp), ("DP", mesh.dp), ("world", mesh.world)):
        measured = measure(group, mesh.device)
        found = mesh.world.all_gather_object((measured, socket.gethostname()))
        if group.size == 1:
            report.add(f"{name} all-reduce", "one rank")
            continue
        rates = [rate for (_, rate), _ in found]
        slowest = min(range(len(rates)), key=rates.__getitem__)
        slowest_rates[name] = rates[slowest] * group.size / (2 * (group.size - 1))  # bytes of a buffer per second
        middle, latency_s = statistics.median(rates), max(latency for (latency, _), _ in found)
        text = f"{latency_s * 1e6:.0f} us, {rates[slowest] / 1e9:.2f} to {max(rates) / 1e9:.2f} GB/s of bus bandwidth"
        text += f", {GB / slowest_rates[name]:.3g} s for a GB"
        uneven = rates[slowest] < SLOW_SHARE * middle
        if uneven:
            text += f"; slowest around rank {slowest} on {found[slowest][1]}"
        fault = (
            f"the tensor-parallel group of rank {slowest} on {found[slowest][1]} reaches {rates[slowest] / 1e9:.2f} GB/s "
            f"(--min-gbytes-per-second {limits.min_gbytes_per_s:g}); look at its links."
        )
        too_slow = name == "TP" and rates[slowest] < limits.min_gbytes_per_s * 1e9
        report.add(f"{name} all-reduce", text, fault if too_slow else None, uneven)
    if limits.traffic is not None:
        report.add("step", step_text(limits.traffic, slowest_rates))


def step_text(traffic: Traffic, rates: dict[str, float]) -> str:
    """How long a step's messages take at the slowest group's ``rates``, bytes of a buffer per second by kind of group."""
    parts = [("tensor-parallel", "TP", traffic.tensor_bytes), ("gradients", "DP", traffic.gradient_bytes)]
    sent = [(what, size, size / rates[name]) for what, name, size in parts if size and name in rates]
    if not sent:
        return "sends nothing"
    each = ", ".join(f"{what} {size / GB:.3g} GB in {seconds:.3g} s" for what, size, seconds in sent)
    return f"takes at least {max(seconds for *_, seconds in sent):.3g} s at these rates, however well they are hidden: {each}"


def measure(group: Communicator, device: torch.device) -> tuple[float, float]:
    """Seconds of an 8-byte all-reduce, and bus bandwidth (2 (n - 1) / n x bytes / time) of a large one."""
    if group.size == 1:
        return 0.0, float("inf")
    size = LARGE_BYTES[device.type]
    small, large = torch.zeros(2, device=device), torch.zeros(size // 4, device=device)
    latency_s, large_s = _median_s(group, small, SMALL_ROUNDS), _median_s(group, large, LARGE_ROUNDS)
    return latency_s, 2 * (group.size - 1) / group.size * size / large_s


def _median_s(group: Communicator, buffer: torch.Tensor, rounds: int) -> float:
    samples = []
    for _ in range(rounds + 1):
        group.barrier()
        _settle(buffer)
        start_s = time.perf_counter()
        group.all_reduce(buffer)
        _settle(buffer)
        samples.append(time.perf_counter() - start_s)
    return statistics.median(samples[1:])


def _settle(buffer: torch.Tensor) -> None:
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)


def _shared(report: Report, world: Communicator, limits: Limits) -> None:
    """Every rank writes a file; rank 0 must see all of them, and all must see rank 0's."""
    for folder in limits.shared:
        bad = unshared(folder, world, limits.patience_s)
        fault = None
        if bad is not None:
            fault = f"{folder} is not one folder for all: rank {bad[0]} on {bad[1]} {bad[2]}; mount the same file system on all nodes."
        report.add(f"shared {folder}", "seen by all ranks" if bad is None else f"rank {bad[0]} {bad[2]}", fault)
    if not limits.shared:
        report.add("shared folders", "none named (--shared)")


def _disk(report: Report, world: Communicator, limits: Limits) -> None:
    for folder in limits.shared or (".",):
        try:
            free = shutil.disk_usage(folder).free / GIB
        except OSError:
            free = 0.0
        found = world.all_gather_object((free, socket.gethostname()))
        least, host = min(found)
        fault = f"{folder} has {least:.1f} GiB free on {host} (--min-free-gib {limits.min_free_gib:g}); make room, or save elsewhere."
        report.add(f"free in {folder}", f"{least:.1f} GiB at least", fault if least < limits.min_free_gib else None)
