"""Show what a model will see of its data: documents, splits, shares of a blend, samples as text, masks."""

import argparse
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from domino_lm.config.data import DataConfig, TokenizerConfig
from domino_lm.config.foreign_text import int_of_flag
from domino_lm.config.schema import settings_of
from domino_lm.data.blended import Blend, BlendedDataset
from domino_lm.data.gpt_dataset import GPTDataset, GPTDatasetConfig
from domino_lm.data.indexed import IndexedDataset
from domino_lm.data.splits import Dataset, DataSources, build_splits, sources_of
from domino_lm.data.tokenizers.build import build_tokenizer
from domino_lm.data.tokenizers.tokenizer import Tokenizer
from domino_lm.tools.setting_flags import add_flags, add_tokenizer_flags, take

HOW_TO_READ = {"full_validation", "dataloader_type", "data_sharding", "num_workers", "data_cache_path"}
"""Settings of the data that do not change what is in it."""


def flag_parser() -> argparse.ArgumentParser:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(
        description="Show what a model will see of its data. The flags mean what they mean in training.",
        epilog="example: %(prog)s --data-path 0.3 data/a_text_document 0.7 data/b_text_document --seq-length 1024 --train-samples 100000 "
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model",
        allow_abbrev=False,
    )
    data = parser.add_argument_group("data")
    add_flags(data, [item for item in settings_of(DataConfig) if item.name not in HOW_TO_READ])
    data.add_argument("--seq-length", type=int_of_flag, default=1024, metavar="N", help="tokens in a sample (default: 1024)")
    data.add_argument("--seed", type=int_of_flag, default=1234, metavar="N", help="seed of the order (default: 1234)")
    for name in ("train", "valid", "test"):
        data.add_argument(
            f"--{name}-samples", type=int_of_flag, metavar="N", help=f"samples that a run takes of the {name} split (default: one epoch)"
        )
    add_tokenizer_flags(parser.add_argument_group("tokenizer (shows text)"))
    show = parser.add_argument_group("what to show")
    show.add_argument("--samples", type=int_of_flag, default=2, metavar="K", help="samples of each split to show (default: 2)")
    show.add_argument("--first-sample", type=int_of_flag, default=0, metavar="I", help="which one to begin with (default: 0)")
    show.add_argument("--document", type=int_of_flag, nargs="*", default=[], metavar="I", help="documents of the first source to show")
    show.add_argument("--json", action="store_true", help="print everything as one JSON object")
    return parser


def inspect(flags: argparse.Namespace) -> dict[str, Any]:
    """Everything that the flags ask for. Raises a ValueError of ours, or IndexError for a document that is not there."""
    settings, data = take(vars(flags), TokenizerConfig), take(vars(flags), DataConfig)
    tokenizer = build_tokenizer(settings, flags.vocab_size) if settings.tokenizer_type else None
    sources = sources_of(data)
    report: dict[str, Any] = {"files": describe_files(sources)}
    config = GPTDatasetConfig(
        sequence_length=flags.seq_length,
        seed=flags.seed,
        eod=tokenizer.eod if tokenizer else None,
        vocab_size=tokenizer.vocab_size if tokenizer else flags.vocab_size,
        data=data,
    )
    splits = build_splits(sources, (flags.train_samples, flags.valid_samples, flags.test_samples), config)
    first = flags.first_sample
    report["splits"] = [
        {
            "split": name,
            "samples": len(dataset),
            "sources": list(_describe_sources(dataset)),
            "shown": [describe_sample(dataset, i, tokenizer) for i in range(first, min(first + flags.samples, len(dataset)))],
        }
        for name, dataset in splits.named()
    ]
    if flags.document:
        report["documents"] = [describe_document(first_pair(sources), i, tokenizer) for i in flags.document]
    return report


def first_pair(sources: DataSources) -> IndexedDataset:
    blend = sources.blend or next(iter(sources.per_split.values()), None)
    if blend is None:
        raise ValueError("--document shows documents of files; --mock-data has none.")
    return IndexedDataset(blend.prefixes[0])


def main() -> None:
    flags = flag_parser().parse_args()
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    try:
        report = inspect(flags)
    except (ValueError, IndexError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps(report) if flags.json else "\n".join(as_text(report)))


Report = dict[str, Any]
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)


def describe_files(sources: DataSources) -> list[Report]:
    """One entry for each pair of files that the sources name: its size, and how long its documents are."""
    blends = [sources.blend, *sources.per_split.values()]
    prefixes = dict.fromkeys(prefix for blend in blends if isinstance(blend, Blend) for prefix in blend.prefixes)
    return [_describe_pair(IndexedDataset(prefix)) for prefix in prefixes]


def describe_sample(dataset: Dataset, i: int, tokenizer: Tokenizer | None) -> Report:
    """Sample ``i``: its source, its text, and where its loss mask and positions are unusual."""
    sample = dataset[i]
    tokens, positions = sample["tokens"], sample["position_ids"]
    found: Report = {"sample": i}
    if isinstance(dataset, BlendedDataset):
        source, number = dataset.locate(i)
        found |= {"source": dataset.datasets[source].indexed.prefix, "sample_of_source": number}
    eod = dataset.config.eod if isinstance(dataset, GPTDataset) else dataset.datasets[0].config.eod
    found |= {
        "tokens": tokens.tolist(),
        "labels": sample["labels"].tolist(),
        "trained_positions": int(sample["loss_mask"].sum()),
        "masked_positions": np.flatnonzero(sample["loss_mask"] == 0).tolist(),
        "position_restarts": (np.flatnonzero(np.diff(positions) != 1) + 1).tolist(),
        "ends_of_document": [] if eod is None else np.flatnonzero(tokens == eod).tolist(),
    }
    if "attention_mask" in sample:
        found["first_visible_position"] = (~sample["attention_mask"][0]).argmax(axis=1).tolist()
    if tokenizer is not None:
        found["text"] = tokenizer.decode(tokens.tolist())
    return found


def describe_document(dataset: IndexedDataset, i: int, tokenizer: Tokenizer | None) -> Report:
    """Document ``i`` of a pair of files: its sequences of token ids, and their text. Raises IndexError outside the file."""
    if not 0 <= i < dataset.num_documents:
        raise IndexError(f"--document {i} is outside 0..{dataset.num_documents - 1} of {dataset.prefix}")
    begin, end = map(int, dataset.document_indices[i : i + 2])
    sequences = [dataset.get(k).tolist() for k in range(begin, end)]
    found: Report = {"document": i, "prefix": dataset.prefix, "sequences": sequences}
    if tokenizer is not None:
        found["text"] = [tokenizer.decode(sequence) for sequence in sequences]
    return found


def as_text(report: Report, indent: str = "") -> Iterator[str]:
    """The lines that say what a report holds."""
    for key, value in report.items():
        label = key.replace("_", " ")
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for entry in value:
                title, *rest = entry.items()
                yield f"{indent}{label.removesuffix('s')} {title[1]}"
                yield from as_text(dict(rest), indent + "  ")
        else:
            yield f"{indent}{label + ':':<24}{_short(value)}"


def _describe_pair(dataset: IndexedDataset) -> Report:
    sequences_per_document = np.diff(dataset.document_indices)
    ends = np.concatenate(([0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)))
    tokens_per_document = np.diff(ends[dataset.document_indices])
    quantiles = np.quantile(tokens_per_document, QUANTILES).astype(int).tolist() if len(tokens_per_document) else []
    return {
        "prefix": dataset.prefix,
        "documents": dataset.num_documents,
        "empty_documents": int(np.count_nonzero(sequences_per_document == 0)),
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "token_type": dataset.dtype.name,
        "tokens_per_document": dict(zip(("least", "median", "90 %", "99 %", "most"), quantiles, strict=False)),
    }


def _describe_sources(dataset: Dataset) -> Iterator[Report]:
    if isinstance(dataset, BlendedDataset):
        asked = dataset.size if dataset.size is not None else len(dataset)
        for share in dataset.shares():
            part = share.samples / asked if asked else 0.0
            yield {"prefix": share.prefix, "weight": share.weight, "samples": share.samples, "share": part, "epochs": share.epochs}
        return
    samples = len(dataset) if dataset.num_samples is None else dataset.num_samples
    epochs = samples * dataset.config.sequence_length / dataset.tokens_per_epoch
    yield {"prefix": dataset.indexed.prefix, "weight": 1.0, "samples": samples, "share": 1.0, "epochs": epochs}


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and value and isinstance(value[0], list | str):
        return "; ".join(map(_short, value[:4])) + (f"; ... ({len(value)})" if len(value) > 4 else "")
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = " ".join(map(str, value[:16]))
        return f"{shown} ... ({len(value)})" if len(value) > 16 else shown or "none"
    return repr(value) if isinstance(value, str) and not value.isprintable() else str(value)


if __name__ == "__main__":
    main()
