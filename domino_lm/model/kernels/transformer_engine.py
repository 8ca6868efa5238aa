"""NVIDIA Transformer Engine behind the fp8 seam: scales, rounds and transposes a matrix in its fused kernels."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from domino_lm.model.kernels.fp8 import Quantise, Quantised


def find_quantiser(device: torch.device) -> Quantise | None:
    """Transformer Engine's per-tensor quantiser if version 2 is installed, else None."""
    try:
        module = import_module("transformer_engine.pytorch.tensor.float8_tensor")
        types = import_module("transformer_engine_torch").DType
        return TransformerEngineQuantiser(module.Float8CurrentScalingQuantizer, types, device)
    except (ImportError, AttributeError, OSError):  # absent, older, or built for another CUDA
        return None


class TransformerEngineQuantiser:
    """Does what `fp8.quantise` does, with one quantiser of the library for each type and order."""

    def __init__(self, quantiser: Any, types: Any, device: torch.device) -> None:
        self._make = lambda kind, transposed: quantiser(kind, device=device, rowwise=True, columnwise=transposed)
        self._kinds = {torch.float8_e4m3fn: types.kFloat8E4M3, torch.float8_e5m2: types.kFloat8E5M2}
        self._made: dict[tuple[torch.dtype, bool], Any] = {}

    def __call__(self, matrix: Tensor, dtype: torch.dtype, transposed: bool) -> Quantised:
        key = dtype, transposed
        if key not in self._made:
            self._made[key] = self._make(self._kinds[dtype], transposed)
        found = self._made[key](matrix.contiguous())
        rows = found._data.view(dtype)
        columns = None
        if transposed:  # GPUs whose 8-bit GEMMs take any layout get no transpose from the library
            columns = rows.t().contiguous() if found._transpose is None else found._transpose.view(dtype)
        return Quantised(rows, columns, found._scale_inv.view(()))
