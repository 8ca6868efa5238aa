"""The linear seam: the three GEMMs of a linear layer, each its own call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from domino_lm.model.parameter import Parameter


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [s, b, i] times ``weight`` [o, i] transposed, plus ``bias`` [o]: [s, b, o]."""
    return F.linear(x, weight, bias)


def dgrad(dy: Tensor, weight: Tensor) -> Tensor:
    """Gradient of a linear layer's input: ``dy`` [s, b, o] times ``weight`` [o, i]: [s, b, i]."""
    return dy @ weight


def product(x: Tensor, matrix: Tensor, out: Tensor | None) -> Tensor:
    """``x`` [s, b, i] times ``matrix`` [i, o], into the contiguous ``out`` [s, b, o] where one is given."""
    if out is None:
        return x @ matrix
    torch.mm(x.flatten(0, 1), matrix, out=out.view(-1, out.shape[-1]))
    return out


def accumulate_wgrad(parameter: Parameter, dy: Tensor, x: Tensor) -> None:
    """Add ``dy`` [s, b, o] transposed times ``x`` [s, b, i] to the gradient [o, i] of a weight.

    Where the gradient's dtype is wider than the activations', the product is formed in a temporary, since PyTorch's
    addmm takes one dtype.
    """
    dy_2d, x_2d, grad = dy.flatten(0, 1), x.flatten(0, 1), parameter.main_grad
    if grad.dtype == dy_2d.dtype:
        grad.addmm_(dy_2d.t(), x_2d)
    else:
        grad.add_(dy_2d.t() @ x_2d)


def accumulate_bias_grad(parameter: Parameter, dy: Tensor) -> None:
    """Add the sum of ``dy`` [s, b, o] over tokens to the gradient [o] of a bias."""
    parameter.main_grad.add_(dy.sum((0, 1), dtype=parameter.main_grad.dtype))
