"""The replicated part: a branch joins the residual stream, and the sum is normalised for the next sharded part."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from domino_lm.model.batch import Row, RowContext
from domino_lm.model.linear import accumulate_bias_grad
from domino_lm.model.parameter import Parameter
from domino_lm.model.part import Part


class NormPart(Part):
    """``hidden = residual + dropout(branch + branch_bias + positions)``, then LayerNorm, or RMSNorm without ``bias``.

    ``branch_bias`` [h] belongs to the row-parallel linear before this part; ``positions`` [rows, h] is the learned
    position table, in the first norm of the chain alone. All weights are replicated.
    """

    sharded = False

    def __init__(
        self,
        weight: Parameter,
        bias: Parameter | None,
        *,
        epsilon: float,
        dropout: float,
        site: str,
        branch_bias: Parameter | None = None,
        positions: Parameter | None = None,
    ) -> None:
        self.positions = positions
        self.branch_bias = branch_bias
        self.weight = weight
        self.bias = bias
        self.epsilon = epsilon
        self.dropout = dropout
        self.site = site
        self.columns = torch.arange(weight.shape[0], device=weight.device)

    def norm(self, hidden: Tensor) -> Tensor:
        """LayerNorm, or RMSNorm without a bias, of [s, b, h]."""
        return self.kernels.normalise(hidden, self.weight, self.bias, self.epsilon)

    def keep(self, row: Row) -> Tensor | None:
        """Which elements [s, b, h] of the branch stay, or None where nothing is dropped."""
        if self.dropout == 0 or row.dropout is None:
            return None
        return row.dropout.keep(self.site, self.columns, self.dropout)

    def join(self, branch: Tensor, residual: Tensor | None, row: Row, keep: Tensor | None) -> Tensor:
        """The residual stream [s, b, h] after ``branch`` has joined it."""
        positions = None if self.positions is None else self._positions_of(row)
        return self.kernels.join(branch, self.branch_bias, positions, keep, 1 / (1 - self.dropout), residual)

    def join_columns(self, columns: Tensor, residual: Tensor | None, row: Row, keep: Tensor | None) -> Tensor:
        """The same for a branch in column blocks, a view [s, b, c, h/c] of [c, s, b, h/c].

        Adding to the contiguous residual reads the view where it lies, so that assembling the blocks costs no pass.
        """
        if residual is None or keep is not None:
            return self.join(columns.flatten(2), residual, row, keep)
        hidden = (residual.unflatten(-1, columns.shape[-2:]) + columns).flatten(2)  # [s, b, h]
        return hidden if self.branch_bias is None else hidden.add_(self.branch_bias)

    def forward(self, branch: Tensor, residual: Tensor | None, row: Row) -> tuple[Tensor, Tensor]:
        """Normalised and plain residual stream, through autograd."""
        hidden = self.join(branch, residual, row, self.keep(row))
        return self.norm(hidden), hidden

    def local(self, branch: Tensor, residual: Tensor | None, ctx: RowContext) -> tuple[Tensor, Tensor]:
        """The same under the plan, of a branch [s, b, h] or [s, b, c, h/c]: only the norm is recorded, for `local_grad`."""
        keep = self.keep(ctx.row)
        join = self.join_columns if branch.dim() == 4 else self.join
        hidden = join(branch, residual, ctx.row, keep).requires_grad_()
        with torch.enable_grad():
            normed = self.norm(hidden)
        ctx.saved = (hidden, normed, keep)
        return normed.detach(), hidden.detach()

    def forget(self, ctx: RowContext) -> None:
        """Drop the normalised stream, for `rebuild`."""
        hidden, _, keep = ctx.saved
        ctx.saved = (hidden.detach(), None, keep)

    def rebuild(self, ctx: RowContext) -> Tensor:
        """Normalise the kept residual stream again: [s, b, h]."""
        hidden, _, keep = ctx.saved
        hidden.requires_grad_()
        with torch.enable_grad():
            normed = self.norm(hidden)
        ctx.saved = (hidden, normed, keep)
        return normed.detach()

    def normed(self, ctx: RowContext) -> Tensor:
        """The normalised stream [s, b, h] that `local` or `rebuild` left."""
        tensor: Tensor = ctx.saved[1]
        return tensor.detach()

    def local_grad(self, d_normed: Tensor, d_residual: Tensor | None, ctx: RowContext) -> tuple[Tensor, Tensor]:
        """Gradients [s, b, h] of branch and residual; accumulates those of all weights."""
        hidden, normed, keep = ctx.saved
        weights = [self.weight] if self.bias is None else [self.weight, self.bias]
        d_hidden, *d_weights = torch.autograd.grad(normed, [hidden, *weights], d_normed)
        for weight, grad in zip(weights, d_weights, strict=True):
            weight.main_grad.add_(grad)
        if d_residual is not None:
            d_hidden = d_hidden.add_(d_residual)
        d_branch = d_hidden if keep is None else d_hidden * keep * (1 / (1 - self.dropout))
        if self.branch_bias is not None:
            accumulate_bias_grad(self.branch_bias, d_branch)
        if self.positions is not None:
            self._accumulate_positions(self.positions, d_branch, ctx.row)
        return d_branch, d_hidden

    def _positions_of(self, row: Row) -> Tensor:
        assert self.positions is not None
        if row.position_ids is None:
            return self.positions[row.start : row.start + row.length, None]  # [s, 1, h]
        return F.embedding(row.position_ids, self.positions)  # [s, b, h]

    @staticmethod
    def _accumulate_positions(positions: Parameter, d_branch: Tensor, row: Row) -> None:
        grad: Any = positions.main_grad
        if row.position_ids is None:
            grad[row.start : row.start + row.length].add_(d_branch.sum(1, dtype=grad.dtype))
        else:
            grad.index_add_(0, row.position_ids.flatten(), d_branch.flatten(0, 1).to(grad.dtype))
