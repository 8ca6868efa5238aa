"""Vocabulary-parallel output layer and cross entropy, the last part of the chain."""

from typing import NamedTuple

import torch
from torch import Tensor

from domino_lm.model.batch import Recorded, Row, RowContext
from domino_lm.model.embedding import local_rows
from domino_lm.model.linear import gemm
from domino_lm.model.parameter import Parameter
from domino_lm.model.part import ALL_COLUMNS, Part, input_of
from domino_lm.parallel.collectives import Communicator, CopyToShards, ReduceFromShards


class LocalSoftmax(NamedTuple):
    """What forward keeps until the loss: this rank's softmax before it is normalised, and what a core recorded."""

    exponentials: Tensor  # [s, b, v/t]; the loss turns them into the logits' gradient
    maximum: Tensor  # [s, b, 1]
    ids: Tensor  # [s, b]
    ours: Tensor  # [s, b, 1]
    core: Recorded | None


class Head(Part):
    """Logits stay cut over the vocabulary; ranks exchange three numbers per token: maximum, sum of exponentials, target logit.

    ``vocab_rows`` is the true vocabulary if padded columns are kept out of the softmax, or None if they take part.
    The softmax is computed in fp32, or float64 for float64 models. A subclass may write ``core(logits, ctx)`` (a soft cap, a scale),
    without weights of its own: it sees this rank's logits [s, b, v/t] before padding is masked.
    """

    explicit_weights = ("weight",)
    sharded = True
    forward_collective = "statistics"
    backward_collective = "all_reduce"

    def __init__(self, tp: Communicator, weight: Parameter, vocab_rows: int | None) -> None:
        self.tp = tp
        self.weight = weight  # [v/t, h], the embedding's own table if they are tied
        assert not self.core_parameters(), "a head's core has no weights of its own"
        self.true_columns = None if vocab_rows is None else max(0, vocab_rows - tp.rank * weight.shape[0])

    def body(self, x: Tensor, ctx: RowContext) -> Tensor:
        """Statistics [3, s, b] of this rank's logits of ``x`` [s, b, h]; keeps their exponentials."""
        logits, recorded = self.product(x), None  # [s, b, v/t]
        if self.has_core:
            recorded = ctx.record(self.core, logits)
            logits = recorded.out.detach().clone()  # what follows overwrites it
        logits = self.mask_padding_(logits)
        ids, ours = local_rows(ctx.row.labels, self.weight, self.tp)
        target = logits.gather(-1, ids.unsqueeze(-1)).masked_fill_(~ours, 0)  # [s, b, 1]
        maximum = finite_maximum(logits)  # [s, b, 1]
        exponentials = logits.sub_(maximum).exp_()
        ctx.x, ctx.saved = x, LocalSoftmax(exponentials, maximum, ids, ours, recorded)
        return torch.cat((maximum, exponentials.sum(-1, keepdim=True), target), -1).permute(2, 0, 1).contiguous()

    def loss(self, gathered: Tensor, ctx: RowContext) -> tuple[Tensor, Tensor]:
        """From all ranks' statistics [t, 3, s, b] to the logits' gradient [s, b, v/t] and the row's summed loss [].

        The gradient is (softmax - one-hot) times each token's ``loss_weight``; it overwrites the kept exponentials.
        """
        exponentials, local_maximum, ids, ours, recorded = ctx.state(LocalSoftmax)
        maxima, sums, targets = gathered.unbind(1)  # 3 x [t, s, b]
        maximum = maxima.amax(0)  # [s, b]
        total = (sums * (maxima - maximum).exp()).sum(0)
        losses = total.log() + maximum - targets.sum(0)
        weight = ctx.row.loss_weight.to(total.dtype).unsqueeze(-1)  # [s, b, 1]
        scale = (local_maximum - maximum.unsqueeze(-1)).exp() / total.unsqueeze(-1) * weight
        d_logits = exponentials.mul_(scale).scatter_add_(-1, ids.unsqueeze(-1), -weight * ours)
        ctx.saved = None
        if recorded is not None:
            d_logits = self.core_grad(recorded, d_logits, ctx)
        return d_logits.to(self.weight.dtype), (losses * ctx.row.loss_mask).sum()

    def tail_grad(self, d_logits: Tensor, columns: slice = ALL_COLUMNS, out: Tensor | None = None) -> Tensor:
        """Gradient by the input's ``columns``: this rank's partial sum [s, b, columns], in ``out`` if one is given."""
        return self.kernels.head_linear.dgrad_columns(d_logits, self.weight, columns, out)

    def wgrad(self, ctx: RowContext, d_logits: Tensor) -> None:
        """Accumulate the output weight's gradient."""
        self.kernels.head_linear.accumulate_wgrad(self.weight, d_logits, input_of(ctx))

    def forward(self, x: Tensor, row: Row) -> Tensor:
        """Loss of every token [s, b] through autograd."""
        maximum, total, target = self.statistics(x, row)
        return (total.log() + maximum - target).squeeze(-1)

    def statistics(self, x: Tensor, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        """Largest logit, sum of exponentials less it, and the label's logit of every token, over all ranks: 3 x [s, b, 1]."""
        logits = self.logits(CopyToShards.apply(x, self.tp), row)  # [s, b, v/t]
        maximum = self.tp.all_reduce(finite_maximum(logits.detach()), op="max")  # [s, b, 1]
        ids, ours = local_rows(row.labels, self.weight, self.tp)
        target = ReduceFromShards.apply(logits.gather(-1, ids.unsqueeze(-1)).masked_fill(~ours, 0), self.tp)
        total = ReduceFromShards.apply((logits - maximum).exp().sum(-1, keepdim=True), self.tp)
        return maximum, total, target

    def logits(self, x: Tensor, row: Row) -> Tensor:
        """This rank's columns [s, b, v/t] of the logits of ``x`` [s, b, h], through autograd."""
        logits = self.product(x)
        if self.has_core:
            logits = self.core(logits, RowContext(row)).clone()
        return self.mask_padding_(logits)

    def product(self, x: Tensor) -> Tensor:
        """This rank's columns [s, b, v/t] of the GEMM of ``x`` [s, b, h], in the precision of the softmax."""
        logits = gemm(x, self.weight)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def mask_padding_(self, logits: Tensor) -> Tensor:
        """``logits`` [s, b, v/t] with columns of padding at minus infinity, if they are kept out of the softmax."""
        if self.true_columns is not None and self.true_columns < self.weight.shape[0]:
            logits[..., self.true_columns :] = -torch.inf
        return logits


def finite_maximum(logits: Tensor) -> Tensor:
    """Largest logit of each token [s, b, 1]; a rank that holds nothing but padding has a finite one too."""
    return logits.amax(-1, keepdim=True).clamp_min_(torch.finfo(logits.dtype).min)
