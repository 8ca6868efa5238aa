"""JSON lines to token files: read in blocks, encode in workers, write in order.

The parent cuts the input into blocks of whole lines and keeps a bounded number of them in flight, so memory stays flat
for any file size; results are written in the order of the input, so the output does not depend on the number of workers.
The first fault in the input ends the run, unless bad lines are skipped: nothing is left under the output's name.
"""

import os
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TextIO

import numpy as np

from domino_lm.config.data import TokenizerConfig
from domino_lm.data.indexed import best_dtype
from domino_lm.data.preprocess.documents import SHOWN_FAULTS, EncodedBlock, Encoder, OnError
from domino_lm.data.preprocess.inputs import BLOCK_BYTES, MAX_LINE_BYTES, PreprocessError, expand_inputs, read_blocks, size_on_disk
from domino_lm.data.preprocess.outputs import PartitionedWriter
from domino_lm.data.preprocess.pool import encode_blocks
from domino_lm.data.preprocess.sentences import SentenceSplitter
from domino_lm.data.tokenizers.build import build_tokenizer


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """One run of the preprocessor."""

    input: str | tuple[str, ...]
    """JSON lines, one document each: files, patterns in quotes (hidden files are left out), or - for standard input; .gz and .zst are decompressed, of .parquet the columns of --json-keys are read."""

    output_prefix: str
    """Path of the output without _KEY_document and extension."""

    tokenizer: TokenizerConfig

    vocab_size: int | None = None
    """Number of ids, for a tokenizer without a vocabulary of its own."""

    json_keys: tuple[str, ...] = ("text",)
    """Keys to encode, one pair of files each."""

    append_eod: bool = False
    """End each document that is not empty with the end-of-document token."""

    split_sentences: bool = False
    """Make each sentence a sequence; the files are called PREFIX_KEY_sentence."""

    keep_newlines: bool = False
    """Keep the white space between sentences, at their ends."""

    lang: str = "english"
    """Language of --split-sentences."""

    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    """Processes or threads that encode, by default one per CPU; the output does not depend on it."""

    partitions: int = 1
    """Deal the documents to so many parts in turn and join the parts: Megatron's order."""

    keep_sequential_samples: bool = False
    """Keep the order of the input whatever --partitions says."""

    on_error: OnError = "stop"
    """A bad line ends the run (stop), is counted and left out (skip), or has invalid characters replaced by U+FFFD (replace; other faults stop)."""

    max_line_gib: float = MAX_LINE_BYTES / 2**30
    """Longest line, or row of a table, in GiB and unpacked: an archive of a few bytes may hold a line that fills memory."""

    log_interval: int = 1000
    """Documents between progress lines."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.input,) if isinstance(self.input, str) else self.input

    def prefix(self, key: str) -> str:
        """Prefix of the pair that holds ``key``."""
        return f"{self.output_prefix}_{key}_{'sentence' if self.split_sentences else 'document'}"


@dataclass
class Summary:
    """What a run has done so far.

    ``empty`` (documents), ``tokens`` and ``longest`` (document, in tokens) are counted for each key; ``replaced`` are the
    lines in which invalid characters were replaced.
    """

    documents: int = 0
    blank_lines: int = 0
    first_blank_line: str = ""
    skipped: int = 0
    replaced: int = 0
    size_bytes: int = 0
    read_bytes: int = 0
    seconds: float = 0.0
    empty: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    longest: dict[str, int] = field(default_factory=dict)

    def rate(self) -> str:
        seconds = max(self.seconds, 1e-9)
        return f"{self.documents / seconds:.1f} docs/s, {self.size_bytes / 2**20 / seconds:.2f} MB/s"

    def million_tokens(self) -> str:
        return f"{sum(self.tokens.values()) / 1e6:.1f} M tokens"


def preprocess(config: PreprocessConfig, progress: TextIO | None = None) -> Summary:
    """Encode ``config.input`` into one pair of token files for each key.

    Lines of progress go to ``progress`` (a bar when it is a terminal). Raises PreprocessError, TokenizerError or
    IndexedDatasetError; no output file exists then, unless an earlier run made it.
    """
    paths = expand_inputs(config.inputs)
    _check(config, paths)
    encoder = build_encoder(config)
    keys = config.json_keys
    summary = Summary(empty=dict.fromkeys(keys, 0), tokens=dict.fromkeys(keys, 0), longest=dict.fromkeys(keys, 0))
    partitions = 1 if config.keep_sequential_samples else config.partitions
    size, started = size_on_disk(paths), time.monotonic()
    try:
        with ExitStack() as stack:
            writers = [stack.enter_context(PartitionedWriter(config.prefix(key), encoder.dtype, partitions)) for key in keys]
            report = stack.enter_context(Progress(config.log_interval, size, progress))
            blocks = read_blocks(paths, keys, max_line_bytes=int(config.max_line_gib * 2**30))
            workers = config.workers if size is None else min(config.workers, max(1, size // BLOCK_BYTES))
            results = stack.enter_context(closing(encode_blocks(blocks, workers, encoder, config, build_encoder)))
            for encoded in results:
                for writer, part in zip(writers, encoded.keys, strict=True):
                    writer.add(part)
                _count(summary, config, encoded, time.monotonic() - started)
                report.update(summary)
            _require_tokens(summary, config)
            for writer in writers:
                writer.prepare()
    except MemoryError as error:
        raise PreprocessError(
            f"{' '.join(config.inputs)}: out of memory after {summary.documents} documents; a document needs about ten times its size, "
            "and each of --workers as much: give more memory, fewer workers, or split long lines."
        ) from error
    except OSError as error:
        where = error.filename or f"{' '.join(config.inputs)} or {config.output_prefix}"
        raise PreprocessError(f"{where}: {error.strerror or error}; free space or check the permissions, then run again.") from error
    summary.seconds = time.monotonic() - started
    return summary


def build_encoder(config: PreprocessConfig) -> Encoder:
    """The encoder of each worker. Raises TokenizerError or PreprocessError if the flags describe none."""
    tokenizer = build_tokenizer(config.tokenizer, config.vocab_size)
    if config.append_eod and tokenizer.eod is None:
        raise PreprocessError("--append-eod: the tokenizer has no end-of-document token; leave the flag out or use another tokenizer.")
    splitter = SentenceSplitter(config.lang, config.keep_newlines) if config.split_sentences else None
    return Encoder(tokenizer, best_dtype(tokenizer.vocab_size), config.json_keys, config.append_eod, config.on_error, splitter)


class Progress:
    """Tells how far a run is: a bar on a terminal, else a line per ``interval`` documents."""

    def __init__(self, interval: int, size_bytes: int | None, stream: TextIO | None) -> None:
        self._stream, self._interval, self._size_bytes = stream, interval, size_bytes
        self._reported, self._bar = 0, None
        if stream is not None and stream.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=size_bytes, unit="B", unit_scale=True, unit_divisor=1024, desc="encoding", file=stream)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, summary: Summary) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(f"{summary.documents} documents, {summary.million_tokens()}", refresh=False)
            self._bar.update(summary.read_bytes - self._bar.n)
        elif self._stream is not None and summary.documents // self._interval > self._reported:
            self._reported = summary.documents // self._interval
            left = f", {self._left_s(summary):.0f} s left" if self._size_bytes else ""
            found = f"{summary.rate()}, {summary.million_tokens()}{left}"
            print(f"Processed {summary.documents} documents ({found}).", file=self._stream, flush=True)

    def _left_s(self, summary: Summary) -> float:
        """Seconds that the rest takes at the speed so far."""
        assert self._size_bytes is not None
        return summary.seconds * (self._size_bytes / max(summary.read_bytes, 1) - 1)


def _check(config: PreprocessConfig, paths: list[str]) -> None:
    for flag, value in (("--workers", config.workers), ("--partitions", config.partitions), ("--log-interval", config.log_interval)):
        if value < 1:
            raise PreprocessError(f"{flag} {value} cannot be; use at least 1.")
    if not 2**-30 <= config.max_line_gib < float("inf"):
        raise PreprocessError(
            f"--max-line-gib {config.max_line_gib:g} leaves no line; give GiB above 0, by default {MAX_LINE_BYTES >> 30}."
        )
    doubled = {key for key in config.json_keys if config.json_keys.count(key) > 1}
    if doubled or not config.json_keys:
        raise PreprocessError(f"--json-keys {' '.join(config.json_keys)} must name at least one key, and each once.")
    if config.keep_newlines and not config.split_sentences:
        raise PreprocessError("--keep-newlines says what stands between sentences; it needs --split-sentences.")
    for key in config.json_keys:
        prefix = config.prefix(key)
        for output in (prefix + ".bin", prefix + ".idx"):
            overwritten = [path for path in paths if os.path.exists(output) and os.path.exists(path) and os.path.samefile(output, path)]
            if overwritten:
                raise PreprocessError(
                    f"--output-prefix {config.output_prefix} would overwrite --input {overwritten[0]}; choose another prefix."
                )


def _count(summary: Summary, config: PreprocessConfig, encoded: EncodedBlock, seconds: float) -> None:
    found = encoded.found
    if found.blank_lines and not summary.blank_lines:
        summary.first_blank_line = found.first_blank_line
        print(f"warning: {found.first_blank_line}: blank line skipped; further ones are only counted.", file=sys.stderr)
    for fault in found.faults[: max(0, SHOWN_FAULTS - summary.skipped)]:
        print(f"skipped: {fault}", file=sys.stderr)
    summary.documents += encoded.documents
    summary.blank_lines += found.blank_lines
    summary.skipped += found.skipped
    summary.replaced += found.replaced
    summary.size_bytes += encoded.size_bytes
    summary.read_bytes = encoded.read_bytes
    summary.seconds = seconds
    for key, part in zip(config.json_keys, encoded.keys, strict=True):
        summary.empty[key] += int(np.count_nonzero(part.sequences_per_document == 0))
        summary.tokens[key] += part.ids.size
        summary.longest[key] = max(summary.longest[key], part.longest)


def _require_tokens(summary: Summary, config: PreprocessConfig) -> None:
    names = " ".join(config.inputs)
    if summary.documents == 0:
        skipped = f", {summary.skipped} bad lines" if summary.skipped else ""
        raise PreprocessError(f"{names}: no document in it ({summary.blank_lines} blank lines{skipped}); give a file of JSON lines.")
    for key, tokens in summary.tokens.items():
        if tokens == 0:
            raise PreprocessError(
                f"{names}: all {summary.documents} documents are empty under the key {key!r}; give the key that holds text with --json-keys."
            )
