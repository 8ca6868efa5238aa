"""Files mapped into memory without holding a descriptor each, so that hundreds of them can be open together."""

import ctypes
import os
import weakref
from mmap import MAP_SHARED, PROT_READ
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def map_file(path: str | os.PathLike[str]) -> npt.NDArray[np.uint8]:
    """The bytes of a file, read-only and mapped for as long as any array made from them lives. Raises OSError.

    `mmap.mmap`, and numpy's memmap on it, keep a descriptor as long as the mapping; the system itself needs none.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            return np.empty(0, np.uint8)
        address = libc.mmap(None, size, PROT_READ, MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(path))
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, libc.munmap, address, size).atexit = False  # threads may still read when the program ends
    array = np.frombuffer(memoryview(memory), np.uint8)
    array.flags.writeable = False
    return array


def map_npy(path: Path) -> Array:
    """The array of an ``.npy`` file as numpy.save writes it, mapped. Raises OSError or ValueError."""
    with open(path, "rb") as file:
        version = np.lib.format.read_magic(file)
        if version != (1, 0):
            raise ValueError(f"version {version} of the npy format, not (1, 0)")
        shape, column_major, dtype = np.lib.format.read_array_header_1_0(file)
        offset = file.tell()
    if dtype.hasobject or column_major:
        raise ValueError(f"an array of {dtype}{' by columns' if column_major else ''}, which no index is")
    content = map_file(path)
    if content.size < offset + np.prod(shape, dtype=np.int64) * dtype.itemsize:
        raise ValueError(f"{content.size} bytes are too few for {shape} of {dtype}")
    return np.ndarray(shape, dtype, content, offset)
