"""Flags of the tokenizer for the tools that need one: those of training that `TokenizerConfig` holds, and ``--vocab-size``."""

import dataclasses
from typing import Any

from domino_lm.config.data import TokenizerConfig
from domino_lm.data.tokenizers.build import TOKENIZER_TYPES


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


def tokenizer_of(flags: dict[str, Any]) -> tuple[TokenizerConfig, int | None]:
    """Takes the flags of `add_tokenizer_flags` out of parsed ``flags``: the settings, and ``--vocab-size``."""
    names = [field.name for field in dataclasses.fields(TokenizerConfig)]
    given = {name: flags.pop(name) for name in names}
    given["tokenizer_special_tokens"] = tuple(given["tokenizer_special_tokens"])
    return TokenizerConfig(**given), flags.pop("vocab_size")
