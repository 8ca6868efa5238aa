"""The replicated part: a branch joins the residual stream, and the sum is normalised for the next sharded part."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from domino_lm.model.batch import Recorded, Row, RowContext
from domino_lm.model.linear import accumulate_bias_grad
from domino_lm.model.parameter import Parameter
from domino_lm.model.part import Part


class Joined(NamedTuple):
    """What a row's norm keeps: the residual stream, its norm with autograd's graph between them, dropout, and what a core recorded."""

    hidden: Tensor  # [s, b, h]
    normed: Tensor | None  # [s, b, h]; None between `forget` and `rebuild`
    keep: Tensor | None  # [s, b, h]
    core: Recorded | None


class NormPart(Part):
    """``hidden = residual + dropout(core(branch + branch_bias + positions))``, then LayerNorm, or RMSNorm without ``bias``.

    ``branch_bias`` [h] belongs to the row-parallel linear before this part; ``positions`` [rows, h] is the learned
    position table, in the first norm of the chain alone. With ``weight_less_1`` the norm multiplies by 1 + ``weight``. A subclass may write ``core(branch, ctx)`` (a norm after the branch, a
    multiplier), with weights of its own. All weights are replicated.
    """

    explicit_weights = ("positions", "branch_bias", "weight", "bias")
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
        weight_less_1: bool = False,
    ) -> None:
        self.weight_less_1 = weight_less_1
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
        return self.kernels.normalise(hidden, self.weight + 1 if self.weight_less_1 else self.weight, self.bias, self.epsilon)

    def keep(self, row: Row) -> Tensor | None:
        """Which elements [s, b, h] of the branch stay, or None if nothing is dropped."""
        if self.dropout == 0 or row.dropout is None:
            return None
        return row.dropout.keep(self.site, self.columns, self.dropout)

    def join(self, branch: Tensor, residual: Tensor | None, row: Row, keep: Tensor | None) -> Tensor:
        """The residual stream [s, b, h] after ``branch``, without a core, has joined it."""
        positions = None if self.positions is None else self._positions_of(row)
        return self.kernels.join(branch, self.branch_bias, positions, keep, 1 / (1 - self.dropout), residual)

    def join_core(self, made: Tensor, residual: Tensor | None, keep: Tensor | None) -> Tensor:
        """The same for what the core ``made`` [s, b, h] of the branch."""
        return self.kernels.join(made, None, None, keep, 1 / (1 - self.dropout), residual)

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
        keep = self.keep(row)
        if self.has_core:
            hidden = self.join_core(self.core(self.join(branch, None, row, None), RowContext(row)), residual, keep)
        else:
            hidden = self.join(branch, residual, row, keep)
        return self.norm(hidden), hidden

    def local(self, branch: Tensor, residual: Tensor | None, ctx: RowContext) -> tuple[Tensor, Tensor]:
        """The same under the plan, of a branch [s, b, h] or [s, b, c, h/c]: core and norm are recorded, for `local_grad`."""
        keep, recorded = self.keep(ctx.row), None
        if self.has_core:
            whole = branch.flatten(2) if branch.dim() == 4 else branch
            recorded = ctx.record(self.core, self.join(whole, None, ctx.row, None).detach())
            hidden = self.join_core(recorded.out.detach(), residual, keep)
        else:
            hidden = (self.join_columns if branch.dim() == 4 else self.join)(branch, residual, ctx.row, keep)
        return self._record(Joined(hidden, None, keep, recorded), ctx), hidden.detach()

    def _record(self, joined: Joined, ctx: RowContext) -> Tensor:
        """Normalise the residual stream, keep the graph, and return [s, b, h] without one."""
        hidden = joined.hidden.requires_grad_()
        with torch.enable_grad():
            normed = self.norm(hidden)
        ctx.saved = joined._replace(normed=normed)
        return normed.detach()

    def forget(self, ctx: RowContext) -> None:
        """Drop the normalised stream, for `rebuild`."""
        joined = ctx.state(Joined)
        ctx.saved = joined._replace(hidden=joined.hidden.detach(), normed=None)

    def rebuild(self, ctx: RowContext) -> Tensor:
        """Normalise the kept residual stream again: [s, b, h]."""
        return self._record(ctx.state(Joined), ctx)

    def normed(self, ctx: RowContext) -> Tensor:
        """The normalised stream [s, b, h] that `local` or `rebuild` left."""
        normed = ctx.state(Joined).normed
        assert normed is not None, "the plan rebuilds the norm before it is read"
        return normed.detach()

    def local_grad(self, d_normed: Tensor, d_residual: Tensor | None, ctx: RowContext) -> tuple[Tensor, Tensor]:
        """Gradients [s, b, h] of branch and residual; accumulates those of all weights."""
        hidden, normed, keep, recorded = ctx.state(Joined)
        assert normed is not None, "the plan rebuilds the norm before its gradient"
        weights = [self.weight] if self.bias is None else [self.weight, self.bias]
        d_hidden, *d_weights = torch.autograd.grad(normed, [hidden, *weights], d_normed)
        for weight, grad in zip(weights, d_weights, strict=True):
            weight.main_grad.add_(grad)
        if d_residual is not None:
            d_hidden = d_hidden.add_(d_residual)
        d_branch = d_hidden if keep is None else d_hidden * keep * (1 / (1 - self.dropout))
        if recorded is not None:
            d_branch = self.core_grad(recorded, d_branch, ctx)
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
