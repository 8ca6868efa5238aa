"""Weights start alike and are cut alike whatever the tensor-parallel size."""

from __future__ import annotations

import math

import pytest
import torch

from domino_lm.model.build import build_stack
from domino_lm.model.parameter import ParameterSpec
from domino_lm.parallel.collectives import Communicator
from tests.distributed.models import MODELS
from tests.silent_rank import SilentRank


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_shards_put_together_are_the_whole(dim: int | None, blocks: int) -> None:
    spec = ParameterSpec(name="w", key="w", shape=(8, 8), shard_dim=dim, shard_blocks=blocks)
    full = torch.randn(8, 8)
    assert torch.equal(spec.unshard([spec.shard(full, rank, 4 // blocks) for rank in range(4 // blocks)]), full)


def test_gated_input_gives_each_rank_its_gate_rows_and_its_up_rows() -> None:
    spec = ParameterSpec(name="w", key="w", shape=(8, 1), shard_dim=0, shard_blocks=2)
    assert spec.shard(torch.arange(8.0)[:, None], 1, 2).flatten().tolist() == [2, 3, 6, 7]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_initial_weights_do_not_depend_on_the_ranks_that_hold_them(model: object) -> None:
    whole = build_stack(model, Communicator.single(), 5).parameters()  # type: ignore[arg-type]
    halves = [build_stack(model, SilentRank(rank, 2), 5).parameters() for rank in (0, 1)]  # type: ignore[arg-type]
    for parameter, first, second in zip(whole, *halves, strict=True):
        rows = parameter.spec.vocab_rows
        assert torch.equal(first.spec.unshard([first.data, second.data])[:rows], parameter.data[:rows]), parameter.spec.name


def test_ranks_start_with_different_shards() -> None:
    halves = [build_stack(MODELS["gpt"], SilentRank(rank, 2), 5).parameters() for rank in (0, 1)]
    cut = [(a, b) for a, b in zip(*halves, strict=True) if a.spec.shard_dim is not None and a.dim() == 2]
    assert cut
    assert not any(torch.equal(a, b) for a, b in cut)


def test_initial_spread_is_the_configured_one_and_narrower_for_output_projections() -> None:
    for parameter in build_stack(MODELS["llama"], Communicator.single(), 5).parameters():
        if parameter.dim() == 2:
            narrow = "linear_proj" in parameter.spec.name or "linear_fc2" in parameter.spec.name
            expected = 0.12 / math.sqrt(4) if narrow else 0.12
            found = parameter.data[: parameter.spec.vocab_rows].std().item()
            assert found == pytest.approx(expected, rel=0.1), parameter.spec.name
