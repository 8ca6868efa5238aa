"""Megatron's ``--ckpt-format torch_dist`` beside its tensors: the state that all ranks share, in whichever place its version keeps it."""

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.torch_files import load_torch_file

COMMON_FILE = "common.pt"
COMMON_OBJECT = "common_state/shard_0_1"
MASTER_PREFIX = "optimizer.state.fp32_param."
"""Keys of fp32 weights that a run in half precision keeps beside its own."""


def read_common(path: Path, metadata: Metadata) -> dict[str, Any]:
    """Arguments, iteration, optimizer's numbers and schedule: from ``common.pt``, or from an object among the tensors.

    Objects of Megatron's classes are inert records. Raises CheckpointError if neither is there or can be read.
    """
    if (path / COMMON_FILE).is_file():
        common = load_torch_file(path / COMMON_FILE, str(path / COMMON_FILE))
    else:
        place = next((info for index, info in metadata.storage_data.items() if index.fqn == COMMON_OBJECT), None)
        if place is None:
            raise CheckpointError(f"{path}: neither {COMMON_FILE} nor the object {COMMON_OBJECT} is there, one of which Megatron writes")
        with (path / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            common = load_torch_file(file.read(place.length), f"{path / place.relative_path}, object {COMMON_OBJECT}")
        if isinstance(common, list) and len(common) == 1:
            common = common[0]
    if not isinstance(common, dict) or "iteration" not in common:
        raise CheckpointError(f"{path}: the state beside the tensors has no iteration; it is not one that Megatron writes")
    return common
