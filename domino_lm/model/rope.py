"""Rotary position embedding (Su et al., 2021), in the half-split form."""

from __future__ import annotations

import torch
from torch import Tensor


def rotation_table(seq_length: int, width: int, base: float, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines [s, 1, 1, d] of position x base^(-2i/d), the frequencies repeated for both halves.

    Angles are computed in fp32, as the models that exist were trained, or in float64 for float64 models.
    """
    exact = torch.promote_types(dtype, torch.float32)
    frequencies = base ** -(torch.arange(0, width, 2, dtype=exact, device=device) / width)  # [d/2]
    angles = torch.outer(torch.arange(seq_length, dtype=exact, device=device), frequencies)  # [s, d/2]
    angles = torch.cat((angles, angles), -1)[:, None, None]  # [s, 1, 1, d]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of ``x`` [s, b, n, d] by its token's angles."""
    first, second = x.chunk(2, -1)  # 2 x [s, b, n, d/2]
    return x * cos + torch.cat((-second, first), -1) * sin
