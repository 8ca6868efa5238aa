"""Randomness as a function of global coordinates, so that it depends on no layout and no order.

Dropout masks are a hash of (seed, step, part, sample, token, column): the same element is dropped whatever the rows,
columns, ranks or schedule, and recomputing a part needs no saved generator state. Initial weights are drawn from a seed
of their own name. Two rounds of multiply and xor-shift follow the pattern of MurmurHash3's finaliser (Appleby, 2011).
"""

import hashlib
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

MIX_64 = (0xFF51AFD7ED558CCD - 2**64, 0xC4CEB9FE1A85EC53 - 2**64)  # of MurmurHash3, as signed integers
MIX_32 = (0x7FEB352D, 0x846CA68B - 2**32)  # of the lowbias32 search (Wellons, 2018)


def name_seed(seed: int, name: str) -> int:
    """A 63-bit seed for one name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def mix(x: Tensor) -> Tensor:
    """Scramble int64 counters into int64 hashes, elementwise."""
    for factor in MIX_64:
        x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * factor
    return x ^ ((x >> 33) & 0x7FFFFFFF)


def outer_hash(outer: Tensor, inner: Tensor) -> Tensor:
    """Hash every pair of ``outer`` [..., 1] and ``inner`` [n], both int64 hashes already, into int32 [..., n].

    The wide part runs in place on 32-bit integers, since it covers a whole activation.
    """
    wide = outer.to(torch.int32) ^ inner.to(torch.int32)
    for factor in MIX_32:
        wide.bitwise_xor_((wide >> 16).bitwise_and_(0xFFFF)).mul_(factor)
    return wide


@dataclass(slots=True, eq=False)
class DropoutKey:
    """Identifies the masks of one step: ``seed`` of the run, ``step`` as a device tensor, ``samples`` [b] within the step."""

    seed: int
    step: Tensor  # [] int64
    samples: Tensor  # [b] int64, numbered over the global batch
    tokens: Tensor  # [s] int64

    def of_samples(self, start: int, size: int) -> Self:
        """The key of ``size`` samples from ``start``."""
        return replace(self, samples=self.samples[start : start + size])

    def of_tokens(self, start: int, size: int) -> Self:
        """The key of ``size`` tokens of every sample from ``start``."""
        return replace(self, tokens=self.tokens[start : start + size])

    def keep(self, site: str, columns: Tensor, probability: float) -> Tensor:
        """Which elements of a tensor [s, b, n] stay, each dropped with ``probability``.

        ``site`` names the place in the model, ``columns`` [n] int64 the global columns that this rank holds.
        """
        site_seed = name_seed(self.seed, f"dropout {site}")
        token_hash = mix(mix(self.step + site_seed) ^ mix(self.samples + (self.tokens[:, None] << 32)))  # [s, b]
        column_hash = mix(columns ^ (site_seed >> 7))  # [n]
        threshold = int(probability * 2**32) - 2**31
        return outer_hash(token_hash[..., None], column_hash) >= threshold
