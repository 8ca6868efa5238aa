"""The three indices that give a data set of fixed-length samples its order, equal to Megatron's to the bit.

The *document index* lists the split's sequences, once per epoch, shuffled; read in that order they form one long stream
of tokens. The *sample index* cuts this stream every ``sequence_length`` tokens and holds, for each cut, the position in
the document index and the token offset there. The *shuffle index* permutes the samples. One
``numpy.random.RandomState(seed)`` makes all shuffles, document index first.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
INT32_MAX = 2**31 - 1
CHUNK = 1 << 20


class DatasetError(ValueError):
    """A data set or a split that cannot give the samples asked of it. The message names the file, the values and the way out."""


class Epochs(NamedTuple):
    """How often the split's tokens are read to give the samples asked for."""

    repeats: int
    separate_final: bool
    samples_before_final: int


def plan_epochs(tokens: int, num_samples: int | None, sequence_length: int, extra: int) -> Epochs:
    """The fewest epochs of ``tokens`` that give ``num_samples`` (one epoch for None).

    The final epoch is shuffled apart when less than 80 % of its samples are needed: shuffled together, the
    documents of the samples that are never reached would be spread over all epochs.
    """
    assert tokens > 0
    if num_samples is None:
        return Epochs(1, False, 0)
    count = max(1, -(-(num_samples * sequence_length + extra) // tokens))
    if count == 1:
        return Epochs(1, False, 0)
    before_final = ((count - 1) * tokens - extra) // sequence_length
    per_epoch = (tokens - extra) // sequence_length
    separate = num_samples - before_final < int(0.80 * per_epoch)
    return Epochs(count, separate, before_final)


def count_samples(tokens: int, sequence_length: int, extra: int, drop_last: bool) -> int:
    """Samples in a stream of ``tokens``; the last one may be short unless ``drop_last``."""
    usable = tokens - extra
    if usable <= 0:
        return 0
    return usable // sequence_length if drop_last else -(-usable // sequence_length)


def document_index_dtype(stop: int) -> type[np.int32] | type[np.int64]:
    """Type that holds every sequence number below ``stop``: Megatron's int32 as long as that is possible."""
    return np.int32 if stop - 1 <= INT32_MAX else np.int64


def sample_index_dtype(positions: int, longest: int) -> type[np.int32] | type[np.int64]:
    """Type that holds positions in a document index of that many entries and offsets in the longest sequence."""
    return np.int32 if max(positions, longest) <= INT32_MAX else np.int64


def shuffle_index_dtype(samples: int) -> type[np.uint32] | type[np.int64]:
    return np.uint32 if samples < 2**32 - 2 else np.int64


def build_document_index(sequences: range, epochs: Epochs, rng: np.random.RandomState) -> Array:
    """Sequence numbers of all epochs, shuffled together; a separate final epoch is shuffled behind the others."""
    dtype = document_index_dtype(sequences.stop)
    parts = [epochs.repeats - 1, 1] if epochs.separate_final else [epochs.repeats]
    index = []
    for copies in parts:
        part = np.tile(np.arange(sequences.start, sequences.stop, dtype=dtype), copies)
        rng.shuffle(part)
        index.append(part)
    return np.concatenate(index)


def build_sample_index(lengths: Array, document_index: Array, sequence_length: int, samples: int, extra: int) -> Array:
    """Where each sample begins, and where the last one ends: [samples + 1, 2] of (position in document index, offset).

    Sample k reads ``sequence_length + extra`` tokens from row k on; row k + 1 lies ``extra`` tokens before its end. A row
    names the sequence that holds the last token read, never the start of the one behind it; where documents run out before
    the last sample is full, it names the last sequence.
    """
    # In a mapped file they stand between bytes, and gathering them takes three times as long.
    lengths = np.require(lengths, requirements="A")
    index = np.zeros((samples + 1, 2), sample_index_dtype(len(document_index), int(lengths.max(initial=0))))
    before, row = 0, 1
    for start in range(0, len(document_index), CHUNK):
        chunk_lengths = lengths[document_index[start : start + CHUNK]]
        ends = np.cumsum(chunk_lengths, dtype=np.int64)
        ends += before
        last = start + CHUNK >= len(document_index)
        stop_row = samples + 1 if last else min((int(ends[-1]) - extra) // sequence_length, samples) + 1
        stops = np.arange(row, stop_row, dtype=np.int64) * sequence_length + extra
        if last:
            np.minimum(stops, ends[-1], out=stops)
        positions = np.searchsorted(ends, stops, side="left")
        index[row:stop_row, 0] = positions + start
        index[row:stop_row, 1] = stops - extra - (ends[positions] - chunk_lengths[positions])
        if last and samples * sequence_length + extra > ends[-1] and chunk_lengths[-1] >= extra:
            index[-1] = len(document_index) - 1, chunk_lengths[-1] - extra  # documents have run out, empty ones at the end too
        before, row = int(ends[-1]), max(row, stop_row)
    return index


def build_shuffle_index(samples: int, epochs: Epochs, rng: np.random.RandomState) -> Array:
    """A permutation of the samples; those of a separate final epoch stay behind the others."""
    index = np.arange(samples, dtype=shuffle_index_dtype(samples))
    border = epochs.samples_before_final if epochs.separate_final else samples
    rng.shuffle(index[:border])
    if border < samples:
        rng.shuffle(index[border:])
    return index
