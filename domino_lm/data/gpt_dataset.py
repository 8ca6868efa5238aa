"""Samples of fixed length for a language model, cut from a token file in Megatron's order, to the bit.

The three indices of `domino_lm.data.indices` say which tokens make up sample ``i``; here the split is cut out of
the file, and samples get their labels and masks.
"""

import itertools
import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from domino_lm.config.data import DataConfig
from domino_lm.data.index_cache import cached_indices
from domino_lm.data.indices import (
    Array,
    DatasetError,
    Epochs,
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    count_samples,
    plan_epochs,
)

Sample = dict[str, Array]
SplitName = Literal["train", "valid", "test"]
NO_TOKEN = -1
"""Fills up a short last sample. An id of the tokenizer would take the loss from the same id in the data."""
SPLITS: tuple[SplitName, SplitName, SplitName] = ("train", "valid", "test")


class TokenSource(Protocol):
    """Where sequences of tokens come from: a pair of token files, or tokens made up on the spot."""

    prefix: str
    dtype: np.dtype[Any]
    sequence_lengths: npt.NDArray[np.int32]

    def __len__(self) -> int: ...

    def get(self, i: int, offset: int = 0, length: int | None = None) -> Array: ...

    def identity(self) -> dict[str, Any]:
        """Everything about the tokens that the order of samples depends on."""


class EmptySplitError(DatasetError):
    """A split without a single sample."""


@dataclass(frozen=True, kw_only=True)
class GPTDatasetConfig:
    """How samples are cut and masked. The same for all splits."""

    sequence_length: int
    """Tokens in one sample."""

    seed: int
    """Seed of the order of documents and samples."""

    eod: int | None = None
    """End-of-document id, which resets and masks at ends of documents need."""

    vocab_size: int | None = None
    """Ids from here on are refused when a sample is read; None refuses negative ones alone."""

    data: DataConfig = field(default_factory=DataConfig)
    """What happens at ends of documents; with ``reset_attention_mask`` samples carry a [1, s, s] mask."""

    drop_last_partial_validation_sequence: bool = True
    """Drop the tokens at the end of the validation split that fill no whole sample; otherwise they are padded."""

    add_extra_token_to_sequence: bool = True
    """Read one token more than a sample has, so that its last token has a label too."""

    def __post_init__(self) -> None:
        if self.sequence_length < 1:
            raise DatasetError(f"--seq-length {self.sequence_length} leaves no token in a sample; use at least 1.")
        if not 0 <= self.seed < 2**32:
            raise DatasetError(f"--seed {self.seed} cannot order the data; use 0 to {2**32 - 1}.")
        if self.data.needs_eod and self.eod is None:
            flags = ", ".join(self.data.needs_eod)
            raise DatasetError(f"{flags}: the tokenizer has no end-of-document id; leave the flag out or use another tokenizer.")


def parse_split(split: str) -> tuple[float, float, float]:
    """Weights of train, validation and test from ``--split``, normalised to a sum of 1.

    One to three plain numbers, separated by commas, slashes, colons or spaces; missing ones are 0.
    """
    unquoted = split.strip().strip("'\"")  # Megatron's scripts keep words in arrays, from which quotes arrive as they are typed
    words = [word for word in re.split(r"[,/:;\s]+", unquoted) if word]
    if not 1 <= len(words) <= 3 or not all(re.fullmatch(r"\d+\.?\d*|\.\d+", word, re.ASCII) for word in words):
        raise DatasetError(f"--split {split!r} is not one to three plain numbers >= 0; write for example 969,30,1.")
    weights = [float(word) for word in words] + [0.0] * (3 - len(words))
    total = sum(weights)
    if not 0 < total < float("inf"):
        raise DatasetError(f"--split {split!r} has the sum {total:g}; at least one of its numbers must be above 0.")
    train, valid, test = (weight / total for weight in weights)
    return train, valid, test


def split_ranges(split: str, sequences: int) -> tuple[range | None, range | None, range | None]:
    """The contiguous sequences of train, validation and test; None if the split's weight is 0."""
    weights = parse_split(split)
    bounds = [0, *(round(fraction * sequences) for fraction in itertools.accumulate(weights))]
    train, valid, test = (range(lo, hi) if w > 0 else None for w, (lo, hi) in zip(weights, itertools.pairwise(bounds), strict=True))
    return train, valid, test


def attention_mask(tokens: Array, eod: int | None = None) -> npt.NDArray[np.bool_]:
    """Causal mask [1, s, s] of one sample, True where attending is forbidden; with ``eod``, not across an end of document either."""
    length = len(tokens)
    blocked = ~np.tri(length, dtype=np.bool_)
    if eod is not None:
        document = _documents(tokens, eod)
        blocked |= document[:, None] != document[None, :]
    return blocked[None]


def _documents(tokens: Array, eod: int) -> Array:
    """Number of the document each token belongs to; an end of document closes its own."""
    is_end = (tokens == eod).astype(np.int64)
    ends_before: Array = np.cumsum(is_end) - is_end
    return ends_before


def count_split(
    indexed: TokenSource, sequences: range, split: SplitName, num_samples: int | None, config: GPTDatasetConfig
) -> tuple[int, Epochs, int]:
    """Tokens in one epoch of a split, the epochs that give ``num_samples`` (None: one), and how many samples these hold.

    Raises EmptySplitError if the split cannot give a single sample although some are asked for.
    """
    extra = int(config.add_extra_token_to_sequence)
    lengths = indexed.sequence_lengths[sequences.start : sequences.stop]
    tokens_per_epoch = int(lengths.sum(dtype=np.int64))
    if tokens_per_epoch == 0:
        raise EmptySplitError(
            f"{indexed.prefix}: the {split} split has {len(sequences)} of {len(indexed)} {_unit(indexed)} and no token; "
            f"use more data, or change --split so that {split} gets some, or give it the weight 0."
        )
    epochs = plan_epochs(tokens_per_epoch, num_samples, config.sequence_length, extra)
    tokens = epochs.repeats * tokens_per_epoch
    samples = count_samples(tokens, config.sequence_length, extra, _drops_last(config, split))
    if samples == 0 and num_samples != 0:
        raise EmptySplitError(
            f"{indexed.prefix}: the {split} split has {tokens} tokens, too few for one sample of --seq-length {config.sequence_length}"
            f"{' and its last label' if extra else ''}; use more data, another --split or shorter samples."
        )
    return tokens_per_epoch, epochs, samples


def _drops_last(config: GPTDatasetConfig, split: SplitName) -> bool:
    return config.drop_last_partial_validation_sequence or split != "valid"


class GPTDataset:
    """Samples of one split. ``dataset[i]`` is a dict of numpy arrays:

    ==================  ==================  ======================================================
    ``tokens``          int64 [s]           input ids
    ``labels``          int64 [s]           the id to predict at each position
    ``loss_mask``       float32 [s]         1, or 0 where the loss does not count
    ``position_ids``    int64 [s]           positions in the sample, or in its document when reset
    ``attention_mask``  bool [1, s, s]      only with ``reset_attention_mask``; True = blocked
    ==================  ==================  ======================================================

    ``len(dataset)`` covers whole epochs and is usually larger than ``num_samples``, the samples asked for (None: one
    epoch). Raises DatasetError when the split cannot give a single sample although some are asked for.
    """

    def __init__(
        self,
        indexed: TokenSource,
        sequences: range,
        split: SplitName,
        num_samples: int | None,
        config: GPTDatasetConfig,
        cache_path: str | os.PathLike[str] | None = None,
    ) -> None:
        if num_samples is not None and num_samples < 0:
            raise DatasetError(f"{num_samples} {split} samples asked for; the number cannot be negative.")
        if indexed.dtype.kind not in "iu":
            raise DatasetError(
                f"{indexed.prefix}.bin holds {indexed.dtype} numbers, which are no token ids; give the prefix of a token file."
            )
        self.indexed, self.sequences, self.split, self.num_samples, self.config = indexed, sequences, split, num_samples, config
        self._extra, self._drop_last = int(config.add_extra_token_to_sequence), _drops_last(config, split)
        self.tokens_per_epoch, self.epochs, self._length = count_split(indexed, sequences, split, num_samples, config)
        self.shorter_than_a_sample = self.epochs.repeats > 1 and self.tokens_per_epoch - self._extra < config.sequence_length
        """Every sample repeats some tokens."""
        shapes = {
            "document_index": (len(sequences) * self.epochs.repeats,),
            "sample_index": (self._length + 1, 2),
            "shuffle_index": (self._length,),
        }
        found = cached_indices(cache_path, split, self.identity, shapes, self._build_indices)
        self.document_index, self.sample_index, self.shuffle_index = found

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < self._length:
            raise IndexError(f"{self.indexed.prefix}: {self.split} sample {i} is outside 0..{self._length - 1}")
        text = self._read(int(self.shuffle_index[i]))
        if self._extra:
            tokens, labels = text[:-1].copy(), text[1:].copy()
        else:
            tokens, labels = text, np.roll(text, -1)
            labels[-1] = NO_TOKEN
        return self._mask(tokens, labels)

    @property
    def sources(self) -> list["GPTDataset"]:
        """Itself: one source."""
        return [self]

    def taken(self, begin: int, end: int) -> Array:
        """How many of a run's samples ``begin`` to ``end`` each source gives, int64 [1]."""
        return np.array([end - begin])

    def identity(self) -> dict[str, Any]:
        """Everything that the indices depend on: the files by content, and each setting that changes the result."""
        return {
            "format": 2,
            "tokens": self.indexed.identity(),
            "sequences": [self.sequences.start, self.sequences.stop],
            "num_samples": self.num_samples,
            "sequence_length": self.config.sequence_length,
            "seed": self.config.seed,
            "extra_token": self._extra,
            "drop_last": self._drop_last,
        }

    def _read(self, sample: int) -> npt.NDArray[np.int64]:
        """The sample's tokens, filled up with NO_TOKEN at the end: [s + extra]."""
        (first, begin), (last, end) = (map(int, row) for row in self.sample_index[sample : sample + 2])
        text = np.full(self.config.sequence_length + self._extra, NO_TOKEN, np.int64)
        filled = 0
        for position in range(first, last + 1):
            sequence = int(self.document_index[position])
            offset = begin if position == first else 0
            length = end + self._extra - offset if position == last else None
            part = self.indexed.get(sequence, offset, length)
            text[filled : filled + len(part)] = part
            filled += len(part)
        self._check_ids(sample, text[:filled])
        return text

    def _check_ids(self, sample: int, text: Array) -> None:
        vocab_size = self.config.vocab_size
        low, high = int(text.min(initial=0)), int(text.max(initial=0))
        if low < 0 or (vocab_size is not None and high >= vocab_size):
            entries = "begins at 0" if low < 0 else f"has {vocab_size} entries"
            raise DatasetError(
                f"{self.indexed.prefix}.bin: {self.split} sample {sample} holds token id {low if low < 0 else high}, but the vocabulary "
                f"{entries}; the file was made with another tokenizer: give that one, or preprocess again."
            )

    def _mask(self, tokens: Array, labels: Array) -> Sample:
        config = self.config
        loss_mask = np.ones(len(tokens), np.float32)
        position_ids = np.arange(len(tokens), dtype=np.int64)
        if config.data.eod_mask_loss:
            loss_mask[tokens == config.eod] = 0
        if config.data.reset_position_ids:
            assert config.eod is not None
            starts = np.flatnonzero(np.diff(_documents(tokens, config.eod), prepend=-1))
            position_ids -= np.repeat(starts, np.diff(starts, append=len(tokens)))
        sample = {"tokens": tokens, "labels": labels, "loss_mask": loss_mask, "position_ids": position_ids}
        if config.data.reset_attention_mask:
            sample["attention_mask"] = attention_mask(tokens, config.eod)
        loss_mask[labels == NO_TOKEN] = 0
        tokens[tokens == NO_TOKEN] = 0
        labels[labels == NO_TOKEN] = 0
        return sample

    def _build_indices(self) -> tuple[Array, Array, Array]:
        rng = np.random.RandomState(self.config.seed)
        documents = build_document_index(self.sequences, self.epochs, rng)
        samples = build_sample_index(self.indexed.sequence_lengths, documents, self.config.sequence_length, self._length, self._extra)
        return documents, samples, build_shuffle_index(self._length, self.epochs, rng)


def _unit(source: TokenSource) -> str:
    """What a source's sequences are: documents, unless these were split into sentences."""
    return "documents" if getattr(source, "num_documents", len(source)) >= len(source) else "sequences"
