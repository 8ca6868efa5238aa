"""Weights of a model by name: their shapes, how ranks share them, and what they start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from domino_lm.config.settings import ModelConfig
from domino_lm.model.parameter import Parameter, ParameterFactory, ParameterSpec


@dataclass(frozen=True)
class Weights:
    """Makes the weights of the model ``config``.

    Those of a layer are named ``{layers}.{layer}.{name}``; in checkpoints all layers share one key, under which they are stacked.
    """

    config: ModelConfig
    make: ParameterFactory
    layers: str = "layers"

    def matrix(
        self, name: str, shape: tuple[int, int], shard_dim: int, layer: int, *, blocks: int = 1, std: float | None = None
    ) -> Parameter:
        """A matrix of which each of equal ``blocks`` is cut along ``shard_dim``; N(0, std), by default ``config.init_method_std``."""
        spec = self._spec(name, shape, layer, shard_dim=shard_dim, shard_blocks=blocks)
        return self.make.normal(spec, self.config.init_method_std if std is None else std)

    def vector(
        self, name: str, width: int, value: float = 0.0, layer: int | None = None, *, key: str | None = None, **cut: Any
    ) -> Parameter:
        """A vector of one value; every rank holds it whole, unless ``cut`` has a ``shard_dim``. Checkpoints may name it ``key``."""
        return self.make.constant(self._spec(name, (width,), layer, key, **cut), value)

    def vocabulary(self, name: str) -> Parameter:
        """A table [v, h] of the padded vocabulary, cut by rows."""
        shape = (self.config.padded_vocab_size(self.make.tp.size), self.config.hidden_size)
        return self.make.normal(self._spec(name, shape, shard_dim=0, vocab_rows=self.config.vocab_size), self.config.init_method_std)

    def table(self, name: str, rows: int) -> Parameter:
        """A table [rows, h] that every rank holds whole."""
        return self.make.normal(self._spec(name, (rows, self.config.hidden_size)), self.config.init_method_std)

    def _spec(self, name: str, shape: tuple[int, ...], layer: int | None = None, key: str | None = None, **cut: Any) -> ParameterSpec:
        if layer is None:
            return ParameterSpec(name=name, key=name, shape=shape, **cut)
        path, key = f"{self.layers}.{layer}.{name}", f"{self.layers}.{key or name}"
        return ParameterSpec(name=path, key=key, layer=layer, num_layers=self.config.num_layers, shape=shape, **cut)
