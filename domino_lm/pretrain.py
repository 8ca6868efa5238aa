"""The program: reads flags, builds the run, trains. Runs under torchrun or as one plain process."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from domino_lm.config.arguments import Command, parse_command
from domino_lm.config.settings import ConfigError, RunConfig
from domino_lm.config.toml_file import config_text, require_writable, save_config
from domino_lm.data.indexed import IndexedDatasetError
from domino_lm.data.indices import DatasetError
from domino_lm.data.splits import sources_of
from domino_lm.data.tokenizers.build import build_tokenizer
from domino_lm.data.tokenizers.tokenizer import Tokenizer, TokenizerError
from domino_lm.launch.backend import backend_faults, has_gpu
from domino_lm.launch.checks import run_faults
from domino_lm.launch.exit_code import EXIT_FAILED_RUN, EXIT_NOT_SAVED, EXIT_WRONG_SETTINGS, forget_exit_code, leave_exit_code
from domino_lm.launch.file_checks import check_files, file_faults
from domino_lm.launch.launcher import Launcher
from domino_lm.launch.rank_facts import setting_facts, source_facts
from domino_lm.launch.summary import RunSummary, changed_settings, foreseen_schedule, plan_of_step
from domino_lm.training.stop import BeforeTraining

if TYPE_CHECKING:
    from domino_lm.checkpoint.owner import Claim, TakenError
    from domino_lm.parallel.board import Board
    from domino_lm.parallel.collectives import Communicator
    from domino_lm.parallel.mesh import ParallelMesh
    from domino_lm.parallel.progress import Progress
    from domino_lm.parallel.rendezvous import Rendezvous
    from domino_lm.training.run_data import RunData
    from domino_lm.training.trainer import Trainer
    from domino_lm.watch.watcher import Watcher

Result = TypeVar("Result")

WRONG_SETTINGS = (ConfigError, DatasetError, IndexedDatasetError, TokenizerError)
GONE = "torchrun, which started this rank, is gone, so the run ends here and saves nothing more."

SECONDS_FOR_RANK_0 = 1.0
"""How long other ranks wait before they leave: torchrun ends all ranks when the first one is gone, and rank 0 has to speak."""

SECONDS_FOR_FIRST_OF_NODE = 5.0
"""The same for the first rank of a node, which may have started later than the others of a busy node."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code. Rank 0 alone prints, each error once."""
    forget_exit_code()
    with BeforeTraining() as before:
        return leave_exit_code(run_command(sys.argv[1:] if argv is None else argv, before))


def run_command(words: Sequence[str], before: BeforeTraining) -> int:
    """As `main`; ``before`` is told when training begins."""
    warnings.showwarning = show_warning
    try:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        command = parse_command(words, model_of_checkpoint, lambda run: run_faults(run, world_size), files_of=file_faults)
        if command.dry_run or command.print_plan:
            return dry_run(command, world_size)
        check_files(command.run)
        if command.run.tokenizer.tokenizer_type and command.run.model.vocab_size is not None:
            with_vocabulary(command.run, build_tokenizer(command.run.tokenizer, command.run.model.vocab_size))
    except WRONG_SETTINGS as error:
        return _fail_before_joining(error, EXIT_WRONG_SETTINGS)
    if command.from_checkpoint and int(os.environ.get("RANK", "0")) == 0:
        print(f"taken from the checkpoint in {command.run.checkpoint.load}: {', '.join(command.from_checkpoint)}", flush=True)
    return train(command.run, command.ignored, before.over)


def model_of_checkpoint(folder: str, iteration: int | None, explicit: Mapping[str, object]) -> dict[str, object] | None:
    """Settings of the model that a checkpoint of any kind holds, as --use-checkpoint-args takes them over; None if there is none.

    Raises ConfigError if it does not say what its model is, or if ``explicit`` settings say another shape.
    """
    from domino_lm.checkpoint.index import CheckpointError
    from domino_lm.checkpoint.same_model import settings_to_take

    try:
        return settings_to_take(folder, iteration, explicit)
    except CheckpointError as error:
        raise ConfigError(f"--use-checkpoint-args: {error}") from error


def dry_run(command: Command, world_size: int) -> int:
    """Say everything about a run on ``world_size`` ranks, from one process, without torch, and without writing anything.

    With ``--print-plan`` alone, print its plan and nothing else. Raises ConfigError if the model lacks the layer to print.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        return 0
    run = command.run
    tokenizer = build_tokenizer(run.tokenizer, run.model.vocab_size) if run.tokenizer.tokenizer_type else None
    run = with_vocabulary(run, tokenizer)
    device = "cuda" if has_gpu() or (run.parallel.distributed_backend == "nccl" and world_size > 1) else "cpu"
    foreseen, candidates = foreseen_schedule(run, world_size)
    plan = plan_of_step(foreseen, world_size, device, command.plan_layer) if command.print_plan else ""
    if not command.dry_run:
        print(plan)
        return 0
    print(config_text(run))
    print(RunSummary(foreseen, world_size, device, str(sources_of(run.data)), command.ignored))
    for line in [candidates, plan, *(f"missing   {fault}" for fault in [*backend_faults(run, world_size), *file_faults(run)])]:
        if line:
            print(line)
    print("dry run: nothing was started and nothing written")
    return 0


def train(run: RunConfig, ignored: Sequence[str] = (), begins: Callable[[], None] = lambda: None) -> int:
    """Join the other ranks, take the folder of ``--save``, and train; returns the exit code.

    ``ignored`` flags are listed; ``begins`` is called before the first step.
    """
    with Launcher(_leave_without_launcher) as launcher:
        from domino_lm.parallel.agreement import DisagreementError  # from here on torch is there, which takes seconds to load
        from domino_lm.parallel.mesh import MissingBackendError, ParallelMesh
        from domino_lm.training.save_folder import own_folder

        try:
            boards: list[Board] = []
            joined = ParallelMesh.create(run.parallel, kernels=run.kernels, met=lambda rendezvous: boards.append(meet(run, rendezvous)))
        except DisagreementError as error:
            return _fail(error, EXIT_WRONG_SETTINGS)
        except MissingBackendError as error:  # nodes may differ: the first rank of each that cannot says so
            return _fail(error, EXIT_WRONG_SETTINGS, alone=int(os.environ.get("LOCAL_RANK", "0")) == error.first_local_rank)
        except ConfigError as error:  # an environment variable, which may differ between nodes
            return _fail(error, EXIT_WRONG_SETTINGS, alone=os.environ.get("LOCAL_RANK", "0") == "0")
        except (RuntimeError, ValueError) as error:  # gloo's own are RuntimeError, with frames of C++ below the first line
            world, minutes = os.environ.get("WORLD_SIZE", "1"), run.parallel.distributed_timeout_minutes
            reason = ConfigError(
                f"not all of the {world} ranks that WORLD_SIZE names have joined (--distributed-timeout-minutes {minutes}): {str(error).partition(chr(10))[0]} "
                f"Start {world} processes, best with torchrun, each with its own RANK and the same MASTER_ADDR and MASTER_PORT."
            )
            return _fail(reason, EXIT_FAILED_RUN, alone=True)
        folder = None if run.training.skip_train else run.checkpoint.save
        with joined as mesh:
            try:
                with own_folder(folder, mesh.world, _say, _stop_without_folder) as claim, watching(run, boards) as watcher:
                    return train_on(run, mesh, ignored, claim, lambda: require_own(claim, launcher), begins, watcher)
            except ConfigError as error:
                return _fail(error, EXIT_WRONG_SETTINGS)


def meet(run: RunConfig, rendezvous: Rendezvous) -> Board:
    """Compare what the ranks must have alike, and make the board on which each notes what it does. Raises DisagreementError on all ranks."""
    from domino_lm.parallel.board import Board

    require_same_run(run, rendezvous.all_gather_text)
    return Board.join(rendezvous)


@contextmanager
def watching(run: RunConfig, boards: Sequence[Board]) -> Iterator[Watcher | None]:
    """Watch the ranks while entered, if there are several; an exception that leaves it is told once for the job and ends all of them."""
    from domino_lm.watch.hang_timeout import HangTimeout
    from domino_lm.watch.watcher import Watcher

    if not boards:
        yield None
        return
    with Watcher(boards[0], HangTimeout.of(run.parallel, boards[0].apart)) as watcher:
        try:
            yield watcher
        except Exception as error:
            watcher.fail(error)


def train_on(
    run: RunConfig,
    mesh: ParallelMesh,
    ignored: Sequence[str],
    claim: Claim | None,
    may_save: Callable[[], None],
    begins: Callable[[], None],
    watcher: Watcher | None = None,
) -> int:
    """As `train`, on the ranks of ``mesh``. ``may_save`` is that of `Trainer`."""
    from domino_lm.checkpoint.index import CheckpointError
    from domino_lm.training.saving import SaveError, TrainingError

    try:
        trainer = build_trainer(run, mesh, ignored, claim, may_save, watcher.progress if watcher else None)
        if watcher is not None:
            watcher.named = trainer.executor.named
    except WRONG_SETTINGS as error:
        return _fail(error, EXIT_WRONG_SETTINGS)
    except CheckpointError as error:
        return _fail(error, EXIT_FAILED_RUN)
    begins()
    try:
        trainer.console(str(trainer.fit()))
    except SaveError as error:
        return _fail(error, EXIT_NOT_SAVED)
    except (CheckpointError, TrainingError) as error:
        return _fail(error, EXIT_FAILED_RUN)
    except WRONG_SETTINGS as error:  # data that one rank cannot read: the others cannot know
        if watcher is not None:
            watcher.fail(error, f"error: rank {mesh.world.rank}: {error}")
        return _fail(error, EXIT_FAILED_RUN, alone=True)
    return 0


def require_own(claim: Claim | None, launcher: Launcher) -> None:
    """Raise TakenError if nothing may be saved any more: another run has the folder, or none that anybody waits for is left."""
    from domino_lm.checkpoint.owner import TakenError

    if launcher.is_gone:
        raise TakenError(GONE)
    if claim is not None:
        claim.require()


def build_trainer(
    run: RunConfig,
    mesh: ParallelMesh,
    ignored: Sequence[str] = (),
    claim: Claim | None = None,
    may_save: Callable[[], None] | None = None,
    progress: Progress | None = None,
) -> Trainer:
    """Tokenizer, data, model and trainer, resumed if ``--load`` says so; rank 0 prints what was built."""
    from domino_lm.checkpoint.background import BackgroundSaves
    from domino_lm.checkpoint.same_model import with_gelu_of_checkpoint
    from domino_lm.launch.auto_schedule import settle_schedule
    from domino_lm.model.build import build_stack
    from domino_lm.model.kernels.backends import choose_kernels, install_kernels
    from domino_lm.model.parameter import dtype_of
    from domino_lm.parallel.agreement import Alike, require_agreement
    from domino_lm.training.trainer import Trainer

    dump = run.logging.dump_on_nan
    if dump is not None:
        together(mesh.world, lambda: require_writable(dump, "--dump-on-nan"))
    # Early, since their process takes seconds to start.
    background = BackgroundSaves(mesh, claim) if run.checkpoint.saves_beside and not run.training.skip_train else None
    run, data, tokenizer = build_data(run, mesh)
    run, kept = with_gelu_of_checkpoint(run)
    run, candidates = settle_schedule(run, mesh)
    require_agreement(mesh.world.all_gather_object, [Alike(setting_facts(run), "name a --load that is the same folder on all nodes")])
    stack = build_stack(run.model, mesh.tp, run.training.seed, dtype_of(run.precision.params_dtype), mesh.device)
    chosen = together(mesh.world, lambda: choose_kernels(run.kernels, mesh.device, stack.embedding.weight.dtype, run.model.hidden_size))
    install_kernels(stack, chosen)
    identity = tokenizer.identity() if tokenizer else None
    run_id = claim.run_id if claim else ""
    trainer = Trainer(
        run,
        mesh,
        stack,
        data,
        tokenizer_identity=identity,
        run_id=run_id,
        may_save=may_save,
        background=background,
        progress=progress,
    )
    trainer.console("\n".join(filter(None, [summary(run, mesh, trainer, ignored), candidates, kept])))
    trainer.load()
    folder = run.checkpoint.save
    if folder is not None:
        together(mesh.world, lambda: save_config(run, folder) if mesh.world.rank == 0 else None)
    return trainer


def build_data(run: RunConfig, mesh: ParallelMesh) -> tuple[RunConfig, RunData, Tokenizer | None]:
    """Tokenizer and data sets, and ``run`` with the vocabulary that they settle. Raises one of WRONG_SETTINGS on every rank."""
    from domino_lm.parallel.agreement import Alike, require_agreement
    from domino_lm.training.run_data import RunData

    tokenizer = together(mesh.world, lambda: build_tokenizer(run.tokenizer, run.model.vocab_size) if run.tokenizer.tokenizer_type else None)
    if tokenizer is not None:
        files = {f"the tokenizer's {name}": value for name, value in tokenizer.identity().items()}
        require_agreement(mesh.world.all_gather_object, [Alike(files, "copy the same tokenizer to all nodes")])
    run = with_vocabulary(run, tokenizer)
    data = together(mesh.world, lambda: RunData.build(run, tokenizer, mesh))
    for kind in together(mesh.world, data.alike):  # the files before the order that follows from them
        require_agreement(mesh.world.all_gather_object, [kind])
    return run, data, tokenizer


def require_same_run(run: RunConfig, gather: Callable[[str], list[str]]) -> None:
    """Raise DisagreementError, on every rank, if ranks have other settings, another PyTorch or another program; ``gather`` gives every rank's text."""
    import torch

    from domino_lm.parallel.agreement import Alike, require_agreement

    kinds = [
        Alike(setting_facts(run), "start every rank with the same flags"),
        Alike({"PyTorch": torch.__version__}, "install the same version on all nodes"),
        Alike(source_facts(run.model.model), "put the same program on all nodes"),
    ]
    require_agreement(gather, kinds)


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
    """``run`` with the vocabulary size that flags and tokenizer agree on; raises ConfigError if the model's is too small."""
    given = run.model.vocab_size
    if tokenizer is None:
        return run
    if run.tokenizer.tokenizer_type == "NullTokenizer":
        given = None  # it was made from --vocab-size, and may have an id more
    if given is not None and given < tokenizer.vocab_size:
        raise ConfigError(
            f"--vocab-size {given} is smaller than the {tokenizer.vocab_size} ids of --tokenizer-type {run.tokenizer.tokenizer_type}; "
            f"leave it out, or give at least {tokenizer.vocab_size}."
        )
    return dataclasses.replace(run, model=dataclasses.replace(run.model, vocab_size=given or tokenizer.vocab_size))


def summary(run: RunConfig, mesh: ParallelMesh, trainer: Trainer, ignored: Sequence[str]) -> str:
    """What the run consists of, and which of its settings are not at their defaults."""
    from domino_lm.watch.watch import mfu_basis

    told = RunSummary(run, mesh.world.size, mesh.device.type, trainer.data.describe(), ignored)
    kernels = trainer.stack.embedding.kernels.description
    return f"{told}\n{'kernels':10}{kernels}\n{'speed':10}{mfu_basis(run, mesh.device)}\nsettings that are not at their defaults:\n{changed_settings(run)}"


def _say(line: str) -> None:
    print(line, flush=True)


def _leave_without_launcher() -> None:
    """End this process from any thread, once for the node in words. What it was saving stays unfinished, and nobody takes it for whole."""
    try:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"error: {GONE}", file=sys.stderr, flush=True)
    finally:
        os._exit(leave_exit_code(EXIT_FAILED_RUN))


def _stop_without_folder(error: TakenError) -> None:
    """Have all ranks stop at the step's edge, where the last save will raise ``error`` again."""
    print(f"warning: {error}; stopping", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _fail(error: Exception, code: int, alone: bool = False) -> int:
    """Print an error that all ranks have once, or one that this rank has ``alone``; returns the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    if alone or rank == 0:
        print(f"error: {f'rank {rank}: ' if alone and rank else ''}{error}", file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_FOR_RANK_0)
    return code


def _fail_before_joining(error: Exception, code: int) -> int:
    """Print an error that other ranks may have too; returns the exit code. Rank 0 is first, and torchrun then ends the others of its node.

    Those that still run after a while have other flags or files than rank 0, or are on another node: the first one there speaks.
    """
    rank, of_node = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    time.sleep(SECONDS_FOR_FIRST_OF_NODE + of_node / 2 if of_node else SECONDS_FOR_RANK_0 if rank else 0)
    return _fail(error, code, alone=True)


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
