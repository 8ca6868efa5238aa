"""The cross entropy over ranks that each hold a piece of the vocabulary."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from domino_lm.model.batch import MicroBatch, RowContext
from domino_lm.model.head import Head
from domino_lm.model.parameter import Parameter
from tests.silent_rank import SilentRank


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the second is larger", "the first is larger"])
def test_logits_of_one_rank_may_be_far_above_those_of_the_other(order: tuple[int, int]) -> None:
    """By 200, where an exponential overflows fp32 unless the maximum is that of all ranks."""
    x = torch.tensor([[[1.0, 0.5], [0.25, 1.0]]])  # [s, b, h]
    small = torch.tensor([[0.1, 0.2], [0.3, -0.1]])
    weights = [(small, small + 200.0)[i] for i in order]
    batch = MicroBatch(torch.zeros(1, 2, dtype=torch.int64), torch.tensor([[1, 2]]), torch.ones(1, 2))
    heads = [Head(SilentRank(rank, 2), Parameter(weight), None) for rank, weight in enumerate(weights)]
    contexts = [RowContext(batch.whole()) for _ in heads]
    with torch.no_grad():
        statistics = torch.stack([head.body(x, ctx) for head, ctx in zip(heads, contexts, strict=True)])  # [t, 3, s, b]
        found = [head.loss(statistics, ctx) for head, ctx in zip(heads, contexts, strict=True)]
    logits = (x @ torch.cat(weights).t()).flatten(0, 1).requires_grad_()  # [s b, v]
    expected = F.cross_entropy(logits, batch.labels.flatten(), reduction="sum")
    expected.backward()
    assert [loss.item() for _, loss in found] == pytest.approx([expected.item()] * 2, rel=1e-6)
    assert torch.allclose(torch.cat([grad for grad, _ in found], -1).flatten(0, 1), logits.grad, atol=1e-6)
