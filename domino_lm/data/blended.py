"""Several data sets read as one: which source each sample comes from, in Megatron's order, to the bit.

At step i the source is taken that lags furthest behind its share: the largest ``weight * max(i, 1) - taken``, the first
of equals. A blend is not shuffled itself; each source has shuffled its own samples.
"""

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from domino_lm.data.gpt_dataset import GPTDataset, Sample
from domino_lm.data.index_cache import cached_indices
from domino_lm.data.indices import Array, DatasetError

MAX_SOURCES = 32766
STEPS_PER_LANE = 1024


@dataclass(frozen=True)
class Blend:
    """Prefixes of token files, with the weight of each, or without weights."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None

    def __str__(self) -> str:
        words = self.prefixes if self.weights is None else [f"{w:g} {p}" for w, p in zip(self.weights, self.prefixes, strict=True)]
        return " ".join(words)


def parse_blend(words: Sequence[str], flag: str = "--data-path") -> Blend:
    """Prefixes, or pairs of a weight and a prefix.

    An even number of words is pairs when every first of two is a number, and prefixes when none is; an odd number is
    always prefixes. Raises DatasetError for anything between, and for weights that are not above 0.
    """
    words = [word.strip() for word in words]
    if not words or not all(words):
        raise DatasetError(f"{flag} names no data; give a prefix, or pairs of a weight and a prefix.")
    weights = [_number(word) for word in words[::2]] if len(words) % 2 == 0 else []
    given = [weight for weight in weights if weight is not None]
    prefixes = words[1::2] if given else words
    if len(prefixes) > MAX_SOURCES:
        raise DatasetError(f"{flag} names {len(prefixes)} sources; at most {MAX_SOURCES} can be blended: merge some with domino-lm-merge.")
    if not given:
        return Blend(tuple(prefixes))
    for weight, word in zip(weights, words[::2], strict=True):
        if weight is None:
            raise DatasetError(
                f"{flag} {' '.join(words)}: {word!r} stands where a weight is due; give each prefix a weight before it, or none."
            )
        if not 0 < weight < math.inf:
            raise DatasetError(f"{flag} {' '.join(words)}: the weight {word} must be above 0; leave the source out to read nothing of it.")
    return Blend(tuple(prefixes), tuple(given))


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, in double precision."""
    array = np.array(weights, np.float64)
    return (array / np.sum(array)).tolist()


def source_targets(weights: Sequence[float], size: int) -> list[int]:
    """Samples that a blend of ``size`` takes from each source at most; ``weights`` are normalised."""
    return [math.ceil(size * weight) for weight in weights]


def source_sizes(weights: Sequence[float], size: int, surplus: float) -> list[int]:
    """Samples that each source is built with: its target and a ``surplus`` (0.005 is half a percent)."""
    return [math.ceil(math.ceil(target) * (1 + surplus)) for target in source_targets(weights, size)]


def blend_order(weights: Sequence[float], size: int, available: Sequence[int] | None = None) -> tuple[Array, Array]:
    """Source (int16) and number within its source (int64) of each of ``size`` samples.

    Sources that have given all they have (``available``) are passed over; without it they have no end.
    """
    sources = np.empty(size, np.int16)
    limits = None if available is None else np.array(available, np.float64)
    _Lanes(np.array(weights, np.float64), size, limits).fill(sources)
    return sources, _numbers_within(sources)


class _Lanes:
    """The greedy choice, many stretches of it side by side.

    Each choice depends on all choices before it, but weakly: whatever the sources had given when a stretch begins, after
    a few steps the choices are the same. So the steps are cut into lanes that begin with the counts the shares ask for;
    a lane whose true beginning, known once the lane before it is done, differs is walked again. The result is that of
    walking step by step, always; only the number of rounds varies.
    """

    def __init__(self, weights: Array, size: int, limits: Array | None) -> None:
        self._weights, self._size, self._limits = weights, size, limits
        self._steps = min(STEPS_PER_LANE, max(size, 1))
        self._begins = np.arange(0, size, self._steps)

    def fill(self, sources: Array) -> None:
        """Write the source of every step."""
        starts = self._guess()
        lanes = np.arange(len(self._begins))
        ends = np.empty_like(starts)
        while len(lanes):
            ends[lanes] = self._walk(lanes, starts[lanes], sources)
            wrong = np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1)) + 1
            starts[wrong] = ends[wrong - 1]
            lanes = wrong

    def _guess(self) -> Array:
        """Counts [lanes, sources] that share the samples before each lane as the weights ask."""
        shares = self._begins[:, None] * self._weights[None, :]
        counts = np.floor(shares)
        if self._limits is not None:
            counts = np.minimum(counts, self._limits)
        missing = (self._begins - counts.sum(axis=1)).astype(np.int64)
        order = np.argsort(counts - shares, axis=1, kind="stable")
        np.put_along_axis(counts, order, np.take_along_axis(counts, order, 1) + (np.arange(len(self._weights)) < missing[:, None]), 1)
        counts[:1] = 0
        return counts

    def _walk(self, lanes: Array, counts: Array, sources: Array) -> Array:
        """Choose in all ``lanes`` at once from ``counts`` on; returns the counts at their ends."""
        counts = counts.copy()
        for step in range(self._steps):
            at = self._begins[lanes] + step
            rows = np.flatnonzero(at < self._size)  # the last lane may be short
            at = at[rows]
            error = self._weights * np.maximum(at, 1).astype(np.float64)[:, None] - counts[rows]
            if self._limits is not None:
                error[counts[rows] >= self._limits] = -np.inf
            chosen = np.argmax(error, axis=1)
            counts[rows, chosen] += 1
            sources[at] = chosen
        return counts


class SourceShare(NamedTuple):
    """What a blend takes from one source."""

    prefix: str
    weight: float
    samples: int
    epochs: float


class BlendedDataset:
    """Samples of several data sets, in the order of `blend_order`; each one as its own data set gives it.

    ``size`` samples are asked for, shared by ``weights`` (which add up to 1); ``length`` is how many there are, a few more
    if each share was rounded up. Without ``size`` every sample of every source is read once. Raises DatasetError
    if a source has fewer samples than its share.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float],
        size: int | None,
        length: int | None = None,
        cache_path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.datasets, self.weights, self.size = list(datasets), list(weights), size
        self.split = self.datasets[0].split
        lengths = [len(dataset) for dataset in self.datasets]
        self._length = sum(lengths) if size is None else length or size

        def build() -> tuple[Array, Array]:
            if size is None:
                return blend_order([length / self._length for length in lengths], self._length, lengths)
            return blend_order(self.weights, self._length)

        shapes = {"dataset_index": (self._length,), "dataset_sample_index": (self._length,)}
        self.dataset_index, self.dataset_sample_index = cached_indices(cache_path, f"{self.split}-blend", self.identity, shapes, build)
        self._require_samples(lengths)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < self._length:
            raise IndexError(f"{self.split} sample {i} of the blend is outside 0..{self._length - 1}")
        source, number = self.locate(i)
        return self.datasets[source][number]

    def locate(self, i: int) -> tuple[int, int]:
        """Source of sample ``i``, and its number there."""
        return int(self.dataset_index[i]), int(self.dataset_sample_index[i])

    @property
    def sources(self) -> list[GPTDataset]:
        """What is blended."""
        return self.datasets

    def taken(self, begin: int, end: int) -> Array:
        """How many of a run's samples ``begin`` to ``end`` each source gives, int64 [sources]."""
        return np.bincount(self.dataset_index[begin:end], minlength=len(self.datasets))

    def shares(self) -> list[SourceShare]:
        """Samples that the ``size`` asked for take from each source, and how often they read its tokens."""
        taken = self.taken(0, len(self) if self.size is None else self.size)
        return [
            SourceShare(
                dataset.indexed.prefix, weight, int(samples), int(samples) * dataset.config.sequence_length / dataset.tokens_per_epoch
            )
            for dataset, weight, samples in zip(self.datasets, self.weights, taken, strict=True)
        ]

    def identity(self) -> dict[str, Any]:
        """Everything that the order depends on."""
        return {"format": 1, "datasets": [d.identity() for d in self.datasets], "weights": self.weights, "length": self._length}

    def _require_samples(self, lengths: list[int]) -> None:
        taken = self.taken(0, len(self))
        asked = self.taken(0, len(self) if self.size is None else self.size)
        for dataset, samples, length in zip(self.datasets, taken, lengths, strict=True):
            if samples > length:
                raise DatasetError(
                    f"{dataset.indexed.prefix}: the blend takes {samples} {self.split} samples, but the source was built with {length}; "
                    "raise --mid-level-dataset-surplus."
                )
        idle = [dataset.indexed.prefix for dataset, used in zip(self.datasets, asked, strict=True) if used == 0]
        if idle and self.size:
            warnings.warn(
                f"never sampled: {len(idle)} of {len(asked)} sources, since the weights give none of the {self.size} {self.split} samples to "
                f"{first_few(idle)}.",
                stacklevel=3,
            )


def first_few(names: Sequence[str], shown: int = 3) -> str:
    """The names, or the first ones of them and how many more there are."""
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _numbers_within(sources: Array) -> Array:
    """How many steps before each one chose the same source."""
    order = np.argsort(sources, kind="stable")
    counts = np.bincount(sources)
    numbers = np.empty(len(sources), np.int64)
    numbers[order] = np.arange(len(sources)) - np.repeat(np.cumsum(counts) - counts, counts)
    return numbers
