"""What the process beside a rank does for a save: writes the rank's files, and beside rank 0 publishes once all ranks' are whole.

::

    iter_0000020.tmp-<id>/.written_<rank>    this rank's files are whole: their hashes, and where in them what lies

These marks are how the processes of all ranks know of each other: they share nothing but the folder. They go before the folder
gets its name.
"""

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NamedTuple

from domino_lm.checkpoint.agreement import attempt
from domino_lm.checkpoint.index import METADATA_FILE, CheckpointError
from domino_lm.checkpoint.manifest import Manifest, StoredFiles
from domino_lm.checkpoint.owner import Claim
from domino_lm.checkpoint.publish import write_synced
from domino_lm.checkpoint.retention import Retention
from domino_lm.checkpoint.save_load import complete_and_publish, tidy
from domino_lm.checkpoint.shared_copy import Place, SharedCopy
from domino_lm.checkpoint.writing import WritePlan, Written, write_files, write_index

_LOOK_S = 0.02
_GRACE_S = 10.0

Word = Literal["abandon", "hurry"]
"""To a process that waits for other ranks' files: that they will not come; that they may not come."""


class AbandonedError(CheckpointError):
    """A save that another rank's failure ended."""


class Publication(NamedTuple):
    """What rank 0 adds to all ranks' files."""

    final: Path
    world: int
    record: str
    retention: Retention
    claim: Claim | None

    def require_own(self) -> None:
        """Raise TakenError if another run has the folder now."""
        if self.claim is not None:
            self.claim.require()


class Job(NamedTuple):
    """One save, as the process beside a rank is told of it; the tensors lie in the memory that it shares."""

    unfinished: Path
    plan: WritePlan
    places: Sequence[Place]
    manifest: Manifest
    """Without files."""

    read_back: bool
    publication: Publication | None
    """On rank 0 alone."""


class Outcome(NamedTuple):
    """How a job ended."""

    failure: CheckpointError | None
    warnings: Sequence[str] = ()


def serve(connection: Connection, memory: int) -> None:
    """Do one job after the other until the connection ends, or ``None`` comes over it."""
    copy: SharedCopy | None = None
    try:
        while (job := connection.recv()) is not None:
            if not isinstance(job, Job):
                continue  # a word that came too late
            copy = copy or SharedCopy(memory, job.places)
            connection.send(outcome_of(job, copy, connection))
    except EOFError:
        pass


def outcome_of(job: Job, copy: SharedCopy, connection: Connection) -> Outcome:
    """Do a job; its errors and warnings are told and not raised."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        _, failure = attempt(partial(_do, job, copy, connection))
    return Outcome(failure, [str(one.message) for one in caught if one.category is UserWarning])


def _do(job: Job, copy: SharedCopy, connection: Connection) -> None:
    written = write_files(job.unfinished, job.plan, [tensor.detach for tensor in copy.tensors])
    if job.read_back:
        files = StoredFiles(job.unfinished, manifest=replace(job.manifest, files=written.files))
        for name in written.files:
            files.check(name)
    if job.publication is None:
        _leave_mark(job.unfinished, job.plan.rank, written)
    else:
        others = _marks_of_others(job.unfinished, job.publication.world, connection)
        _publish(job, job.publication, [written, *others])


def _mark(folder: Path, rank: int) -> Path:
    return folder / f".written_{rank}"


def _leave_mark(folder: Path, rank: int, written: Written) -> None:
    """Say that a rank's files are whole; the mark appears whole too."""
    begun = folder / f".writing_{rank}"
    write_synced(begun, written.content())
    os.replace(begun, _mark(folder, rank))


def _marks_of_others(folder: Path, world: int, connection: Connection) -> list[Written]:
    """Wait until the files of ranks 1 and up are whole. Raises AbandonedError if they will not be."""
    missing, deadline_s = list(range(1, world)), float("inf")
    while missing := [rank for rank in missing if not _mark(folder, rank).exists()]:
        if connection.poll(_LOOK_S):
            if connection.recv() != "hurry":
                raise AbandonedError(f"rank {missing[0]} did not write its files")
            deadline_s = time.monotonic() + _GRACE_S
        if time.monotonic() > deadline_s:
            raise AbandonedError(f"rank {missing[0]} did not write its files within {_GRACE_S:.0f} s of rank 0")
    return [Written.read(_mark(folder, rank).read_bytes()) for rank in range(1, world)]


def _publish(job: Job, publication: Publication, written: Sequence[Written]) -> None:
    """Add the index, the manifest and all else, give the folder its name, and move the tracker."""
    for rank in range(1, publication.world):
        _mark(job.unfinished, rank).unlink()
    files = {name: hashes for one in written for name, hashes in one.files.items()}
    files[METADATA_FILE] = write_index(job.unfinished, job.plan, written)
    manifest = replace(job.manifest, files=files)
    complete_and_publish(job.unfinished, publication.final, manifest, publication.record, publication.require_own)
    if job.read_back:
        tidy(publication.final.parent, manifest.iteration, publication.retention, publication.require_own)
