"""Files that torch.save wrote, read without running what they name.

Megatron's files name classes of its own, of argparse, numpy and signal. Each such name becomes an inert record that keeps
what the file would have given the class; any other name that PyTorch does not know as safe is an error.
"""

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from domino_lm.checkpoint.index import Inert, unreadable

# Packages whose names a training state may hold. They are never imported for it: a record stands in for each name.
_KNOWN = "megatron transformer_engine transformer_engine_torch argparse signal numpy _codecs types pathlib enum".split()


def load_torch_file(source: Path | bytes, what: str) -> Any:
    """The object in a file (or its bytes) that torch.save wrote; tensors of a file are mapped, not read, until they are used.

    ``what`` names the file in errors. Raises CheckpointError if it is missing, damaged, or names anything that a
    training state has no use for; nothing in it is run.
    """
    try:
        names = get_unsafe_globals_in_checkpoint(str(source) if isinstance(source, Path) else BytesIO(source))
        foreign = sorted(name for name in names if name.split(".")[0] not in _KNOWN)
        if foreign:
            raise pickle.UnpicklingError(f"it names {', '.join(foreign[:3])}, which no training state holds")
        # A class of its own for each name and load: nothing that one file does to it reaches another.
        with safe_globals([(type(name.rpartition(".")[2], (Inert,), {"name": name}), name) for name in names]):
            if isinstance(source, Path):
                return torch.load(str(source), map_location="cpu", weights_only=True, mmap=True)
            return torch.load(BytesIO(source), map_location="cpu", weights_only=True)
    except Exception as error:
        raise unreadable(what, "a file of torch.save", error) from error


def values_of(namespace: Any) -> dict[str, Any]:
    """The settings of an argparse namespace that a file holds; objects of unknown classes among them are left out."""
    values = namespace.state if isinstance(namespace, Inert) else namespace
    if not isinstance(values, dict):
        return {}
    return {str(name): value for name, value in values.items() if not isinstance(value, Inert)}
