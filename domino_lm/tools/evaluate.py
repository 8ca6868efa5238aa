"""How well does a trained model predict text? Perplexity of files, or the tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from domino_lm.config.foreign_text import int_of_flag, parse_json
from domino_lm.config.settings import ConfigError, RunConfig, refuse
from domino_lm.data.indexed import IndexedDataset
from domino_lm.tools.trained_model import TrainedModel, Use, add_model_flags, read_run, use_model


class Document(NamedTuple):
    """Token ids of a document, and the bytes of its text if there is one."""

    ids: Sequence[int]
    text_bytes: int | None


def flag_parser() -> argparse.ArgumentParser:
    """The flags of this tool; those of training that describe a model are read beside them."""
    found = argparse.ArgumentParser(
        description="Perplexity of files under a trained model: text (.txt and others: one document; .jsonl: one a line), or the prefix of a "
        "pair of token files. Runs as one process, or under torchrun with the model cut over its ranks; further ranks share the text.",
        epilog="example: %(prog)s --load checkpoints/my held_out.jsonl",
        allow_abbrev=False,
    )
    found.add_argument("files", nargs="*", metavar="FILE", help="files to judge, each for itself")
    found.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of .jsonl files that hold text (default: text)"
    )
    found.add_argument(
        "--stride", type=int_of_flag, metavar="N",
        help="tokens from one window to the next; less than the model's positions gives each token more context, at more cost (default: all positions)",
    )  # fmt: skip
    found.add_argument(
        "--batch-size", type=int_of_flag, default=8, metavar="N", help="windows that a replica computes at once (default: 8)"
    )
    found.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        metavar="TASK",
        help="tasks of lm-evaluation-harness, which has to be installed: pip install lm-eval",
    )
    found.add_argument("--include-path", metavar="DIR", help="folder with tasks of one's own, in lm-evaluation-harness's YAML")
    found.add_argument(
        "--num-fewshot", type=int_of_flag, metavar="N", help="examples before each question of a task (default: as the task says)"
    )
    found.add_argument("--limit", type=int_of_flag, metavar="N", help="documents of each task to take (default: all)")
    found.add_argument("--json", action="store_true", help="print results as one JSON object")
    add_model_flags(found)
    return found


def faults(own: argparse.Namespace) -> Iterator[str]:
    """What is wrong with the flags of this tool, one line each."""
    if not own.files and not own.tasks:
        yield "nothing to judge: name files, or tasks with --tasks."
    for name in ("stride", "batch_size", "limit"):
        value = getattr(own, name)
        if value is not None and value < 1:
            yield f"--{name.replace('_', '-')} {value} must be above 0."
    if own.tasks and importlib.util.find_spec("lm_eval") is None:
        yield "--tasks needs lm-evaluation-harness, which is not installed: pip install lm-eval."
    if own.include_path is not None and not Path(own.include_path).is_dir():
        yield f"--include-path {own.include_path}: no such folder; give the one that holds the tasks' YAML files."
    for name in own.files:
        if not Path(name).is_file() and not Path(f"{name}.idx").is_file():
            yield f"{name}: no such file, nor a pair of token files of this prefix."


def documents(model: TrainedModel, file: str, keys: Sequence[str]) -> Iterator[Document]:
    """The documents of a file of text or of token files. Raises ConfigError if they cannot be read or are of another vocabulary."""
    if not Path(file).is_file():
        yield from _stored_documents(model, IndexedDataset(file))
        return
    try:
        if file.endswith(".jsonl"):
            texts = _texts_of_lines(file, keys)
        else:
            texts = iter([Path(file).read_bytes().decode("utf-8")])
        for text in texts:
            yield Document(model.encode(text), len(text.encode()))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 text ({error}).") from error
    except OSError as error:
        raise ConfigError(f"{file}: {(error.strerror or str(error)).lower()}.") from error


def _stored_documents(model: TrainedModel, dataset: IndexedDataset) -> Iterator[Document]:
    for begin, end in zip(dataset.document_indices[:-1], dataset.document_indices[1:], strict=True):
        ids = [int(i) for number in range(begin, end) for i in dataset.get(number)]
        if ids and max(ids) >= model.vocab_size:
            raise ConfigError(
                f"{dataset.prefix}: id {max(ids)} is outside the model's vocabulary of {model.vocab_size}; the files are of another tokenizer."
            )
        yield Document(ids, None)


def _texts_of_lines(file: str, keys: Sequence[str]) -> Iterator[str]:
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = parse_json(line, whole_numbers=False)
                yield from (record[key] for key in keys)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{file}, line {number}: not a JSON object with {' and '.join(keys)} ({error}).") from error


def perplexity(model: TrainedModel, file: str, own: argparse.Namespace) -> dict[str, Any]:
    """Losses of one file. A document follows an end of document, as in training, if the tokenizer has one."""
    from domino_lm.tools.scoring import Piece, pieces_of, score

    begin = [] if model.tokenizer is None or model.tokenizer.eod is None else [model.tokenizer.eod]
    stride = own.stride if own.stride is not None else model.positions
    counts = {"documents": 0, "tokens": 0, "bytes": 0}

    def pieces() -> Iterator[Piece]:
        for document in documents(model, file, own.json_keys):
            counts["documents"] += 1
            counts["bytes"] += document.text_bytes or 0
            for piece in pieces_of([*begin, *document.ids], model.positions, stride):
                counts["tokens"] += piece.judged
                yield piece

    nats = -math.fsum(log_likelihood for log_likelihood, _ in score(model, pieces(), own.batch_size))
    if not counts["tokens"]:
        raise ConfigError(f"{file} holds no token that could be judged; give a file with text.")
    loss = nats / counts["tokens"]
    found = {"file": file, **counts, "loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
    if counts["bytes"]:
        return {**found, "bits_per_byte": nats / math.log(2) / counts["bytes"]}
    del found["bytes"]
    return found


def line_of(result: dict[str, Any]) -> str:
    """A result in words."""
    bits = f", {result['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in result else ""
    return (
        f"{result['file']}: {result['tokens']} tokens in {result['documents']} documents, loss {result['loss']:.4f} nats per token, "
        f"perplexity {result['perplexity']:.2f}{bits}"
    )


def evaluate_all(model: TrainedModel, own: argparse.Namespace) -> int:
    """Judge everything that is asked for; rank 0 prints. The exit code."""
    if own.stride is not None and own.stride > model.positions:
        raise ConfigError(
            f"--stride {own.stride} would leave tokens out, since the model has {model.positions} positions; give at most these."
        )
    if any(Path(file).is_file() for file in own.files):
        model.text_tokenizer()
    found: dict[str, Any] = {"load": model.run.checkpoint.load, "iteration": model.iteration, "files": []}
    for file in own.files:
        found["files"].append(perplexity(model, file, own))
        if model.speaks and not own.json:
            print(line_of(found["files"][-1]), flush=True)
    if own.tasks:
        from domino_lm.tools.harness import evaluate

        settings = {"num_fewshot": own.num_fewshot, "limit": own.limit}
        found["tasks"] = evaluate(model, own.tasks, own.batch_size, own.include_path, **settings)
        if model.speaks and not own.json:
            for task, values in found["tasks"].items():
                print(
                    f"{task}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items() if isinstance(value, float)), flush=True
                )
    if model.speaks and own.json:
        print(json.dumps(found), flush=True)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Read flags, load, judge; the exit code."""

    def read(world_size: int) -> tuple[RunConfig, Use]:
        own, rest = flag_parser().parse_known_args(argv)
        refuse(list(faults(own)))
        return read_run(own, rest, world_size), partial(evaluate_all, own=own)

    return use_model(read)


if __name__ == "__main__":
    sys.exit(main())
