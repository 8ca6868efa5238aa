"""A checkpoint of any kind as the same thing: a model's settings, a training state, and unsharded tensors read one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domino_lm.checkpoint.folder import Kind
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.megatron_legacy import Role
from domino_lm.checkpoint.source import prefix_of, refuse_not_finite
from domino_lm.config.settings import ModelConfig
from domino_lm.model.build import build_stack
from domino_lm.model.families.lookup import family_of
from domino_lm.model.parameter import ParameterSpec
from domino_lm.model.parameter_groups import Moment, moments_of_weight
from domino_lm.parallel.collectives import Communicator

# Megatron's order of the parameters of a layer, by which its optimizer numbers them.
_LAYER_ORDER = (
    "input_layernorm self_attention.linear_proj self_attention.linear_qkv pre_mlp_layernorm mlp.linear_fc1 mlp.linear_fc2"
).split()


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """What every reader returns and every writer takes."""

    kind: Kind
    path: Path
    model: ModelConfig
    """Settings; ``vocab_size`` is the true vocabulary."""

    vocab_rows: int
    """Rows of the stored word embedding."""

    softmax_rows: int
    """Vocabulary rows that take part in the softmax."""

    dtype: torch.dtype
    """Data type of the weights."""

    iteration: int
    optimizer_steps: int | None
    """Updates that the optimizer has made; None if the checkpoint holds no moments."""

    state: dict[str, Any]
    """Training state, in the form of native checkpoints."""

    moments: tuple[Moment, ...] = ()
    """What the optimizer keeps of each weight."""

    read: Callable[[ParameterSpec, Role], Tensor]
    """The unsharded tensor of a parameter, vocabulary rows as stored."""

    def specs(self) -> list[ParameterSpec]:
        """Every parameter, in the order of Megatron's ``named_parameters``."""
        return parameter_specs(self.model)

    def roles(self) -> tuple[Role, ...]:
        """What is stored of each parameter."""
        return ("weight",) if self.optimizer_steps is None else ("weight", *self.moments)

    def shape(self, spec: ParameterSpec, vocab_rows: int) -> tuple[int, ...]:
        """Shape of a parameter's tensor if the vocabulary has ``vocab_rows`` rows."""
        return spec.shape if spec.vocab_rows is None else (vocab_rows, *spec.shape[1:])

    def tensor(self, spec: ParameterSpec, role: Role, vocab_rows: int, dtype: torch.dtype) -> Tensor:
        """The tensor; one of a vocabulary gets ``vocab_rows`` rows: some are cut off, or zeros added.

        Raises CheckpointError if its shape is not what the model's settings say.
        """
        stored = self.read(spec, role)
        refuse_not_finite(self.path, f"{prefix_of(role)}{spec.name}", stored)
        expected = self.shape(spec, self.vocab_rows)
        if tuple(stored.shape) != expected:
            raise CheckpointError(
                f"{self.path}: {spec.name} has the shape {list(stored.shape)}, the model's settings say {list(expected)}; "
                "the settings in the checkpoint do not belong to its weights"
            )
        if spec.vocab_rows is not None and stored.shape[0] != vocab_rows:
            resized = stored.new_zeros(vocab_rows, *stored.shape[1:])
            rows = min(vocab_rows, stored.shape[0])
            resized[:rows] = stored[:rows]
            stored = resized
        return stored.to(dtype).contiguous()

    def without_optimizer(self) -> StoredModel:
        """The same without moments."""
        return replace(self, optimizer_steps=None)

    def with_dtype(self, dtype: torch.dtype | None) -> StoredModel:
        """The same with weights to be written in ``dtype``; moments stay in fp32."""
        return self if dtype is None else replace(self, dtype=dtype)


def parameter_specs(model: ModelConfig) -> list[ParameterSpec]:
    """Every parameter of a model, without memory for any, in the order of Megatron's ``named_parameters``."""
    with torch.device("meta"):
        stack = build_stack(model, Communicator.single(), seed=0, device=torch.device("meta"))
    return sorted((parameter.spec for parameter in stack.parameters()), key=lambda spec: _megatron_order(spec.name))


def _megatron_order(name: str) -> tuple[int, int, int, int]:
    section = next(
        i
        for i, start in enumerate(("embedding.word", "embedding.pos", "decoder.layers", "decoder.final", "output"))
        if name.startswith(start)
    )
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    layer, part = (int(match[1]), _LAYER_ORDER.index(match[2])) if match else (0, 0)
    return section, layer, part, int(name.endswith(".bias"))


def check_tensor_parallel(model: ModelConfig, size: int) -> None:
    """Raise CheckpointError if the model cannot be cut over ``size`` ranks."""
    fault = next(family_of(model).faults(size), "") if size > 0 else "give at least 1"
    if fault:
        raise CheckpointError(f"--target-tensor-parallel-size {size}: {fault}")


def with_vocabulary(stored: StoredModel, vocab_size: int | None) -> StoredModel:
    """The checkpoint with ``vocab_size`` as its true vocabulary. Raises CheckpointError if it holds fewer rows."""
    if vocab_size is None:
        return stored
    if not 0 < vocab_size <= stored.vocab_rows:
        raise CheckpointError(
            f"--vocab-size {vocab_size}: {stored.path} holds {stored.vocab_rows} vocabulary rows; give a number from 1 to that"
        )
    return replace(stored, model=replace(stored.model, vocab_size=vocab_size))


def tensors(stored: StoredModel, roles: tuple[Role, ...]) -> Iterator[tuple[ParameterSpec, Role]]:
    """Everything to write: all weights, then all moments of a kind, then those of the next."""
    specs = [(spec, ("weight", *moments_of_weight(stored.moments, spec))) for spec in stored.specs()]
    return ((spec, role) for role in roles for spec, kept in specs if role in kept)
