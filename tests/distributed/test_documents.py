"""The README's and the docs' commands do what they say, in their order, on a corpus of a few documents."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_readme import ROOT, commands

SHORT = "--train-iters 2 --lr-warmup-iters 1 --eval-iters 1 --split 90,10,0 --log-interval 1 --num-workers 0"


def run(folder: Path, words: list[str], **variables: str) -> str:
    """One command in ``folder``, which holds links to what it names."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    assert not re.search(r"warning|Traceback", done.stderr, re.I), done.stderr
    return done.stdout


def python(folder: Path, program: str, flags: str, ranks: int = 1, **variables: str) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return run(folder, [sys.executable, *launcher, *program.split(), *shlex.split(flags)], **variables)


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder as a reader of the README has it: the repository's tools, a text, a tokenizer."""
    for name in ("tools", "domino_lm", "examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "tokenizer.model").symlink_to(ROOT / "examples/data/sp4096.model")
    (tmp_path / "data").mkdir()
    lines = (ROOT / "examples/data/corpus.jsonl").read_text().splitlines()[:60]
    (tmp_path / "my.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.slow
def test_the_commands_for_ones_own_text_lead_from_text_to_curves(desk: Path) -> None:
    preprocess = next(flags for document, flags in commands("tools/preprocess_data.py") if document == "README.md")
    train = next(flags for document, flags in commands("-m domino_lm.pretrain") if document == "README.md")
    (verify,) = (flags for _, flags in commands("tools/verify.py"))
    plot = next(flags for _, flags in commands("tools/plot_run.py") if "--names" not in flags)
    python(desk, "tools/preprocess_data.py", preprocess)
    out = python(desk, "-m domino_lm.pretrain", f"{train} {SHORT} --metrics-file runs/my/metrics.jsonl", ranks=2)
    assert "training ended: finished at iteration 2" in out
    again = python(desk, "-m domino_lm.pretrain", f"{train} {SHORT}", ranks=2)
    assert "resumed from checkpoints/my at iteration 2" in again
    assert "all is normal" in python(desk, "tools/verify.py", f"{verify} --split 90,10,0 --verify-steps 1", ranks=2)
    assert "curves.png" in python(desk, "tools/plot_run.py", plot)


def test_the_memory_command_answers_for_all_its_ranks(desk: Path) -> None:
    (flags,) = (flags for _, flags in commands("-m domino_lm.pretrain") if "--dry-run" in flags)
    assert "64 rank(s) = 8 tensor-parallel x 8 data-parallel" in python(desk, "-m domino_lm.pretrain", flags, WORLD_SIZE="64")
