"""How often a run has read each source of its training data."""

import numpy as np

from domino_lm.data.blended import BlendedDataset, first_few
from domino_lm.data.continued import ContinuedDataset
from domino_lm.data.gpt_dataset import GPTDataset


class EpochCount:
    """Counts the tokens that a run reads of each source. An epoch of a source is as many tokens as it has."""

    def __init__(self, dataset: GPTDataset | BlendedDataset | ContinuedDataset, consumed: int) -> None:
        """``consumed`` samples of the run have been read before."""
        self._dataset, self._consumed = dataset, consumed
        self._sample_tokens = dataset.sources[0].config.sequence_length
        self._epoch_tokens = np.array([source.tokens_per_epoch for source in dataset.sources], np.int64)
        self._tokens = dataset.taken(0, consumed) * self._sample_tokens

    @property
    def epochs(self) -> float:
        """Tokens read of all sources over those that they have."""
        return float(self._tokens.sum() / self._epoch_tokens.sum())

    def advance(self, consumed: int) -> str | None:
        """Count up to ``consumed`` samples; which sources have begun another epoch with them, in words, or None."""
        before = self._epoch_numbers()
        self._tokens = self._tokens + self._dataset.taken(self._consumed, consumed) * self._sample_tokens
        self._consumed, now = consumed, self._epoch_numbers()
        begun = np.flatnonzero((now > before) & (now > 1)).tolist()
        return first_few([f"epoch {now[i]} of {self._dataset.sources[i].indexed.prefix}" for i in begun]) or None

    def _epoch_numbers(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Which epoch the last token read of each source belongs to, from 1 on; 0 before the first."""
        return -(-self._tokens // self._epoch_tokens)
