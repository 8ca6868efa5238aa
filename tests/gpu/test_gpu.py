"""What only a machine with GPUs can say; `make gpu-check` measures more."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_bench import Bench, known_hardware
from benchmarks.gpu_correctness import correctness
from domino_lm.checkpoint.shared_copy import SharedCopy, new_memory, places_of

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_every_schedule_and_kernel_is_right_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    rows = list(correctness(Bench(device, False, known_hardware(device)), time.monotonic() + 300))
    assert [row for row in rows if row.verdict == "FAULT"] == []


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("cut", ["--domino-row-slices 2", "--domino-column-slices 2", "--sequence-parallel"])
def test_two_ranks_over_nccl_compute_what_one_does(cut: str) -> None:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "tools/verify.py"]
    flags = (
        "--preset debug-llama --vocab-size 512 --mock-data --tokenizer-type NullTokenizer --tensor-model-parallel-size 2 "
        f"--micro-batch-size 4 --lr 1e-3 --train-iters 4 {cut}"
    )
    done = subprocess.run([*words, *flags.split()], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(GPUS < 1, reason="needs a GPU")
def test_what_is_saved_beside_training_is_what_the_gpu_held() -> None:
    device, memory = torch.device("cuda", 0), new_memory()
    tensors = [torch.randn(300, 1000, device=device), torch.randn(64, 64, device=device).bfloat16().t()]
    places = places_of(tensors)
    copy = SharedCopy.reserve(memory, places, device)
    copy.take(tensors)
    held = [tensor.cpu() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    other = SharedCopy(memory, places)  # as another process sees it
    assert all(torch.equal(one, two) for one, two in zip(other.tensors, held, strict=True))
    copy.release()
