"""Tokens made up on the spot, for runs without data; the same ones as Megatron's mock data."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
SEQUENCES = 100_000
LONGEST = 4096


class MockTokens:
    """100,000 sequences of 1 to 4095 tokens: 1, 2, 3, ... below the vocabulary size, then the end-of-document id."""

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.prefix = "--mock-data"
        self.dtype = np.dtype(np.int64)
        self.vocab_size, self.eod = vocab_size, eod
        lengths = np.random.default_rng(0).integers(1, LONGEST, size=SEQUENCES)
        self.sequence_lengths: npt.NDArray[np.int32] = lengths.astype(np.int32)

    def __len__(self) -> int:
        """Number of sequences."""
        return SEQUENCES

    def get(self, i: int, offset: int = 0, length: int | None = None) -> Array:
        """Tokens ``[offset, offset + length)`` of sequence ``i``."""
        total = int(self.sequence_lengths[i])
        stop = total if length is None else offset + length
        tokens = np.arange(offset + 1, stop + 1, dtype=np.int64) % self.vocab_size
        if stop == total and stop > offset:
            tokens[-1] = self.eod
        return tokens

    def identity(self) -> dict[str, Any]:
        """What the order of samples depends on."""
        return {"mock_sequences": SEQUENCES}
