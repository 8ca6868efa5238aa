"""Refuses settings that cannot work together, before anything is built. Nothing here imports torch."""

from collections.abc import Iterator

from domino_lm.config.arguments import config_from_values
from domino_lm.config.batch_plan import data_parallel_size, eval_batch_size, eval_micro_batch_size, global_batch_size
from domino_lm.config.schema import flat_values, settings
from domino_lm.config.settings import ConfigError, ModelConfig, RunConfig, refuse
from domino_lm.config.stand_ins import faults_beside
from domino_lm.data.gpt_dataset import parse_split
from domino_lm.data.indices import DatasetError
from domino_lm.data.splits import sources_of
from domino_lm.data.tokenizers.build import foreign_options
from domino_lm.model.families.lookup import family_of
from domino_lm.model.family import divisors, either
from domino_lm.schedule.cuts import Uncut, cut_faults

MOMENT_STEP = 2**-5
"""A bf16 moment is rounded to 2^-9 of itself; steps below 2^-5 of it would lose a sixteenth and more of what they add."""


def check_run(run: RunConfig, world_size: int) -> None:
    """Raise ConfigError naming every fault of ``run`` on ``world_size`` ranks."""
    refuse(run_faults(run, world_size))


def run_faults(run: RunConfig, world_size: int) -> list[str]:
    """Every fault of ``run`` on ``world_size`` ranks, one line each: flags, values and the way out."""
    numbers = dict(_number_faults(run))
    if not numbers:
        return _faults_of_sound_numbers(run, world_size)
    others = faults_beside(numbers, flat_values(run), config_from_values, lambda sound: _faults_of_sound_numbers(sound, world_size))
    return [*numbers.values(), *others]


def _faults_of_sound_numbers(run: RunConfig, world_size: int) -> list[str]:
    return [
        *_layout_faults(run, world_size),
        *_model_faults(run),
        *_schedule_faults(run),
        *_kernel_faults(run),
        *_precision_faults(run),
        *_data_faults(run),
        *_length_faults(run, world_size),
        *_optimizer_faults(run),
        *_checkpoint_faults(run),
    ]


def can_shard(model: ModelConfig, tp: int) -> bool:
    """Whether ``tp`` tensor-parallel ranks can share every width of ``model``."""
    return not any(family_of(model).faults(tp))


def widest_tensor_parallel(run: RunConfig, ranks: int) -> int:
    """The most of ``ranks``, a divisor of them, that can share the model; 1 if none can, or if numbers are at fault."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return 1 if any(_number_faults(run)) else max((size for size in sizes if can_shard(run.model, size)), default=1)


def _number_faults(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Settings whose values are outside their own range, whatever the others are, and the fault of each."""
    for item in settings():
        value = item.of(run)
        if item.bounds is not None and value is not None and not item.bounds.hold(value):
            yield item.name, f"{item.flag} {value} {item.bounds.text}."


def _layout_faults(run: RunConfig, world_size: int) -> Iterator[str]:
    """Ranks and batch sizes that do not divide."""
    tp = run.parallel.tensor_model_parallel_size
    if world_size % tp:
        yield (
            f"--tensor-model-parallel-size {tp} does not divide the {world_size} ranks that were started; "
            f"use {either(divisors(world_size))}, or start a multiple of {tp} ranks."
        )
        return
    micro, batch = run.training.micro_batch_size, run.training.global_batch_size
    replicas = data_parallel_size(run, world_size)
    if batch is not None and batch % (micro * replicas):
        step = micro * replicas
        nearest = either(sorted({max(step, batch // step * step), -(-batch // step) * step}))
        yield (
            f"--global-batch-size {batch} is not a multiple of --micro-batch-size {micro} x data-parallel size {replicas} = {step}; "
            f"use {nearest}."
        )


def _model_faults(run: RunConfig) -> Iterator[str]:
    """A model that is not to be found, and what its family says of its widths."""
    try:
        yield from family_of(run.model).faults(run.parallel.tensor_model_parallel_size)
    except ConfigError as error:
        yield str(error)


def _schedule_faults(run: RunConfig) -> Iterator[str]:
    """Cuts that do not fit what they cut, and settings of a schedule that is not on."""
    schedule = run.schedule
    if schedule.schedule in ("baseline", "auto"):
        cuts = {"domino_row_slices": 1, "domino_column_slices": 1, "domino_row_dim": None, "domino_pair": None}
        given = [name for name, nothing in cuts.items() if getattr(schedule, name) not in (None, nothing)]
        if given:
            why = "which cuts nothing" if schedule.schedule == "baseline" else "which chooses the cut"
            yield f"{_flag(given[0])} {getattr(schedule, given[0])} contradicts --schedule {schedule.schedule}, {why}; leave one out."
            return
    elif schedule.domino_calibration is not None:
        yield f"--domino-calibration {schedule.domino_calibration} is for --schedule auto; give that, or leave it out."
    yield from cut_faults(schedule, Uncut.of(run))
    yield from _recompute_faults(run)
    if schedule.use_distributed_optimizer and schedule.sharding == "no_shard":
        yield "--use-distributed-optimizer contradicts --data-parallel-sharding-strategy no_shard; leave one out."
    if schedule.overlap_param_gather and schedule.sharding == "no_shard":
        yield "--overlap-param-gather gathers what --use-distributed-optimizer updates by shares; give that too, or leave it out."


def _recompute_faults(run: RunConfig) -> Iterator[str]:
    """Recompute settings that say nothing or too little."""
    schedule, layers = run.schedule, run.model.num_layers
    if schedule.recompute_granularity != "full":
        given = [name for name in ("recompute_method", "recompute_num_layers") if getattr(schedule, name) is not None]
        if given:
            yield f"{_flag(given[0])} belongs to --recompute-granularity full; give that, or leave it out."
    elif schedule.recompute_method is None:
        yield "--recompute-granularity full needs --recompute-method uniform (all layers) or block (the first --recompute-num-layers)."
    elif schedule.recompute_method == "block" and not 1 <= (schedule.recompute_num_layers or 0) <= layers:
        yield f"--recompute-method block needs --recompute-num-layers from 1 to {layers}, the number of layers."


def _kernel_faults(run: RunConfig) -> Iterator[str]:
    """Groups that are not there, and steps that cannot be captured."""
    kernels = run.kernels
    unknown = [name for name in kernels.high_priority_stream_groups if name not in ("tp", "dp")]
    if unknown:
        yield f"--high-priority-stream-groups {' '.join(unknown)}: there are the groups tp and dp."
    if kernels.cuda_graph and run.schedule.domino_pair == "micro-batches":
        yield (
            "--cuda-graph replays one micro-batch after the other, but --domino-pair micro-batches interleaves two; "
            "leave one out, or use --domino-pair row-groups."
        )
    if kernels.cuda_graph and run.schedule.sharding == "optim_grads":
        yield (
            "--cuda-graph reads gradients where they were when it captured, but --data-parallel-sharding-strategy optim_grads "
            "gives their memory back; use optim."
        )
    if kernels.cuda_graph and run.schedule.overlap_param_gather:
        yield "--cuda-graph captures a step to its end, but --overlap-param-gather lets it reach into the next; leave one out."
    if kernels.cuda_graph and kernels.cuda_graph_warmup_steps < 1:
        yield f"--cuda-graph-warmup-steps {kernels.cuda_graph_warmup_steps}: at least one step must run before a capture."


def _precision_faults(run: RunConfig) -> Iterator[str]:
    """Two formats at once, a loss scale that nothing needs, and formats that lose what they should keep."""
    precision = run.precision
    if precision.bf16 and precision.fp16:
        yield "--bf16 and --fp16 are both given; leave one out."
    if precision.loss_scale is not None and not (precision.bf16 or precision.fp16):
        yield f"--loss-scale {precision.loss_scale:g} has nothing to keep in range in fp32; leave it out, or give --fp16."
    if precision.dynamic_loss_scale and precision.min_loss_scale > precision.initial_loss_scale:
        yield f"--min-loss-scale {precision.min_loss_scale:g} is above --initial-loss-scale {precision.initial_loss_scale:g}; lower it."
    if precision.gradient_dtype == "bfloat16" and not precision.bf16:
        asked = "--grad-reduce-in-bf16" if precision.grad_reduce_in_bf16 else "--main-grads-dtype bf16"
        yield f"{asked} belongs to --bf16; give that, or leave it out."
    if precision.main_params_dtype != "fp32":
        yield (
            f"--main-params-dtype {precision.main_params_dtype}: a weight of 11 bits takes no update below 1/2048 of it, which is most of them; "
            "leave it out."
        )
    for name, beta in (("exp_avg", run.optimizer.adam_beta1), ("exp_avg_sq", run.optimizer.adam_beta2)):
        yield from _moment_faults(f"{name}_dtype", getattr(precision, f"{name}_dtype"), f"adam_beta{1 + (name != 'exp_avg')}", beta)


def _moment_faults(name: str, kind: str, beta_name: str, beta: float) -> Iterator[str]:
    """Formats of optimizer moments that gradients vanish in, or that stand still."""
    if kind in ("fp16", "fp8"):
        least = "6e-8" if kind == "fp16" else "1e-5"
        yield f"{_flag(name)} {kind} holds nothing below {least}, where moments of clipped gradients lie; use bf16 or fp32."
    elif kind == "bf16" and 1 - beta < MOMENT_STEP:
        yield (
            f"{_flag(name)} bf16 keeps 8 bits, but {_flag(beta_name)} {beta:g} moves a moment by {1 - beta:.2g} of it per step, "
            f"which rounding swallows; use fp32, or a {_flag(beta_name)} of at most {1 - MOMENT_STEP:g}."
        )


def _data_faults(run: RunConfig) -> Iterator[str]:
    """Data that is not named or named twice, tokenizers without their files."""
    try:
        sources = sources_of(run.data)
        if parse_split(sources.split)[0] == 0 and not sources.per_split:
            yield f"--split {sources.split} leaves nothing to train on; its first number must be above 0."
        if sources.per_split and "train" not in sources.per_split:
            yield "the paths of single splits leave out training: give --train-data-path too."
    except DatasetError as error:
        yield str(error)
    if not run.data.data_sharding and run.data.dataloader_type != "cyclic":
        yield "--no-data-sharding says how --dataloader-type cyclic deals samples out; give that too, or leave it out."
    kind = run.tokenizer.tokenizer_type
    files = [name for name in ("tokenizer_model", "vocab_file", "merge_file") if getattr(run.tokenizer, name) is not None]
    if kind is None and files:
        yield f"{_flag(files[0])} {getattr(run.tokenizer, files[0])} is read by no tokenizer: give --tokenizer-type, or leave it out."
    if kind is None and run.model.vocab_size is None:
        yield "the vocabulary size is unknown: give --tokenizer-type with its files, or --vocab-size."
    if kind is None:
        if run.data.needs_eod:
            yield f"{', '.join(run.data.needs_eod)} must know the end-of-document id: give --tokenizer-type with its files."
        return
    needed = {"GPT2BPETokenizer": ["vocab_file", "merge_file"], "NullTokenizer": []}.get(kind, ["tokenizer_model"])
    absent = [_flag(name) for name in needed if getattr(run.tokenizer, name) is None]
    if kind == "NullTokenizer" and run.model.vocab_size is None:
        absent = ["--vocab-size"]
    if absent:
        yield f"--tokenizer-type {kind} also needs {' and '.join(absent)}."
    yield from foreign_options(run.tokenizer, kind)


def _length_faults(run: RunConfig, world_size: int) -> Iterator[str]:
    """A run without an end or with two, a batch that does not grow evenly, collections that never come."""
    training = run.training
    if (training.train_iters is None) == (training.train_samples is None):
        given = "neither is given" if training.train_iters is None else "both are given"
        yield f"--train-iters or --train-samples says how long to train, but {given}; give one."
    if training.train_samples is not None and training.train_samples < global_batch_size(run, world_size):
        yield f"--train-samples {training.train_samples} does not fill one batch of {global_batch_size(run, world_size)} sequences; give more."
    if training.manual_gc_interval and not training.manual_gc:
        yield f"--manual-gc-interval {training.manual_gc_interval} belongs to --manual-gc; give that, or leave it out."
    yield from _evaluation_faults(run, world_size)
    wrong = [number for number in training.iterations_to_skip if number < 1]
    if wrong:
        yield f"--iterations-to-skip {wrong[0]}: iterations are counted from 1."
    ramp = training.rampup_batch_size
    if ramp is None:
        return
    words, full = " ".join(map(str, ramp)), global_batch_size(run, world_size)
    if len(ramp) != 3 or min(ramp) < 1:
        yield f"--rampup-batch-size {words}: three numbers above 0 are needed: first batch, increment, samples."
        return
    start, increment, _ = ramp
    step = training.micro_batch_size * max(1, data_parallel_size(run, world_size))
    if start > full or (full - start) % increment:
        yield f"--rampup-batch-size {words} does not reach --global-batch-size {full} from {start} in steps of {increment}; change one."
    elif start % step or (increment % step and start < full):
        yield f"--rampup-batch-size {words}: first batch and increment must be multiples of --micro-batch-size x data-parallel size = {step}."


def _evaluation_faults(run: RunConfig, world_size: int) -> Iterator[str]:
    """Batches of an evaluation that do not divide, and a run that would do nothing."""
    training, replicas = run.training, max(1, data_parallel_size(run, world_size))
    size, step = eval_batch_size(run, world_size), eval_micro_batch_size(run) * replicas
    if (training.eval_global_batch_size or training.eval_micro_batch_size) and size % step:
        whole = "--eval-global-batch-size" if training.eval_global_batch_size else "--global-batch-size"
        part = "--eval-micro-batch-size" if training.eval_micro_batch_size else "--micro-batch-size"
        nearest = either(sorted({max(step, size // step * step), -(-size // step) * step}))
        yield (
            f"{whole} {size} is not a multiple of {part} {eval_micro_batch_size(run)} x data-parallel size {replicas} = {step}; "
            f"give --eval-global-batch-size {nearest}."
        )
    if training.skip_train and not training.eval_iters:
        yield "--skip-train only evaluates, and --eval-iters 0 evaluates nothing; give more."


def _optimizer_faults(run: RunConfig) -> Iterator[str]:
    """Learning rates, and the lengths of their warm-up and decay, out of order."""
    optimizer = run.optimizer
    if optimizer.min_lr > optimizer.lr:
        yield f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}; exchange or lower it."
    if optimizer.lr_warmup_init > optimizer.lr:
        yield f"--lr-warmup-init {optimizer.lr_warmup_init} is above --lr {optimizer.lr}; lower it."
    yield from _decoupled_faults(run)
    yield from _weight_decay_faults(run)
    yield from _unit_faults(run)
    if optimizer.lr_warmup_fraction is not None:
        for name in ("lr_warmup_iters", "lr_warmup_samples"):
            if getattr(optimizer, name):
                yield f"--lr-warmup-fraction and {_flag(name)} {getattr(optimizer, name)} both set the warm-up; leave one out."
        if not 0 <= optimizer.lr_warmup_fraction < 1:
            yield f"--lr-warmup-fraction {optimizer.lr_warmup_fraction} must be at least 0 and below 1."
    for unit in ("iters", "samples"):
        decay = getattr(optimizer, f"lr_decay_{unit}") or getattr(run.training, f"train_{unit}")
        warmup, anneal = (getattr(optimizer, f"lr_{name}_{unit}") for name in ("warmup", "wsd_decay"))
        if decay is not None and warmup >= decay:
            yield f"--lr-warmup-{unit} {warmup} leaves nothing of the {decay} {_unit_name(unit)} of the decay; use less."
        if decay is not None and anneal is not None and anneal + warmup > decay:
            yield f"--lr-wsd-decay-{unit} {anneal} and the warm-up do not fit into the {decay} {_unit_name(unit)} of the decay; use less."


def _decoupled_faults(run: RunConfig) -> Iterator[str]:
    """Learning rates of embedding and output layer out of order."""
    optimizer, peak = run.optimizer, run.optimizer.decoupled_lr
    if peak is None:
        return
    minimum = optimizer.min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
    name = "--min-lr" if optimizer.decoupled_min_lr is None else "--decoupled-min-lr"
    if minimum > peak:
        yield f"{name} {minimum} is above --decoupled-lr {peak}; give a lower --decoupled-min-lr."
    if optimizer.lr_warmup_init > peak:
        yield f"--lr-warmup-init {optimizer.lr_warmup_init} is above --decoupled-lr {peak}; lower it."


def _weight_decay_faults(run: RunConfig) -> Iterator[str]:
    """Weight decay that grows without knowing from where to where, or the other way round."""
    optimizer, style = run.optimizer, run.optimizer.weight_decay_incr_style
    ends = {name: getattr(optimizer, name) for name in ("start_weight_decay", "end_weight_decay")}
    if style == "constant":
        for name, value in ends.items():
            if value is not None:
                yield f"{_flag(name)} {value} needs --weight-decay-incr-style linear or cosine; give that, or --weight-decay alone."
    elif None in ends.values():
        yield f"--weight-decay-incr-style {style} leads from --start-weight-decay to --end-weight-decay; give both."
    elif run.kernels.cuda_graph:
        yield f"--weight-decay-incr-style {style} changes what --cuda-graph captures; leave one out."
    if optimizer.optimizer == "muon":
        yield from _muon_faults(run)
    if optimizer.optimizer == "sgd":
        if run.kernels.apex_optimizer:
            yield "--apex-optimizer is an AdamW, and --optimizer sgd is none; leave one out."
        kinds = [name for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if getattr(run.precision, name) != "fp32"]
        if kinds:
            yield f"{_flag(kinds[0])} {getattr(run.precision, kinds[0])} is of AdamW's moments, and --optimizer sgd has none; leave it out."


def _muon_faults(run: RunConfig) -> Iterator[str]:
    """What cuts matrices that Muon needs whole, or captures updates whose capture is not there."""
    schedule = run.schedule
    if schedule.sharding != "no_shard":
        given = "--use-distributed-optimizer" if schedule.use_distributed_optimizer else "--data-parallel-sharding-strategy"
        yield (
            f"--optimizer muon updates whole matrices, of which {given} would leave each replica a share; "
            "leave one out (tensor parallelism and recompute save memory beside Muon)."
        )
    if run.kernels.cuda_graph:
        yield "--cuda-graph does not capture the updates of --optimizer muon; leave one out."


def _unit_faults(run: RunConfig) -> Iterator[str]:
    """Lengths in iterations and samples mixed, and WSD without its decay or the other way round."""
    optimizer = run.optimizer
    by_samples = run.training.train_samples is not None
    wrong, length = ("iters", "--train-samples") if by_samples else ("samples", "--train-iters")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        value = getattr(optimizer, f"{name}_{wrong}")
        if value:
            right = "samples" if by_samples else "iters"
            yield f"{_flag(name)}-{wrong} {value} does not go with {length}, which counts otherwise; use {_flag(name)}-{right}."
    anneal = optimizer.lr_wsd_decay_samples if by_samples else optimizer.lr_wsd_decay_iters
    if optimizer.lr_decay_style == "WSD" and anneal is None:
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{'samples' if by_samples else 'iters'}, the length of its decay."
    elif optimizer.lr_decay_style != "WSD" and (optimizer.lr_wsd_decay_iters or optimizer.lr_wsd_decay_samples):
        yield f"--lr-wsd-decay-iters and -samples belong to --lr-decay-style WSD, not {optimizer.lr_decay_style}; leave them out."


def _unit_name(unit: str) -> str:
    return "iterations" if unit == "iters" else unit


def _checkpoint_faults(run: RunConfig) -> Iterator[str]:
    """Settings of saving and loading without a folder."""
    checkpoint = run.checkpoint
    for name in ("no_save_optim", "keep_last", "save_retain_interval", "exit_on_save_failure"):
        if getattr(checkpoint, name) and checkpoint.save is None:
            yield f"{_flag(name)} says how to save, but nothing is saved: give --save, or leave it out."
    if checkpoint.save_retain_interval and checkpoint.save_retain_interval % (
        checkpoint.save_interval or checkpoint.save_retain_interval + 1
    ):
        yield (
            f"--save-retain-interval {checkpoint.save_retain_interval} is no multiple of --save-interval {checkpoint.save_interval}, "
            "so that none of its checkpoints would ever be saved; give a multiple."
        )
    rate_flags = ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
    for name in ("exit_on_missing_checkpoint", "finetune", "no_load_optim", "ckpt_step", *rate_flags):
        if getattr(checkpoint, name) and checkpoint.load is None:
            yield f"{_flag(name)} says how to load, but nothing is loaded: give --load, or leave it out."
    if all(getattr(checkpoint, name) for name in rate_flags):
        yield f"{' and '.join(map(_flag, rate_flags))} take the learning rate from either side; leave one out."


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
