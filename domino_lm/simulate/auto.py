"""Chooses a schedule: simulates the candidates on this machine's measured costs and takes the fastest that fits.

Imports no torch; the measuring is `calibrate`'s.
"""

from dataclasses import dataclass, replace

from domino_lm.config.settings import ConfigError, ScheduleConfig
from domino_lm.schedule.cuts import resolve_cut
from domino_lm.simulate.predict import CUTS, Prediction, Setting, obstacle, predict

LATENCY_BOUND = 0.75
"""A collective is latency-bound if a piece of it takes more than this share of the whole one's time: cutting it in
two would then make it take one and a half times as long in all."""

NO_FASTER = 1.02
"""Candidates predicted within a fiftieth of the fastest count as equally fast, since predictions miss by more; the least cut one is taken."""

CHOSEN = ("schedule", "domino_row_slices", "domino_row_dim", "domino_column_slices", "domino_pair")
"""Settings that are chosen; all others stay as they were asked for."""


@dataclass(frozen=True)
class Candidate:
    """One schedule, and its prediction or why it has none."""

    name: str
    schedule: ScheduleConfig
    prediction: Prediction | None = None
    refused: str = ""
    """Why it was not simulated, or does not fit."""


@dataclass(frozen=True)
class Choice:
    """The schedule that runs, and all that were considered."""

    chosen: Candidate
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        """A table of the candidates, fastest first."""
        width = max(len(candidate.name) for candidate in self.candidates)
        ran = sorted((c for c in self.candidates if c.prediction is not None), key=lambda c: _step_s(c))
        lines = [f"{'schedule':{width}}  {'step ms':>9} {'exposed F':>9} {'exposed B':>9} {'memory GB':>9}"]
        for candidate in ran:
            prediction = candidate.prediction
            assert prediction is not None
            exposed = " ".join(f"{1e3 * prediction.exposed_s(phase):9.2f}" for phase in "FB")
            mark = "  <- taken" if candidate is self.chosen else f"  {candidate.refused}"
            lines.append(
                f"{candidate.name:{width}}  {1e3 * prediction.step_s:9.2f} {exposed} {prediction.memory.total / 1e9:9.2f}{mark}".rstrip()
            )
        lines += [f"{candidate.name:{width}}  not tried: {candidate.refused}" for candidate in self.candidates if not candidate.prediction]
        return "\n".join(lines)


def choose(setting: Setting, asked: ScheduleConfig, memory_bytes: float | None = None) -> Choice:
    """The fastest candidate for ``setting``, of equally fast ones the least cut, whose memory stays under ``memory_bytes``, by default the device's.

    ``asked`` keeps its sequence parallelism, recompute and bucket settings; its cuts are what is chosen. Deterministic:
    ranks that give the same arguments choose the same. Raises ConfigError if nothing fits.
    """
    limit = setting.hardware.device.memory_bytes if memory_bytes is None else memory_bytes
    candidates = []
    for name, cut in CUTS.items():
        schedule = replace(asked, **{field: getattr(cut, field) for field in CHOSEN})
        candidate = Candidate(name, schedule, refused=_obstacle(setting, schedule))
        if not candidate.refused:
            prediction = predict(setting, schedule)
            over = "" if prediction.memory.total <= limit else f"over the limit of {limit / 1e9:.2f} GB"
            candidate = replace(candidate, prediction=prediction, refused=over)
        candidates.append(candidate)
    fitting = [candidate for candidate in candidates if candidate.prediction is not None and not candidate.refused]
    if not fitting:
        if all(candidate.prediction is None for candidate in candidates):
            raise ConfigError(f"--schedule auto: {candidates[0].refused}.")
        least = min(c.prediction.memory.total for c in candidates if c.prediction is not None)
        raise ConfigError(
            f"--schedule auto: every schedule needs more than the {limit / 1e9:.2f} GB of one rank, the smallest {least / 1e9:.2f} GB; "
            "lower --micro-batch-size, raise --tensor-model-parallel-size, or give --recompute-granularity."
        )
    within_s = NO_FASTER * min(map(_step_s, fitting))
    as_fast = [candidate for candidate in fitting if _step_s(candidate) <= within_s]
    return Choice(min(as_fast, key=lambda candidate: resolve_cut(candidate.schedule, setting.uncut).pieces), tuple(candidates))


def _obstacle(setting: Setting, schedule: ScheduleConfig) -> str:
    """Why a candidate cannot run here, or should not be tried; empty if it should."""
    if found := obstacle(setting, schedule):
        return found
    pieces = resolve_cut(schedule, setting.uncut).pieces
    if pieces > 1 and setting.tensor_parallel == 1:
        return "one tensor-parallel rank has nothing to hide"
    if schedule.domino_column_slices > 1 and schedule.sequence_parallel:
        return "columns hide nothing of the gathers of sequence parallelism"
    return _latency_bound(setting, pieces)


def _latency_bound(setting: Setting, pieces: int) -> str:
    """Cutting a collective pays only while a smaller one is faster, by this machine's own figures."""
    hardware, model = setting.hardware, setting.model
    size_bytes = float(setting.micro_batch_size * model.seq_length * model.hidden_size * hardware.element_bytes)
    group, _ = hardware.fabric.groups(setting.tensor_parallel, setting.data_parallel)
    half, whole = (hardware.fabric.transfer("all_reduce", size_bytes / part, group).seconds for part in (pieces, max(1, pieces // 2)))
    if pieces > 1 and half > LATENCY_BOUND * whole:
        return f"an all-reduce of {size_bytes / pieces / 1024:.0f} KiB is latency-bound: {1e6 * half:.0f} us against {1e6 * whole:.0f} us uncut"
    return ""


def _step_s(candidate: Candidate) -> float:
    assert candidate.prediction is not None
    return candidate.prediction.step_s
