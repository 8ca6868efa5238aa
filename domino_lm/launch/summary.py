"""What a run consists of, in a few lines: model, layout, step, schedule, memory, what is on and what has no effect.

Nothing here imports torch, so that ``--dry-run`` answers at once, for any number of ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from domino_lm.config.batch_plan import BatchPlan, data_parallel_size
from domino_lm.config.kernels import KernelConfig
from domino_lm.config.schema import flat_values, settings
from domino_lm.config.settings import RunConfig, ScheduleConfig
from domino_lm.launch.file_checks import known_machine
from domino_lm.model.families.lookup import family_of
from domino_lm.schedule.cuts import Uncut, resolve_cut, resolved_schedule
from domino_lm.schedule.passes import step_templates
from domino_lm.schedule.plan import Plan
from domino_lm.simulate.auto import choose
from domino_lm.simulate.costs import Shapes, model_parts
from domino_lm.simulate.hardware import HARDWARE, Hardware
from domino_lm.simulate.memory import Memory, copied_bytes, memory_of
from domino_lm.simulate.predict import Setting, planned
from domino_lm.simulate.remarks import plan_text

MIB = 2**20
ASSUMED_MACHINE = "dgx-h100"
"""Where --dry-run simulates --schedule auto without a calibration."""

SHARES = "use_distributed_optimizer data_parallel_sharding_strategy overlap_param_gather"
MUON = (
    "muon_momentum muon_nesterov muon_split_qkv muon_num_ns_steps muon_coefficient_type muon_scale_mode muon_extra_scale_factor "
    "muon_fp32_matmul_prec"
)
DYNAMIC_LOSS_SCALE = "initial_loss_scale min_loss_scale loss_scale_window hysteresis"
SHOWN_MICRO_BATCHES = 3
"""One step's memory is at its peak by then: later micro-batches repeat the earlier ones."""


@dataclass(frozen=True)
class RunSummary:
    """A run on ``world_size`` ranks of ``device`` (cpu, cuda); its vocabulary is resolved."""

    run: RunConfig
    world_size: int
    device: str = "cpu"
    data: str = ""
    """What is read, in words."""

    ignored: Sequence[str] = ()
    """Further flags without effect, each with the reason."""

    def __str__(self) -> str:
        rows = [
            ("model", family_of(self.run.model).describe()),
            ("", self.parameters()),
            ("layout", self.layout()),
            ("step", self.step()),
            ("length", self.length()),
            ("data", self.data),
            ("schedule", schedule_reason(self.run)),
            ("memory", self.memory()),
            *(("on" if not index else "", text) for index, text in enumerate(switched_on(self.run, self.world_size, self.device))),
            *(("ignored" if not i else "", text) for i, text in enumerate([*self.ignored, *without_effect(self.run, self.world_size)])),
        ]
        return "\n".join(f"{name:10}{text}" for name, text in rows if text)

    def parameters(self) -> str:
        """True parameters of the whole model, and what one rank holds of them, vocabulary padding included."""
        tp = self.run.parallel.tensor_model_parallel_size
        held = sum(part.parameters for part in model_parts(self.run.model, tp, _eager(self.device)))
        precision = self.run.precision.params_dtype
        return f"{family_of(self.run.model).parameter_count():,} parameters, {held:,} on each rank, {precision} on {self.device}"

    def layout(self) -> str:
        """Ranks and how they share the work."""
        tp = self.run.parallel.tensor_model_parallel_size
        replicas = data_parallel_size(self.run, self.world_size)
        first = f"; ranks 0 to {tp - 1} are the first model, {tp} to {2 * tp - 1} the second" if tp > 1 and replicas > 1 else ""
        return f"{self.world_size} rank(s) = {tp} tensor-parallel x {replicas} data-parallel{first}"

    def step(self) -> str:
        """Sequences, tokens and micro-batches of one optimizer step."""
        batches, length, micro = BatchPlan.of(self.run, self.world_size), self.run.model.seq_length, self.run.training.micro_batch_size
        count = batches.full // (micro * data_parallel_size(self.run, self.world_size))
        ramp = (
            f"; the batch grows from {batches.start} by {batches.increment} over {batches.ramp_samples:,} samples" if batches.ramps else ""
        )
        return f"{batches.full} sequences x {length} = {batches.full * length:,} tokens, in {count} micro-batch(es) of {micro} per replica{ramp}"

    def length(self) -> str:
        """Steps, samples and tokens of the whole run."""
        batches = BatchPlan.of(self.run, self.world_size)
        return f"{batches.iterations:,} steps, {batches.samples:,} samples, {batches.samples * self.run.model.seq_length:,} tokens"

    def memory(self) -> str:
        """Estimate of one rank, by kind."""
        found = memory_estimate(self.run, self.world_size, self.device)
        named = {"weights": found.weights, "gradients": found.gradients, "optimizer": found.optimizer, "activations": found.activations}
        named |= {"copy for saves": found.copy} if found.copy else {}
        kinds = ", ".join(f"{kind} {_size(size)}" for kind, size in named.items())
        return f"{_size(found.total)} per rank by estimate: {kinds}; the allocator and the libraries take more on top"


def memory_estimate(run: RunConfig, world_size: int, device: str) -> Memory:
    """What one rank holds at the peak of a step. A schedule still to be chosen (auto) counts as the default one."""
    plan, shapes, count = _step(run, world_size, device)
    found = memory_of(
        chain.from_iterable(step_templates(plan, min(SHOWN_MICRO_BATCHES, count))),
        shapes,
        gradient_bytes=run.precision.gradient_bytes,
        optimizer_bytes=run.precision.optimizer_bytes(run.optimizer.optimizer),
    )
    masks = (
        count * run.training.micro_batch_size * run.model.seq_length**2 if run.data.reset_attention_mask else 0
    )  # a byte each, for the step
    copy = copy_for_saves(run, world_size, device) if device == "cpu" else 0.0
    return replace(found, activations=found.activations + masks, copy=copy)


def copy_for_saves(run: RunConfig, world_size: int, device: str) -> float:
    """Bytes of main memory on each rank for what ``--async-save`` writes."""
    if not run.checkpoint.saves_beside or run.training.skip_train:
        return 0.0
    held = sum(part.parameters for part in model_parts(run.model, run.parallel.tensor_model_parallel_size, _eager(device)))
    kept = 0 if run.checkpoint.no_save_optim else run.precision.optimizer_bytes(run.optimizer.optimizer)
    return copied_bytes(held, data_parallel_size(run, world_size), run.precision.element_bytes, kept)


def plan_of_step(run: RunConfig, world_size: int, device: str, layer: int | None = None) -> str:
    """The plan of a step, one op per line with a remark, or of one ``layer`` of it; see `plan_text`."""
    plan, shapes, count = _step(run, world_size, device)
    return plan_text(plan, shapes, count, layer)


def _step(run: RunConfig, world_size: int, device: str) -> tuple[Plan, Shapes, int]:
    """Plan, shapes and micro-batches of a full step."""
    schedule = replace(run.schedule, schedule=None) if run.schedule.schedule == "auto" else run.schedule
    setting = Setting.of(run, world_size, _eager(device, run.precision.element_bytes))
    return *planned(setting, schedule), setting.micro_batches


def foreseen_schedule(run: RunConfig, world_size: int) -> tuple[RunConfig, str]:
    """``run`` with the schedule that auto would take, and the table that says why; nothing is measured for it.

    Simulates what ``--domino-calibration`` names or holds, else a machine that is known by its datasheet, and says so.
    Raises ConfigError if nothing fits.
    """
    if run.schedule.schedule != "auto":
        return run, ""
    given = run.schedule.domino_calibration
    known = known_machine(given)
    hardware = replace(known or HARDWARE[ASSUMED_MACHINE], element_bytes=run.precision.element_bytes)
    limit = hardware.device.memory_bytes / world_size if hardware.host_blocks else hardware.device.memory_bytes
    choice = choose(Setting.of(run, world_size, hardware), run.schedule, limit)
    basis = f"as {given} says" if known else f"assumed to be {ASSUMED_MACHINE}, since nothing is measured yet; the run itself decides"
    table = f"what auto would choose on {hardware.name} ({basis}; activations of {hardware.element_bytes} bytes):\n{choice}"
    return replace(run, schedule=choice.chosen.schedule), table


def schedule_reason(run: RunConfig) -> str:
    """Which schedule runs, in words, and why."""
    schedule, tp = run.schedule, run.parallel.tensor_model_parallel_size
    if schedule.schedule == "auto":
        return "auto: measures this machine when the run starts, simulates the cuts that fit and takes the fastest"
    cut, pieces = resolve_cut(schedule, Uncut.of(run)), []
    if cut.rows > 1:
        pieces.append(f"{cut.rows} rows of {' + '.join(map(str, cut.row_sizes))} {'tokens' if cut.sequence_rows else 'sequences'}")
    if cut.cols > 1:
        pieces.append(f"{cut.cols} column blocks")
    if cut.pair is not None:
        pieces.append(f"{cut.pair.replace('-', ' ')} paired")
    if pieces:
        kind, what = resolved_schedule(schedule, tp), "row" if cut.rows > 1 else "block"
        return f"{kind}, {', '.join(pieces)}: the all-reduce of one {what} travels while the others compute"
    if schedule.schedule == "baseline":
        return "baseline, as --schedule says: Megatron's order, nothing is cut"
    if tp == 1:
        return "baseline: one tensor-parallel rank has no all-reduce to hide (--domino-row-slices cuts all the same)"
    return "domino with a single row, as the flags say: it hides next to nothing"


def switched_on(run: RunConfig, world_size: int, device: str = "cpu") -> Iterator[str]:
    """What is not part of every run, one line each."""
    yield from _formats(run, device)
    if run.kernels.deterministic_mode:
        yield "deterministic mode: the same bits in every run on the same machines and layout (docs/determinism.md)"
    yield from _fp8(run.kernels, device)
    schedule, tp, replicas = run.schedule, run.parallel.tensor_model_parallel_size, data_parallel_size(run, world_size)
    if schedule.sequence_parallel and tp > 1:
        yield "sequence parallelism: norms, residuals and dropout are cut over tensor-parallel ranks"
    if schedule.recompute_granularity is not None:
        yield f"recompute, {schedule.recompute_granularity}: activations are computed again in backward"
    if schedule.domino_defer_wgrad:
        yield "weight gradients held back to fill waits"
    yield from _optimizer(run)
    if replicas > 1:
        yield f"data-parallel reduction {'behind backward' if schedule.overlap_grad_reduce else 'after backward'}"
        yield from _shared_out(schedule, replicas)
    if any(part.explicit_heads for part in family_of(run.model).chain):
        yield f"attention dropout {run.model.attention_dropout:g}: attention is spelled out, which is slower than the fused kernel"
    if copied := copy_for_saves(run, world_size, device):
        where = "main memory" if device == "cpu" else "pinned main memory"
        yield f"checkpoints are written beside training, from a copy that takes {_size(copied)} of {where} on each rank"
    if run.data.reset_attention_mask:
        yield "attention ends at document ends: masks are materialised, which is slower"


def _optimizer(run: RunConfig) -> Iterator[str]:
    """What differs between weights, or from AdamW with a constant weight decay."""
    optimizer = run.optimizer
    if optimizer.optimizer == "sgd":
        yield f"SGD with momentum {optimizer.sgd_momentum:g}; weight decay is added to the gradient"
    if optimizer.optimizer == "muon":
        yield (
            f"Muon for the matrices of layers: momentum {optimizer.muon_momentum:g}, {optimizer.muon_num_ns_steps} Newton-Schulz steps "
            f"on whole matrices in {_newton_schulz_precision(run)}; AdamW for all other weights"
        )
    if optimizer.decoupled_lr is not None:
        minimum = optimizer.min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
        yield f"learning rate of word embedding and output layer: {optimizer.decoupled_lr:g}, at the end {minimum:g}"
    if optimizer.weight_decay_incr_style != "constant":
        ends = f"from {optimizer.start_weight_decay:g} to {optimizer.end_weight_decay:g}"
        yield f"weight decay {ends} over the run, {optimizer.weight_decay_incr_style}"
    if run.model.embedding_init_method_std is not None:
        yield "embeddings have a deviation of their own and take no weight decay, as in Megatron"


def _newton_schulz_precision(run: RunConfig) -> str:
    """Arithmetic of Muon's iteration, in words."""
    return {"medium": "bf16 (on a CPU fp32)", "high": "TF32 (on a CPU fp32)", "highest": "fp32"}[run.optimizer.muon_fp32_matmul_prec]


def _shared_out(schedule: ScheduleConfig, replicas: int) -> Iterator[str]:
    """What data-parallel ranks keep shares of."""
    if schedule.sharding != "no_shard":
        what = "optimizer state" if schedule.sharding == "optim" else "optimizer state and gradients (reduced every micro-batch)"
        gathers = "behind the next step's forward" if schedule.overlap_param_gather else "before the step ends"
        yield f"distributed optimizer: each of {replicas} replicas keeps a share of {what}; updated parameters are gathered {gathers}"


def _formats(run: RunConfig, device: str) -> Iterator[str]:
    """Number formats that are not fp32 throughout, and that a GPU is slow in fp32."""
    precision = run.precision
    if precision.element_bytes == 4 and device == "cuda":
        tf32 = "TF32" if run.kernels.tf32 else "fp32"
        others = "--bf16 is twice as fast" if run.kernels.tf32 else "--bf16 is several times as fast, --tf32 comes near it"
        yield f"warning: GEMMs in {tf32} on GPUs: {others}, and bf16 takes half the memory for weights and activations"
    if precision.element_bytes < 4:
        kept = f"gradients in {precision.gradient_dtype}, master weights in float32"
        yield f"{precision.params_dtype}: weights, activations and tensor-parallel collectives; {kept}"
    if precision.dynamic_loss_scale:
        yield f"dynamic loss scale from {precision.initial_loss_scale:g}: the first steps are skipped until gradients fit"
    elif precision.loss_scale is not None:
        yield f"constant loss scale {precision.loss_scale:g}"
    if (precision.exp_avg_dtype, precision.exp_avg_sq_dtype) != ("fp32", "fp32"):
        yield f"optimizer moments kept in {precision.exp_avg_dtype} and {precision.exp_avg_sq_dtype}"


def _fp8(kernels: KernelConfig, device: str) -> Iterator[str]:
    """8-bit GEMMs: how they are scaled, and that a CPU has none."""
    if kernels.fp8_format is None:
        return
    yield (
        f"fp8 ({kernels.fp8_format}): GEMMs of attention and MLP, scaled {kernels.fp8_recipe} from each tensor itself; "
        "Megatron's default is delayed scaling, from a history of earlier steps"
    )
    if device == "cpu":
        yield "warning: a CPU has no 8-bit GEMMs; they are emulated one by one, a hundred times slower: a few tokens/s, to try numerics alone"


def without_effect(run: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that differ from their defaults and change nothing in this run, with the reason."""
    tp, replicas = run.parallel.tensor_model_parallel_size, data_parallel_size(run, world_size)
    dynamic, checked = run.precision.dynamic_loss_scale, run.training.check_for_nan_in_loss_and_grad
    evaluates, logs = run.training.eval_interval or run.training.skip_train, run.logging
    sgd, muon = (run.optimizer.optimizer == name for name in ("sgd", "muon"))
    tokenizer = run.tokenizer.tokenizer_type
    idle = (
        ("sequence_parallel", tp == 1, "one tensor-parallel rank has nobody to share with"),
        ("domino_pair", tp == 1, "one tensor-parallel rank has no all-reduce to hide"),
        ("ddp_bucket_size overlap_grad_reduce", replicas == 1, "a single replica reduces nothing"),
        (SHARES, replicas == 1, "a single replica has nobody to share with"),
        *((name, True, why) for name, why in family_of(run.model).unread().items()),
        ("min_lr lr_decay_iters lr_decay_samples", run.optimizer.lr_decay_style == "constant", "--lr-decay-style constant keeps the rate"),
        (
            "eval_iters eval_micro_batch_size eval_global_batch_size full_validation multiple_validation_sets",
            not evaluates,
            "--eval-interval 0 evaluates nothing",
        ),
        ("full_validation multiple_validation_sets", evaluates and not run.training.eval_iters, "--eval-iters 0 evaluates nothing"),
        ("tiktoken_pattern tiktoken_num_special_tokens", tokenizer != "TikTokenizer", "they are TikTokenizer's"),
        ("decoupled_min_lr", run.optimizer.decoupled_lr is None, "--decoupled-lr gives embedding and output layer no rate of their own"),
        ("weight_decay", run.optimizer.weight_decay_incr_style != "constant", "--start-weight-decay and --end-weight-decay say how much"),
        ("sgd_momentum", not sgd, f"{'Muon' if muon else 'AdamW'} has no momentum of SGD's"),
        (MUON, not muon, "they are Muon's"),
        ("adam_beta1 adam_beta2 adam_eps", sgd, "SGD has no moments of AdamW's"),
        ("save_interval async_save", run.checkpoint.save is None, "--save names no folder, so nothing is saved"),
        ("tf32", run.precision.element_bytes < 4, f"there are no GEMMs of fp32 in {run.precision.params_dtype}"),
        ("timeline_iteration", logs.timeline is None, "--timeline names no file"),
        ("tensorboard_log_interval", logs.tensorboard_dir is None, "--tensorboard-dir names no folder"),
        ("wandb_exp_name wandb_save_dir", logs.wandb_project is None, "--wandb-project names no project"),
        ("distributed_backend distributed_timeout_minutes", world_size == 1, "one rank talks to nobody"),
        (DYNAMIC_LOSS_SCALE, not dynamic, "no loss scale is dynamic"),
        ("max_skipped_steps", checked is not None, f"--{'' if checked else 'no-'}check-for-nan-in-loss-and-grad says what happens"),
    )
    values, defaults = flat_values(run), {item.name: item.default for item in settings()}
    for names, nothing, why in idle:
        for name in names.split() if nothing else ():
            if values[name] != defaults[name]:
                yield f"--{name.replace('_', '-')} {values[name]}: {why}"


def changed_settings(run: RunConfig) -> str:
    """Every setting that is not at its default, part by part."""
    lines: dict[str, list[str]] = {}
    for item in settings():
        value = item.of(run)
        if value != item.default:
            lines.setdefault(item.part, []).append(f"{item.name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}")
    return "\n".join(f"{part:11}{', '.join(texts)}" for part, texts in lines.items())


def _eager(device: str, element_bytes: int = 4) -> Hardware:
    """A machine that computes with PyTorch's own kernels, which is all that shapes and memory ask of it."""
    return replace(HARDWARE["dgx-h100"], name=device, element_bytes=element_bytes, fused=False, cpu=device == "cpu")


def _size(size_bytes: float) -> str:
    return f"{size_bytes / MIB:,.1f} MiB" if size_bytes < 1024 * MIB else f"{size_bytes / MIB / 1024:,.1f} GiB"
