"""What a model would see of its data: documents, splits, shares of a blend, and samples with their masks."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from domino_lm.data.blended import Blend, BlendedDataset
from domino_lm.data.gpt_dataset import GPTDataset
from domino_lm.data.indexed import IndexedDataset
from domino_lm.data.splits import Dataset, DataSources, Splits
from domino_lm.data.tokenizers.tokenizer import Tokenizer

Report = dict[str, Any]
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)


def describe_files(sources: DataSources) -> list[Report]:
    """One entry for each pair of files that the sources name: its size, and how long its documents are."""
    blends = [sources.blend, *sources.per_split.values()]
    prefixes = dict.fromkeys(prefix for blend in blends if isinstance(blend, Blend) for prefix in blend.prefixes)
    return [_describe_pair(IndexedDataset(prefix)) for prefix in prefixes]


def describe_splits(splits: Splits) -> list[Report]:
    """One entry for each data set of a run: its samples, epochs, and for a blend the share of each source."""
    return [{"split": name, "samples": len(dataset), "sources": list(_describe_sources(dataset))} for name, dataset in splits.named()]


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
