"""The folder of ``--save`` before anything is built: it can be written, belongs to this run alone, and is one for all ranks."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from domino_lm.checkpoint.owner import Applicant, Claim, Refresher, TakenError
from domino_lm.checkpoint.retention import remove_leftovers
from domino_lm.config.settings import ConfigError
from domino_lm.config.toml_file import require_writable
from domino_lm.launch.shared_folder import unshared
from domino_lm.parallel.collectives import Communicator

ATTEMPT_EVERY_S = 1.0
SAY_EVERY_S = 15.0


@contextmanager
def own_folder(
    folder: str | None, world: Communicator, say: Callable[[str], None], lost: Callable[[TakenError], None]
) -> Iterator[Claim | None]:
    """Hold ``folder`` for this run while entered, and give it back then; yields the claim on rank 0, None elsewhere or without a folder.

    All ranks call this. It waits, and tells ``say``, while another run may still be alive there. ``lost`` is called from a
    thread of rank 0 when another run has taken the folder all the same, as it may from one that stood still. Raises ConfigError
    on all ranks if it cannot be written, belongs to a run that is alive, or is not one folder for all of them.
    """
    if folder is None:
        yield None
        return
    claim = _take(folder, world, say)
    if claim is None:
        _refuse_unshared(folder, world)
        yield None
        return
    try:
        with Refresher(claim, lost):
            _refuse_unshared(folder, world)
            yield claim
    finally:
        claim.give_back()


def _take(folder: str, world: Communicator, say: Callable[[str], None]) -> Claim | None:
    """Rank 0 takes the folder while the others wait for it: not for one answer, which could take longer than a collective may."""
    applicant = Applicant(Path(folder), uuid.uuid4().hex) if world.rank == 0 else None
    said_s = -SAY_EVERY_S
    while True:
        claim, message, error = _attempt(folder, applicant) if applicant is not None else (None, "", None)
        taken, error = world.broadcast_object((claim is not None, error))
        if error is not None:
            raise error
        if taken:
            return claim
        if message and time.monotonic() - said_s >= SAY_EVERY_S:
            said_s = time.monotonic()
            say(message)
        time.sleep(ATTEMPT_EVERY_S)


def _attempt(folder: str, applicant: Applicant) -> tuple[Claim | None, str, ConfigError | None]:
    """A claim, or for what to wait, or an error, which the other ranks must learn before any rank raises."""
    try:
        require_writable(folder)
        remove_leftovers(Path(folder))
        found = applicant.attempt()
    except ConfigError as error:
        return None, "", error
    return (None, found, None) if isinstance(found, str) else (found, "", None)


def _refuse_unshared(folder: str, world: Communicator) -> None:
    bad = unshared(folder, world) if world.size > 1 else None
    if bad is not None:
        rank, host, why = bad
        raise ConfigError(
            f"--save {folder} is not one folder for all ranks: rank {rank} on {host} {why}, and a checkpoint has parts of every rank. "
            "Give a folder on storage that all nodes share."
        )
