"""What megatron-core 0.16.1 does with data, timed; runs with its folder on PYTHONPATH and prints one JSON object.

python data_megatron.py index PREFIX EPOCHS CACHE
python data_megatron.py sentencepiece INPUT MODEL OUTPUT
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.remove(str(Path(__file__).resolve().parent))  # a file here is called megatron too

WORKERS = 2
SEQUENCE_LENGTH = 2048
LINES_PER_TASK = 32
MEBI = 1 << 20


def peak_mb() -> float:
    """Largest resident memory of this program; getrusage would count the one that started it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / MEBI


def index(prefix: str, epochs: int, cache: str) -> dict[str, Any]:
    """Sample order of a large data set: seconds and megabytes for the three indices."""
    import numpy as np
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    class NoText:
        eod, pad, vocab_size, unique_identifiers = 0, None, 60000, {"class": "none"}

        @property
        def eos(self) -> int:
            raise AttributeError

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQUENCE_LENGTH,
        blend=([prefix], None),
        split="1",
        path_to_cache=cache,
        tokenizer=NoText(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    before_mb = peak_mb()
    started, started_cpu = time.perf_counter(), time.process_time()
    indexed = GPTDataset.build_low_level_dataset(prefix, config)
    tokens = int(np.asarray(indexed.sequence_lengths).sum(dtype=np.int64))
    samples = None if epochs == 1 else int(epochs * tokens // SEQUENCE_LENGTH * 0.98)
    dataset = GPTDataset(indexed, prefix, np.arange(len(indexed), dtype=np.int32), samples, Split.train, config)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    arrays = (dataset.document_index, dataset.sample_index, dataset.shuffle_index)
    return figures(seconds, cpu_seconds, before_mb) | {"sha256": [hashlib.sha256(array.tobytes()).hexdigest() for array in arrays]}


def figures(seconds: float, cpu_seconds: float, before_mb: float) -> dict[str, Any]:
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": peak_mb(), "growth_mb": peak_mb() - before_mb}


def start_worker(model: str) -> None:
    from sentencepiece import SentencePieceProcessor

    globals()["processor"] = SentencePieceProcessor(model_file=model)


def encode(lines: list[str]) -> list[list[int]]:
    processor = globals()["processor"]
    encoded = []
    for line in lines:
        ids = processor.encode(json.loads(line)["text"])
        encoded.append([*ids, processor.eos_id()] if ids else ids)
    return encoded


def tasks(path: str) -> Iterator[list[str]]:
    with open(path, encoding="utf-8") as file:
        lines: list[str] = []
        for line in file:
            lines.append(line)
            if len(lines) == LINES_PER_TASK:
                yield lines
                lines = []
        yield lines


def sentencepiece(path: str, model: str, output: str) -> dict[str, Any]:
    """Two worker processes of plain sentencepiece, which feed the builder; importing and starting the workers is not counted."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    with multiprocessing.get_context("fork").Pool(WORKERS, start_worker, (model,)) as pool:
        pool.map(encode, [['{"text": "warm"}']] * WORKERS * 4)
        started, started_cpu = time.perf_counter(), time.process_time()
        builder = IndexedDatasetBuilder(output + ".bin", dtype=np.uint16)
        for documents in pool.imap(encode, tasks(path)):
            for ids in documents:
                if ids:
                    builder.add_item(torch.IntTensor(ids))
                builder.end_document()
        builder.finalize(output + ".idx")
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
        pool.close()
        pool.join()
    workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds + workers.ru_utime + workers.ru_stime}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "index":
        print(json.dumps(index(sys.argv[2], int(sys.argv[3]), sys.argv[4])))
    else:
        print(json.dumps(sentencepiece(*sys.argv[2:])))
