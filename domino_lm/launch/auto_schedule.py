"""``--schedule auto``: measures this machine or reads what was measured, and settles the schedule on all ranks."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

import torch

from domino_lm.config.settings import ConfigError, RunConfig
from domino_lm.launch.file_checks import known_machine
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.simulate.auto import choose
from domino_lm.simulate.calibrate import calibrate
from domino_lm.simulate.hardware import HARDWARE, Hardware
from domino_lm.simulate.predict import Setting

T = TypeVar("T")


def settle_schedule(run: RunConfig, mesh: ParallelMesh) -> tuple[RunConfig, str]:
    """``run`` with the fastest schedule by simulation in place of auto, and the table that says why.

    Every rank must call; rank 0's measurements and choice are everyone's. ``--domino-calibration FILE.json`` is read
    if it exists, and written if it does not. Raises ConfigError, on every rank, if nothing fits.
    """
    if run.schedule.schedule != "auto":
        return run, ""
    hardware = replace(_hardware(run.schedule.domino_calibration, mesh), element_bytes=run.precision.element_bytes)

    def settle() -> tuple[RunConfig, str]:
        choice = choose(Setting.of(run, mesh.world.size, hardware), run.schedule, _memory_bytes(mesh, hardware))
        return replace(run, schedule=choice.chosen.schedule), f"candidates by simulation on {hardware.name}:\n{choice}"

    return _from_rank_0(mesh, settle)


def _hardware(given: str | None, mesh: ParallelMesh) -> Hardware:
    """What is known by name or file, else measured: by every rank of a TP group together, rank 0's group counts."""
    known = _from_rank_0(mesh, lambda: known_machine(given))
    if known is not None:
        return known
    if mesh.device.type != "cpu":
        raise ConfigError(
            f"--schedule auto measures CPUs only; name this machine with --domino-calibration: {', '.join(HARDWARE)}, or a .json file."
        )
    measured: Hardware = mesh.world.broadcast_object(calibrate(mesh.tp, mesh.device, "this machine"))
    if given is not None and mesh.world.rank == 0:
        measured.write_json(given)
    return measured


def _from_rank_0(mesh: ParallelMesh, ask: Callable[[], T]) -> T:
    """Rank 0's answer, or its ConfigError, on every rank."""
    answer: T | ConfigError | None = None
    if mesh.world.rank == 0:
        try:
            answer = ask()
        except ConfigError as error:
            answer = error
    answer = mesh.world.broadcast_object(answer)
    if isinstance(answer, ConfigError):
        raise answer
    return cast("T", answer)


def _memory_bytes(mesh: ParallelMesh, hardware: Hardware) -> float:
    """Memory of one rank: the GPU's own, or its share of the host's."""
    if mesh.device.type == "cuda":
        return float(torch.cuda.get_device_properties(mesh.device).total_memory)
    return hardware.device.memory_bytes / mesh.world.size
