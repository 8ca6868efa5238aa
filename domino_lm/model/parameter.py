"""A weight as one rank holds it: its name, its place in the unsharded model and in a checkpoint, its gradient memory."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from domino_lm.config.settings import ModelConfig
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.random import name_seed


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """The place of a local tensor in the unsharded model and in checkpoints."""

    name: str
    """Megatron's model name, ``decoder.layers.3.self_attention.linear_qkv.weight``."""

    key: str
    """Megatron's torch_dist key; layers share one: ``decoder.layers.self_attention.linear_qkv.weight``."""

    layer: int | None = None
    """Index along the leading dimension that the key stacks layers on; None if nothing is stacked."""

    num_layers: int = 1
    """Length of that dimension."""

    shape: tuple[int, ...]
    """Unsharded shape of this layer's tensor, vocabulary rows padded for this tensor-parallel size."""

    shard_dim: int | None = None
    """Dimension that is cut over tensor-parallel ranks; None if every rank holds the whole."""

    shard_blocks: int = 1
    """Equal blocks along ``shard_dim`` that are each cut: 2 for SwiGLU's input, gate rows before up rows."""

    vocab_rows: int | None = None
    """True rows if dimension 0 is the padded vocabulary."""

    matrix_rows: tuple[int, ...] = ()
    """Rows of several matrices that take turns along dimension 0, in one turn: a group's queries, its key, its value; () if it is one."""

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The part of an unsharded tensor that ``rank`` of ``size`` holds, contiguous."""
        if self.shard_dim is None:
            return full.contiguous()
        blocks = full.chunk(self.shard_blocks, self.shard_dim)
        return torch.cat([block.chunk(size, self.shard_dim)[rank] for block in blocks], self.shard_dim).contiguous()

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The unsharded tensor from every rank's part, in rank order."""
        if self.shard_dim is None:
            return shards[0]
        pieces = [shard.chunk(self.shard_blocks, self.shard_dim) for shard in shards]
        ordered = [pieces[rank][block] for block in range(self.shard_blocks) for rank in range(len(shards))]
        return torch.cat(ordered, self.shard_dim)


def dtype_of(name: str) -> torch.dtype:
    """PyTorch's type of a name: float32, bfloat16, float16, float64."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class Parameter(torch.nn.Parameter):
    """A local weight with its `ParameterSpec`; ``main_grad`` is set by `GradientBuckets`."""

    spec: ParameterSpec
    main_grad: Tensor

    @classmethod
    def of(cls, local: Tensor, spec: ParameterSpec) -> Self:
        """Wrap this rank's tensor."""
        parameter = cls(local)
        parameter.spec = spec
        return parameter


@dataclass(frozen=True)
class ParameterFactory:
    """Makes a model's parameters, each from a seed of its own name, over its true rows.

    Neither the tensor-parallel size nor the padding of the vocabulary changes a parameter's initial values.
    """

    tp: Communicator
    seed: int
    dtype: torch.dtype
    device: torch.device

    def normal(self, spec: ParameterSpec, std: float) -> Parameter:
        """Weights from N(0, std); padded vocabulary rows are zero."""
        return self._make(spec, lambda full, generator: full.normal_(0.0, std, generator=generator))

    def xavier(self, spec: ParameterSpec) -> Parameter:
        """Uniform weights of variance 2 / (rows + columns) (Glorot and Bengio, 2010), of the unsharded matrix; padded rows are zero."""
        rows, columns = spec.vocab_rows or spec.shape[0], spec.shape[1]
        bound = math.sqrt(6 / (rows + columns))
        return self._make(spec, lambda full, generator: full.uniform_(-bound, bound, generator=generator))

    def constant(self, spec: ParameterSpec, value: float) -> Parameter:
        """Weights of one value."""
        return self._make(spec, lambda full, _: full.fill_(value))

    def _make(self, spec: ParameterSpec, fill: Callable[[Tensor, torch.Generator], Tensor]) -> Parameter:
        full = torch.zeros(spec.shape, dtype=torch.float32)
        generator = torch.Generator().manual_seed(name_seed(self.seed, spec.name))
        fill(full[: spec.vocab_rows], generator)
        local = spec.shard(full, self.tp.rank, self.tp.size)
        return Parameter.of(local.to(device=self.device, dtype=self.dtype), spec)


@dataclass(frozen=True)
class Weights:
    """Makes the weights of the model ``config``.

    Those of a layer are named ``{layers}.{layer}.{name}``; in checkpoints all layers share one key, under which they are stacked.
    """

    config: ModelConfig
    make: ParameterFactory
    layers: str = "layers"

    def matrix(
        self,
        name: str,
        shape: tuple[int, int],
        shard_dim: int,
        layer: int,
        *,
        blocks: int = 1,
        std: float | None = None,
        matrix_rows: tuple[int, ...] = (),
    ) -> Parameter:
        """A matrix of which each of equal ``blocks`` is cut along ``shard_dim``; N(0, std), by default ``config.init_method_std``.

        With ``config.init_method_xavier_uniform`` it is drawn by that. ``matrix_rows`` says which matrices it holds, if several.
        """
        std = None if self.config.init_method_xavier_uniform else self.config.init_method_std if std is None else std
        return self._drawn(self._spec(name, shape, layer, shard_dim=shard_dim, shard_blocks=blocks, matrix_rows=matrix_rows), std)

    def vector(
        self, name: str, width: int, value: float = 0.0, layer: int | None = None, *, key: str | None = None, **cut: Any
    ) -> Parameter:
        """A vector of one value; every rank holds it whole, unless ``cut`` has a ``shard_dim``. Checkpoints may name it ``key``."""
        return self.make.constant(self._spec(name, (width,), layer, key, **cut), value)

    def vocabulary(self, name: str) -> Parameter:
        """A table [v, h] of the padded vocabulary, cut by rows."""
        shape = (self.config.padded_vocab_size(self.make.tp.size), self.config.hidden_size)
        other = None if self.config.init_method_xavier_uniform else self.config.init_method_std
        std = self.config.embedding_std if name.startswith("embedding.") else other
        return self._drawn(self._spec(name, shape, shard_dim=0, vocab_rows=self.config.vocab_size), std)

    def table(self, name: str, rows: int) -> Parameter:
        """A table [rows, h] of embeddings that every rank holds whole."""
        return self._drawn(self._spec(name, (rows, self.config.hidden_size)), self.config.embedding_std)

    def _drawn(self, spec: ParameterSpec, std: float | None) -> Parameter:
        return self.make.xavier(spec) if std is None else self.make.normal(spec, std)

    def _spec(self, name: str, shape: tuple[int, ...], layer: int | None = None, key: str | None = None, **cut: Any) -> ParameterSpec:
        if layer is None:
            return ParameterSpec(name=name, key=name, shape=shape, **cut)
        path, key = f"{self.layers}.{layer}.{name}", f"{self.layers}.{key or name}"
        return ParameterSpec(name=path, key=key, layer=layer, num_layers=self.config.num_layers, shape=shape, **cut)
