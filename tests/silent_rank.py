"""One rank of several, in a process of its own."""

from __future__ import annotations

from domino_lm.parallel.collectives import Communicator


class SilentRank(Communicator):
    """Rank ``rank`` of ``size`` that never communicates."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.group = rank, size, None
