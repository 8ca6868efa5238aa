"""Merge all pairs of token files (.bin and .idx) of a folder into one; flags as in Megatron's tool of the same name."""

import argparse
import os
import sys
from collections.abc import Sequence

from domino_lm.data.indexed import IndexedDataset, IndexedDatasetError, IndexedDatasetWriter


def flag_parser() -> argparse.ArgumentParser:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(
        description="Write the documents of all pairs in a folder, in the order of their names, into PREFIX.bin and PREFIX.idx.",
        epilog="example: %(prog)s --input shards --output-prefix data/corpus_text_document",
        allow_abbrev=False,
    )
    parser.add_argument("--input", required=True, metavar="DIR", help="folder with the pairs; other files in it are named and left alone")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the merged pair without its extension")
    parser.add_argument("--multimodal", action="store_true", help="the pairs are multimodal: each sequence has a mode")
    return parser


def main() -> None:
    flags = flag_parser().parse_args()
    try:
        prefixes, others = pairs_in(flags.input)
        for name in others:
            print(f"left alone: {name} is no .bin or .idx file", file=sys.stderr)
        merged = merge(prefixes, flags.output_prefix, flags.multimodal)
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; no output was written")
    print(f"{merged.prefix}.bin and .idx: {merged.num_documents} documents, {merged.num_tokens} tokens of {len(prefixes)} pairs")


def pairs_in(folder: str) -> tuple[list[str], list[str]]:
    """Prefixes of all pairs in a folder, sorted, and the names of other files there (hidden ones left out).

    Raises IndexedDatasetError for half a pair, and if there is no pair.
    """
    if not os.path.isdir(folder):
        raise IndexedDatasetError(f"--input {folder}: no such folder.")
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file() and not entry.name.startswith("."))
    halves = {extension: {name.removesuffix(extension) for name in names if name.endswith(extension)} for extension in (".bin", ".idx")}
    for have, lack in ((".bin", ".idx"), (".idx", ".bin")):
        lonely = sorted(halves[have] - halves[lack])
        if lonely:
            raise IndexedDatasetError(
                f"{os.path.join(folder, lonely[0])}{have} has no {lack} beside it; put the other half there, or take it away."
            )
    if not halves[".bin"]:
        raise IndexedDatasetError(f"--input {folder}: no pair of .bin and .idx files in this folder.")
    prefixes = [os.path.join(folder, name) for name in sorted(halves[".bin"])]
    return prefixes, [name for name in names if not name.endswith((".bin", ".idx"))]


def merge(prefixes: Sequence[str], output_prefix: str, multimodal: bool = False) -> IndexedDataset:
    """Write the documents of all pairs, in this order, into one; every pair is checked before the first byte is written.

    Raises IndexedDatasetError; no output exists then, unless it was there before.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    _require_alike(datasets, output_prefix, multimodal)
    try:
        with IndexedDatasetWriter(output_prefix, datasets[0].dtype, multimodal) as writer:
            for dataset in datasets:
                writer.append(dataset)
    except OSError as error:
        raise IndexedDatasetError(
            f"{error.filename or output_prefix}: {error.strerror or error}; free space or check the permissions, then run again."
        ) from error
    return IndexedDataset(output_prefix)


def _require_alike(datasets: Sequence[IndexedDataset], output_prefix: str, multimodal: bool) -> None:
    first = datasets[0]
    for dataset in datasets:
        if dataset.dtype != first.dtype:
            raise IndexedDatasetError(
                f"{dataset.prefix} holds {dataset.dtype} tokens, but {first.prefix} holds {first.dtype}; they were made with tokenizers of other "
                "sizes: preprocess all texts with one."
            )
        if multimodal != (dataset.sequence_modes is not None):
            state, way_out = ("has no modes", "leave --multimodal out") if multimodal else ("is multimodal", "add --multimodal")
            raise IndexedDatasetError(f"{dataset.prefix}.idx {state}; {way_out}, or merge pairs of one kind.")
        for extension in (".bin", ".idx"):
            target = output_prefix + extension
            if os.path.exists(target) and os.path.samefile(dataset.prefix + extension, target):
                raise IndexedDatasetError(
                    f"--output-prefix {output_prefix} is one of the pairs to merge; choose a prefix outside the folder, or move the earlier result."
                )


if __name__ == "__main__":
    main()
