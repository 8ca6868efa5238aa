"""The two MLPs, each a core between two GEMMs."""

from torch import Tensor

from domino_lm.model.batch import RowContext
from domino_lm.model.parameter import Parameter
from domino_lm.model.part import ShardedPart
from domino_lm.parallel.collectives import Communicator


class GeluMlp(ShardedPart):
    """GELU part: ``w_in`` [f/t, h], ``w_out`` [h, f/t]; ``approximate`` is tanh or none (the exact erf)."""

    def __init__(self, tp: Communicator, w_in: Parameter, w_out: Parameter, b_in: Parameter | None, *, approximate: str) -> None:
        super().__init__(tp, w_in, w_out, b_in)
        self.approximate = approximate

    def core(self, h: Tensor, ctx: RowContext) -> Tensor:
        return self.kernels.gelu(h, self.approximate)  # [s, b, f/t]


class GatedMlp(ShardedPart):
    """SwiGLU part: ``w_in`` [2f/t, h] holds gate rows, then up rows; ``w_out`` [h, f/t]."""

    def core(self, h: Tensor, ctx: RowContext) -> Tensor:
        return self.kernels.swiglu(h)  # [s, b, f/t]
