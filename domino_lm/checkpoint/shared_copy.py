"""A copy of tensors in memory that another process sees: training waits while it is taken, and not while it is written."""

import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from domino_lm.checkpoint.index import CheckpointError

_ALIGNMENT = 64


class Place(NamedTuple):
    """Where a tensor lies in the memory."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes that it takes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def places_of(tensors: Sequence[Tensor]) -> list[Place]:
    """One place after the other, in the order of ``tensors``."""
    places, begin = [], 0
    for tensor in tensors:
        places.append(Place(begin, tuple(tensor.shape), tensor.dtype))
        begin += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places


def size_of(places: Sequence[Place]) -> int:
    """Bytes of memory that hold all ``places``; at least one."""
    return max((place.begin + place.size_bytes for place in places), default=0) or 1


def new_memory() -> int:
    """The descriptor of empty anonymous memory. It has no name, so that nothing of it outlives its processes."""
    return os.memfd_create("checkpoint", os.MFD_CLOEXEC)


class SharedCopy:
    """The memory behind a descriptor, as this process sees it."""

    def __init__(self, descriptor: int, places: Sequence[Place]) -> None:
        """Map memory that `reserve` has sized."""
        self._memory = mmap.mmap(descriptor, size_of(places), flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # One storage each: torch.save writes all of a tensor's storage.
        self.tensors = [self._tensor(place) for place in places]
        self._pinned = 0

    @classmethod
    def reserve(cls, descriptor: int, places: Sequence[Place], device: torch.device) -> "SharedCopy":
        """Take the memory now, pinned if the tensors lie on a GPU. Raises CheckpointError if there is not so much."""
        size = size_of(places)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            raise CheckpointError(
                f"--async-save needs {size / 2**30:.2f} GiB of memory on each rank for a copy of what it saves ({error.strerror}); "
                "leave it off, or save without the optimizer (--no-save-optim)"
            ) from error
        copy = cls(descriptor, places)
        if device.type == "cuda":
            copy._pin(size)
        return copy

    def take(self, tensors: Sequence[Tensor]) -> None:
        """Copy ``tensors``; returns once they may change."""
        for target, source in zip(self.tensors, tensors, strict=True):
            target.copy_(source, non_blocking=True)
        if self._pinned:
            torch.cuda.current_stream().synchronize()

    def release(self) -> None:
        """Let go of pinned memory."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)
            self._pinned = 0

    def _pin(self, size: int) -> None:
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))
        if code != 0:
            raise CheckpointError(
                f"--async-save: {size / 2**30:.2f} GiB could not be pinned (CUDA error {code}); raise the limit of locked memory (ulimit -l)"
            )
        self._pinned = address

    def _tensor(self, place: Place) -> Tensor:
        count = torch.Size(place.shape).numel()
        if count == 0:
            return torch.empty(place.shape, dtype=place.dtype)
        return torch.frombuffer(self._memory, dtype=place.dtype, count=count, offset=place.begin).view(place.shape)
