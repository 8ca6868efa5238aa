"""Show what a model will see of its data: documents, splits, shares of a blend, samples as text, masks."""

import argparse
import json
import sys
import warnings
from typing import Any

from domino_lm.data.gpt_dataset import GPTDatasetConfig
from domino_lm.data.indexed import IndexedDataset
from domino_lm.data.splits import DataSources, build_splits, sources_of
from domino_lm.data.tokenizers.build import build_tokenizer
from domino_lm.data.tokenizers.tokenizer import Tokenizer
from domino_lm.tools.inspection import as_text, describe_document, describe_files, describe_sample, describe_splits
from domino_lm.tools.tokenizer_flags import add_tokenizer_flags, tokenizer_of


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Show what a model will see of its data. The flags mean what they mean in training.",
        epilog="example: %(prog)s --data-path 0.3 data/a_text_document 0.7 data/b_text_document --seq-length 1024 --train-samples 100000 "
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model",
        allow_abbrev=False,
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data-path", nargs="+", metavar="WORD", help="a prefix, several, or pairs of weight and prefix")
    for name in ("train", "valid", "test"):
        data.add_argument(f"--{name}-data-path", nargs="+", metavar="WORD", help=f"the same for the {name} split alone")
    data.add_argument("--data-args-path", metavar="FILE", help="file with the words of --data-path")
    data.add_argument("--per-split-data-args-path", metavar="FILE", help="JSON file with the words of train, valid and test")
    data.add_argument("--mock-data", action="store_true", help="made-up tokens")
    data.add_argument("--split", help="weights of train, validation and test (default: 969,30,1)")
    data.add_argument("--mid-level-dataset-surplus", type=float, default=0.005, help=argparse.SUPPRESS)
    data.add_argument("--multiple-validation-sets", action="store_true", help="keep validation sources apart")
    data.add_argument("--seq-length", type=int, default=1024, metavar="N", help="tokens in a sample (default: 1024)")
    data.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of the order (default: 1234)")
    for name in ("train", "valid", "test"):
        data.add_argument(
            f"--{name}-samples", type=int, metavar="N", help=f"samples that a run takes of the {name} split (default: one epoch)"
        )
    data.add_argument("--reset-position-ids", action="store_true")
    data.add_argument("--reset-attention-mask", action="store_true")
    data.add_argument("--eod-mask-loss", action="store_true")
    add_tokenizer_flags(parser.add_argument_group("tokenizer (shows text)"))
    show = parser.add_argument_group("what to show")
    show.add_argument("--samples", type=int, default=2, metavar="K", help="samples of each split to show (default: 2)")
    show.add_argument("--first-sample", type=int, default=0, metavar="I", help="which one to begin with (default: 0)")
    show.add_argument("--document", type=int, nargs="*", default=[], metavar="I", help="documents of the first source to show")
    show.add_argument("--json", action="store_true", help="print everything as one JSON object")
    return parser.parse_args(argv)


def inspect(flags: argparse.Namespace) -> dict[str, Any]:
    """Everything that the flags ask for. Raises a ValueError of ours, or IndexError for a document that is not there."""
    settings, vocab_size = tokenizer_of(vars(flags))
    tokenizer = build_tokenizer(settings, vocab_size) if settings.tokenizer_type else None
    sources = sources_of(flags)
    report: dict[str, Any] = {"files": describe_files(sources)}
    splits = build_splits(sources, (flags.train_samples, flags.valid_samples, flags.test_samples), config_of(flags, tokenizer, vocab_size))
    report["splits"] = describe_splits(splits)
    for entry, (_, dataset) in zip(report["splits"], splits.named(), strict=True):
        stop = min(flags.first_sample + flags.samples, len(dataset))
        entry["shown"] = [describe_sample(dataset, i, tokenizer) for i in range(flags.first_sample, stop)]
    if flags.document:
        report["documents"] = [describe_document(first_pair(sources), i, tokenizer) for i in flags.document]
    return report


def config_of(flags: argparse.Namespace, tokenizer: Tokenizer | None, vocab_size: int | None) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        sequence_length=flags.seq_length,
        seed=flags.seed,
        eod=tokenizer.eod if tokenizer else None,
        vocab_size=tokenizer.vocab_size if tokenizer else vocab_size,
        reset_position_ids=flags.reset_position_ids,
        reset_attention_mask=flags.reset_attention_mask,
        eod_mask_loss=flags.eod_mask_loss,
    )


def first_pair(sources: DataSources) -> IndexedDataset:
    blend = sources.blend or next(iter(sources.per_split.values()), None)
    if blend is None:
        raise ValueError("--document shows documents of files; --mock-data has none.")
    return IndexedDataset(blend.prefixes[0])


def main() -> None:
    flags = parse_arguments()
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        report = inspect(flags)
    except (ValueError, IndexError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps(report) if flags.json else "\n".join(as_text(report)))
