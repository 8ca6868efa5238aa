"""What every rank must find alike in the data of a run: the token files, and the order in which samples are read."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from domino_lm.data.blended import BlendedDataset
from domino_lm.data.gpt_dataset import GPTDataset
from domino_lm.data.indexed import IndexedDataset

BLOCK_BYTES = 1 << 16
BLOCKS = 64
"""Blocks of one token file that are hashed; all of it if it is no longer than they are."""

BLOCKS_OF_ALL = 1 << 14
"""Blocks of all files of a run: with many sources each gets fewer, and 2 at least."""

SHOWN_HASH = 12


def file_facts(datasets: Iterable[GPTDataset | BlendedDataset]) -> dict[str, str]:
    """Size and hash of each index, and of each token file its size and a hash of blocks spread over it; copies have the same."""
    opened = {
        source.indexed.prefix: source.indexed for data in datasets for source in data.sources if isinstance(source.indexed, IndexedDataset)
    }
    blocks = max(2, min(BLOCKS, BLOCKS_OF_ALL // max(1, len(opened))))
    facts = {}
    for prefix, indexed in opened.items():
        identity = indexed.identity()
        bin_bytes, idx_bytes = identity["sizes_bytes"]
        facts[f"{prefix}.idx"] = f"{idx_bytes:,} bytes with hash {identity['idx_sha256'][:SHOWN_HASH]}"
        facts[f"{prefix}.bin"] = f"{bin_bytes:,} bytes with hash {sampled_hash(indexed.bin_path, bin_bytes, blocks)}"
    return facts


def order_facts(datasets: Iterable[tuple[str, GPTDataset | BlendedDataset]]) -> dict[str, str]:
    """Hash of what else decides which samples each split reads, and in which order."""
    return {f"the {name} samples": _hash(_without_files(dataset.identity())) for name, dataset in datasets}


def sampled_hash(path: Any, size: int, blocks: int = BLOCKS) -> str:
    """Short hash of ``blocks`` blocks of a file of ``size`` bytes, the first and the last one among them, or of all of it if it is small."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if size <= blocks * BLOCK_BYTES:
            digest = hashlib.file_digest(file, "sha256")
        else:
            for block in range(blocks):
                file.seek((size - BLOCK_BYTES) * block // (blocks - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()[:SHOWN_HASH]


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:SHOWN_HASH]


def _without_files(identity: Any) -> Any:
    """An identity without the token files, which are compared by themselves."""
    if isinstance(identity, dict):
        return {key: _without_files(value) for key, value in identity.items() if key != "tokens"}
    return [_without_files(value) for value in identity] if isinstance(identity, list) else identity
