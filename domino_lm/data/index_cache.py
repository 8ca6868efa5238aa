"""Indices kept on disk: built by one process of a node while the others wait, and mapped into memory by all."""

import fcntl
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from domino_lm.data.drafts import Draft
from domino_lm.data.indices import Array, DatasetError
from domino_lm.data.mapped import map_npy


def cached_indices(
    folder: str | os.PathLike[str] | None,
    split: str,
    identity: Callable[[], dict[str, Any]],
    shapes: Mapping[str, tuple[int, ...]],
    build: Callable[[], Sequence[Array]],
) -> Sequence[Array]:
    """What ``build`` gives, kept in ``folder`` if there is one; see `IndexCache`."""
    return build() if folder is None else IndexCache(Path(folder), split, identity(), shapes).load_or_build(build)


class IndexCache:
    """The indices of one split or blend on disk, as ``<hash of identity>-<split>-<index>.npy``.

    The first process that asks for indices which are not there builds them; others on the same node wait for it (a file
    lock, which the system frees when its holder dies). Files are written under temporary names and renamed, so if a
    file system knows no locks, processes that build the same indices at the same time cannot disturb each other either.
    A damaged file is reported and built again.
    """

    def __init__(self, folder: Path, split: str, identity: dict[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """``shapes`` names the indices, with the shape each must have."""
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
        self._folder, self._shapes = folder, list(shapes.values())
        self._paths = [folder / f"{key}-{split}-{name}.npy" for name in shapes]
        self._lock = folder / f"{key}-{split}.lock"

    def load_or_build(self, build: Callable[[], Sequence[Array]]) -> list[Array]:
        """The indices, memory-mapped. Raises DatasetError when the folder cannot be written."""
        found = self.load()
        if found is not None:
            return found
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with _locked(self._lock):
                found = self.load(warn=False)
                if found is None:
                    self._save(build())
        except OSError as error:
            raise DatasetError(
                f"--data-cache-path {self._folder}: the indices cannot be written ({error.strerror or error}); free space, give a folder "
                "that may be written, or leave the flag out to keep them in memory."
            ) from error
        return found or self.load() or list(build())

    def load(self, warn: bool = True) -> list[Array] | None:
        """The indices, or None when they have to be built; ``warn`` says why if they are there but damaged."""
        if not all(path.exists() for path in self._paths):
            return None
        arrays = []
        for path, shape in zip(self._paths, self._shapes, strict=True):
            try:
                array = map_npy(path)
                fault = None if array.shape == shape else f"its shape is {array.shape}, not {shape}"
            except (OSError, ValueError, EOFError) as error:
                fault = str(error)
            if fault is not None:
                if warn:
                    warnings.warn(f"{path}: the cached index is damaged ({fault}); it is built again.", stacklevel=3)
                return None
            arrays.append(array)
        return arrays

    def _save(self, indices: Sequence[Array]) -> None:
        for path, index in zip(self._paths, indices, strict=True):
            draft = Draft(path)
            try:
                np.save(draft.file, index)
                draft.file.flush()
                os.fsync(draft.file.fileno())
                draft.publish()
            finally:
                draft.discard()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of ``path``, which ends with the file; if the file system has no locks, goes on without."""
    with open(path, "ab") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
