"""The program: reads flags, builds the run, trains. Runs under torchrun or as one plain process."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from domino_lm.arguments import parse_arguments
from domino_lm.checks import check_run
from domino_lm.config import ConfigError, RunConfig
from domino_lm.data.indexed import IndexedDatasetError
from domino_lm.data.indices import DatasetError
from domino_lm.data.loader import LoaderError
from domino_lm.data.tokenizer import Tokenizer, TokenizerError, build_tokenizer

if TYPE_CHECKING:
    from domino_lm.parallel.collectives import Communicator
    from domino_lm.parallel.mesh import ParallelMesh
    from domino_lm.training.run_data import RunData
    from domino_lm.training.trainer import Trainer

Result = TypeVar("Result")

WRONG_SETTINGS = (ConfigError, DatasetError, IndexedDatasetError, LoaderError, TokenizerError)
EXIT_WRONG_SETTINGS = 2
EXIT_FAILED_RUN = 1
SECONDS_FOR_RANK_0 = 1.0
"""How long other ranks wait before they leave: torchrun ends all ranks when the first one is gone, and rank 0 has to speak."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code. Rank 0 alone prints, each error once."""
    try:
        run = parse_arguments(sys.argv[1:] if argv is None else argv)
        check_run(run, int(os.environ.get("WORLD_SIZE", "1")))
    except ConfigError as error:
        return _fail(error, EXIT_WRONG_SETTINGS)
    return train(run)


def train(run: RunConfig) -> int:
    """Build everything that `check_run` found sound, and train; returns the exit code."""
    code = _train(run)
    # The threads of process groups end with the last reference to them, and must while the interpreter lives: one that
    # drops a tensor later aborts the process.
    gc.collect()
    return code


def _train(run: RunConfig) -> int:
    import torch  # from here on, since it takes seconds

    from domino_lm.parallel.mesh import ParallelMesh
    from domino_lm.training.stored_metadata import CheckpointError
    from domino_lm.training.trainer import TrainingError

    warnings.showwarning = show_warning
    try:
        joined = ParallelMesh.create(run.parallel)
    except (torch.distributed.DistError, ValueError) as error:
        world, minutes = os.environ.get("WORLD_SIZE", "1"), run.parallel.distributed_timeout_minutes
        reason = ConfigError(
            f"not all of the {world} ranks that WORLD_SIZE names have joined (--distributed-timeout-minutes {minutes}): {error} "
            f"Start {world} processes, best with torchrun, each with its own RANK and the same MASTER_ADDR and MASTER_PORT."
        )
        return _fail(reason, EXIT_FAILED_RUN, alone=True)
    with joined as mesh:
        try:
            trainer = build_trainer(run, mesh)
        except WRONG_SETTINGS as error:
            return _fail(error, EXIT_WRONG_SETTINGS)
        except CheckpointError as error:
            return _fail(error, EXIT_FAILED_RUN)
        try:
            trainer.console(str(trainer.fit()))
        except (CheckpointError, TrainingError) as error:
            return _fail(error, EXIT_FAILED_RUN)
        except WRONG_SETTINGS as error:  # data that one rank cannot read: the others cannot know
            return _fail(error, EXIT_FAILED_RUN, alone=True)
    return 0


def build_trainer(run: RunConfig, mesh: ParallelMesh) -> Trainer:
    """Tokenizer, data, model and trainer, resumed where ``--load`` says so; rank 0 prints what was built."""
    from domino_lm.model.stack import build_stack
    from domino_lm.training.schedule_choice import settle_schedule
    from domino_lm.training.trainer import Trainer

    run, data, tokenizer = build_data(run, mesh)
    run, candidates = settle_schedule(run, mesh)
    stack = build_stack(run.model, mesh.tp, run.training.seed, device=mesh.device)
    trainer = Trainer(run, mesh, stack, data, tokenizer_identity=tokenizer.identity() if tokenizer else None)
    trainer.console("\n".join(filter(None, [summary(run, mesh, trainer), candidates])))
    trainer.load()
    return trainer


def build_data(run: RunConfig, mesh: ParallelMesh) -> tuple[RunConfig, RunData, Tokenizer | None]:
    """Tokenizer and data sets, and ``run`` with the vocabulary that they settle. Raises one of WRONG_SETTINGS on every rank."""
    from domino_lm.training.run_data import RunData

    tokenizer = together(mesh.world, lambda: build_tokenizer(run.tokenizer) if run.tokenizer.tokenizer_type else None)
    run = with_vocabulary(run, tokenizer)
    return run, together(mesh.world, lambda: RunData.build(run, tokenizer, mesh)), tokenizer


def together(world: Communicator, build: Callable[[], Result]) -> Result:
    """The result of ``build`` on this rank, once it has succeeded on all; the first rank's error is raised on every rank.

    ``build`` must not communicate. Without this, ranks would wait for one that has already failed.
    """
    result, error = None, None
    try:
        result = build()
    except WRONG_SETTINGS as raised:
        error = raised
    failed = next((e for e in world.all_gather_object(error) if e is not None), None)
    if failed is not None:
        raise failed
    return result  # type: ignore[return-value]


def with_vocabulary(run: RunConfig, tokenizer: Tokenizer | None) -> RunConfig:
    """``run`` with the vocabulary size that flags and tokenizer agree on; raises ConfigError where the model's is too small."""
    given = run.model.vocab_size
    if tokenizer is None:
        return run
    if given is not None and given < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {given} is smaller than the {tokenizer.vocab_size} ids of --tokenizer-type {run.tokenizer.tokenizer_type}; "
            f"leave it out, or give at least {tokenizer.vocab_size}."
        )
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=given or tokenizer.vocab_size))


def summary(run: RunConfig, mesh: ParallelMesh, trainer: Trainer) -> str:
    """What the run consists of, in a few lines."""
    from domino_lm.training.trainer import parameter_count, schedule_reason

    model, batch = run.model, trainer.batch_size
    kind = f"{model.normalization}, {'SwiGLU' if model.swiglu else 'GELU'}, {model.position_embedding_type} positions"
    heads = f"{model.num_attention_heads} heads, {model.query_groups} query groups"
    lines = {
        "model": f"{model.num_layers} layers, hidden {model.hidden_size}, {heads}, {kind}, vocabulary {model.vocab_size}",
        "": f"{parameter_count(trainer.stack):,} parameters, {str(trainer.stack.parameters()[0].dtype).removeprefix('torch.')} on {mesh.device.type}",
        "layout": f"{mesh.world.size} rank(s) = {mesh.tp.size} tensor-parallel x {mesh.dp.size} data-parallel",
        "step": f"{batch} sequences x {model.seq_length} = {batch * model.seq_length:,} tokens, "
        f"in {trainer.num_micro_batches} micro-batch(es) of {run.training.micro_batch_size} a replica",
        "data": f"{len(trainer.data.train):,} training samples from {run.data.data_path}",
        "schedule": schedule_reason(run, mesh.tp.size),
    }
    return "\n".join(f"{name:10}{text}" for name, text in lines.items())


def _fail(error: Exception, code: int, alone: bool = False) -> int:
    """Print an error that all ranks have once, or one that this rank has ``alone``; returns the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    if alone or rank == 0:
        print(f"error: {f'rank {rank}: ' if alone and rank else ''}{error}", file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_FOR_RANK_0)
    return code


def show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: object = None, line: str | None = None
) -> None:
    """Warnings as one line, once for all ranks; what only developers can act on stays out."""
    if issubclass(category, DeprecationWarning | FutureWarning):
        return
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"warning: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
