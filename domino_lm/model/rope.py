"""Rotary position embedding (Su et al., 2021), in the half-split form."""

import math

import torch
from torch import Tensor

ORIGINAL_LENGTH = 8192
"""Tokens of the samples that Llama 3 was trained on before its frequencies were scaled."""

LOW_FREQUENCY_FACTOR, HIGH_FREQUENCY_FACTOR = 1.0, 4.0
"""Turns that a frequency makes in the original length: with fewer than the first it is slowed down, with more than the second it is kept."""


def rotation_table(
    seq_length: int,
    width: int,
    base: float,
    dtype: torch.dtype,
    device: torch.device,
    scaling_factor: float | None = None,
    interpolation_factor: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [s, 1, 1, d] of position x base^(-2i/d), the frequencies repeated for both halves.

    With ``scaling_factor`` frequencies are those of `scaled`; positions are divided by ``interpolation_factor`` (Chen et al., 2023). Angles are computed in fp32, as the models that exist were
    trained, or in float64 for float64 models.
    """
    exact = torch.promote_types(dtype, torch.float32)
    frequencies = base ** -(torch.arange(0, width, 2, dtype=exact, device=device) / width)  # [d/2]
    if scaling_factor is not None:
        frequencies = scaled(frequencies, scaling_factor)
    positions = torch.arange(seq_length, dtype=exact, device=device)
    if interpolation_factor is not None:
        positions = positions * (1 / interpolation_factor)
    angles = torch.outer(positions, frequencies)  # [s, d/2]
    angles = torch.cat((angles, angles), -1)[:, None, None]  # [s, 1, 1, d]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def scaled(frequencies: Tensor, factor: float) -> Tensor:
    """Llama 3.1's frequencies: low ones divided by ``factor``, high ones unchanged, interpolated linearly in turns between."""
    turns = ORIGINAL_LENGTH * frequencies / (2 * math.pi)  # in the original length
    kept = ((turns - LOW_FREQUENCY_FACTOR) / (HIGH_FREQUENCY_FACTOR - LOW_FREQUENCY_FACTOR)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of ``x`` [s, b, n, d] by its token's angles."""
    first, second = x.chunk(2, -1)  # 2 x [s, b, n, d/2]
    return x * cos + torch.cat((-second, first), -1) * sin
