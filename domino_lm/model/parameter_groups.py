"""How Megatron groups parameters for its optimizers, and what these keep of each."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from domino_lm.model.parameter import Parameter, ParameterSpec

Moment = Literal["exp_avg", "exp_avg_sq", "momentum_buffer"]
"""What optimizers keep of a weight, as Megatron's checkpoints name it."""
MOMENTS: Mapping[str, tuple[Moment, ...]] = {
    "muon": ("exp_avg", "exp_avg_sq", "momentum_buffer"),
    "adam": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
}
"""By optimizer, what it keeps of any weight; one that keeps more stands before those whose names are among its own."""


class HasParameters(Protocol):
    """A part of a model."""

    def parameters(self) -> Iterator[Parameter]:
        """Its weights."""


INPUT_AND_OUTPUT = ("embedding.word_embeddings.weight", "output_layer.weight")


def is_layer_matrix(spec: ParameterSpec) -> bool:
    """Whether a weight is a matrix of a layer, which Muon updates: no embedding, output layer, norm weight or bias."""
    return spec.layer is not None and len(spec.shape) == 2


def moments_of_weight(kept: tuple[Moment, ...], spec: ParameterSpec) -> tuple[Moment, ...]:
    """What the optimizer that keeps ``kept`` in all keeps of one weight: Muon a matrix's momentum, and of all others what AdamW does."""
    if kept != MOMENTS["muon"]:
        return kept
    return MOMENTS["sgd"] if is_layer_matrix(spec) else MOMENTS["adam"]


def layer_matrices(parts: Iterable[HasParameters]) -> dict[int, list[Parameter]]:
    """The matrices of layers by the number of their part in the chain, parts without any left out."""
    found = ((number, [weight for weight in part.parameters() if is_layer_matrix(weight.spec)]) for number, part in enumerate(parts))
    return {number: matrices for number, matrices in found if matrices}


@dataclass(frozen=True)
class Group:
    """What a parameter is updated with: one of Megatron's groups."""

    decays: bool
    """Takes weight decay."""

    decoupled: bool = False
    """Takes the learning rate of embedding and output layer, if they have one of their own."""

    @classmethod
    def of(cls, name: str, dimensions: int, *, embeddings_decay: bool = True, decoupled: bool = False) -> Self:
        """That of the parameter that Megatron's model calls ``name``.

        Matrices decay, and embeddings unless told otherwise; biases and norm weights do not. ``decoupled`` says whether
        word embedding and output layer have a rate of their own.
        """
        decays = dimensions >= 2 and not name.endswith(".bias")
        return cls(decays and (embeddings_decay or not name.startswith("embedding.")), decoupled and name in INPUT_AND_OUTPUT)


GROUPS = (Group(True), Group(True, True), Group(False, True), Group(False))
"""In Megatron's order."""
