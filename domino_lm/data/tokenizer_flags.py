"""Flags of the tokenizer for the tools that need one; training makes the same flags from its configuration."""

from dataclasses import dataclass
from typing import Any

from domino_lm.data.tokenizer import TOKENIZER_TYPES


@dataclass(frozen=True, kw_only=True)
class ToolTokenizer:
    """The tokenizer that a tool was asked for; `tokenizer.build_tokenizer` makes it."""

    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_sentencepiece_legacy: bool = False
    tokenizer_special_tokens: tuple[str, ...] = ()
    tokenizer_hf_no_include_special_tokens: bool = False
    null_tokenizer_eod_id: int | None = None
    null_tokenizer_pad_id: int | None = None
    null_tokenizer_extra_eod: bool = False


def add_tokenizer_flags(group: Any, required: bool = False) -> None:
    """Add Megatron's flags for a tokenizer to a group of a parser."""
    group.add_argument("--tokenizer-type", required=required, choices=list(TOKENIZER_TYPES))
    group.add_argument(
        "--tokenizer-model", metavar="FILE", help="SentencePiece model; a tokenizer.json or its folder for HuggingFaceTokenizer"
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    group.add_argument("--vocab-size", type=int, metavar="N", help="number of ids of NullTokenizer")
    group.add_argument("--tokenizer-sentencepiece-legacy", action="store_true", help="special tokens behind the SentencePiece vocabulary")
    group.add_argument("--tokenizer-special-tokens", nargs="+", default=(), metavar="TOKEN", help="the tokens that the legacy mode adds")
    group.add_argument(
        "--tokenizer-hf-no-include-special-tokens", action="store_true", help="leave out what a tokenizer.json puts around each text"
    )
    group.add_argument("--null-tokenizer-eod-id", type=int, metavar="ID", help="end of document of NullTokenizer (default: the last id)")
    group.add_argument("--null-tokenizer-pad-id", type=int, metavar="ID", help="padding id of NullTokenizer (default: -1)")
    group.add_argument(
        "--null-tokenizer-extra-eod",
        action="store_true",
        help="put NullTokenizer's end of document behind --vocab-size, as megatron-core 0.16 did",
    )


def tokenizer_of(flags: dict[str, Any]) -> tuple[ToolTokenizer, int | None]:
    """Takes the flags of `add_tokenizer_flags` out of parsed ``flags``: the settings, and ``--vocab-size``."""
    names = list(ToolTokenizer.__dataclass_fields__)
    given = {name: flags.pop(name) for name in names}
    given["tokenizer_special_tokens"] = tuple(given["tokenizer_special_tokens"])
    return ToolTokenizer(**given), flags.pop("vocab_size")
