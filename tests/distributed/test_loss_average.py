"""A loss that is reported is the mean over all tokens that count, however they lie in micro-batches and on ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest

from domino_lm.parallel.mesh import ParallelMesh
from tests.distributed.training_runs import built, write_tokens
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


class Uneven:
    """A data set of which one sample counts a single token, the next all of them."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.split = dataset, dataset.split

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        sample = dict(self.dataset[i])
        if i % 2 == 0:
            sample["loss_mask"] = numpy.zeros_like(sample["loss_mask"])
            sample["loss_mask"][0] = 1
        return sample


def evaluated(mesh: ParallelMesh, tokens: Path, flags: str) -> float:
    trainer = built(mesh, tokens, flags)
    (valid,) = trainer.data.valid
    return trainer.evaluate(Uneven(valid))


@pytest.mark.parametrize("objective", ["", "--calculate-per-token-loss"])
def test_an_evaluation_weighs_every_token_alike_on_any_layout(ranks: Ranks, tmp_path: Path, objective: str) -> None:
    tokens = write_tokens(tmp_path)
    whole = ranks(1).run(evaluated, tokens, f"--micro-batch-size 8 {objective}", tp=1)[0]
    for world, tp, micro in ((1, 1, 1), (2, 1, 1), (4, 2, 1)):
        for loss in ranks(world).run(evaluated, tokens, f"--micro-batch-size {micro} {objective}", tp=tp):
            assert loss == pytest.approx(whole, rel=1e-6)
