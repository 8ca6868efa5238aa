"""Memory of one device by kind."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from domino_lm.model.shapes import MAIN_GRAD_BYTES
from domino_lm.schedule.ops import Kind, Op, writes_gradient
from domino_lm.simulate.activations import peak_activations
from domino_lm.simulate.costs import Shapes

OPTIMIZER_BYTES = 8
"""AdamW's two moments, fp32; a master weight of 4 comes on top if weights are narrower."""

MATRIX_BYTES = 4
"""Of a matrix that is updated whole: its momentum, fp32; a master weight likewise."""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    copy: float = 0.0
    """Of what is being saved beside training, where it lies in the same memory."""

    @property
    def total(self) -> float:
        """All kinds; the allocator's waste and the libraries' buffers come on top."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.copy


def memory_of(ops: Iterable[Op], shapes: Shapes, *, gradient_bytes: int = MAIN_GRAD_BYTES, optimizer_bytes: int | None = None) -> Memory:
    """What a rank holds when the ops are at their peak, each kind at its own.

    Where the plan shares them out, a rank keeps 1 / data-parallel size of the optimizer's state, and of gradients in fp32.
    A gradient takes ``gradient_bytes``, what the optimizer keeps of a weight ``optimizer_bytes``: by default fp32 moments, and a
    master weight if weights are narrower. Of matrices that the plan updates whole it keeps momentum and master weight.
    """
    parameters, size, matrices = shapes.parameters, shapes.element_bytes, shapes.in_whole_matrices
    master_bytes = 4 if size < 4 else 0
    if optimizer_bytes is None:
        optimizer_bytes = OPTIMIZER_BYTES + master_bytes
    kept = (shapes.updated - matrices) * optimizer_bytes + matrices * (MATRIX_BYTES + master_bytes)
    ops = list(ops)
    gradients = float(parameters * gradient_bytes)
    if shapes.slicing.sharding == "optim_grads":
        gradients = shapes.updated * MAIN_GRAD_BYTES + peak_gradients(ops, shapes) * gradient_bytes
    return Memory(parameters * size, gradients, kept, peak_activations(ops, shapes))


def peak_gradients(ops: Sequence[Op], shapes: Shapes) -> float:
    """Most gradients that lie in buckets at once: a bucket is whole from the first op that writes into it until its reduction is redeemed."""
    slicing, whole, peak = shapes.slicing, set[int](), 0.0
    for op in ops:
        if op.phase == "B" and writes_gradient(op, slicing):
            whole.update(slicing.buckets_of(op.part))
            peak = max(peak, sum(shapes.bucket_elements(bucket) for bucket in whole))
        elif op.phase == "S" and op.kind is Kind.WAIT and slicing.collective(op).arrives == "reduced":
            whole.discard(op.part)
    return peak


def copied_bytes(parameters: float, replicas: int, element_bytes: int, optimizer_bytes: int) -> float:
    """What a save beside training copies on one rank, which holds ``parameters``: weights and what the optimizer keeps, shared by replicas."""
    return parameters * (element_bytes + optimizer_bytes) / replicas
