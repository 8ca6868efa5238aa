"""A model family: the one place that knows what a kind of model is made of. Nothing here imports torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from domino_lm.config.settings import ModelConfig
from domino_lm.model.shapes import PartShape, Rank

if TYPE_CHECKING:
    from domino_lm.model.parameter import ParameterFactory
    from domino_lm.model.stack import Stack


class Family(ABC):
    """A kind of model, of the sizes in ``config``. A subclass writes `stack` and `shapes`; all else follows from these two.

    Both list the same chain: embedding, then a replicated norm and a sharded part in turn, final norm, head.
    """

    fixed: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Settings of ModelConfig that this kind of model does not leave open, and their values; they replace what flags say."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = replace(config, **self.fixed)

    @abstractmethod
    def stack(self, make: ParameterFactory) -> Stack:
        """The model with its weights, as the rank that ``make`` serves holds it."""

    @abstractmethod
    def shapes(self, rank: Rank) -> tuple[PartShape, ...]:
        """One record per part of the chain, as ``rank`` holds it; no weights are built for it."""

    def faults(self, tensor_parallel: int) -> Iterator[str]:
        """Why there is no such model, or why ``tensor_parallel`` ranks cannot share it: flags, values and the way out."""
        heads, hidden = self.config.num_attention_heads, self.config.hidden_size
        if self.config.kv_channels is None and hidden % heads:
            yield f"--hidden-size {hidden} does not divide into --num-attention-heads {heads}; change one, or give --kv-channels."
        if heads % tensor_parallel:
            size = f"--tensor-model-parallel-size {tensor_parallel}"
            yield f"{size} does not divide --num-attention-heads {heads}; use a size of {either(divisors(heads))}."

    def unread(self) -> dict[str, str]:
        """Settings of ModelConfig that this model does not read, and why; a run names those that were given all the same."""
        return {name: f"--model {self.config.model} has {value}" for name, value in self.fixed.items()}

    def describe(self) -> str:
        """Sizes and arithmetic in one line."""
        config = self.config
        heads = f"{config.num_attention_heads} heads of {config.head_width}"
        return f"{config.model}: {config.num_layers} layers, hidden {config.hidden_size}, {heads}, vocabulary {config.vocab_size}"

    @property
    def chain(self) -> tuple[PartShape, ...]:
        """The parts as one rank alone holds them; the planner reads how they join, which is the same at any size."""
        return self.shapes(Rank())

    def parameter_count(self) -> int:
        """Parameters of the unsharded model, without vocabulary padding."""
        return sum(part.parameters for part in self._unpadded().chain)

    def flops_per_token(self) -> float:
        """6 FLOPs per GEMM weight, output layer included, and 12 x layers x sequence x heads x head width for attention.

        This is PaLM's count (arXiv 2204.02311, appendix B): the whole attention square, nothing recomputed.
        """
        chain = self._unpadded().chain
        weights = sum(part.hidden * (part.inner + part.mid) for part in chain)
        return 6.0 * weights + 12.0 * self.config.seq_length * sum(part.attention_width for part in chain)

    def _unpadded(self) -> Family:
        return type(self)(replace(self.config, make_vocab_size_divisible_by=1))


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def either(values: Sequence[int]) -> str:
    """``values`` in words: 1, 2 or 4."""
    return " or ".join(filter(None, [", ".join(map(str, values[:-1])), str(values[-1])]))
