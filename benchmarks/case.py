"""What is compared: the model, its layout, and the variants of every program. Imports without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from domino_lm.config.settings import ModelConfig, ScheduleConfig

BYTES_PER_ELEMENT = 4
HEAD_WIDTH = 64
STATISTICS = 3


@dataclass(frozen=True)
class Case:
    """One model on one layout; every program gets the same one, the same weights and the same tokens."""

    family: str
    model: ModelConfig
    tensor_parallel: int
    data_parallel: int
    micro_batch_size: int
    micro_batches: int = 1
    seed: int = 1234

    @property
    def ranks(self) -> int:
        """Processes that run it."""
        return self.tensor_parallel * self.data_parallel

    def to_json(self) -> str:
        """Text that `from_json` reads back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """The case that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "model": ModelConfig(**fields["model"])})

    def wire_bytes(self, phase: str) -> float:
        """Bytes that each tensor-parallel rank sends, and receives, in forward ("F") or backward ("B") of a step.

        A ring moves 2 (n - 1) / n of an all-reduced buffer in each direction. Forward reduces after the embedding and
        after both halves of each layer and exchanges three numbers a token; backward reduces once a column-parallel GEMM.
        """
        ranks, tokens = self.tensor_parallel, self.model.seq_length * self.micro_batch_size
        reduced = (2 * self.model.num_layers + 1) * tokens * self.model.hidden_size * 2 * (ranks - 1) / ranks
        gathered = STATISTICS * tokens * (ranks - 1) if phase == "F" else 0
        return (reduced + gathered) * BYTES_PER_ELEMENT * self.micro_batches


def model_of(family: str, *, hidden: int, layers: int, seq: int, vocab: int) -> ModelConfig:
    """GPT (LayerNorm, learned positions, exact GELU, tied head) or LLaMA (RMSNorm, RoPE, SwiGLU, grouped queries).

    Raises ValueError where heads of 64, in pairs for LLaMA, do not fill ``hidden``.
    """
    unit = HEAD_WIDTH if family == "gpt" else 2 * HEAD_WIDTH
    if hidden < unit or hidden % unit:
        raise ValueError(
            f"--hidden {hidden} does not divide into heads of {HEAD_WIDTH}{', two a group' * (family != 'gpt')}: use multiples of {unit}"
        )
    heads = hidden // HEAD_WIDTH
    gpt = ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        seq_length=seq,
        vocab_size=vocab,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_gelu_fusion=False,
    )
    if family == "gpt":
        return gpt
    return replace(
        gpt,
        group_query_attention=True,
        num_query_groups=heads // 2,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
    )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way in which a program runs the case."""

    label: str
    optimum: str = "no_comm"
    """The same program's variant without communication, which this one is measured against."""

    schedule: ScheduleConfig | None = None
    """Ours alone: how the plan is cut and ordered; None runs plain autograd, or what ``auto`` chooses."""

    auto: bool = False
    """Ours alone: the schedule is chosen on each link, as ``--schedule auto`` does."""

    serial: bool = False
    """Ours alone: every collective is redeemed right after it started."""

    communicates: bool = True
    one_way: bool = True
    """Ours alone: two ranks exchange messages on one-way connections; without it, gloo's own collectives."""

    paired: bool = False
    """Forward and backward overlap, so that only their sum has a meaning."""

    only_for: frozenset[str] = frozenset({"gpt", "llama"})
    """Model families that the program can run."""

    smallest_micro_batch: int = 1
    """Samples that it needs to cut a micro-batch."""

    fewest_micro_batches: int = 1
    """Micro-batches that a step needs for it to differ from another variant."""

    extra: bool = False
    """Measured only where it is asked for by name."""


OURS, MEGATRON, DEEPSPEED = "domino_lm", "megatron_core", "deepspeed"
SERIAL, NO_COMM, AUTO = "serial", "no_comm", "auto"
_BASELINE = ScheduleConfig(schedule="baseline")


def _domino(**settings: Any) -> ScheduleConfig:
    return ScheduleConfig(schedule="domino", **settings)


_ROWS_2, _SEQUENCE_4 = _domino(domino_row_slices=2), _domino(domino_row_slices=4, domino_row_dim="sequence")
_COLUMNS_2 = _domino(domino_row_slices=1, domino_column_slices=2)
_GROUPS = _domino(domino_row_slices=4, domino_pair="row-groups")
_PAIRED = _domino(domino_row_slices=2, domino_pair="micro-batches")
_UNCUT_PAIRED = _domino(domino_row_slices=1, domino_pair="micro-batches")

# One line adds a schedule to the comparison; an extra one is measured only where it is asked for by name.
OUR_VARIANTS: dict[str, Variant] = {
    SERIAL: Variant(label="serial", schedule=_BASELINE, serial=True),
    "baseline": Variant(label="baseline", schedule=_BASELINE),
    "rows2": Variant(label="2 rows", schedule=_ROWS_2, smallest_micro_batch=2),
    "rows2_deferred": Variant(
        label="2 rows, wgrad deferred", schedule=_domino(domino_row_slices=2, domino_defer_wgrad=True), smallest_micro_batch=2
    ),
    "rows2_gloo": Variant(label="2 rows, gloo's all-reduce", schedule=_ROWS_2, one_way=False, smallest_micro_batch=2, extra=True),
    "rows4": Variant(label="4 rows", schedule=_domino(domino_row_slices=4), smallest_micro_batch=4),
    "columns2": Variant(label="2 columns", schedule=_COLUMNS_2),
    "columns4": Variant(label="4 columns", schedule=_domino(domino_row_slices=1, domino_column_slices=4), extra=True),
    "rows2_columns2": Variant(
        label="2 rows x 2 columns", schedule=_domino(domino_row_slices=2, domino_column_slices=2), smallest_micro_batch=2
    ),
    "sequence4": Variant(label="4 sequence rows", schedule=_SEQUENCE_4),
    "sequence2": Variant(label="2 sequence rows", schedule=_domino(domino_row_slices=2, domino_row_dim="sequence"), extra=True),
    "row_groups": Variant(label="2 groups of 2 rows", schedule=_GROUPS, paired=True, smallest_micro_batch=4),
    "paired": Variant(label="2 rows, micro-batches paired", schedule=_PAIRED, paired=True, smallest_micro_batch=2, fewest_micro_batches=2),
    "paired_uncut": Variant(label="micro-batches paired", schedule=_UNCUT_PAIRED, paired=True, fewest_micro_batches=2, extra=True),
    AUTO: Variant(label="auto", auto=True),
    NO_COMM: Variant(label="no communication", schedule=_BASELINE, communicates=False),
    "rows2_no_comm": Variant(label="2 rows, no communication", schedule=_ROWS_2, communicates=False, smallest_micro_batch=2),
    "columns2_no_comm": Variant(label="2 columns, no communication", schedule=_COLUMNS_2, communicates=False, extra=True),
    "sequence4_no_comm": Variant(label="4 sequence rows, no communication", schedule=_SEQUENCE_4, communicates=False, extra=True),
    "autograd": Variant(label="plain autograd", extra=True),
}
_DOMINO_GPT: dict[str, Any] = {"only_for": frozenset({"gpt"}), "smallest_micro_batch": 2}
VARIANTS: dict[str, dict[str, Variant]] = {
    OURS: OUR_VARIANTS,
    MEGATRON: {
        "default": Variant(label="default"),
        NO_COMM: Variant(label="no communication", communicates=False),
    },
    DEEPSPEED: {
        "inter": Variant(label="Domino, inter-layer", **_DOMINO_GPT),
        "intra": Variant(label="Domino, intra-layer", **_DOMINO_GPT),
        "blocking": Variant(label="Domino, blocking", **_DOMINO_GPT),
        NO_COMM: Variant(label="no communication", communicates=False, **_DOMINO_GPT),
    },
}


def variants_of(program: str, case: Case) -> dict[str, Variant]:
    """Those of a program's variants that can run ``case``."""
    return {
        name: variant
        for name, variant in VARIANTS[program].items()
        if case.family in variant.only_for
        and case.micro_batch_size >= variant.smallest_micro_batch
        and case.micro_batches >= variant.fewest_micro_batches
    }
