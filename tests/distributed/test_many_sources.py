"""A program trains on hundreds of sources within a few descriptors, with indices that it builds and with those that it finds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from domino_lm.data.indexed import IndexedDatasetWriter

SOURCES, DESCRIPTORS = 600, 256


@pytest.mark.long
def test_six_hundred_sources_train_under_256_descriptors_with_a_cache_that_is_built_and_one_that_is_there(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for number in range(SOURCES):
        with IndexedDatasetWriter(tmp_path / f"{number:03}", np.uint16) as writer:
            for _ in range(10 + number % 20):
                writer.add_document(random.integers(0, 500, 40))
    (tmp_path / "words").write_text(" ".join(f"{1 + number % 7} {tmp_path}/{number:03}" for number in range(SOURCES)))
    flags = (
        "--preset debug-gpt --num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
        f"--tokenizer-type NullTokenizer --vocab-size 500 --data-args-path {tmp_path}/words --data-cache-path {tmp_path}/cache "
        "--split 9,1,0 --micro-batch-size 32 --train-iters 20 --eval-interval 20 --eval-iters 1 --lr 1e-3 --log-interval 5"
    )
    found = []
    for _ in range(2):
        command = f"ulimit -n {DESCRIPTORS} && exec {sys.executable} -m domino_lm.pretrain {flags}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr.count("never sampled") == 2, done.stderr  # training and validation, each once
        found.append(re.findall(r"lm loss: (\S+)", done.stdout))
    assert len(found[0]) == 4
    assert found[0] == found[1]
    assert len(list((tmp_path / "cache").iterdir())) >= SOURCES
