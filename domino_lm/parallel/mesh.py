"""The grid of ranks: tensor-parallel neighbours inside, data-parallel replicas across."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from domino_lm.config.kernels import KernelConfig
from domino_lm.config.settings import ConfigError, ParallelConfig
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.determinism import set_variables, use_deterministic_kernels
from domino_lm.parallel.gloo_pair import PairCommunicator
from domino_lm.parallel.interface import InterfaceError, choose_interface
from domino_lm.parallel.nccl_variables import set_nccl_variables
from domino_lm.parallel.rendezvous import Rendezvous


class MissingBackendError(ConfigError):
    """A communication backend or a GPU that this machine, or this build of PyTorch, does not have."""

    first_local_rank = 0
    """The first rank of a node that meets it."""


@dataclass(frozen=True)
class ParallelMesh:
    """Communicators of this rank and the device it computes on. Built once and passed."""

    world: Communicator
    tp: Communicator
    dp: Communicator
    device: torch.device

    @classmethod
    def create(
        cls,
        parallel: ParallelConfig,
        device: torch.device | None = None,
        kernels: KernelConfig | None = None,
        met: Callable[[Rendezvous], None] = lambda rendezvous: None,
    ) -> Self:
        """Join the ranks that torchrun started, or stand alone as one plain process.

        Reads ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``. Rank r is tensor-parallel rank ``r % t`` of replica ``r // t``.
        ``kernels`` says how NCCL's kernels share the GPU, and whether results are to be reproducible. ``met`` is called, if there are
        several ranks, when they have met and have no process groups yet: ranks with other settings would wait for different ones.
        Raises ConfigError if t does not divide the number of ranks, or if the environment asks for what is not reproducible,
        MissingBackendError if the backend cannot carry data between this machine's devices, or other nodes
        could not reach this one.
        """
        kernels = kernels or KernelConfig()
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        check_layout(parallel, world_size)
        if kernels.cuda_device_max_connections is not None:  # read once, when the first context is made
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(kernels.cuda_device_max_connections)
        if kernels.deterministic_mode:
            set_variables(os.environ)
            use_deterministic_kernels()
        device = device if device is not None else default_device()
        if world_size == 1:
            return cls.single(device)
        backend = parallel.distributed_backend or ("nccl" if device.type == "cuda" else "gloo")
        fault = backend_fault(backend, device)
        if fault is not None:
            raise MissingBackendError(fault)
        if device.type == "cuda":
            _take(device)
        if backend == "nccl":
            set_nccl_variables(os.environ, kernels, torch.__version__)
        try:
            choose_interface(os.environ)
        except InterfaceError as error:
            raise MissingBackendError(str(error)) from error
        timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
        rendezvous = Rendezvous.join(timeout)
        met(rendezvous)
        rank, store = rendezvous.rank, rendezvous.part("default_pg")
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=rendezvous.size)
        return cls.from_world(parallel.tensor_model_parallel_size, device, timeout, kernels if backend == "nccl" else None)

    @classmethod
    def from_world(cls, tp_size: int, device: torch.device, timeout: timedelta | None = None, nccl: KernelConfig | None = None) -> Self:
        """Split torch.distributed's process group into TP groups of ``tp_size`` and DP groups across them.

        ``nccl`` holds the options of NCCL groups, if the groups use NCCL.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        grid = torch.arange(size).view(size // tp_size, tp_size)  # [dp, tp]
        one_way = tp_size == 2 and device.type == "cpu" and dist.get_backend() == "gloo"
        tp = _join_pairs(grid.tolist(), rank, timeout) if one_way else _join(grid.tolist(), rank, timeout, _nccl_options(nccl, "tp"))
        dp = _join(grid.t().tolist(), rank, timeout, _nccl_options(nccl, "dp"))
        return cls(Communicator(rank, size, dist.group.WORLD), tp, dp, device)

    @classmethod
    def single(cls, device: torch.device) -> Self:
        """This process alone; needs no torch.distributed."""
        alone = Communicator.single()
        return cls(alone, alone, alone, device)

    def group_of(self, rank: int, link: str) -> range:
        """The ranks with which ``rank`` shares a ``link``: tp or dp."""
        tp, size = self.tp.size, self.world.size
        return range(rank // tp * tp, rank // tp * tp + tp) if link == "tp" else range(rank % tp, size, tp)

    def set_timeout(self, timeout: timedelta) -> None:
        """Let collectives that begin from now on take so long."""
        for communicator in (self.world, self.tp, self.dp):
            communicator.set_timeout(timeout)

    def close(self) -> None:
        """Leave the process groups; the mesh must not be used afterwards.

        The groups' threads end with the last reference to them, and must while the interpreter lives: one that drops a
        tensor later aborts the process.
        """
        for communicator in (self.world, self.tp, self.dp):
            communicator.leave()
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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


def backend_fault(backend: str, device: torch.device) -> str | None:
    """Why ``backend`` (gloo, nccl) cannot carry data between ranks whose tensors lie on ``device``; None if it can."""
    asked = f"--distributed-backend {backend}"
    if not dist.is_available():
        return f"{asked}: PyTorch {torch.__version__} was built without its distributed package; install one that has it."
    if backend == "nccl" and device.type != "cuda":
        return f"{asked} carries data between GPUs, and PyTorch finds none on this machine; use gloo, or leave it out."
    if not {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available}[backend]():
        other = "gloo" if backend == "nccl" else "nccl"
        return f"{asked}: PyTorch {torch.__version__} was built without it; use {other}, or install a PyTorch that has it."
    return None


def _take(device: torch.device) -> None:
    """Make ``device`` this process's own. Raises MissingBackendError if the node has fewer GPUs than ranks."""
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        error = MissingBackendError(
            f"more ranks were started on this node than the {count} GPU(s) that PyTorch finds; start at most {count}, "
            "best with torchrun --nproc-per-node."
        )
        error.first_local_rank = count
        raise error
    torch.cuda.set_device(device)


def default_device() -> torch.device:
    """This rank's GPU if CUDA is available, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def _nccl_options(nccl: KernelConfig | None, group: str) -> Any:
    """Options of one group, or None if all are NCCL's own."""
    if nccl is None or (group not in nccl.high_priority_stream_groups and nccl.nccl_max_ctas is None):
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=group in nccl.high_priority_stream_groups)
    if nccl.nccl_max_ctas is not None:
        options.config.min_ctas, options.config.max_ctas = 1, nccl.nccl_max_ctas
    return options


def _join(groups: list[list[int]], rank: int, timeout: timedelta | None, options: Any = None) -> Communicator:
    """Create every group, as each rank must, and return the one that holds ``rank``."""
    mine = Communicator.single()
    for ranks in groups:
        group = dist.new_group(ranks, timeout=timeout, pg_options=options) if len(ranks) > 1 else None
        if rank in ranks:
            mine = Communicator(ranks.index(rank), len(ranks), group)
    return mine


def _join_pairs(pairs: list[list[int]], rank: int, timeout: timedelta | None) -> Communicator:
    """As `_join`, for pairs of CPU ranks: a group for what gloo does itself, and one for each direction."""
    joined = [(ranks.index(rank) if rank in ranks else None, [dist.new_group(ranks, timeout=timeout) for _ in range(3)]) for ranks in pairs]
    ((mine, (group, *ways)),) = [(place, groups) for place, groups in joined if place is not None]
    return PairCommunicator(mine, group, (ways[0], ways[1]))
