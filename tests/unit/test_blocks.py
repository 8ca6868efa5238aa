"""Where the pieces that a rank holds stand in a checkpoint's global tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata

from domino_lm.checkpoint.blocks import Block, blocks_of, blocks_of_range, plan_reads
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.model.parameter import ParameterSpec
from tests.silent_rank import SilentRank

GATED = ParameterSpec(name="decoder.layers.1.w", key="decoder.layers.w", layer=1, num_layers=3, shape=(8, 2), shard_dim=0, shard_blocks=2)
SPECS = {
    "gated": GATED,
    "gated_bias": ParameterSpec(name="b", key="b", shape=(8,), shard_dim=0, shard_blocks=2),
    "rows": ParameterSpec(name="w", key="w", shape=(8, 3), shard_dim=0),
    "columns": ParameterSpec(name="w", key="w", shape=(3, 8), shard_dim=1),
    "whole": ParameterSpec(name="w", key="w", layer=0, num_layers=2, shape=(5, 3)),
}


def numbered(spec: ParameterSpec) -> Tensor:
    """A global tensor whose elements are their own numbers."""
    full = torch.zeros(spec.shape)
    return torch.arange(float(full.numel())).view(spec.shape)


def put_together(spec: ParameterSpec, blocks: Sequence[Block]) -> Tensor:
    """The global tensor of this layer, NaN where no block stands."""
    whole = torch.full(blocks[0].global_shape, torch.nan)
    for block in blocks:
        place = tuple(slice(offset, offset + size) for offset, size in zip(block.offsets, block.values.shape, strict=True))
        whole[place] = block.values
    return whole if spec.layer is None else whole[spec.layer]


def test_a_gated_input_keeps_gate_rows_before_up_rows_in_a_file() -> None:
    """Of rows 0..3 (gate) and 4..7 (up), the second of two ranks holds 2, 3 and 6, 7: two blocks of layer 1 of 3."""
    tp = SilentRank(1, 2)
    gate, up = blocks_of(GATED, GATED.shard(numbered(GATED), 1, 2), tp)
    assert (gate.key, gate.global_shape, gate.offsets, up.offsets) == ("decoder.layers.w", (3, 8, 2), (1, 2, 0), (1, 6, 0))
    assert gate.values.tolist() == [[[4, 5], [6, 7]]]
    assert up.values.tolist() == [[[12, 13], [14, 15]]]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_blocks_of_all_ranks_make_the_whole_tensor(spec: ParameterSpec) -> None:
    full = numbered(spec)
    blocks = [block for rank in (0, 1) for block in blocks_of(spec, spec.shard(full, rank, 2), SilentRank(rank, 2))]
    assert torch.equal(put_together(spec, blocks), full)


@pytest.mark.parametrize("share", [1, 3, 4, 7])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_shares_of_the_distributed_optimizer_make_the_whole_tensor(spec: ParameterSpec, share: int) -> None:
    """Each replica owns ``share`` elements of a flattened local tensor, wherever rows and gate end."""
    full, blocks = numbered(spec), []
    for rank in (0, 1):
        local = spec.shard(full, rank, 2)
        for start in range(0, local.numel(), share):
            values = local.flatten()[start : start + share]
            blocks += list(blocks_of_range(spec, local.shape, start, values, SilentRank(rank, 2), ""))
    assert all(block.owned for block in blocks)
    assert torch.equal(put_together(spec, blocks), full)


def stored(size: tuple[int, int], *rows: tuple[int, int]) -> Metadata:
    """A tensor "w" of which the chunks ``rows``, first and number, are there."""
    chunks = [ChunkStorageMetadata(torch.Size((first, 0)), torch.Size((number, size[1]))) for first, number in rows]
    return Metadata({"w": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(size), chunks)})


def test_stored_chunks_that_leave_a_hole_are_refused() -> None:
    blocks = list(blocks_of(SPECS["rows"], torch.zeros(4, 3), SilentRank(1, 2)))  # rows 4 to 7
    assert len(plan_reads(Path("a"), stored((8, 3), (0, 6), (6, 2)), blocks)["w"]) == 2
    with pytest.raises(CheckpointError, match=r"do not cover the block of size \[4, 3\] at \[4, 0\] exactly"):
        plan_reads(Path("a"), stored((8, 3), (0, 6)), blocks)
