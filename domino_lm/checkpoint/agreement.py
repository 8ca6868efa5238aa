"""Doing a part of saving or loading on one rank or on all, so that a failure of any is an error of every one."""

from collections.abc import Callable
from typing import TypeVar, cast

from domino_lm.checkpoint.index import CheckpointError, DamagedError
from domino_lm.parallel.collectives import Communicator

Result = TypeVar("Result")


def attempt(action: Callable[[], Result]) -> tuple[Result | None, CheckpointError | None]:
    """The result of ``action``, or its error, which the other ranks must learn before any rank raises."""
    try:
        return action(), None
    except CheckpointError as error:
        return None, type(error)(str(error))
    except OSError as error:
        return None, CheckpointError(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except Exception as error:
        return None, CheckpointError(f"{type(error).__name__}: {error}")


def on_first_rank(world: Communicator, action: Callable[[], Result]) -> Result:
    """Run ``action`` on rank 0; every rank gets its result, or raises its failure, a CheckpointError."""
    result, failure = world.broadcast_object(attempt(action) if world.rank == 0 else None)
    if failure is not None:
        raise failure
    return cast(Result, result)


def on_every_rank(world: Communicator, action: Callable[[], Result]) -> Result:
    """Run ``action`` everywhere; if it failed on any rank, every rank raises `first_failure`."""
    result, failure = attempt(action)
    failed = first_failure(world.all_gather_object(failure))
    if failed is not None:
        raise failed
    return cast(Result, result)


def first_failure(failures: list[CheckpointError | None]) -> CheckpointError | None:
    """The first rank's error, naming the rank if there are several; one that no other checkpoint mends comes before damage."""
    found = [(rank, error) for rank, error in enumerate(failures) if error is not None]
    for rank, error in sorted(found, key=lambda failed: isinstance(failed[1], DamagedError)):
        return type(error)(str(error) if len(failures) == 1 else f"{error} (rank {rank})")
    return None
