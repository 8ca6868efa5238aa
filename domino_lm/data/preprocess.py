"""JSON lines to token files: read in blocks, encode in worker processes, write in order.

The parent cuts the input into blocks of whole lines and keeps a bounded number of them in flight, so memory stays flat
for any file size; results are written in the order of the input, so the output does not depend on the number of workers.
The first fault in the input ends the run: nothing is left under the output's name.
"""

import gzip
import os
import signal
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context, parent_process
from typing import IO, TextIO

import numpy as np

from domino_lm.config import TokenizerConfig
from domino_lm.data.documents import Block, EncodedBlock, Encoder, PreprocessError
from domino_lm.data.indexed import IndexedDatasetWriter, best_dtype
from domino_lm.data.tokenizer import build_tokenizer

BLOCK_BYTES = 1 << 18
BLOCKS_PER_WORKER = 3


@dataclass(frozen=True, kw_only=True)
class PreprocessConfig:
    """One run of the preprocessor."""

    input: str
    """File of JSON lines; read through gzip when its name ends in .gz."""

    output_prefix: str
    """The files are <output_prefix>_<key>_document.bin and .idx."""

    tokenizer: TokenizerConfig

    json_keys: tuple[str, ...] = ("text",)
    """Keys to encode; each gives one pair of files."""

    append_eod: bool = False
    """End each document that is not empty with the end-of-document token."""

    workers: int = field(default_factory=lambda: len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    """Processes that encode; 1 encodes in this process."""

    log_interval: int = 1000
    """Documents between progress lines."""

    def prefix(self, key: str) -> str:
        """Prefix of the pair that holds ``key``."""
        return f"{self.output_prefix}_{key}_document"


@dataclass
class Summary:
    """What a run has done so far. ``empty`` (documents), ``tokens`` and ``longest`` (document, in tokens) are counted for each key."""

    documents: int = 0
    blank_lines: int = 0
    first_blank_line: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    empty: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    longest: dict[str, int] = field(default_factory=dict)

    def rate(self) -> str:
        seconds = max(self.seconds, 1e-9)
        return f"{self.documents / seconds:.1f} docs/s, {self.size_bytes / 2**20 / seconds:.2f} MB/s"


def preprocess(config: PreprocessConfig, progress: TextIO | None = None) -> Summary:
    """Encode ``config.input`` into one pair of token files for each key.

    Lines of progress go to ``progress`` (a bar when it is a terminal). Raises PreprocessError, TokenizerError or
    IndexedDatasetError; no output file exists then, unless an earlier run made it.
    """
    _check(config)
    encoder = build_encoder(config)
    summary = Summary(
        empty=dict.fromkeys(config.json_keys, 0), tokens=dict.fromkeys(config.json_keys, 0), longest=dict.fromkeys(config.json_keys, 0)
    )
    started = time.monotonic()
    try:
        with ExitStack() as stack:
            source = stack.enter_context(_open(config.input))
            writers = [stack.enter_context(IndexedDatasetWriter(config.prefix(key), encoder.dtype)) for key in config.json_keys]
            report = stack.enter_context(Progress(config, progress))
            results = stack.enter_context(closing(_encode_all(config, encoder, read_blocks(source, config.input))))
            for encoded in results:
                for writer, part in zip(writers, encoded.keys, strict=True):
                    writer.add_documents(part.ids, part.lengths, part.sequences_per_document)
                _count(summary, config, encoded, time.monotonic() - started)
                report.update(summary)
            _require_tokens(summary, config)
    except OSError as error:
        where = error.filename or f"{config.input} or {config.output_prefix}"
        raise PreprocessError(f"{where}: {error.strerror or error}; free space or check the permissions, then run again.") from error
    summary.seconds = time.monotonic() - started
    return summary


def build_encoder(config: PreprocessConfig) -> Encoder:
    """What every process encodes with. Raises TokenizerError or PreprocessError when the flags give no such thing."""
    tokenizer = build_tokenizer(config.tokenizer)
    if config.append_eod and tokenizer.eod is None:
        raise PreprocessError("--append-eod: the tokenizer has no end-of-document token; leave the flag out or use another tokenizer.")
    return Encoder(tokenizer, best_dtype(tokenizer.vocab_size), config.json_keys, config.append_eod, config.input)


def read_blocks(source: IO[bytes], path: str, size_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Cuts a file into blocks of whole lines of about ``size_bytes``; a longer line is a block of its own."""
    line, offset = 1, 0
    while True:
        try:
            data = source.read(size_bytes)
            if data and not data.endswith(b"\n"):
                data += source.readline()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise PreprocessError(f"{path}, line {line}, byte {offset}: the gzip file is damaged ({error}); compress it again.") from error
        if not data:
            return
        yield Block(data, line, offset)
        line += data.count(b"\n")
        offset += len(data)


class Progress:
    """Tells how far a run is: a bar on a terminal, else a line each ``log_interval`` documents."""

    def __init__(self, config: PreprocessConfig, stream: TextIO | None) -> None:
        self._stream, self._interval, self._reported, self._bar = stream, config.log_interval, 0, None
        if stream is not None and stream.isatty():
            from tqdm import tqdm

            # The size on disk says nothing about the bytes inside a compressed file.
            total = None if config.input.endswith(".gz") else os.path.getsize(config.input)
            self._bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="encoding", file=stream)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, summary: Summary) -> None:
        if self._bar is not None:
            self._bar.update(summary.size_bytes - self._bar.n)
        elif self._stream is not None and summary.documents // self._interval > self._reported:
            self._reported = summary.documents // self._interval
            print(f"Processed {summary.documents} documents ({summary.rate()}).", file=self._stream, flush=True)


def _check(config: PreprocessConfig) -> None:
    if config.workers < 1:
        raise PreprocessError(f"--workers {config.workers} leaves no process to encode; use at least 1.")
    if config.log_interval < 1:
        raise PreprocessError(f"--log-interval {config.log_interval} is no number of documents; use at least 1.")
    doubled = {key for key in config.json_keys if config.json_keys.count(key) > 1}
    if doubled or not config.json_keys:
        raise PreprocessError(f"--json-keys {' '.join(config.json_keys)} must name at least one key, and each once.")
    if not os.path.exists(config.input):
        raise PreprocessError(f"--input {config.input}: no such file.")
    if os.path.isdir(config.input):
        raise PreprocessError(f"--input {config.input} is a folder; give one file of JSON lines.")
    for key in config.json_keys:
        prefix = config.prefix(key)
        folder = os.path.dirname(prefix) or "."
        if not os.path.isdir(folder):
            raise PreprocessError(f"--output-prefix {config.output_prefix}: the folder {folder} does not exist; make it with mkdir -p.")
        for path in (prefix + ".bin", prefix + ".idx"):
            if os.path.exists(path) and os.path.samefile(path, config.input):
                raise PreprocessError(
                    f"--output-prefix {config.output_prefix} would overwrite --input {config.input}; choose another prefix."
                )


def _open(path: str) -> IO[bytes]:
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def _encode_all(config: PreprocessConfig, encoder: Encoder, blocks: Iterable[Block]) -> Generator[EncodedBlock]:
    if config.workers == 1:
        yield from map(encoder, blocks)
        return
    # Spawned, not forked: a fork of a process with the tokenizer's threads may hang.
    pool = ProcessPoolExecutor(config.workers, get_context("spawn"), _start_worker)
    try:
        yield from _in_order(lambda block: pool.submit(_encode_in_worker, config, block), blocks, config.workers * BLOCKS_PER_WORKER)
    except BrokenExecutor as error:
        raise PreprocessError(
            f"{config.input}: a worker process died (killed by hand, or by the system for want of memory); "
            f"run again, with fewer than --workers {config.workers} if memory is short."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(submit: Callable[[Block], Future[EncodedBlock]], blocks: Iterable[Block], in_flight: int) -> Iterator[EncodedBlock]:
    """Results in the order of the blocks, with at most ``in_flight`` blocks read ahead."""
    pending: deque[Future[EncodedBlock]] = deque()
    for block in blocks:
        pending.append(submit(block))
        if len(pending) >= in_flight:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and stops the workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Without this, workers of a killed parent would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@cache
def _worker_encoder(config: PreprocessConfig) -> Encoder:
    """Each worker builds its tokenizer once, with its first block."""
    return build_encoder(config)


def _encode_in_worker(config: PreprocessConfig, block: Block) -> EncodedBlock:
    return _worker_encoder(config)(block)


def _count(summary: Summary, config: PreprocessConfig, encoded: EncodedBlock, seconds: float) -> None:
    if encoded.blank_lines and not summary.blank_lines:
        summary.first_blank_line = encoded.first_blank_line
        print(
            f"warning: {config.input}, line {encoded.first_blank_line}: blank line skipped; further ones are only counted.", file=sys.stderr
        )
    summary.documents += encoded.documents
    summary.blank_lines += encoded.blank_lines
    summary.size_bytes += encoded.size_bytes
    summary.seconds = seconds
    for key, part in zip(config.json_keys, encoded.keys, strict=True):
        summary.empty[key] += int(np.count_nonzero(part.sequences_per_document == 0))
        summary.tokens[key] += part.ids.size
        summary.longest[key] = max(summary.longest[key], part.longest)


def _require_tokens(summary: Summary, config: PreprocessConfig) -> None:
    if summary.documents == 0:
        raise PreprocessError(f"{config.input}: no document in it ({summary.blank_lines} blank lines); give a file of JSON lines.")
    for key, tokens in summary.tokens.items():
        if tokens == 0:
            raise PreprocessError(
                f"{config.input}: all {summary.documents} documents are empty under the key {key!r}; give the key that holds text with --json-keys."
            )
