"""The arithmetic of parts between GEMMs, as pure functions of tensors, which a compiler or another library can replace."""

import torch.nn.functional as F
from torch import Tensor


def normalise(hidden: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm (Ba et al., 2016), or without ``bias`` RMSNorm (Zhang and Sennrich, 2019), of [s, b, h]."""
    if bias is None:
        return F.rms_norm(hidden, weight.shape, weight, epsilon)
    return F.layer_norm(hidden, weight.shape, weight, bias, epsilon)


def join(
    branch: Tensor, bias: Tensor | None, positions: Tensor | None, keep: Tensor | None, scale: float, residual: Tensor | None
) -> Tensor:
    """``residual`` + dropout(``branch`` + ``bias`` + ``positions``), each [s, b, h]: the residual stream.

    ``keep`` says which elements stay, times ``scale``; None is no dropout.
    """
    if bias is not None:
        branch = branch + bias
    if positions is not None:
        branch = branch + positions
    if keep is not None:
        branch = branch * keep * scale
    return branch if residual is None else residual + branch


def gelu(h: Tensor, approximate: str) -> Tensor:
    """GELU of [s, b, f/t]; ``approximate`` is tanh or none (the exact erf)."""
    return F.gelu(h, approximate=approximate)


def swiglu(h: Tensor) -> Tensor:
    """silu(gate) x up of [s, b, 2f/t], whose first half is the gate: [s, b, f/t]."""
    gate, up = h.chunk(2, dim=-1)  # 2 x [s, b, f/t]
    return F.silu(gate) * up
