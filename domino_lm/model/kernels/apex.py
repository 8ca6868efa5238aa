"""NVIDIA Apex behind the seams: weight gradients that accumulate in their GEMM, fused and persistent norms."""

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from domino_lm.model.kernels import pointwise
from domino_lm.model.linear import Linear
from domino_lm.model.parameter import Parameter


def find(name: str) -> ModuleType | None:
    """The extension module ``name`` if Apex was built with it, else None."""
    try:
        return import_module(name)
    except ImportError:  # absent, or built for another CUDA
        return None


class ApexWgradLinear(Linear):
    """Weight gradients by Apex's GEMM, which reads 16-bit or fp32 operands and adds to ``main_grad``."""

    def __init__(self, extension: ModuleType) -> None:
        self._fp32 = extension.wgrad_gemm_accum_fp32
        self._half = extension.wgrad_gemm_accum_fp16

    def accumulate_wgrad(self, weight: Parameter, dy: Tensor, x: Tensor) -> None:
        accumulate = self._fp32 if weight.main_grad.dtype == torch.float32 else self._half
        accumulate(x.flatten(0, 1), dy.flatten(0, 1), weight.main_grad)


class ApexNorms:
    """Apex's norms under the signature of `pointwise.normalise`; LayerNorm may be the persistent one, of some widths alone."""

    def __init__(self, fused: ModuleType, persistent: ModuleType | None) -> None:
        self._layer_norm, self._rms_norm = fused.fused_layer_norm_affine, fused.fused_rms_norm_affine
        self._persistent = persistent.FastLayerNormFN.apply if persistent is not None else None

    def __call__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return pointwise.normalise(hidden, weight, bias, epsilon)
        if bias is None:
            return self._rms_norm(hidden, weight, weight.shape, epsilon)
        if self._persistent is not None:
            return self._persistent(hidden, weight, bias, epsilon)
        return self._layer_norm(hidden, weight, bias, weight.shape, epsilon)
