"""Make token files (.bin and .idx) from JSON lines; flags as in Megatron's tool of the same name."""

import argparse
import dataclasses
import json
import signal
import sys

from domino_lm.data.preprocess.preprocess import PreprocessConfig, Summary, preprocess
from domino_lm.tools.tokenizer_flags import add_tokenizer_flags, tokenizer_of

EXIT_LINES_SKIPPED = 3


def parse_arguments(argv: list[str] | None = None) -> tuple[PreprocessConfig, bool]:
    """The run, and whether its summary is wanted as JSON."""
    parser = argparse.ArgumentParser(
        description="Encode the documents of JSON lines files into PREFIX_KEY_document.bin and .idx, the files that training reads.",
        epilog="example: %(prog)s --input corpus.jsonl --output-prefix data/corpus --tokenizer-type SentencePieceTokenizer "
        "--tokenizer-model tokenizer.model --append-eod. Exit codes: 0 all lines are in the output; 1 nothing was written; "
        f"{EXIT_LINES_SKIPPED} written, but bad lines were skipped.",
        allow_abbrev=False,
    )
    _add_data_flags(parser.add_argument_group("data"))
    add_tokenizer_flags(parser.add_argument_group("tokenizer"), required=True)
    run = parser.add_argument_group("run")
    run.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes or threads that encode (default: the number of CPUs); the output does not depend on it",
    )
    run.add_argument("--log-interval", type=int, default=1000, metavar="N", help="documents between progress lines (default: 1000)")
    run.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    flags = vars(parser.parse_args(argv))
    flags["json_keys"], flags["input"] = tuple(flags["json_keys"]), tuple(flags["input"])
    as_json = flags.pop("json")
    tokenizer, vocab_size = tokenizer_of(flags)
    given = {name: value for name, value in flags.items() if value is not None}
    return PreprocessConfig(tokenizer=tokenizer, vocab_size=vocab_size, **given), as_json


def _add_data_flags(data: argparse._ArgumentGroup) -> None:
    data.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="FILE",
        help="JSON lines, one document each: files, patterns in quotes (hidden files are left out), or - for standard input; .gz and .zst are "
        "decompressed, of .parquet the columns of --json-keys are read",
    )
    data.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to encode, one pair of files each (default: text)"
    )
    data.add_argument("--append-eod", action="store_true", help="end each document that is not empty with the end-of-document token")
    data.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the output without _KEY_document and extension")
    data.add_argument(
        "--split-sentences", action="store_true", help="make each sentence a sequence; the files are called PREFIX_KEY_sentence"
    )
    data.add_argument("--keep-newlines", action="store_true", help="keep the white space between sentences, at their ends")
    data.add_argument("--lang", default="english", metavar="LANGUAGE", help="language of --split-sentences (default: english)")
    data.add_argument(
        "--partitions", type=int, default=1, metavar="P", help="deal the documents to P parts in turn and join the parts: Megatron's order"
    )
    data.add_argument("--keep-sequential-samples", action="store_true", help="keep the order of the input whatever --partitions says")
    data.add_argument(
        "--on-error",
        choices=["stop", "skip", "replace"],
        default="stop",
        help="a bad line ends the run (default), is counted and left out, or has invalid characters replaced by U+FFFD",
    )


def print_summary(summary: Summary, config: PreprocessConfig) -> None:
    print(f"{summary.documents} documents in {summary.seconds:.1f} s ({summary.rate()})")
    if summary.blank_lines:
        print(f"{summary.blank_lines} blank lines skipped, the first is {summary.first_blank_line}")
    if summary.skipped:
        print(f"{summary.skipped} bad lines skipped: their documents are not in the output")
    if summary.replaced:
        print(f"{summary.replaced} lines had characters replaced by U+FFFD")
    for key, tokens in summary.tokens.items():
        print(
            f"{config.prefix(key)}.bin and .idx: {tokens} tokens, {summary.empty[key]} empty documents, longest document {summary.longest[key]} tokens"
        )


def stop(signal_number: int, _: object) -> None:
    raise SystemExit(128 + signal_number)


def stop_on_sigterm() -> None:
    """SIGTERM raises SystemExit, in a read that waits for a pipe too.

    The system may hand the signal to another thread, or just before the read begins; the read would not notice. A timer
    that does nothing else interrupts it.
    """
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)


def main() -> None:
    config, as_json = parse_arguments()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files may be no text
    stop_on_sigterm()
    try:
        summary = preprocess(config, sys.stderr)
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; no output was written")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # no handler is left for its signal when the interpreter ends
    if as_json:
        print(json.dumps(dataclasses.asdict(summary) | {"outputs": {key: config.prefix(key) for key in config.json_keys}}))
    else:
        print_summary(summary, config)
    if summary.skipped:
        sys.exit(EXIT_LINES_SKIPPED)
