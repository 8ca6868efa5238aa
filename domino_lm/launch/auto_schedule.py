"""``--schedule auto``: measures this machine or reads what was measured, and settles the schedule on all ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from domino_lm.config.settings import ConfigError, RunConfig
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.simulate.auto import choose
from domino_lm.simulate.calibrate import calibrate
from domino_lm.simulate.hardware import HARDWARE, Hardware, find_hardware
from domino_lm.simulate.predict import Setting


def settle_schedule(run: RunConfig, mesh: ParallelMesh) -> tuple[RunConfig, str]:
    """``run`` with the fastest schedule by simulation in place of auto, and the table that says why.

    Every rank must call; rank 0's measurements and choice are everyone's. ``--domino-calibration FILE.json`` is read
    where it exists and written where it does not. Raises ConfigError, on every rank, where nothing fits.
    """
    if run.schedule.schedule != "auto":
        return run, ""
    hardware = replace(_hardware(run.schedule.domino_calibration, mesh), element_bytes=run.precision.element_bytes)
    outcome: ConfigError | tuple[RunConfig, str] | None = None
    if mesh.world.rank == 0:
        try:
            choice = choose(Setting.of(run, mesh.world.size, hardware), run.schedule, _memory_bytes(mesh, hardware))
            outcome = replace(run, schedule=choice.chosen.schedule), f"candidates by simulation on {hardware.name}:\n{choice}"
        except ConfigError as error:
            outcome = error
    settled = mesh.world.broadcast_object(outcome)
    if isinstance(settled, ConfigError):
        raise settled
    return settled


def _hardware(given: str | None, mesh: ParallelMesh) -> Hardware:
    """What is known by name or file, else measured: by every rank of a TP group together, rank 0's group counts."""
    known: Hardware | ConfigError | None = None
    if mesh.world.rank == 0 and given is not None and (not given.endswith(".json") or Path(given).exists()):
        try:
            known = find_hardware(given)
        except ConfigError as error:
            known = ConfigError(str(error).replace("--hardware", "--domino-calibration"))
    known = mesh.world.broadcast_object(known)
    if isinstance(known, ConfigError):
        raise known
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


def _memory_bytes(mesh: ParallelMesh, hardware: Hardware) -> float:
    """Memory of one rank: the GPU's own, or its share of the host's."""
    if mesh.device.type == "cuda":
        return float(torch.cuda.get_device_properties(mesh.device).total_memory)
    return hardware.device.memory_bytes / mesh.world.size
