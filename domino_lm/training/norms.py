"""Numbers about all parameters of the unsharded model, for the log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from domino_lm.training.optimizer import Optimizer


def parameter_norm(optimizer: Optimizer) -> Tensor:
    """Norm of all weights, 0-d: those that ranks share out are summed over them, those that they hold alike counted once."""
    return optimizer.norm_of([piece.weights for piece in optimizer.counted_pieces()])


@torch.no_grad()
def zero_gradients(optimizer: Optimizer) -> Tensor:
    """How many entries of the reduced gradient are exactly 0, 0-d float64, counted like `parameter_norm`."""
    zeros = torch.zeros((), dtype=torch.float64, device=optimizer.parameters[0].device)
    for piece in optimizer.counted_pieces():
        zeros += piece.grad.numel() - torch.count_nonzero(piece.grad)
    return optimizer.sum_over_holders(zeros)
