"""The kernels of a part, chosen once when a run is built."""

from __future__ import annotations

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
    """For people: which library does what."""

    def begin_step(self) -> None:
        """A step is about to read the weights, which may have changed."""
        self.linear.begin_step()
        self.head_linear.begin_step()

    def refresh(self) -> None:
        """Prepare all weights now, in the memory where they were prepared before."""
        self.linear.refresh()
        self.head_linear.refresh()


PYTORCH = Kernels()
