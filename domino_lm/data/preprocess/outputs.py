"""Where the preprocessor's documents go: one pair of files for each key, in the order of the input or dealt to partitions."""

import glob
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from domino_lm.data.drafts import draft_suffix, is_of_this_node, is_old
from domino_lm.data.indexed import Array, IndexedDataset, IndexedDatasetWriter
from domino_lm.data.preprocess.documents import EncodedKey


class PartitionedWriter:
    """Writes the documents of one key.

    Several ``partitions`` deal the documents out in turn and put the partitions one behind the other in the end: the
    order of Megatron's tool with the same number. Used as a context, like IndexedDatasetWriter: nothing stands under the
    final name unless it is whole, and nothing else is left.
    """

    def __init__(self, prefix: str, dtype: npt.DTypeLike, partitions: int = 1) -> None:
        self._target = IndexedDatasetWriter(prefix, dtype)
        self._prefixes = [f"{prefix}.part-{i}{draft_suffix()}" for i in range(partitions)] if partitions > 1 else []
        self._parts: list[IndexedDatasetWriter] = []
        self._documents = 0
        with ExitStack() as opened:
            opened.push(self._target)
            _remove_abandoned_parts(prefix)
            opened.callback(self._remove_parts)
            self._opened_parts = opened.enter_context(ExitStack())
            self._parts = [self._opened_parts.enter_context(IndexedDatasetWriter(part, dtype)) for part in self._prefixes]
            self._opened = opened.pop_all()

    def add(self, encoded: EncodedKey) -> None:
        """Append the documents of one block."""
        count = len(encoded.sequences_per_document)
        if not self._parts:
            self._target.add_documents(encoded.ids, encoded.lengths, encoded.sequences_per_document)
        else:
            for i, part in enumerate(self._parts):
                chosen = (np.arange(self._documents, self._documents + count) % len(self._parts)) == i
                part.add_documents(*_of_documents(encoded, chosen))
        self._documents += count

    def prepare(self) -> None:
        """Write everything that is left to write; leaving the context then only renames."""
        self._opened_parts.close()
        self._parts.clear()
        for prefix in self._prefixes:
            self._target.append(IndexedDataset(prefix))
        self._remove_parts()
        self._prefixes = []
        self._target.prepare()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._opened.__exit__(kind, error, trace)
            return
        with self._opened:
            self.prepare()

    def _remove_parts(self) -> None:
        for prefix in self._prefixes:
            for extension in (".bin", ".idx"):
                with suppress(OSError):
                    Path(prefix + extension).unlink(missing_ok=True)


def _remove_abandoned_parts(prefix: str) -> None:
    """Remove parts that killed writers left: the caller holds the target's draft, so no other writer is at work."""
    for path in Path(prefix).parent.glob(f"{glob.escape(os.path.basename(prefix))}.part-*.tmp-*"):
        with suppress(OSError):
            if is_of_this_node(path) or is_old(path):
                path.unlink()


def _of_documents(encoded: EncodedKey, chosen: Array) -> tuple[Array, Array, Sequence[int] | Array]:
    """Ids, lengths and sequence counts of the chosen documents."""
    sequences = np.repeat(chosen, encoded.sequences_per_document)
    tokens = np.repeat(sequences, encoded.lengths)
    return encoded.ids[tokens], encoded.lengths[sequences], encoded.sequences_per_document[chosen]
