"""What one rank updates of a parameter."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from domino_lm.model.parameter import Parameter


@dataclass(frozen=True)
class Piece:
    """The elements of one parameter that this rank updates: ``start`` to ``stop`` of its flattened weights.

    ``main`` is what AdamW updates: the parameter's own memory, or an fp32 copy of a narrower one (a master weight). It has
    the parameter's shape if the piece is the whole parameter, and is 1-D elsewhere. The gradient is ``gradient``
    [stop - start] if data-parallel ranks hold shares, and else lies in ``main_grad``.
    """

    parameter: Parameter
    start: int
    stop: int
    main: Tensor
    gradient: Tensor | None = None

    @classmethod
    def of(cls, parameter: Parameter, start: int = 0, stop: int | None = None, gradient: Tensor | None = None) -> Self:
        """All of a parameter, or elements that this rank owns; its ``main`` begins as the weights are."""
        piece = cls(parameter, start, parameter.numel() if stop is None else stop, parameter.detach(), gradient)
        return replace(piece, main=piece.weights.to(torch.promote_types(parameter.dtype, torch.float32)))

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its parameter."""
        return self.stop - self.start == self.parameter.numel()

    @property
    def is_owned(self) -> bool:
        """Whether no other data-parallel rank updates it."""
        return self.gradient is not None

    @property
    def is_master(self) -> bool:
        """Whether ``main`` is a copy, which has to be brought back into the parameter after an update."""
        return self.main.dtype != self.parameter.dtype

    @property
    def weights(self) -> Tensor:
        """The parameter's memory of these elements, shaped like ``main``."""
        return self._of(self.parameter.detach())

    @property
    def grad(self) -> Tensor:
        """Their gradient, a view shaped like ``main``; the bucket may hold it in another dtype."""
        return self._of(self.parameter.main_grad) if self.gradient is None else self.gradient.view(self.main.shape)

    def _of(self, whole: Tensor) -> Tensor:
        return whole if self.is_whole else whole.view(-1)[self.start : self.stop]
