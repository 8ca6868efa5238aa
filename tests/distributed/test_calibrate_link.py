"""The calibration of a link between two ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.simulate.calibrate import REDUCED_BYTES, calibrate
from domino_lm.simulate.links import MeasuredFabric
from tests.rank_pool import RankPool


def _calibrated(mesh: ParallelMesh) -> MeasuredFabric:
    fabric = calibrate(mesh.tp, torch.device("cpu"), "here").fabric
    assert isinstance(fabric, MeasuredFabric)
    return fabric


@pytest.mark.long
def test_all_reduces_are_measured_at_every_size_and_ranks_agree(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(_calibrated, tp=2)
    assert first == second
    assert [point[0] for point in first.points] == list(REDUCED_BYTES)
    assert all(seconds > 0 and taken_s >= 0 for _, seconds, taken_s in first.points)
    assert first.points[-1][1] > first.points[0][1], "8 MiB travel longer than 4 KiB"
