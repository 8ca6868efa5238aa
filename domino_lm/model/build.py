"""Builds the model that settings describe."""

from collections.abc import Sequence

import torch

from domino_lm.config.settings import ConfigError, ModelConfig
from domino_lm.model.families.lookup import family_of
from domino_lm.model.parameter import Parameter, ParameterFactory
from domino_lm.model.part import Part
from domino_lm.model.shapes import PartShape, Rank
from domino_lm.model.stack import Stack
from domino_lm.parallel.collectives import Communicator


def build_stack(
    model: ModelConfig,
    tp: Communicator,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = torch.device("cpu"),  # noqa: B008
) -> Stack:
    """The model that ``model`` describes, as ``tp.rank`` holds it, with initial weights from ``seed``.

    Raises ConfigError if its parts are not those that its family's shape records describe.
    """
    family = family_of(model)
    stack = family.stack(ParameterFactory(tp, seed, dtype, device))
    compare_with_shapes(stack.parts, family.shapes(Rank(tp.size)), str(model.model))
    return stack


def compare_with_shapes(parts: Sequence[Part], shapes: Sequence[PartShape], name: str) -> None:
    """Raise ConfigError if a part differs from its record, by which the model ``name`` is planned, predicted and estimated."""
    if len(parts) != len(shapes):
        raise ConfigError(f"--model {name}: its stack has {len(parts)} parts, its shapes are {len(shapes)}; give each part one.")
    seen: set[Parameter] = set()
    for number, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
        built = {link: getattr(part, link) for link in ("forward_collective", "backward_collective", "couples_tokens")}
        built["parameters"] = sum(parameter.numel() for parameter in {*part.parameters()} - seen)
        built["core_parameters"] = sum(parameter.numel() for parameter in part.core_parameters())
        seen.update(part.parameters())
        for field, value in built.items():
            if getattr(shape, field) != value:
                raise ConfigError(
                    f"--model {name}: part {number} has {field} {value}, its shape says {getattr(shape, field)}; correct one."
                )
