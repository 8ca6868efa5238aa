"""The index of a PyTorch distributed checkpoint (its ``.metadata``), read without running what it says.

PyTorch reads this file with plain pickle, which calls whatever the file names. Here the names that such an index holds
become inert records, any other name is an error, and the index is rebuilt from the records with every field checked.
"""

import errno
import os
import pickle
import stat
from collections.abc import Callable
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

METADATA_FILE = ".metadata"

# Everything that PyTorch and Megatron put into an index. A name maps to what stands in for it: a record keeps what the
# file would have given the class and does nothing with it. Write plans are Megatron's own note of how it saved.
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta "
        "_MEM_FORMAT_ENCODING"
    ).split(),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}

_PRESENT_NAMES = {"optimizer.state.param.": "optimizer.state.fp32_param."}
"""Prefix of fp32 weights in checkpoints of Megatron's distributed optimizer, and that of its plain optimizer, used here for both."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message names the file or tensor and the way out."""


class DamagedError(CheckpointError):
    """A checkpoint whose files are not what was written, whatever they are instead; an older one may be whole."""


class Inert:
    """What a file says about one object of a class that is not loaded: the class's name and the object's state."""

    name = ""
    state: Any = None

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Arguments are accepted; nothing here needs them."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def unreadable(what: str, kind: str, error: Exception) -> DamagedError:
    """The error for a file that should be of a ``kind``; a damaged pickle or archive raises nearly any exception."""
    if isinstance(error, DamagedError):
        return error
    if isinstance(error, OSError):
        return DamagedError(f"{what} cannot be read ({error.strerror or error}); take another checkpoint")
    return DamagedError(
        f"{what}: not {kind}, or damaged: {first_line(error)}. "
        "Nothing in it was run and nothing was loaded; take another checkpoint, and only from people you trust."
    )


def first_line(error: Exception) -> str:
    """What an error says first, or its kind if it says nothing; what torch advises about ``weights_only`` is left out."""
    text = str(error)
    if "weights_only" in text:
        text = text.partition("WeightsUnpickler error: ")[2] or "it is no archive of tensors"
    return (text.strip() or type(error).__name__).splitlines()[0]


def open_regular(path: Path) -> FileIO:
    """Open a file to read, unbuffered. Raises OSError if it is a folder, a pipe or a device, for which nobody waits."""
    file = FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a plain file", str(path))
    return file


class _IndexUnpickler(pickle.Unpickler):
    """Resolves the names of `_RECORDS` to inert records, data types to themselves, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            # A class of its own for each name and load: a file that rewrites the class changes no other load.
            return type(name, (Inert,), {"name": name})
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint index holds")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to an object outside the file")


def _member(owner: Any, name: str) -> Inert:
    """What stands for ``getattr``, with which Python before 3.11.4 pickles a member of an enumeration: an empty record."""
    if isinstance(owner, type) and issubclass(owner, Inert):
        return owner()
    raise pickle.UnpicklingError("it names builtins.getattr of something else than a record, which no checkpoint index holds")


def read_metadata(folder: Path, read: Callable[[str], bytes] | None = None) -> Metadata:
    """Read the index of the checkpoint in ``folder``: tensors, chunks, and where in which file each chunk lies.

    ``read`` gives the file's content by its name. Nothing that the file names is called. Raises DamagedError if it is
    missing, damaged, or names anything that an index has no use for.
    """
    path = folder / METADATA_FILE
    try:
        if read is None:
            with open_regular(path) as file:
                content = file.read()
        else:
            content = read(METADATA_FILE)
        return _rebuild(_IndexUnpickler(BytesIO(content)).load())
    except Exception as error:
        raise unreadable(f"{path}: the checkpoint's index", "that of a PyTorch distributed checkpoint", error) from error


def missing_data(folder: Path, metadata: Metadata) -> list[str]:
    """What ``folder`` lacks of the data that its index lists: one line for each file that is absent or too short."""
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    faults = []
    for name, size_bytes in sorted(needed.items()):
        try:
            found_bytes = (folder / name).stat().st_size
        except OSError as error:
            faults.append(f"{name}: {error.strerror}")
            continue
        if found_bytes < size_bytes:
            faults.append(f"{name}: {found_bytes} bytes, the index needs {size_bytes}")
    return faults


def _rebuild(index: Any) -> Metadata:
    """The index as PyTorch's own classes, from records; TypeError, KeyError or ValueError if a field is not what it must be."""
    fields = _fields(index, "Metadata")
    tensors = {_key(key): _storage(value) for key, value in fields["state_dict_metadata"].items()}
    places = {_index(key): _place(value) for key, value in fields["storage_data"].items()}
    return Metadata(state_dict_metadata=tensors, storage_data=places)


def _storage(record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(record, Inert) and record.name == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    properties = fields["properties"]
    dtype = properties.state[0] if isinstance(properties, Inert) else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a tensor of type {dtype!r}")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=_size(fields["size"]),
        chunks=[ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(_key(fields["fqn"]), None if offset is None else _size(offset))


def _place(record: Any) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    name, (offset, length) = _text(fields["relative_path"]), _size((fields["offset"], fields["length"]))
    if Path(name).name != name:
        raise ValueError(f"data file {name!r} lies outside the checkpoint's folder")
    if fields.get("transform_descriptors"):
        raise ValueError(f"data file {name!r} is compressed ({fields['transform_descriptors']}), which is not supported")
    return _StorageInfo(name, offset, length)


def _fields(record: Any, kind: str) -> dict[str, Any]:
    if not isinstance(record, Inert) or record.name != kind or not isinstance(record.state, dict):
        raise TypeError(f"{kind} expected, found {type(record).__name__}")
    return record.state


def _size(value: Any) -> torch.Size:
    if not isinstance(value, tuple) or not all(isinstance(n, int) and n >= 0 for n in value):
        raise TypeError(f"sizes expected, found {value!r}")
    return torch.Size(value)


def _key(value: Any) -> str:
    key = _text(value)
    for other, present in _PRESENT_NAMES.items():
        if key.startswith(other):
            return present + key.removeprefix(other)
    return key


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a name expected, found {value!r}")
    return value
