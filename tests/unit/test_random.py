"""Dropout by hashing drops what it should, everywhere alike, and never by a pattern."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from domino_lm.parallel.random import DropoutKey, name_seed

S, B, N = 64, 8, 256


def keep(seed: int = 1, step: int = 5, site: str = "a", probability: float = 0.1, samples: Tensor | None = None) -> Tensor:
    samples = torch.arange(B) if samples is None else samples
    return DropoutKey(seed, torch.tensor(step), samples, torch.arange(S)).keep(site, torch.arange(N), probability)  # [s, b, n]


def correlation(a: Tensor, b: Tensor) -> float:
    return torch.corrcoef(torch.stack((a.flatten().float(), b.flatten().float())))[0, 1].item()


@pytest.mark.parametrize("probability", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_the_one_asked_for(probability: float) -> None:
    dropped = 1 - keep(probability=probability).float().mean().item()
    assert abs(dropped - probability) <= 5 * (probability * (1 - probability) / (S * B * N)) ** 0.5


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("lag", [1, 2, 3])
def test_neighbours_along_tokens_samples_and_columns_are_dropped_independently(dim: int, lag: int) -> None:
    mask = keep(probability=0.5)
    size = mask.shape[dim]
    assert abs(correlation(mask.narrow(dim, 0, size - lag), mask.narrow(dim, lag, size - lag))) < 5 / (S * B * N) ** 0.5


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_every_token_sample_and_column_loses_its_share(dim: int) -> None:
    mask = keep(probability=0.5).float()
    others = [d for d in range(3) if d != dim]
    count = mask.numel() / mask.shape[dim]
    assert ((mask.mean(others) - 0.5).abs() < 6 * 0.5 / count**0.5).all()


def test_corners_of_a_rectangle_are_dropped_independently() -> None:
    mask = keep(probability=0.5)[:, 0].float() * 2 - 1  # [s, n]
    corners = mask[:-1, :-1] * mask[1:, :-1] * mask[:-1, 1:] * mask[1:, 1:]
    assert abs(corners.mean().item()) < 5 / corners.numel() ** 0.5


@pytest.mark.parametrize("other", [{"seed": 2}, {"step": 6}, {"site": "b"}], ids=["seed", "step", "site"])
def test_masks_of_another_seed_step_or_site_are_unrelated(other: dict[str, int | str]) -> None:
    assert abs(correlation(keep(probability=0.5), keep(probability=0.5, **other))) < 5 / (S * B * N) ** 0.5  # type: ignore[arg-type]


def test_a_sample_has_its_mask_whatever_row_it_is_in() -> None:
    assert torch.equal(keep()[:, 3:5], keep(samples=torch.arange(3, 5)))


def test_names_have_seeds_of_their_own() -> None:
    assert len({name_seed(seed, name) for seed in range(100) for name in ("a", "b", "c")}) == 300
