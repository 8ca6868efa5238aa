"""Merge all pairs of token files (.bin and .idx) of a folder into one; flags as in Megatron's tool of the same name."""

import argparse
import sys

from domino_lm.tools.merge import merge, pairs_in


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write the documents of all pairs in a folder, in the order of their names, into PREFIX.bin and PREFIX.idx.",
        epilog="example: %(prog)s --input shards --output-prefix data/corpus_text_document",
        allow_abbrev=False,
    )
    parser.add_argument("--input", required=True, metavar="DIR", help="folder with the pairs; other files in it are named and left alone")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path of the merged pair without its extension")
    parser.add_argument("--multimodal", action="store_true", help="the pairs are multimodal: each sequence has a mode")
    return parser.parse_args(argv)


def main() -> None:
    flags = parse_arguments()
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
