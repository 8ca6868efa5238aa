"""The three indices that give a data set of fixed-length samples its order, equal to Megatron's to the bit.

The *document index* lists the split's sequences, once per epoch, shuffled; read in that order they form one long stream
of tokens. The *sample index* cuts this stream every ``sequence_length`` tokens and holds, for each cut, the position in
the document index and the token offset there. The *shuffle index* permutes the samples. One
``numpy.random.RandomState(seed)`` makes all shuffles, document index first.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from domino_lm.data.indexed import IndexedDataset

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
    names the sequence that holds the last token read, never the start of the one behind it.
    """
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    longest = int(lengths[document_index].max(initial=0))
    total = int(ends[-1]) if len(ends) else 0
    index = np.zeros((samples + 1, 2), sample_index_dtype(len(document_index), longest))
    for start in range(1, samples + 1, CHUNK):
        rows = np.arange(start, min(start + CHUNK, samples + 1), dtype=np.int64)
        stops = np.minimum(rows * sequence_length + extra, total)
        positions = np.searchsorted(ends, stops, side="left")
        begins = ends[positions] - lengths[document_index[positions]]
        index[rows, 0] = positions
        index[rows, 1] = stops - extra - begins
    return index


def build_shuffle_index(samples: int, epochs: Epochs, rng: np.random.RandomState) -> Array:
    """A permutation of the samples; those of a separate final epoch stay behind the others."""
    index = np.arange(samples, dtype=shuffle_index_dtype(samples))
    border = epochs.samples_before_final if epochs.separate_final else samples
    rng.shuffle(index[:border])
    if border < samples:
        rng.shuffle(index[border:])
    return index


class IndexCache:
    """The three indices of one split on disk, as ``<hash of identity>-<split>-<index>.npy``.

    Files are written under temporary names and renamed, so ranks that build the same indices at the same time cannot
    disturb each other; loading maps them into memory. A damaged file is reported and built again.
    """

    NAMES = ("document_index", "sample_index", "shuffle_index")

    def __init__(self, folder: Path, split: str, identity: dict[str, Any]) -> None:
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
        self._folder = folder
        self._paths = [folder / f"{key}-{split}-{name}.npy" for name in self.NAMES]

    def load(self, samples: int) -> tuple[Array, Array, Array] | None:
        """The indices, or None when they have to be built."""
        if not all(path.exists() for path in self._paths):
            return None
        arrays = []
        for path in self._paths:
            try:
                arrays.append(np.load(path, mmap_mode="r", allow_pickle=False))
            except (OSError, ValueError, EOFError) as error:
                warnings.warn(f"{path}: the cached index is damaged ({error}); it is built again.", stacklevel=2)
                return None
        documents, sample_index, shuffle = arrays
        if sample_index.shape != (samples + 1, 2) or shuffle.shape != (samples,):
            warnings.warn(f"{self._paths[1]}: the cached index has another number of samples; it is built again.", stacklevel=2)
            return None
        return documents, sample_index, shuffle

    def save(self, indices: Sequence[Array]) -> None:
        """Raises DatasetError when the folder cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path, index in zip(self._paths, indices, strict=True):
                temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
                try:
                    with open(temporary, "wb") as file:
                        np.save(file, index)
                    os.replace(temporary, path)
                finally:
                    temporary.unlink(missing_ok=True)
        except OSError as error:
            raise DatasetError(
                f"--data-cache-path {self._folder}: the indices cannot be written ({error.strerror}); free space, give a folder "
                "that may be written, or leave the flag out to keep them in memory."
            ) from error


def file_identity(indexed: IndexedDataset) -> dict[str, Any]:
    """Names a pair of token files by content, so that indices built for other data are never used for it."""
    with open(indexed.idx_path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    stats = [path.stat() for path in (indexed.bin_path, indexed.idx_path)]
    return {"idx_sha256": digest, "sizes_bytes": [s.st_size for s in stats], "mtimes_ns": [s.st_mtime_ns for s in stats]}
