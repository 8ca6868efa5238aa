"""What domino_lm does with data, timed; prints one JSON object.

python data_ours.py index PREFIX EPOCHS
python data_ours.py loader PREFIX WORKERS
python data_ours.py preprocess FLAGS OF tools/preprocess_data.py
"""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from domino_lm.data.gpt_dataset import GPTDataset, GPTDatasetConfig
from domino_lm.data.indexed import IndexedDataset
from domino_lm.data.loader import Batches
from domino_lm.data.samplers import SequentialSampler

SEQUENCE_LENGTH = 2048
MEBI = 1 << 20
MICRO_BATCH, BATCHES = 4, 400


def peak_mb() -> float:
    """Largest resident memory of this program; getrusage would count the one that started it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / MEBI


def index(prefix: str, epochs: int) -> dict[str, Any]:
    """Sample order of a large data set: seconds and megabytes for checking the files and building the three indices."""
    before_mb = peak_mb()
    started, started_cpu = time.perf_counter(), time.process_time()
    indexed = IndexedDataset(prefix)
    samples = None if epochs == 1 else int(epochs * indexed.num_tokens // SEQUENCE_LENGTH * 0.98)
    dataset = GPTDataset(indexed, range(len(indexed)), "train", samples, GPTDatasetConfig(sequence_length=SEQUENCE_LENGTH, seed=1))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    peak = peak_mb()
    arrays = (dataset.document_index, dataset.sample_index, dataset.shuffle_index)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_mb": peak,
        "growth_mb": peak - before_mb,
        "sha256": [hashlib.sha256(array.tobytes()).hexdigest() for array in arrays],
    }


def loader(prefix: str, workers: int) -> dict[str, Any]:
    """Samples a second, and the wait of a step that computes as long as its data takes to read."""
    indexed = IndexedDataset(prefix)
    dataset = GPTDataset(indexed, range(len(indexed)), "train", None, GPTDatasetConfig(sequence_length=512, seed=1))
    reader = Batches(dataset, SequentialSampler(len(dataset), micro_batch_size=MICRO_BATCH), workers)
    started = time.perf_counter()
    for _ in range(BATCHES // 2):
        next(reader)
    batch_s = (time.perf_counter() - started) / (BATCHES // 2)
    before = reader.blocked_s
    for _ in range(BATCHES // 2 - 1):
        time.sleep(2 * batch_s)  # a step on an accelerator: this thread waits, the workers read
        next(reader)
    waited_ms = (reader.blocked_s - before) / (BATCHES // 2 - 1) * 1e3
    reader.close()
    return {"samples_per_s": MICRO_BATCH / batch_s, "wait_ms_per_step": waited_ms, "batch_ms": batch_s * 1e3}


def preprocess(flags: list[str]) -> dict[str, Any]:
    """Memory of the tool at its peak."""
    tool = str(Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py")
    sys.argv = [tool, *flags]
    sys.path.insert(0, str(Path(tool).parent))
    runpy.run_path(tool, run_name="__main__")
    return {"peak_mb": peak_mb()}


if __name__ == "__main__":
    if sys.argv[1] == "preprocess":
        print(json.dumps(preprocess(sys.argv[2:])))
    else:
        program = {"index": index, "loader": loader}[sys.argv[1]]
        print(json.dumps(program(sys.argv[2], int(sys.argv[3]))))
