"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

from tests.rank_pool import RankPool

settings.register_profile("project", deadline=None, max_examples=50)  # the machine may be busy, and a plan is no small thing to draw
settings.load_profile("project")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(4).run(function, *args, tp=2)`` runs a module-level function on four gloo processes."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in pools or not pools[size].alive:
            pools[size] = RankPool(size)
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()
