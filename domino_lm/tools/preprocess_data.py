"""Make token files (.bin and .idx) from JSON lines; flags as in Megatron's tool of the same name."""

import argparse
import dataclasses
import json
import signal
import sys

from domino_lm.config.data import TokenizerConfig
from domino_lm.config.schema import settings_of
from domino_lm.data.preprocess.preprocess import PreprocessConfig, Summary, preprocess
from domino_lm.tools.setting_flags import add_flags, add_tokenizer_flags, take

EXIT_LINES_SKIPPED = 3


def flag_parser() -> argparse.ArgumentParser:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(
        description="Encode the documents of JSON lines files into PREFIX_KEY_document.bin and .idx, the files that training reads.",
        epilog="example: %(prog)s --input corpus.jsonl --output-prefix data/corpus --tokenizer-type SentencePieceTokenizer "
        "--tokenizer-model tokenizer.model --append-eod. Exit codes: 0 all lines are in the output; 1 nothing was written; "
        f"{EXIT_LINES_SKIPPED} written, but bad lines were skipped.",
        allow_abbrev=False,
    )
    items = {item.name: item for item in settings_of(PreprocessConfig)}
    run_flags = [items.pop(name) for name in ("workers", "log_interval")]
    del items["vocab_size"]  # comes with the tokenizer's
    add_flags(parser.add_argument_group("data"), items.values())
    add_tokenizer_flags(parser.add_argument_group("tokenizer"), required=True)
    run = parser.add_argument_group("run")
    add_flags(run, run_flags)
    run.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    return parser


def parse_arguments(argv: list[str] | None = None) -> tuple[PreprocessConfig, bool]:
    """The run, and whether its summary is wanted as JSON."""
    flags = vars(flag_parser().parse_args(argv))
    as_json = flags.pop("json")
    return take(flags, PreprocessConfig, tokenizer=take(flags, TokenizerConfig)), as_json


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


if __name__ == "__main__":
    main()
