"""Muon by the ops of a plan: momentum, gathers and updates before the STEP op."""

from collections.abc import Callable

from torch import Tensor

from domino_lm.parallel.collectives import Pending
from domino_lm.training.optimizer import Optimizer, Rates


class PlannedMuon:
    """What a plan's ops call of ``optimizer`` before its STEP; see `schedule.binding.MatrixUpdates`.

    ``bad_loss(loss_sum)`` and ``rates()`` give the arguments of `Optimizer.step`.
    """

    def __init__(self, optimizer: Optimizer, bad_loss: Callable[[Tensor], Tensor], rates: Callable[[], Rates]) -> None:
        self._optimizer = optimizer
        self._bad_loss = bad_loss
        self._rates = rates

    def begin(self, loss_sum: Tensor) -> None:
        """Gradient norm, clipping factor and momentum."""
        self._optimizer.begin(self._bad_loss(loss_sum))

    def gather_start(self, part: int) -> Pending:
        """Begin to gather a part's momentum."""
        assert self._optimizer.muon is not None, "the optimizer of a plan that updates whole matrices is Muon"
        return self._optimizer.muon.gather_start(part)

    def update(self, part: int, gathered: Tensor) -> None:
        """Update a part's matrices."""
        self._optimizer.update_matrices(part, gathered, self._rates())
