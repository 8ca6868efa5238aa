"""Which heads attention hands to which kernel, by recorded calls on tensors that claim to lie on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from domino_lm.model import attention
from domino_lm.model.attention import Attention
from domino_lm.model.batch import MicroBatch, RowContext
from domino_lm.model.parameter import Parameter
from domino_lm.parallel.collectives import Communicator

HEADS, GROUPS, WIDTH, LENGTH, SAMPLES = 8, 2, 16, 32, 3


def key_heads(monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, masked: bool, groups: int = GROUPS) -> int:
    """Key heads that the fused kernel is given; PyTorch is told that they are grouped if they are fewer than the query's."""
    calls: list[int] = []

    def recorded(query: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor | None) -> Tensor:
        assert query.shape == (SAMPLES, HEADS, LENGTH, WIDTH)
        assert keys[0].shape == values[0].shape
        assert (mask is not None) == masked
        calls.append(keys[0].shape[1])
        return torch.empty_like(query)

    monkeypatch.setattr(attention, "attend", recorded)
    with FakeTensorMode():
        weights = [Parameter(torch.empty(1, device=device)) for _ in range(2)]
        part = Attention(
            Communicator.single(), *weights, None, groups=groups, head_width=WIDTH, rotation=None, seq_length=LENGTH, dropout=0.0, site="x"
        )
        tokens = torch.zeros(LENGTH, SAMPLES, dtype=torch.int64, device=device)
        mask = torch.zeros(SAMPLES, 1, LENGTH, LENGTH, dtype=torch.bool, device=device) if masked else None
        row = replace(MicroBatch(tokens, tokens, tokens.float()).whole(), attention_mask=mask)
        h = torch.empty(LENGTH, SAMPLES, (HEADS + 2 * groups) * WIDTH, dtype=dtype, device=device)
        assert part.core(h, RowContext(row)).shape == (LENGTH, SAMPLES, HEADS * WIDTH)
    return calls[0]


@pytest.mark.parametrize(
    ("device", "dtype", "masked", "repeated"),
    [
        ("cuda", torch.bfloat16, False, False),
        ("cuda", torch.float16, False, False),
        ("cuda", torch.float32, False, True),
        ("cuda", torch.bfloat16, True, True),
        ("cuda", torch.float32, True, True),
        ("cpu", torch.bfloat16, False, True),
    ],
)
def test_grouped_heads_are_repeated_where_no_fused_kernel_takes_them(
    device: str, dtype: torch.dtype, masked: bool, repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert key_heads(monkeypatch, device, dtype, masked) == (HEADS if repeated else GROUPS)


def test_heads_that_are_not_grouped_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_heads(monkeypatch, "cuda", torch.float32, True, groups=HEADS) == HEADS
