"""A whole training step predicted: schedules by name, simulated, and what a person wants to know of them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Self

from domino_lm.config.batch_plan import data_parallel_size, global_batch_size
from domino_lm.config.presets import PRESETS
from domino_lm.config.settings import ModelConfig, RunConfig, ScheduleConfig
from domino_lm.model.families.lookup import family_of
from domino_lm.model.shapes import PartShape
from domino_lm.schedule.cuts import Uncut, cut_faults, resolve_cut
from domino_lm.schedule.ops import TP_LINK
from domino_lm.schedule.passes import serialize, steady_state, step_templates
from domino_lm.schedule.plan import Plan
from domino_lm.schedule.step import Gradient, step_plan
from domino_lm.simulate.costs import Shapes, model_parts, shapes_of
from domino_lm.simulate.hardware import Hardware
from domino_lm.simulate.matrix_updates import MatrixUpdates, parts_with_matrices
from domino_lm.simulate.memory import Memory, memory_of
from domino_lm.simulate.simulator import Simulation, simulate

VOCABULARIES = {"llama2": 32000, "debug-llama": 32000, "llama3": 128256}
DEFAULT_VOCAB_SIZE = 50257
"""GPT-2's, for models of no family that has its own."""


def vocabulary_of(preset: str) -> int:
    """True vocabulary of a named model's tokenizer, which presets leave open."""
    return next((size for family, size in VOCABULARIES.items() if preset.startswith(family)), DEFAULT_VOCAB_SIZE)


def named_model(preset: str, **changes: Any) -> ModelConfig:
    """A named model as a prediction needs it; ``changes`` are further fields."""
    return ModelConfig(**{"vocab_size": vocabulary_of(preset), **PRESETS[preset], **changes})


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained on what."""

    model: ModelConfig
    hardware: Hardware
    tensor_parallel: int
    data_parallel: int = 1
    micro_batch_size: int = 1
    micro_batches: int = 1
    """Micro-batches of one step on each rank."""

    masked: bool = False
    """Whether samples have attention masks (--reset-attention-mask)."""
    matrices: MatrixUpdates | None = None
    """How the optimizer updates whole matrices; None: it does not."""

    @classmethod
    def of(cls, run: RunConfig, world_size: int, hardware: Hardware) -> Self:
        """``run`` on ``world_size`` devices of ``hardware``, its largest batch if batches grow."""
        replicas, size = data_parallel_size(run, world_size), run.training.micro_batch_size
        return cls(
            model=run.model,
            hardware=hardware,
            tensor_parallel=run.parallel.tensor_model_parallel_size,
            data_parallel=replicas,
            micro_batch_size=size,
            micro_batches=global_batch_size(run, world_size) // (size * replicas),
            masked=run.data.reset_attention_mask,
            matrices=MatrixUpdates.of(run.optimizer),
        )

    @property
    def uncut(self) -> Uncut:
        """A micro-batch on one rank."""
        return Uncut(self.micro_batch_size, self.model.seq_length, self.model.hidden_size, self.tensor_parallel)

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.model.seq_length * self.micro_batch_size * self.micro_batches * self.data_parallel

    @property
    def devices(self) -> int:
        """All ranks."""
        return self.tensor_parallel * self.data_parallel


def sliced(rows: int = 1, cols: int = 1, **settings: Any) -> ScheduleConfig:
    """``rows`` x ``cols`` slices, rows along the batch, under further settings."""
    along = {"domino_row_dim": "batch"} if rows > 1 else {}
    values: dict[str, Any] = {"schedule": "domino", "domino_row_slices": rows, "domino_column_slices": cols, **along, **settings}
    return ScheduleConfig(**values)


BASELINE = ScheduleConfig(schedule="baseline")
CUTS: dict[str, ScheduleConfig] = {
    "baseline": BASELINE,
    "columns 2": sliced(1, 2),
    "columns 4": sliced(1, 4),
    "rows 2": sliced(2),
    "rows 3": sliced(3),
    "rows 4": sliced(4),
    "sequence rows 2": sliced(2, domino_row_dim="sequence"),
    "sequence rows 4": sliced(4, domino_row_dim="sequence"),
    "paired": sliced(1, domino_pair="micro-batches"),
    "2 x 2": sliced(2, 2),
    "row groups": sliced(4, domino_pair="row-groups"),
    "rows 2, paired": sliced(2, domino_pair="micro-batches"),
    "sequence rows 2, paired": sliced(2, domino_row_dim="sequence", domino_pair="micro-batches"),
}
"""Candidates of ``--schedule auto``. The uncut order comes first, so that a tie goes to it."""

SCHEDULES: dict[str, ScheduleConfig] = {
    **CUTS,
    "rows 2, wgrad deferred": sliced(2, domino_defer_wgrad=True),
    "baseline, sequence parallel": sliced(1, sequence_parallel=True),
    "rows 2, sequence parallel": sliced(2, sequence_parallel=True),
    "rows 2, recompute full": sliced(2, recompute_granularity="full"),
}
"""What ``--compare`` compares, beside a step that waits for each collective where it starts."""


def obstacle(setting: Setting, schedule: ScheduleConfig) -> str:
    """Why ``schedule`` cannot run, or has nothing to pair; empty if it can."""
    for fault in cut_faults(schedule, setting.uncut):
        return fault.split(";")[0]
    return "a step has one micro-batch" if schedule.domino_pair == "micro-batches" and setting.micro_batches < 2 else ""


@dataclass(frozen=True)
class Prediction:
    """One step under one schedule: its first micro-batches simulated, and what each further one adds.

    ``shown`` holds as many micro-batches as it takes until one more adds what the one before did, ``shorter`` one fewer.
    """

    setting: Setting
    shapes: Shapes
    shown: Simulation
    micro_batches: int
    shorter: Simulation | None

    def over_step(self, of: Callable[[Simulation], float]) -> float:
        """A quantity that adds up over micro-batches, for the whole step."""
        if self.shorter is None:
            return of(self.shown)
        return of(self.shown) + (self.setting.micro_batches - self.micro_batches) * (of(self.shown) - of(self.shorter))

    @cached_property
    def step_s(self) -> float:
        """Time of the whole step."""
        return self.over_step(lambda part: part.makespan_s)

    @property
    def tokens_per_s_per_device(self) -> float:
        """Throughput."""
        return self.setting.tokens / self.step_s / self.setting.devices

    @property
    def mfu(self) -> float:
        """Model FLOPs (see `Family.flops_per_token`) over the device's dense peak."""
        return self.tokens_per_s_per_device * family_of(self.setting.model).flops_per_token() / self.setting.hardware.device.peak_flops

    def exposed_s(self, phase: str) -> float:
        """Time of the step that compute stood waiting for a link in ``phase``."""
        return self.over_step(lambda part: part.exposed_s(phase))

    @cached_property
    def memory(self) -> Memory:
        """Bytes on one device by kind."""
        return memory_of(self.shown.plan.ops, self.shapes)


def predict(setting: Setting, schedule: ScheduleConfig = BASELINE, free: Collection[str] = (), *, serial: bool = False) -> Prediction:
    """Simulate one step; collectives on the links in ``free`` take no time. See `planned`."""
    plan, shapes = planned(setting, schedule, serial=serial)
    shown = min(setting.micro_batches, 3 if plan.interleaved else 2)

    def run(micro_batches: int) -> Simulation:
        ops = steady_state(list(chain.from_iterable(step_templates(plan, micro_batches))))
        return simulate(plan.with_ops(ops), shapes, setting.hardware, setting.data_parallel, free)

    return Prediction(setting, shapes, run(shown), shown, run(shown - 1) if shown > 1 else None)


def planned(setting: Setting, schedule: ScheduleConfig, *, serial: bool = False) -> tuple[Plan, Shapes]:
    """The plan of one micro-batch of ``setting`` with the step's end, and what its ops work on.

    With ``serial`` each tensor-parallel collective is waited for where it starts. Raises ConfigError if it cannot be cut so.
    """
    parts = model_parts(setting.model, setting.tensor_parallel, setting.hardware, setting.masked)
    gradients = list(_gradients(parts, setting.tensor_parallel))
    whole = parts_with_matrices(parts) if setting.matrices else ()
    plan, _ = step_plan(parts, schedule, resolve_cut(schedule, setting.uncut), gradients, setting.data_parallel, whole)
    plan = serialize(plan) if serial else plan
    layout = (setting.tensor_parallel, setting.hardware, setting.micro_batch_size, setting.data_parallel)
    return plan, shapes_of(setting.model, plan, *layout, masked=setting.masked, matrices=setting.matrices)


def _gradients(parts: Sequence[PartShape], tensor_parallel: int) -> Iterator[Gradient]:
    """The gradients of each part together; those of a sharded part's core apart, since every rank holds them whole."""
    for number, part in enumerate(parts):
        whole = part.core_parameters if part.sharded and tensor_parallel > 1 else 0
        tied = not number and not parts[-1].parameters  # the head writes into the embedding's table
        writers = frozenset({number, len(parts) - 1} if tied else {number})
        for elements, sharded in ((part.parameters - whole, part.sharded), (whole, False)):
            if elements:
                yield Gradient(writers, elements, sharded)


def optimum(setting: Setting, schedule: ScheduleConfig = BASELINE) -> Prediction:
    """The uncut step without tensor-parallel communication: what no schedule of the same kernels can beat.

    Of ``schedule`` only sequence parallelism is kept, which makes replicated parts cheaper.
    """
    return predict(setting, replace(BASELINE, sequence_parallel=schedule.sequence_parallel), free=(TP_LINK,))


MFU_FORMULA = "6 x GEMM weights (output layer included) + 12 x layers x sequence x heads x head width per token, over the dense peak"
