"""Whether this machine has what a communication backend needs, as far as can be seen without torch."""

from collections.abc import Iterator
from pathlib import Path

from domino_lm.config.settings import RunConfig

GPU_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/dev/kfd"))
"""Where the drivers of NVIDIA's and AMD's GPUs show."""


def has_gpu() -> bool:
    """Whether a driver of GPUs is loaded."""
    return any(path.exists() for path in GPU_DRIVERS)


def backend_faults(run: RunConfig, world_size: int) -> Iterator[str]:
    """Why the ranks could not talk to each other on this machine; one rank talks to nobody."""
    if run.parallel.distributed_backend == "nccl" and world_size > 1 and not has_gpu():
        yield "--distributed-backend nccl carries data between GPUs, and this machine has none; use gloo, or leave it out."
