"""The sharded part: two explicit GEMMs around a differentiable core, written once for every model."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from torch import Tensor

from domino_lm.model.batch import Recorded, Row, RowContext
from domino_lm.model.kernels.kernel_set import PYTORCH, Kernels
from domino_lm.model.linear import accumulate_bias_grad, gemm
from domino_lm.model.parameter import Parameter
from domino_lm.parallel.collectives import Communicator, CopyToShards, ReduceFromShards

ALL_COLUMNS = slice(None)


class Part:
    """A part of the chain: even ones are sharded, odd ones replicated."""

    sharded: bool
    forward_collective: str | None = None
    backward_collective: str | None = None
    couples_tokens: bool = False
    kernels: Kernels = PYTORCH
    explicit_weights: ClassVar[tuple[str, ...]] = ()
    """Attributes whose gradients the part forms itself; autograd finds those of all other weights, which `core` uses."""

    def parameters(self) -> Iterator[Parameter]:
        """The part's weights, in the order in which they were given to it."""
        return (value for value in vars(self).values() if isinstance(value, Parameter))

    def core(self, h: Tensor, ctx: RowContext) -> Tensor:
        """The function between the part's explicit GEMMs, differentiable in ``h``; by default the identity, at no cost."""
        return h

    @property
    def has_core(self) -> bool:
        """Whether the class has a `core` of its own."""
        return type(self).core is not Part.core

    def core_parameters(self) -> list[Parameter]:
        """Weights that only the core uses, replicated over tensor-parallel ranks."""
        found = vars(self).items() if self.has_core else ()
        return [value for name, value in found if isinstance(value, Parameter) and name not in self.explicit_weights]

    @property
    def core_weights(self) -> bool:
        """Whether the core has weights of its own."""
        return bool(self.core_parameters())

    def core_grad(self, recorded: Recorded, d_out: Tensor, ctx: RowContext) -> Tensor:
        """Gradient of the core's input by that of its output; accumulates those of the core's own weights."""
        own = self.core_parameters()
        d_in, *d_own = ctx.backward(recorded.out, d_out, [recorded.leaf, *own])
        for parameter, grad in zip(own, d_own, strict=True):
            parameter.main_grad.add_(grad)
        return d_in


class FirstGemm(NamedTuple):
    """A sharded part's first product [s, b, n/t], kept by recompute to run the core again."""

    h: Tensor


class SecondGemm(NamedTuple):
    """Operands of the second weight's gradient: the core's output [s, b, m/t] and the part's output gradient [s, b, h]."""

    mid: Tensor
    dy: Tensor


class ShardedPart(Part, ABC):
    """Column-parallel GEMM, a core, row-parallel GEMM. A model writes ``core``; the rest stands here.

    The weights are local: ``w_in`` [n/t, h] with bias ``b_in`` [n/t], ``w_out`` [h, m/t]. Under the plan, ``body`` and
    ``tail`` go forward, ``body_grad``, ``tail_grad`` and ``wgrad`` back; the collectives between them are ops of the plan.
    `forward` is the same arithmetic through plain autograd. A row's context holds a `Recorded` core after ``body``, a `FirstGemm`
    or nothing if that is to be recomputed, and a `SecondGemm` after ``body_grad``.
    """

    explicit_weights = ("w_in", "b_in", "w_out")
    sharded = True
    forward_collective = "all_reduce"
    backward_collective = "all_reduce"

    def __init__(self, tp: Communicator, w_in: Parameter, w_out: Parameter, b_in: Parameter | None = None) -> None:
        self.tp = tp
        self.w_in = w_in
        self.b_in = b_in
        self.w_out = w_out

    @abstractmethod
    def core(self, h: Tensor, ctx: RowContext) -> Tensor:
        """From the first GEMM's output [s, b, n/t] to the second one's input [s, b, m/t]; differentiable in ``h``."""

    def body(self, x: Tensor, ctx: RowContext) -> Tensor:
        """First GEMM and core of ``x`` [s, b, h]: [s, b, m/t]. Keeps what backward needs."""
        ctx.x = x
        return self._record(self.kernels.linear.forward(x, self.w_in, self.b_in), ctx)

    def _record(self, h: Tensor, ctx: RowContext) -> Tensor:
        """Run the core on ``h`` [s, b, n/t] as a leaf, keep its graph, and return its output [s, b, m/t] without one."""
        ctx.saved = recorded = ctx.record(self.core, h)
        return recorded.out.detach()

    def forget(self, ctx: RowContext, keep_gemm: bool) -> None:
        """Drop what the core keeps, and without ``keep_gemm`` the part's input and first GEMM too, for `rebuild`."""
        ctx.saved = FirstGemm(ctx.state(Recorded).leaf.detach()) if keep_gemm else None
        ctx.x = ctx.x if keep_gemm else None
        ctx.forget_graph()

    def rebuild(self, ctx: RowContext, x: Tensor | None) -> None:
        """Compute again what `forget` dropped; ``x`` [s, b, h] is the part's input if that was dropped too."""
        ctx.restart()
        if x is None:
            self._record(ctx.state(FirstGemm).h, ctx)
        else:
            self.body(x, ctx)

    def tail(self, mid: Tensor, columns: slice = ALL_COLUMNS, out: Tensor | None = None) -> Tensor:
        """Second GEMM for the output ``columns``: this rank's partial sum [s, b, columns], in ``out`` if one is given."""
        return self.kernels.linear.forward_columns(mid, self.w_out, columns, out)

    def body_grad(self, dy: Tensor, ctx: RowContext) -> Tensor:
        """From the gradient [s, b, h] of the reduced output to that of the first GEMM's output [s, b, n/t].

        Gradients of the core's own weights are accumulated here, since autograd finds them on the way.
        """
        recorded = ctx.state(Recorded)
        dh = self.core_grad(recorded, self.kernels.linear.dgrad(dy, self.w_out), ctx)
        ctx.saved = SecondGemm(recorded.out.detach(), dy)
        return dh

    def tail_grad(self, dh: Tensor, columns: slice = ALL_COLUMNS, out: Tensor | None = None) -> Tensor:
        """Gradient by the input's ``columns``: this rank's partial sum [s, b, columns], in ``out`` if one is given."""
        return self.kernels.linear.dgrad_columns(dh, self.w_in, columns, out)

    def wgrad(self, ctx: RowContext, dh: Tensor) -> None:
        """Accumulate both weights' gradients, a GEMM each, and the first bias's, from the gradient ``dh`` [s, b, n/t]."""
        mid, dy = ctx.state(SecondGemm)
        self.kernels.linear.accumulate_wgrad(self.w_out, dy, mid)
        self.kernels.linear.accumulate_wgrad(self.w_in, dh, input_of(ctx))
        if self.b_in is not None:
            accumulate_bias_grad(self.b_in, dh)

    def forward(self, x: Tensor, row: Row, ctx: RowContext | None = None) -> Tensor:
        """The whole part through autograd, collectives included: ``x`` [s, b, h] to the reduced [s, b, h].

        ``ctx`` is what the core sees of the row and of earlier ones; without it there are none.
        """
        h = gemm(CopyToShards.apply(x, self.tp), self.w_in, self.b_in)  # [s, b, n/t]
        return ReduceFromShards.apply(gemm(self.core(h, ctx or RowContext(row)), self.w_out), self.tp)


def input_of(ctx: RowContext) -> Tensor:
    """The first GEMM's input, which some plans drop and gather or compute again before a weight gradient."""
    assert ctx.x is not None, "the plan brings a part's input back before its weight gradient"
    return ctx.x
