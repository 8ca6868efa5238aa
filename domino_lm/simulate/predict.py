"""A whole training step predicted: plans by name, simulated, and what a person wants to know of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from domino_lm.config.presets import PRESETS
from domino_lm.config.settings import ConfigError, ModelConfig, ScheduleConfig
from domino_lm.schedule.ops import TP_LINK, transformer_chain
from domino_lm.schedule.passes import gather_parameters, last_writers, reduce_gradients, serialize, steady_state, step_templates
from domino_lm.schedule.plan import Plan
from domino_lm.schedule.step import compute_plan
from domino_lm.simulate.costs import Shapes, shapes_of
from domino_lm.simulate.hardware import Hardware
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

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.model.seq_length * self.micro_batch_size * self.micro_batches * self.data_parallel

    @property
    def devices(self) -> int:
        """All ranks."""
        return self.tensor_parallel * self.data_parallel


@dataclass(frozen=True)
class Schedule:
    """How a micro-batch is cut and ordered; ``serial`` waits for each collective where it starts."""

    config: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(schedule="baseline"))
    serial: bool = False

    def plan(self, setting: Setting) -> Plan:
        """The plan of one micro-batch of ``setting``, without the step's end. Raises ConfigError where it cannot be cut so."""
        size, length, tp = setting.micro_batch_size, setting.model.seq_length, setting.tensor_parallel
        try:
            plan = compute_plan(transformer_chain(setting.model.num_layers), self.config, size, length, tp)
        except ValueError as error:
            raise ConfigError(f"micro-batch {size}, sequence {length}, TP {tp}: {error}") from error
        return serialize(plan) if self.serial else plan

    def fits(self, setting: Setting) -> bool:
        """Whether the micro-batch can be cut so."""
        rows = self.config.rows(setting.micro_batch_size, setting.tensor_parallel)
        if self.config.row_dim(setting.micro_batch_size) == "sequence":
            return rows <= setting.model.seq_length // setting.tensor_parallel
        enough_batches = self.config.domino_pair != "micro-batches" or setting.micro_batches > 1
        return rows <= setting.micro_batch_size and enough_batches


def sliced(rows: int = 1, cols: int = 1, **settings: Any) -> Schedule:
    """``rows`` x ``cols`` slices under further settings of ScheduleConfig."""
    values: dict[str, Any] = {
        "schedule": "domino",
        "domino_row_slices": rows,
        "domino_column_slices": cols,
        "domino_row_dim": "batch",
        **settings,
    }
    return Schedule(ScheduleConfig(**values))


BASELINE, SERIAL = Schedule(), Schedule(serial=True)
SCHEDULES: dict[str, Schedule] = {
    "serial": SERIAL,
    "baseline": BASELINE,
    "rows 2": sliced(2),
    "rows 2, wgrad together": sliced(2, domino_wgrad_rows="together"),
    "rows 2, wgrad deferred": sliced(2, domino_defer_wgrad=True),
    "rows 4": sliced(4),
    "columns 2": sliced(1, 2),
    "columns 4": sliced(1, 4),
    "2 x 2": sliced(2, 2),
    "sequence rows 2": sliced(2, domino_row_dim="sequence"),
    "sequence rows 4": sliced(4, domino_row_dim="sequence"),
    "row groups": sliced(4, domino_pair="row-groups"),
    "paired": sliced(1, domino_pair="micro-batches"),
    "rows 2, paired": sliced(2, domino_pair="micro-batches"),
    "baseline, sequence parallel": sliced(1, sequence_parallel=True),
    "rows 2, sequence parallel": sliced(2, sequence_parallel=True),
    "rows 2, recompute full": sliced(2, recompute_granularity="full"),
}
"""What ``--compare`` compares."""


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
        """Model FLOPs (see `flops_per_token`) over the device's dense peak."""
        return self.tokens_per_s_per_device * flops_per_token(self.setting.model) / self.setting.hardware.device.peak_flops

    def exposed_s(self, phase: str) -> float:
        """Time of the step that compute stood waiting for a link in ``phase``."""
        return self.over_step(lambda part: part.exposed_s(phase))

    @cached_property
    def memory(self) -> Memory:
        """Bytes on one device by kind."""
        return memory_of(self.shown.plan.ops, self.shapes)


def predict(
    setting: Setting,
    schedule: Schedule,
    free: Collection[str] = (),
    *,
    bucket_size: int | None = None,
    overlap_grad_reduce: bool = True,
) -> Prediction:
    """Simulate one step; collectives on the links in ``free`` take no time. Raises ConfigError where it cannot be cut so."""
    config = replace(schedule.config, ddp_bucket_size=bucket_size, overlap_grad_reduce=overlap_grad_reduce)
    plan, shapes = step_plan(setting, replace(schedule, config=config))
    shown = min(setting.micro_batches, 3 if plan.paired else 2)

    def run(micro_batches: int) -> Simulation:
        ops = steady_state(list(chain.from_iterable(step_templates(plan, micro_batches))))
        return simulate(plan.with_ops(ops), shapes, setting.hardware, setting.data_parallel, free)

    return Prediction(setting, shapes, run(shown), shown, run(shown - 1) if shown > 1 else None)


def step_plan(setting: Setting, schedule: Schedule) -> tuple[Plan, Shapes]:
    """The plan of one micro-batch of ``setting`` with the step's end, its gradients in buckets of whole parts, and what it works on."""
    body, config, replicas = schedule.plan(setting), schedule.config, setting.data_parallel
    shapes = shapes_of(setting.model, body, setting.tensor_parallel, setting.hardware, setting.micro_batch_size, replicas)
    buckets, replica_buckets = bucket_parts(body, shapes, config.ddp_bucket_size or max(40_000_000, 1_000_000 * replicas))
    sharding = config.sharding if replicas > 1 else "no_shard"
    plan = reduce_gradients(body, buckets, config.overlap_grad_reduce, replica_buckets, sharding)
    plan = gather_parameters(plan, config.overlap_param_gather) if plan.slicing.sharded else plan
    return plan, replace(shapes, slicing=plan.slicing)


def optimum(setting: Setting, schedule: Schedule = BASELINE) -> Prediction:
    """The uncut step without tensor-parallel communication: what no schedule of the same kernels can beat.

    Of ``schedule`` only sequence parallelism is kept, which makes replicated parts cheaper.
    """
    uncut = ScheduleConfig(schedule="baseline", sequence_parallel=schedule.config.sequence_parallel)
    return predict(setting, Schedule(uncut), free=(TP_LINK,))


def bucket_parts(plan: Plan, shapes: Shapes, bucket_size: int) -> tuple[list[frozenset[int]], list[int]]:
    """Parts of each gradient bucket, in the order in which their last gradients are written, and the buckets that TP ranks sum.

    Parts are not split: a bucket may be larger than ``bucket_size`` by less than one part. Under sequence parallelism
    the replicated parts' gradients are the last bucket.
    """
    writers = last_writers(plan)
    ordered = sorted((part for part in writers if shapes.parts[part].parameters), key=writers.__getitem__)
    partial = [part for part in ordered if plan.slicing.sequence_parallel and not plan.slicing.chain[part].sharded]
    buckets: list[frozenset[int]] = []
    open_parts: list[int] = []
    for part in ordered:
        if part in partial:
            continue
        open_parts.append(part)
        if sum(shapes.parts[item].parameters for item in open_parts) >= bucket_size:
            buckets.append(frozenset(open_parts))
            open_parts = []
    buckets += [frozenset(open_parts)] if open_parts else []
    if not shapes.parts[plan.slicing.last].parameters:  # the head writes into the embedding's table
        buckets = [parts | {plan.slicing.last} if 0 in parts else parts for parts in buckets]
    return ([*buckets, frozenset(partial)], [len(buckets)]) if partial else (buckets, [])


def flops_per_token(model: ModelConfig) -> float:
    """6 FLOPs for each weight of a GEMM, output layer included, and 12 x layers x sequence x heads x head width for attention.

    That is PaLM's count (arXiv 2204.02311, appendix B): the whole attention square, nothing recomputed.
    """
    assert model.vocab_size is not None
    width, groups = model.num_attention_heads * model.head_width, model.query_groups * model.head_width
    attention = model.hidden_size * (2 * width + 2 * groups)
    mlp = model.hidden_size * model.ffn_width * (3 if model.swiglu else 2)
    weights = model.num_layers * (attention + mlp) + model.vocab_size * model.hidden_size
    return 6.0 * weights + 12.0 * model.num_layers * model.seq_length * width


MFU_FORMULA = "6 x GEMM weights (output layer included) + 12 x layers x sequence x heads x head width a token, over the dense peak"
