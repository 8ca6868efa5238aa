"""torch.compile behind the seam: each pure function between GEMMs becomes one graph, shared by all layers."""

from dataclasses import replace

import torch
from torch import Tensor

from domino_lm.config.settings import ConfigError
from domino_lm.model.kernels import pointwise
from domino_lm.model.kernels.kernel_set import Kernels
from domino_lm.model.rope import rotate

RECOMPILES = 64
"""Shapes and forms of one function: rows of two lengths, ranks' shares, evaluation, with and without dropout or positions."""


def compile_kernels(kernels: Kernels, backend: str, device: torch.device) -> Kernels:
    """``kernels`` with everything pointwise compiled. Raises ConfigError if ``backend`` cannot compile on ``device``."""
    from torch._dynamo import config as dynamo  # a second of import, for --compile alone

    if backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise ConfigError(f"--compile-backend {backend} is not known to this PyTorch; use one of {known}.")
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILES)
    _try(backend, device)

    def compiled(function):  # type: ignore[no-untyped-def]
        return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)

    return replace(
        kernels,
        normalise=compiled(pointwise.normalise),
        join=compiled(pointwise.join),
        gelu=compiled(pointwise.gelu),
        swiglu=compiled(pointwise.swiglu),
        rotate=compiled(rotate),
    )


def _try(backend: str, device: torch.device) -> None:
    """Compile one small function, so that a missing compiler is reported before a run is built and not in its first step."""

    def probe(x: Tensor) -> Tensor:
        return (x + 1).sin()

    try:
        torch.compile(probe, fullgraph=True, dynamic=False, backend=backend)(torch.zeros(8, device=device))
    except Exception as error:  # whatever a compiler raises
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        needs = "a C++ compiler" if device.type == "cpu" else "Triton and a C compiler"
        raise ConfigError(
            f"--compile: torch.compile's {backend} does not work here ({first.strip()}). It needs {needs}; install that, or leave it out."
        ) from error
