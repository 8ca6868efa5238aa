#!/usr/bin/env python3
"""Make token files (.bin and .idx) from JSON lines; flags as in Megatron's tool of the same name."""

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from domino_lm.config import TokenizerConfig
from domino_lm.data.preprocess import PreprocessConfig, Summary, preprocess
from domino_lm.data.tokenizer import TOKENIZER_TYPES


def parse_arguments(argv: list[str] | None = None) -> PreprocessConfig:
    parser = argparse.ArgumentParser(
        description="Encode the documents of a JSON lines file into PREFIX_KEY_document.bin and .idx, the files that training reads.",
        epilog="example: %(prog)s --input corpus.jsonl --output-prefix data/corpus --tokenizer-type SentencePieceTokenizer "
        "--tokenizer-model tokenizer.model --append-eod",
        allow_abbrev=False,
    )
    data = parser.add_argument_group("data")
    data.add_argument("--input", required=True, metavar="FILE", help="JSON lines, one document each; may end in .gz")
    data.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to encode, one pair of files each (default: text)"
    )
    data.add_argument("--append-eod", action="store_true", help="end each document that is not empty with the end-of-document token")
    data.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the output without _KEY_document and extension")
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument("--tokenizer-type", required=True, choices=list(TOKENIZER_TYPES))
    tokenizer.add_argument("--tokenizer-model", metavar="FILE", help="SentencePiece model")
    tokenizer.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    tokenizer.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    run = parser.add_argument_group("run")
    run.add_argument(
        "--workers", type=int, metavar="N", help="processes that encode (default: the number of CPUs); the output does not depend on it"
    )
    run.add_argument("--log-interval", type=int, default=1000, metavar="N", help="documents between progress lines (default: 1000)")
    flags = vars(parser.parse_args(argv))
    flags["json_keys"] = tuple(flags["json_keys"])
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    tokenizer_config = TokenizerConfig(**{name: flags.pop(name) for name in names})
    return PreprocessConfig(tokenizer=tokenizer_config, **{name: value for name, value in flags.items() if value is not None})


def print_summary(summary: Summary, config: PreprocessConfig) -> None:
    print(f"{summary.documents} documents in {summary.seconds:.1f} s ({summary.rate()})")
    if summary.blank_lines:
        print(f"{summary.blank_lines} blank lines skipped, the first is line {summary.first_blank_line}")
    for key, tokens in summary.tokens.items():
        print(
            f"{config.prefix(key)}.bin and .idx: {tokens} tokens, {summary.empty[key]} empty documents, longest document {summary.longest[key]} tokens"
        )


def stop(signal_number: int, _: object) -> None:
    raise SystemExit(128 + signal_number)


def main() -> None:
    config = parse_arguments()
    signal.signal(signal.SIGTERM, stop)
    try:
        summary = preprocess(config, sys.stderr)
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; no output was written")
    print_summary(summary, config)


if __name__ == "__main__":
    main()
