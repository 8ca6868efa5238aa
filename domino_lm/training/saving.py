"""The checkpoints of a run: saved now or beside training, what is said of them, and what a save that fails does to the run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from domino_lm.checkpoint.background import BackgroundSaves
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.owner import TakenError
from domino_lm.checkpoint.retention import Retention
from domino_lm.checkpoint.save_load import save_checkpoint
from domino_lm.checkpoint.source import HasMoments, HasParameters
from domino_lm.config.checkpoint import CheckpointConfig
from domino_lm.parallel.mesh import ParallelMesh


class TrainingError(RuntimeError):
    """A run that cannot continue; the message says why, and what is saved."""


class SaveError(TrainingError):
    """A checkpoint that had to be saved and could not be; the message names the last whole one."""


class Saves:
    """Saves model and optimizer of a run. Every rank holds one and calls the same methods; ``say`` prints a line on rank 0.

    With ``background`` a save is under way until `poll` or `wait` finds that it has ended; there is one at a time.
    """

    def __init__(
        self,
        settings: CheckpointConfig,
        stack: HasParameters,
        optimizer: HasMoments,
        mesh: ParallelMesh,
        run_id: str,
        say: Callable[[str], None],
        background: BackgroundSaves | None = None,
        may_save: Callable[[], None] | None = None,
    ) -> None:
        """``run_id`` and ``may_save`` are those of `save_checkpoint`.

        Raises CheckpointError on all ranks if there is no memory for saves in the background."""
        self._settings, self._stack, self._mesh, self._run_id, self._say = settings, stack, mesh, run_id, say
        self._optimizer = None if settings.no_save_optim else optimizer
        self._background, self._may_save = background, may_save
        if background is not None:
            background.reserve(stack, self._optimizer)
        self._must = False
        self.saved_at: int | None = None
        """Iteration of the last save that succeeded, or of the checkpoint in the same folder that the run was loaded from."""

        self.whole: Path | None = None
        """The last checkpoint that is known to be whole: saved by this run, or loaded."""

        self.loaded: Path | None = None
        self.failure = ""
        """Why the last save failed; empty if it did not."""

    def has(self, iteration: int) -> bool:
        """Whether ``iteration`` is saved by this run, or is being saved."""
        return iteration in (self.saved_at, None if self._background is None else self._background.iteration)

    def save(self, iteration: int, state: dict[str, Any], must: bool) -> None:
        """Save what stands at ``iteration``, once an earlier save has ended; with a background only copied when this returns.

        Raises SaveError on all ranks if it is known to have failed and it ``must`` be saved, or ``--exit-on-save-failure`` is given.
        """
        folder = self._settings.save
        assert folder is not None, "a run that saves has a folder"
        self.wait(iteration)
        self._must = must
        beside = "" if self._background is None else ", written while training goes on"
        self._say(f"saving checkpoint at iteration {iteration:7d} to {folder}{beside}")
        retention = Retention(self._settings.keep_last, self._settings.save_retain_interval, self.loaded)
        try:
            if self._background is not None:
                self._background.begin(folder, iteration, state, self._run_id, retention, self._may_save)
                return
            path = save_checkpoint(
                folder, iteration, self._stack, self._optimizer, state, self._mesh, self._run_id, retention, self._may_save
            )
        except CheckpointError as error:
            self._failed(iteration, iteration, error)
        else:
            self._succeeded(iteration, path)

    def poll(self, now: int) -> None:
        """Take notice of a save under way that has ended; ``now`` is the run's iteration. Raises as `save` does."""
        self._notice(now, lambda background: background.poll())

    def wait(self, now: int) -> None:
        """As `poll` does, once a save under way has ended."""
        self._notice(now, lambda background: background.wait())

    def close(self) -> None:
        """Let a save under way end and say how it did, if the run ends by an error. No collective; call it last."""
        if self._background is None:
            return
        iteration = self._background.iteration
        path = self._background.close()
        if iteration is not None and path is not None:
            self._succeeded(iteration, path)
        elif iteration is not None:
            self._say(f"warning: not saved at iteration {iteration}, {self._last_whole()}")

    def _notice(self, now: int, ended: Callable[[BackgroundSaves], Path | None]) -> None:
        if self._background is None or self._background.iteration is None:
            return
        iteration = self._background.iteration
        try:
            path = ended(self._background)
        except CheckpointError as error:
            self._failed(iteration, now, error)
        else:
            if path is not None:
                self._succeeded(iteration, path)

    def _succeeded(self, iteration: int, path: Path) -> None:
        self._say(f"  successfully saved checkpoint from iteration {iteration:7d} to {self._settings.save}")
        self.saved_at, self.whole, self.failure = iteration, path, ""

    def _failed(self, iteration: int, now: int, error: CheckpointError) -> None:
        if self._must or self._settings.exit_on_save_failure or isinstance(error, TakenError):
            raise SaveError(f"{error} The run ends at iteration {now}; {self._last_whole()}.") from error
        self.failure = f"not saved at iteration {iteration}, {self._last_whole()}: {error}"
        self._say(f"warning: {self.failure} Training goes on, and saves again at the next --save-interval.")

    def _last_whole(self) -> str:
        return f"the last whole checkpoint is {self.whole}" if self.whole is not None else "this run has no whole checkpoint"
