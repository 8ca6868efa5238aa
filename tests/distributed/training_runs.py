"""Small runs of the real program for `test_training`: a token file, flags, and what a run leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy

from domino_lm.config.arguments import parse_arguments
from domino_lm.config.settings import RunConfig
from domino_lm.data.indexed import IndexedDatasetWriter
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.pretrain import build_trainer
from domino_lm.training.trainer import Trainer
from domino_lm.watch.metrics import StepReport

VOCABULARY = 97
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --hidden-dropout 0.1 --attention-dropout 0.1 "
    f"--vocab-size {VOCABULARY} --make-vocab-size-divisible-by 8 --lr 1e-2 --min-lr 1e-3 --lr-warmup-iters 2 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 8 --split 80,20,0 --eval-iters 2 --eval-interval 4 --log-interval 1"
)
REPOSITORY = Path(__file__).parents[2]


def write_tokens(folder: Path) -> Path:
    """A token file of 40 short documents; returns its prefix."""
    random = numpy.random.default_rng(0)
    with IndexedDatasetWriter(folder / "tokens", numpy.uint16) as writer:
        for _ in range(40):
            length = int(random.integers(20, 60))
            writer.add_document(numpy.cumsum(random.integers(0, 3, length)) % VOCABULARY)
    return folder / "tokens"


def configure(tokens: Path, flags: str = "") -> RunConfig:
    return parse_arguments(f"{TINY} --data-path {tokens} {flags}".split())


def built(mesh: ParallelMesh, tokens: Path, flags: str = "") -> Trainer:
    """A trainer of this layout, resumed where the flags say so."""
    trainer = build_trainer(configure(tokens, f"{flags} --tensor-model-parallel-size {mesh.tp.size}"), mesh)
    trainer.console = lambda line: None
    return trainer


def steps(trainer: Trainer, count: int) -> list[StepReport]:
    batches = trainer.training_batches()
    return [trainer.step(batches)[0] for _ in range(count)]


def program(tokens: Path, flags: str, ranks: int = 1, script: Sequence[str] = ("-m", "domino_lm.pretrain")) -> subprocess.Popen[str]:
    """The real program, or a ``script`` that stands for it, under torchrun for more than one rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, *script, *f"{TINY} --data-path {tokens} {flags}".split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=heed_signals)


def heed_signals() -> None:
    """In a child: a test run in the background of a shell ignores SIGINT, and a program would inherit that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def ranks_of(pid: int) -> list[int]:
    """The processes at the end of a chain of launchers."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return (ranks_of(children[0]) or children) if len(children) == 1 else children
