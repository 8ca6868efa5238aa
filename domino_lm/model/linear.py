"""The GEMMs of a linear layer, each a method that another library's backend may override."""

import torch
import torch.nn.functional as F
from torch import Tensor

from domino_lm.model.parameter import Parameter


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` [s, b, i] times ``weight`` [o, i] transposed, plus ``bias`` [o]: [s, b, o]; differentiable."""
    return F.linear(x, weight, bias)


class Linear:
    """The GEMMs that a plan calls, computed by PyTorch; a backend overrides some of them.

    ``columns`` are a slice of the result's last dimension, written into the contiguous ``out`` if given.
    """

    def invalidate(self) -> None:
        """Invalidate cached copies of the weights (fp8), which may have changed; they are rebuilt on next use."""

    def rebuild(self) -> None:
        """Rebuild invalid copies now, in their memory."""

    def forward(self, x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
        """``x`` [s, b, i] times ``weight`` [o, i] transposed, plus ``bias`` [o]: [s, b, o]."""
        return F.linear(x, weight, bias)

    def forward_columns(self, x: Tensor, weight: Parameter, columns: slice, out: Tensor | None = None) -> Tensor:
        """``x`` [s, b, i] times the rows ``columns`` of ``weight`` [o, i], transposed: [s, b, columns]."""
        return _product(x, weight[columns].t(), out)

    def dgrad(self, dy: Tensor, weight: Parameter) -> Tensor:
        """Gradient of the layer's input: ``dy`` [s, b, o] times ``weight`` [o, i]: [s, b, i]."""
        return dy @ weight

    def dgrad_columns(self, dy: Tensor, weight: Parameter, columns: slice, out: Tensor | None = None) -> Tensor:
        """Gradient by the input's ``columns``: ``dy`` [s, b, o] times those columns of ``weight`` [o, i]: [s, b, columns]."""
        return _product(dy, weight[:, columns], out)

    def accumulate_wgrad(self, weight: Parameter, dy: Tensor, x: Tensor) -> None:
        """Add ``dy`` [s, b, o] transposed times ``x`` [s, b, i] to ``main_grad`` [o, i].

        If that is wider than the activations, the product is formed in a temporary of their dtype, since PyTorch's addmm takes
        one dtype; on CPUs, where 16-bit GEMMs gain little, the operands are widened instead and nothing is rounded.
        """
        dy_2d, x_2d, grad = dy.flatten(0, 1), x.flatten(0, 1), weight.main_grad
        if grad.dtype == dy_2d.dtype or not grad.is_cuda:
            grad.addmm_(dy_2d.t().to(grad.dtype), x_2d.to(grad.dtype))
        else:
            grad.add_(dy_2d.t() @ x_2d)


class MixedAddmmLinear(Linear):
    """Weight gradients by one GEMM that reads 16-bit operands and adds to fp32 memory: cuBLAS by PyTorch's mixed addmm."""

    def accumulate_wgrad(self, weight: Parameter, dy: Tensor, x: Tensor) -> None:
        dy_2d, x_2d, grad = dy.flatten(0, 1), x.flatten(0, 1), weight.main_grad
        if grad.dtype == dy_2d.dtype:
            grad.addmm_(dy_2d.t(), x_2d)
        else:
            torch.ops.aten.addmm.dtype_out(grad, dy_2d.t(), x_2d, grad.dtype, out=grad)


def accumulate_bias_grad(parameter: Parameter, dy: Tensor) -> None:
    """Add the sum of ``dy`` [s, b, o] over tokens to the gradient [o] of a bias."""
    parameter.main_grad.add_(dy.sum((0, 1), dtype=parameter.main_grad.dtype))


def _product(x: Tensor, matrix: Tensor, out: Tensor | None) -> Tensor:
    """``x`` [s, b, i] times ``matrix`` [i, o], in the contiguous ``out`` [s, b, o] if given."""
    if out is None:
        return x @ matrix
    torch.mm(x.flatten(0, 1), matrix, out=out.view(-1, out.shape[-1]))
    return out
