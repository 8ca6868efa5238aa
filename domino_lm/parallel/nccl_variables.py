"""Environment variables that NCCL and its process groups need, set before they start."""

import re
from collections.abc import MutableMapping

from domino_lm.config.kernels import KernelConfig
from domino_lm.config.settings import ConfigError

AVOID_RECORD_STREAMS = "TORCH_NCCL_AVOID_RECORD_STREAMS"
GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
FIRST_WITHOUT_RECORD_STREAMS = (2, 8)
"""From this PyTorch on a process group holds references to what it still reads; before, the allocator kept such memory back until NCCL
had ended, and under graph capture for ever (pytorch #150398)."""


def set_nccl_variables(environment: MutableMapping[str, str], kernels: KernelConfig, torch_version: str) -> None:
    """Set what this PyTorch and these settings need, where the user has not chosen.

    Raises ConfigError if ``environment`` has chosen what cannot work with ``--cuda-graph``.
    """
    if version_of(torch_version) < FIRST_WITHOUT_RECORD_STREAMS:
        environment.setdefault(AVOID_RECORD_STREAMS, "1")
    expandable = next((name for name in ALLOCATOR if expands(environment.get(name, ""))), None)
    if kernels.cuda_graph and expandable is not None and environment.setdefault(GRAPH_REGISTER, "0") != "0":
        raise ConfigError(
            f"--cuda-graph with {expandable}={environment[expandable]} needs {GRAPH_REGISTER}=0, since NCCL cannot register memory that moves, "
            f"but it is {environment[GRAPH_REGISTER]}; unset it, or leave expandable segments out."
        )


def expands(allocator: str) -> bool:
    """Whether an allocator's configuration turns expandable segments on; of several entries the last one holds."""
    found = re.findall(r"expandable_segments\s*:\s*(\w+)", allocator)
    return bool(found) and found[-1].lower() == "true"


def version_of(torch_version: str) -> tuple[int, int]:
    """Major and minor number of a PyTorch version."""
    major, minor, *_ = torch_version.split(".")
    return int(major), int(minor)
