"""How Megatron groups parameters for its optimizers, and what these keep of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

Moment = Literal["exp_avg", "exp_avg_sq", "momentum_buffer"]
"""What optimizers keep of a weight, as Megatron's checkpoints name it."""
MOMENTS: Mapping[str, tuple[Moment, ...]] = {"adam": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}

INPUT_AND_OUTPUT = ("embedding.word_embeddings.weight", "output_layer.weight")


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
