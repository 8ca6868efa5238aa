"""Newton-Schulz: the orthogonal matrix nearest to a given one, nearly, by matrix products alone."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["medium", "high", "highest"]
"""How fp32 is multiplied: in bf16, in TF32, or exactly."""

EPSILON = 1e-7
"""Least norm that a matrix is divided by, so that one of zeros stays so."""

COEFFICIENTS: Mapping[str, Sequence[tuple[float, float, float]]] = MappingProxyType(
    {
        "simple": ((3.4445, -4.7750, 2.0315),),  # Jordan's, https://kellerjordan.github.io/posts/muon
        "quintic": (  # Cesista's, https://leloykun.github.io/ponder/muon-opt-coeffs
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
    }
)
"""Polynomials a s + b s^3 + c s^5 that a step applies to singular values s, in turn; both names are Megatron's."""


def orthogonal(
    matrix: Tensor, steps: int, coefficients: Sequence[tuple[float, float, float]], dtype: torch.dtype | None = None, *, tf32: bool = False
) -> Tensor:
    """``matrix`` [r, c] with each singular value brought near 1, its singular vectors kept; of the same shape and type.

    The values begin at no more than 1, since the matrix is divided by its Frobenius norm. Products are of ``dtype``, by default the
    matrix's own; with ``tf32`` a GPU may round the operands of those in fp32.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix  # [m, n], m <= n: the Gram matrix is the smaller one
    x = x / torch.linalg.vector_norm(x).clamp(min=EPSILON)
    x = x if dtype is None else x.to(dtype)
    with _fp32_products(tf32):
        for a, b, c in islice(cycle(coefficients), steps):
            gram = x @ x.mT  # [m, m]
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # [m, n]
    return (x.mT if tall else x).to(matrix.dtype)


def product_dtype(matrix: Tensor, precision: Precision) -> torch.dtype:
    """What a ``matrix`` is multiplied in. CPUs stay at fp32, since their products in bf16 may be 30 times slower."""
    return torch.bfloat16 if precision == "medium" and matrix.is_cuda and matrix.dtype == torch.float32 else matrix.dtype


@contextmanager
def _fp32_products(tf32: bool) -> Iterator[None]:
    """Multiply fp32 in TF32, where there is such a thing, or exactly; and as before afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
