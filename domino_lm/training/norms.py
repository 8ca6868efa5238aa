"""Numbers about all parameters of the unsharded model, for the log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from domino_lm.model.parameter import Parameter
    from domino_lm.parallel.collectives import Communicator


@torch.no_grad()
def parameter_norm(parameters: Sequence[Parameter], tp: Communicator) -> Tensor:
    """Norm of all weights, 0-d: sharded ones summed over TP, replicated ones counted once."""
    counted = _counted(parameters, tp)
    norms = torch.stack(torch._foreach_norm([p.detach() for p in counted])) if counted else parameters[0].new_zeros(1)
    return tp.all_reduce(norms.double().square().sum()).sqrt()


@torch.no_grad()
def zero_gradients(parameters: Sequence[Parameter], tp: Communicator) -> Tensor:
    """How many entries of ``main_grad`` are exactly 0, 0-d float64, counted like `parameter_norm`."""
    zeros = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for parameter in _counted(parameters, tp):
        zeros += parameter.main_grad.numel() - torch.count_nonzero(parameter.main_grad)
    return tp.all_reduce(zeros)


def _counted(parameters: Sequence[Parameter], tp: Communicator) -> list[Parameter]:
    return [p for p in parameters if p.spec.shard_dim is not None or tp.rank == 0]
