"""The work of updates that take whole matrices: which a part has, and the products of the Newton-Schulz iteration on each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from domino_lm.config.settings import OptimizerConfig
from domino_lm.model.shapes import PartShape
from domino_lm.simulate.hardware import Gemm

MOMENTUM_BYTES = 20
"""For one element: gradient and momentum read, momentum written, then momentum read and written where it travels from, all in fp32."""

WHOLE_BYTES = 28
"""For one element of a whole matrix, outside its products: put together (8), measured and normalised (12), scaled (8)."""

OWN_BYTES = 12
"""For one element that a rank keeps: update and weight read, weight written."""


class MatrixUpdates(NamedTuple):
    """How an optimizer updates whole matrices, as far as its price depends on it."""

    steps: int = 5
    """Steps of the iteration."""

    split_qkv: bool = True
    """Queries, keys and values are three matrices."""

    @classmethod
    def of(cls, optimizer: OptimizerConfig) -> MatrixUpdates | None:
        """That of the settings; None if their optimizer takes weights element by element."""
        return cls(optimizer.muon_num_ns_steps, optimizer.muon_split_qkv) if optimizer.optimizer == "muon" else None

    def gemms(self, part: PartShape, tensor_parallel: int) -> tuple[Gemm, ...]:
        """All products on the whole matrices of a part."""
        return tuple(gemm for rows, columns in self.matrices(part, tensor_parallel) for gemm in self._iteration(rows, columns))

    def matrices(self, part: PartShape, tensor_parallel: int) -> Iterator[tuple[int, int]]:
        """Rows and columns of each whole matrix of a part."""
        queries = part.attention_width
        heads = (part.inner - queries) // 2
        widths = (queries, heads, heads) if self.split_qkv and queries and heads > 0 else (part.inner,)
        yield from ((width * tensor_parallel, part.hidden) for width in widths if width)
        if part.mid:
            yield part.hidden, part.mid * tensor_parallel

    def _iteration(self, rows: int, columns: int) -> Iterator[Gemm]:
        """With m the shorter side and n the longer one, X [m, n]: A = X X^T, its square, and (b A + c A A) X, in each step."""
        m, n = sorted((rows, columns))
        for _ in range(self.steps):
            yield from (Gemm(m, m, n), Gemm(m, m, m), Gemm(m, n, m))


def parts_with_matrices(parts: Sequence[PartShape]) -> tuple[int, ...]:
    """Numbers of the parts whose matrices are updated whole: all between embedding and head that have any."""
    return tuple(number for number, part in enumerate(parts) if 0 < number < len(parts) - 1 and (part.inner or part.mid))


def matrix_elements(part: PartShape) -> int:
    """Elements of a part's matrices on one rank."""
    return part.hidden * (part.inner + part.mid)
