"""``--deterministic-mode``: what makes a step on GPUs give the same bits each time it runs on the same machines and layout.

On CPUs it is so without any of this.
"""

from collections.abc import MutableMapping

import torch

from domino_lm.config.settings import ConfigError

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACES = (":4096:8", ":16:8")
"""Sizes with which every stream has workspaces of its own, as cuBLAS asks for reproducible results; the first is the faster one."""

NCCL_ALGORITHM = "NCCL_ALGO"
NCCL_ALGORITHMS = ("Ring", "Tree", "CollnetDirect", "CollnetChain", "^NVLS")
"""Those that add in an order of their own, Megatron's list; a reduction inside the switch (NVLS) does not."""

COMPILER = "TORCHINDUCTOR_DETERMINISTIC"
"""Keeps the compiler from choosing kernels, and with them an order of sums, by timing them."""


def set_variables(environment: MutableMapping[str, str]) -> None:
    """Make cuBLAS, NCCL and PyTorch's compiler reproducible, before they start.

    Raises ConfigError if ``environment`` has chosen what is not.
    """
    environment.setdefault(COMPILER, "1")
    for variable, allowed in ((CUBLAS_WORKSPACE, CUBLAS_WORKSPACES), (NCCL_ALGORITHM, NCCL_ALGORITHMS)):
        found = environment.setdefault(variable, allowed[0])
        if found not in allowed:
            raise ConfigError(
                f"--deterministic-mode: {variable}={found} is not reproducible; unset it, which takes {allowed[0]}, "
                f"or choose one of {', '.join(allowed)}."
            )


def use_deterministic_kernels() -> None:
    """Make PyTorch take its deterministic kernels in this process, attention's backward among them; one that has none raises an error."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a step writes memory before it reads it
    torch.backends.cudnn.benchmark = False
