"""Encoding in several processes or threads, with results in order and a bounded number of blocks in flight."""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context, parent_process
from typing import TypeVar

from domino_lm.data.documents import EncodedBlock, Encoder
from domino_lm.data.inputs import Block, PreprocessError

BLOCKS_PER_WORKER = 3
STOPPING = {signal.SIGTERM, signal.SIGINT}

Recipe = TypeVar("Recipe")


def encode_blocks(
    blocks: Iterable[Block], workers: int, encoder: Encoder, recipe: Recipe, build: Callable[[Recipe], Encoder]
) -> Generator[EncodedBlock]:
    """Results of all blocks in their order; memory does not grow with their number.

    One worker encodes here, with ``encoder``. Several have encoders of their own, made by ``build(recipe)``: threads
    where the tokenizer frees the interpreter's lock, else processes. Raises PreprocessError when a process dies.
    """
    if workers == 1:
        yield from map(encoder, blocks)
        return
    if encoder.tokenizer.uses_threads:
        own = _EncoderOfThread(encoder, lambda: build(recipe))
        pool: Executor = ThreadPoolExecutor(workers, "encode")
        submit = lambda block: pool.submit(own, block)  # noqa: E731
    else:
        # Spawned, not forked: a fork of a process with the tokenizer's threads may hang.
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
        submit = lambda block: pool.submit(_encode_in_worker, build, recipe, block)  # noqa: E731
    try:
        yield from _in_order(submit, blocks, workers * BLOCKS_PER_WORKER)
    except BrokenExecutor as error:
        raise PreprocessError(
            "a worker process died (killed by hand, or by the system for want of memory); "
            f"run again, with fewer than --workers {workers} if memory is short."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


class _EncoderOfThread:
    """Each thread's own encoder; the first thread takes the one that is there."""

    def __init__(self, first: Encoder, build: Callable[[], Encoder]) -> None:
        self._first: deque[Encoder] = deque([first])
        self._build, self._own = build, threading.local()

    def __call__(self, block: Block) -> EncodedBlock:
        encoder: Encoder | None = getattr(self._own, "encoder", None)
        if encoder is None:
            try:
                encoder = self._first.popleft()
            except IndexError:
                encoder = self._build()
            self._own.encoder = encoder
        return encoder(block)


def _in_order(submit: Callable[[Block], Future[EncodedBlock]], blocks: Iterable[Block], in_flight: int) -> Iterator[EncodedBlock]:
    """Results in the order of the blocks, with at most ``in_flight`` blocks read ahead."""
    pending: deque[Future[EncodedBlock]] = deque()
    for block in blocks:
        with _signals_held():
            pending.append(submit(block))
        if len(pending) >= in_flight:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals that stop the program wait: one that arrives while a worker is being started could get lost there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and stops the workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Without this, workers of a killed parent would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@cache
def _worker_encoder(build: Callable[[Recipe], Encoder], recipe: Recipe) -> Encoder:
    """Each worker builds its tokenizer once, with its first block."""
    return build(recipe)


def _encode_in_worker(build: Callable[[Recipe], Encoder], recipe: Recipe, block: Block) -> EncodedBlock:
    return _worker_encoder(build, recipe)(block)
