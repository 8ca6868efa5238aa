"""Folders that two runs want, disks that are full, and logs that cannot be written."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from pathlib import Path
from unittest import mock

from domino_lm.checkpoint import owner
from domino_lm.training import save_folder, saving, trainer
from tests.chaos.campaign import Fault
from tests.chaos.rig import STEPS, Rig, forked, read_until, rest_of
from tests.full_disk import files_of_at_most


def two_starts(rig: Rig, rng: random.Random) -> None:
    """Two jobs begin in one folder: one trains to its end, the other is refused, or goes on from what the first has left."""
    save = rig.work / "save"
    first = rig.start(save)
    time.sleep(rng.uniform(0, 1))
    second = rig.start(save)
    texts = [rest_of(process) for process in (first, second)]
    codes = sorted([first.returncode, second.returncode])
    assert codes in ([0, 0], [0, 2]), texts
    if codes == [0, 2]:
        assert sum("which is running" in error for _, error in texts) == 1, texts
    else:
        assert sum(out.count("saving checkpoint at iteration") for out, _ in texts) == STEPS // 2, "both saved"
    rig.require_end(save)


def taken_from_one_that_stood_still(rig: Rig, rng: random.Random) -> None:
    """A run is stopped for longer than its record lives; another takes the folder; the first wakes, saves nothing and fails."""
    save = rig.work / "save"
    quick = [mock.patch.object(owner, "STALE_S", 1.5), mock.patch.object(save_folder, "ATTEMPT_EVERY_S", 0.1)]
    first = rig.start(save, more="--train-iters 100000")
    for _ in range(rng.randint(1, 4)):
        read_until(first, "successfully saved")
    os.kill(first.pid, signal.SIGSTOP)
    with quick[0], quick[1]:
        last = int((save / "latest_checkpointed_iteration.txt").read_text())
        end = max(STEPS, last + 2)
        code, text = rig.train(save, more=f"--train-iters {end} --override-opt-param-scheduler")
        assert code == 0, text
        # The other has ended; so that the first finds the folder taken, a record of one that has not is put there.
        record = owner.Claim(save, "another")
        assert record.take(9)
    os.kill(first.pid, signal.SIGCONT)
    _, error = rest_of(first)
    assert first.returncode == 3, error
    assert "has been taken by run another" in error, error
    assert (save / "latest_checkpointed_iteration.txt").read_text() == str(end)


def disk_full_at_a_save(rig: Rig, rng: random.Random, last: bool) -> None:
    """The disk is full while a checkpoint is written: training goes on and the next save is whole; if it was the last one, the run fails."""
    save, fails = rig.work / "save", {STEPS} if last else set(rng.sample(range(2, STEPS, 2), rng.randint(1, 4)))
    room = rng.choice([0, rng.randint(1, 300_000)])
    real = saving.save_checkpoint

    def limited(folder: str, iteration: int, *rest: object) -> Path:
        if iteration not in fails:
            return real(folder, iteration, *rest)  # type: ignore[arg-type]
        with files_of_at_most(room):
            return real(folder, iteration, *rest)  # type: ignore[arg-type]

    with mock.patch.object(saving, "save_checkpoint", limited):
        code, text = rig.train(save)
    rig.require_whole(save)
    if last:
        assert code == 3, text
        assert f"the last whole checkpoint is {save}/iter_{STEPS - 2:07d}" in text, text
        assert rig.load(save).digest == rig.state_at(STEPS - 2)
        return
    assert code == 0, text
    assert all(f"not saved at iteration {iteration}," in text for iteration in fails), text
    rig.require_end(save)


def disk_full_under_logs(rig: Rig, rng: random.Random) -> None:
    """Logs fill their disk: one warning for each, and the run ends as if nothing had been."""
    save, logs = rig.work / "save", rig.work / "logs"
    room = rng.choice([0, rng.randint(1, 20_000)])
    real = saving.save_checkpoint

    def unlimited(*rest: object) -> Path:
        with files_of_at_most(-1):
            return real(*rest)  # type: ignore[arg-type]

    def run() -> tuple[int, str]:
        begun = trainer.Trainer.fit

        def fit(own: trainer.Trainer) -> object:
            with files_of_at_most(room):
                return begun(own)

        with mock.patch.object(saving, "save_checkpoint", unlimited), mock.patch.object(trainer.Trainer, "fit", fit):
            return rig.train(save, more=f"--tensorboard-dir {logs} --metrics-file {logs}/metrics.jsonl")

    ((code, text),) = forked([run])
    assert code == 0, text
    assert "Traceback" not in text, text
    assert text.count("training goes on without") <= 2, text
    assert not [path for path in logs.rglob("*") if "tmp" in path.name], "half-made files stayed"
    rig.require_end(save)


FAULTS = [
    Fault("two jobs that begin in one folder", 4, two_starts),
    Fault("a job that stood still while another took its folder", 2, taken_from_one_that_stood_still),
    Fault("a full disk at a save", 12, partial(disk_full_at_a_save, last=False)),
    Fault("a full disk at the last save", 4, partial(disk_full_at_a_save, last=True)),
    Fault("a full disk under the logs", 6, disk_full_under_logs),
]
