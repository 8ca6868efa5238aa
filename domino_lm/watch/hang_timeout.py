"""How long a rank may stand still before the job ends: given, or taken from the run's own step times."""

from dataclasses import dataclass

from domino_lm.config.settings import ParallelConfig
from domino_lm.parallel.progress import Cell, Cells, Stage

FIRST_STEPS = 2
"""Steps that allocate, compile and warm up."""

LEAST_S = 30.0
LEAST_BETWEEN_NODES_S = 180.0
"""A job of several nodes outlives a link that is cut for a minute or two."""

STEPS = 10
"""Without a setting: so many of the longest of the last steps, but LEAST_S at least."""

GENEROSITY = 10
"""How much longer what has no ops may take (building, an evaluation, a save, the first steps), if a time is given."""

SHARE_OF_COLLECTIVES = 0.9
"""A watcher has to speak before collectives give up by themselves."""

IN_STEPS = (Stage.DATA, Stage.STEP, Stage.EDGE)


@dataclass(frozen=True)
class HangTimeout:
    """``seconds`` as ``--hang-timeout-seconds`` gives them; never more than nearly ``collectives_s``, ``collectives_after_start_s`` after the first steps."""

    seconds: float | None
    collectives_s: float
    collectives_after_start_s: float
    least_s: float = LEAST_S

    @classmethod
    def of(cls, parallel: ParallelConfig, several_nodes: bool = False) -> "HangTimeout":
        """From the settings of a run."""
        whole = parallel.distributed_timeout_minutes * 60.0
        after_start = parallel.distributed_timeout_seconds_after_init or whole
        return cls(parallel.hang_timeout_seconds, whole, after_start, LEAST_BETWEEN_NODES_S if several_nodes else LEAST_S)

    def silent_s(self, cells: Cells) -> float:
        """How long the process of a rank at ``cells`` may show no sign of life."""
        return self.still_s(cells, in_step=True)

    def still_s(self, cells: Cells, in_step: bool | None = None) -> float:
        """How long the main thread of a rank at ``cells`` may not move; an op of a step has less time than a stage without ops."""
        begun = cells[Cell.STEPS_DONE] >= FIRST_STEPS
        in_step = cells[Cell.STAGE] in IN_STEPS if in_step is None else in_step
        bound = SHARE_OF_COLLECTIVES * (self.collectives_after_start_s if begun else self.collectives_s)
        if self.seconds is not None:
            return min(bound, self.seconds * (1 if begun and in_step else GENEROSITY))
        return min(bound, max(self.least_s, STEPS * cells[Cell.LONGEST_STEP_MS] / 1e3)) if begun and in_step else bound

    def __str__(self) -> str:
        if self.seconds is not None:
            return f"--hang-timeout-seconds {self.seconds:g}"
        return f"--hang-timeout-seconds is not given: {STEPS} times the longest of the last steps, at least {self.least_s:g} s"
