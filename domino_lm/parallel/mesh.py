"""The grid of ranks: tensor-parallel neighbours inside, data-parallel replicas across."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from domino_lm.config import ConfigError, ParallelConfig
from domino_lm.parallel.collectives import Communicator


@dataclass(frozen=True)
class ParallelMesh:
    """Communicators of this rank and the device it computes on. Built once and passed."""

    world: Communicator
    tp: Communicator
    dp: Communicator
    device: torch.device

    @classmethod
    def create(cls, parallel: ParallelConfig, device: torch.device | None = None) -> ParallelMesh:
        """Join the ranks that torchrun started, or stand alone as one plain process.

        Reads ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``. Rank r is tensor-parallel rank ``r % t`` of replica ``r // t``.
        Raises ConfigError where t does not divide the number of ranks.
        """
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        check_layout(parallel, world_size)
        device = device if device is not None else default_device()
        if world_size == 1:
            return cls.single(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = parallel.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        dist.init_process_group(backend, timeout=timeout)
        return cls.from_world(parallel.tensor_model_parallel_size, device, timeout)

    @classmethod
    def from_world(cls, tp_size: int, device: torch.device, timeout: timedelta | None = None) -> ParallelMesh:
        """Cut the process group that torch.distributed already has into TP groups of ``tp_size`` and DP groups across them."""
        rank, size = dist.get_rank(), dist.get_world_size()
        grid = torch.arange(size).view(size // tp_size, tp_size)  # [dp, tp]
        tp = _join(grid.tolist(), rank, timeout)
        dp = _join(grid.t().tolist(), rank, timeout)
        return cls(Communicator(rank, size, dist.group.WORLD), tp, dp, device)

    @classmethod
    def single(cls, device: torch.device) -> ParallelMesh:
        """This process alone; needs no torch.distributed."""
        alone = Communicator.single()
        return cls(alone, alone, alone, device)

    def close(self) -> None:
        """Leave the process groups; the mesh must not be used afterwards.

        The groups' threads end with the last reference to them, and must while the interpreter lives: one that drops a
        tensor later aborts the process.
        """
        for communicator in (self.world, self.tp, self.dp):
            communicator.group = None
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> ParallelMesh:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_layout(parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a tensor-parallel size that does not divide the ranks; raises ConfigError with the sizes that do."""
    tp_size = parallel.tensor_model_parallel_size
    if tp_size < 1 or world_size % tp_size:
        divisors = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ConfigError(
            f"--tensor-model-parallel-size {tp_size} does not divide the {world_size} ranks that were started; "
            f"use one of {divisors}, or start a multiple of {max(tp_size, 1)} ranks."
        )


def default_device() -> torch.device:
    """This rank's GPU where CUDA is available, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _join(groups: list[list[int]], rank: int, timeout: timedelta | None) -> Communicator:
    """Create every group, as each rank must, and return the one that holds ``rank``."""
    mine = Communicator.single()
    for ranks in groups:
        group = dist.new_group(ranks, timeout=timeout) if len(ranks) > 1 else None
        if rank in ranks:
            mine = Communicator(ranks.index(rank), len(ranks), group)
    return mine
