"""Encoding in several processes or threads, with results in order and a bounded number of blocks in flight."""

import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from domino_lm.data.preprocess.documents import EncodedBlock, Encoder
from domino_lm.data.preprocess.inputs import Block, PreprocessError

BLOCKS_PER_WORKER = 3
BYTES_IN_FLIGHT = 1 << 26
"""Beyond it, blocks of very long lines are encoded one by one."""
STOPPING = {signal.SIGTERM, signal.SIGINT}

Recipe = TypeVar("Recipe")


def encode_blocks(
    blocks: Iterable[Block], workers: int, encoder: Encoder, recipe: Recipe, build: Callable[[Recipe], Encoder]
) -> Generator[EncodedBlock]:
    """Results of all blocks in their order; memory does not grow with their number.

    One worker encodes here, with ``encoder``. Several have encoders of their own, made by ``build(recipe)``: threads
    if the tokenizer frees the interpreter's lock, else processes. Raises PreprocessError when a process dies.
    """
    if workers == 1:
        yield from map(encoder, blocks)
        return
    pool: _Threads | _Processes
    pool = _Threads(workers, encoder, lambda: build(recipe)) if encoder.tokenizer.uses_threads else _Processes(workers, build, recipe)
    try:
        in_flight: deque[int] = deque()
        for block in blocks:
            size = len(block.data)
            while in_flight and (len(in_flight) >= workers * BLOCKS_PER_WORKER or sum(in_flight) + size > BYTES_IN_FLIGHT):
                in_flight.popleft()
                yield pool.next_result()
            pool.submit(block)
            in_flight.append(size)
        for _ in in_flight:
            yield pool.next_result()
    finally:
        pool.close()


class _Threads:
    """Threads with an encoder each; the first takes the one that is there."""

    def __init__(self, count: int, first: Encoder, build: Callable[[], Encoder]) -> None:
        self._pool = ThreadPoolExecutor(count, "encode")
        self._first: deque[Encoder] = deque([first])
        self._build, self._own = build, threading.local()
        self._pending: deque[Any] = deque()

    def submit(self, block: Block) -> None:
        self._pending.append(self._pool.submit(self._encode, block))

    def next_result(self) -> EncodedBlock:
        result: EncodedBlock = self._pending.popleft().result()
        return result

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _encode(self, block: Block) -> EncodedBlock:
        encoder: Encoder | None = getattr(self._own, "encoder", None)
        if encoder is None:
            try:
                encoder = self._first.popleft()
            except IndexError:
                encoder = self._build()
            self._own.encoder = encoder
        return encoder(block)


class _Processes:
    """Processes that take turns; each has a pipe of its own, whose end tells either side that the other is gone.

    A pool with common queues would hang for good when a process is killed while it holds one.
    """

    def __init__(self, count: int, build: Callable[[Any], Encoder], recipe: Any) -> None:
        # Spawned, not forked: a fork of a process with the tokenizer's threads may hang.
        context = get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._sent = self._received = 0
        self._count = count
        for _ in range(count):
            with _signals_held():
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, build, recipe), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)

    def submit(self, block: Block) -> None:
        try:
            self._pipes[self._sent % self._count].send(block)
            block.take()
        except OSError:
            raise self._death() from None
        self._sent += 1

    def next_result(self) -> EncodedBlock:
        try:
            result: EncodedBlock | Exception = self._pipes[self._received % self._count].recv()
        except (EOFError, OSError):
            raise self._death() from None
        self._received += 1
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()  # it may still be starting, or at a long block whose result nobody wants
        for process in self._processes:
            process.join()

    def _death(self) -> PreprocessError:
        return PreprocessError(
            "a worker process died (killed by hand, or by the system for want of memory); "
            f"run again, with fewer than --workers {self._count} if memory is short."
        )


@contextmanager
def _signals_held() -> Iterator[None]:
    """Signals that stop the program wait: one that arrives while a process is being started could get lost there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection, build: Callable[[Any], Encoder], recipe: Any) -> None:
    """A worker process: blocks in, results or errors out, until the pipe ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and stops the workers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    blocks: queue.SimpleQueue[Block] = queue.SimpleQueue()
    # Always ready to take a block: a parent that waits to hand one over would not read results.
    threading.Thread(target=_take_blocks, args=(pipe, blocks), daemon=True).start()
    encoder = build(recipe)
    while True:
        block = blocks.get()
        result: EncodedBlock | Exception
        try:
            result = encoder(block)
        except Exception as error:
            result = error
        try:
            pipe.send(result)
        except OSError:
            os._exit(1)


def _take_blocks(pipe: Connection, blocks: "queue.SimpleQueue[Block]") -> None:
    """The end of the pipe is the end of the parent, and so of this process, whatever it is doing."""
    try:
        while True:
            blocks.put(pipe.recv())
    except (EOFError, OSError):
        os._exit(1)
