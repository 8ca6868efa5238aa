"""Muon: matrices of layers move along their momentum made orthogonal, each as a whole, whatever ranks share it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from domino_lm.config.settings import OptimizerConfig
from domino_lm.model.parameter import ParameterSpec
from domino_lm.parallel.collectives import Communicator, Pending
from domino_lm.training.newton_schulz import COEFFICIENTS, orthogonal, product_dtype
from domino_lm.training.piece import Piece


class MovedMatrix(NamedTuple):
    """A rank's shard of a matrix, and its momentum, of the same shape."""

    piece: Piece
    momentum: Tensor

    @property
    def spec(self) -> ParameterSpec:
        """The matrix's place in the unsharded model."""
        return self.piece.parameter.spec


class Muon:
    """Updates ``matrices``, which stand by the numbers of their parts: momentum of all, then part by part a gather and the update.

    A weight that holds several matrices (``spec.matrix_rows``) is updated as these unless ``config.muon_split_qkv`` is off. Every
    tensor-parallel rank makes the whole matrix orthogonal and keeps its shard of the result, so that an update depends on the
    matrix alone.
    """

    def __init__(self, matrices: Mapping[int, Sequence[MovedMatrix]], config: OptimizerConfig, tp: Communicator) -> None:
        self.matrices = matrices
        self._config = config
        self._tp = tp
        self._divisor: Tensor | None = None
        self._finite = torch.ones((), dtype=torch.bool)

    @torch.no_grad()
    def advance(self, divisor: Tensor | None, found_inf: Tensor) -> None:
        """Bring all momentum up to date by the gradients over ``divisor`` [] (None: 1); where ``found_inf`` [] is 1, nothing moves."""
        self._divisor, self._finite = divisor, found_inf == 0
        for matrices in self.matrices.values():
            for matrix in matrices:
                moved = torch.lerp(matrix.momentum, self._gradient(matrix), 1 - self._config.muon_momentum)
                matrix.momentum.copy_(torch.where(self._finite, moved, matrix.momentum))

    @torch.no_grad()
    def gather_start(self, part: int) -> Pending:
        """Begin to gather what a part's matrices move along, [n] on each tensor-parallel rank, into [t, n]."""
        return self._tp.all_gather_start(torch.cat([self._direction(matrix).flatten() for matrix in self.matrices[part]]))

    @torch.no_grad()
    def update(self, part: int, gathered: Tensor, lr: float | Tensor, weight_decay: float) -> None:
        """Move a part's matrices, by what `gather_start` has gathered; weights decay as AdamW's do."""
        matrices = self.matrices[part]
        shards = gathered.split([matrix.momentum.numel() for matrix in matrices], 1)  # [t, elements] each
        for matrix, shard in zip(matrices, shards, strict=True):
            spec, main = matrix.spec, matrix.piece.main
            whole = spec.unshard(shard.unflatten(1, main.shape).unbind())
            moved = main * (1 - lr * weight_decay) - lr * spec.shard(self._orthogonal(whole, spec), self._tp.rank, self._tp.size)
            main.copy_(torch.where(self._finite, moved, main))

    def _gradient(self, matrix: MovedMatrix) -> Tensor:
        gradient = matrix.piece.grad.to(matrix.momentum.dtype)
        return gradient if self._divisor is None else gradient / self._divisor

    def _direction(self, matrix: MovedMatrix) -> Tensor:
        if not self._config.muon_nesterov:
            return matrix.momentum
        return torch.lerp(self._gradient(matrix), matrix.momentum, self._config.muon_momentum)

    def _orthogonal(self, whole: Tensor, spec: ParameterSpec) -> Tensor:
        """The update of a whole weight [r, c], matrix by matrix, of unit learning rate."""
        if not spec.matrix_rows or not self._config.muon_split_qkv:
            return self._scaled(whole)
        turns = whole.unflatten(0, (-1, sum(spec.matrix_rows)))  # [turns, rows of one, c]
        made = [self._scaled(matrix.flatten(0, 1)).view_as(matrix) for matrix in turns.split(spec.matrix_rows, 1)]
        return torch.cat(made, 1).flatten(0, 1)

    def _scaled(self, matrix: Tensor) -> Tensor:
        config, (rows, columns) = self._config, matrix.shape
        precision, coefficients = config.muon_fp32_matmul_prec, COEFFICIENTS[config.muon_coefficient_type]
        dtype, tf32 = product_dtype(matrix, precision), precision == "high"
        made = orthogonal(matrix, config.muon_num_ns_steps, coefficients, dtype, tf32=tf32)
        squares = {"spectral": max(rows, columns), "unit_rms_norm": rows / columns, "shape_scaling": max(1, rows / columns)}
        return made * (squares[config.muon_scale_mode] ** 0.5 * config.muon_extra_scale_factor)
