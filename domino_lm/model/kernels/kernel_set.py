"""The kernels of a part, chosen once when a run is built."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from domino_lm.model.kernels import pointwise
from domino_lm.model.linear import Linear
from domino_lm.model.rope import rotate


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What parts compute with; the defaults are PyTorch's own. ``backends`` chooses others."""

    linear: Linear = field(default_factory=Linear)
    """GEMMs of attention and MLP."""

    head_linear: Linear = field(default_factory=Linear)
    """GEMMs of the output layer, which are never in 8 bits."""

    normalise: Callable[[Tensor, Tensor, Tensor | None, float], Tensor] = pointwise.normalise
    join: Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None, float, Tensor | None], Tensor] = pointwise.join
    gelu: Callable[[Tensor, str], Tensor] = pointwise.gelu
    swiglu: Callable[[Tensor], Tensor] = pointwise.swiglu
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate

    description: str = "PyTorch"
    """Which library does what, in words."""

    def invalidate(self) -> None:
        """As `Linear.invalidate`, before a step."""
        self.linear.invalidate()
        self.head_linear.invalidate()

    def rebuild(self) -> None:
        """As `Linear.rebuild`, for captured steps."""
        self.linear.rebuild()
        self.head_linear.rebuild()


PYTORCH = Kernels()
