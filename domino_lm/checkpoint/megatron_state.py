"""What Megatron's checkpoints say beside tensors: its arguments and its schedule, as settings and state of this program, and back."""

import random
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch

from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.torch_files import values_of
from domino_lm.config.megatron_flags import megatron_flags
from domino_lm.config.settings import ModelConfig
from domino_lm.model.families.transformer import without_redundant_settings
from domino_lm.model.parameter import ParameterSpec
from domino_lm.model.parameter_groups import GROUPS, Group

CHECKPOINT_VERSION = 3.0
LOSS_SCALE = ("scale", "growth_tracker", "hysteresis_tracker")
"""A checkpoint's keys of a dynamic loss scale."""
_SAME_NAME = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention kv_channels seq_length max_position_embeddings "
    "position_embedding_type rotary_base use_rope_scaling rope_scaling_factor normalization swiglu bias_gelu_fusion openai_gelu add_bias_linear untie_embeddings_and_output_weights "
    "attention_dropout hidden_dropout init_method_std vocab_size make_vocab_size_divisible_by "
    "rotary_seq_len_interpolation_factor apply_layernorm_1p embedding_init_method_std init_method_xavier_uniform"
).split()
_SETTINGS = (
    "global_batch_size micro_batch_size train_iters seed lr min_lr decoupled_lr decoupled_min_lr weight_decay start_weight_decay "
    "end_weight_decay weight_decay_incr_style optimizer sgd_momentum adam_beta1 adam_beta2 adam_eps"
).split()


def read_model(common: Mapping[str, Any], where: str) -> ModelConfig:
    """The model that a checkpoint's arguments describe.

    Raises CheckpointError if there are no arguments, or if they ask for arithmetic that this program does not have.
    """
    args = values_of(common.get("args"))
    if "num_layers" not in args:
        raise CheckpointError(
            f"{where}: the checkpoint holds weights but no arguments of the run that made it, so its model is not known; "
            "give the model's flags (--num-layers, --hidden-size, --num-attention-heads, --seq-length, ...)"
        )
    found = [(flag.argument, args.get(flag.argument), flag) for flag in megatron_flags() if flag.changes_model]
    foreign = [f"{name} {value}" for name, value, flag in found if not flag.is_off(value)]
    position = args.get("position_embedding_type", "learned_absolute")
    if args.get("use_rotary_position_embeddings"):
        position = "rope"
    if position not in ("learned_absolute", "rope"):
        foreign.append(f"position_embedding_type {position}")
    if args.get("normalization", "LayerNorm") not in ("LayerNorm", "RMSNorm"):
        foreign.append(f"normalization {args['normalization']}")
    if foreign:
        raise CheckpointError(f"{where}: the checkpoint is of a model that this program does not build: {', '.join(foreign)}")
    known = {name: args[name] for name in _SAME_NAME if args.get(name) is not None}
    known |= {
        "position_embedding_type": position,
        "norm_epsilon": args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5)),
        "rotary_base": float(args.get("rotary_base", 10000)),
        "seq_length": args.get("seq_length", args.get("max_position_embeddings")),
        "mask_padded_vocab": False,
        "apply_layernorm_1p": bool(args.get("apply_layernorm_1p") or args.get("layernorm_zero_centered_gamma")),
    }
    factor, std = known.pop("rotary_seq_len_interpolation_factor", None), known.pop("embedding_init_method_std", None)
    known |= {"rotary_seq_len_interpolation_factor": float(factor)} if factor not in (None, 1) else {}
    known |= {"embedding_init_method_std": std} if std not in (None, args.get("init_method_std")) else {}
    if known.get("group_query_attention"):
        known["num_query_groups"] = args["num_query_groups"]
    return without_redundant_settings(ModelConfig(**known))


def arithmetic_of(common: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings of the checkpoint's model that the shapes of its tensors do not tell, by field name; empty without arguments."""
    if "num_layers" not in values_of(common.get("args")):
        return {}
    model = read_model(common, where)
    names = ["num_attention_heads", "position_embedding_type", "normalization", "norm_epsilon", "apply_layernorm_1p", "swiglu"]
    names += ["rotary_base", "use_rope_scaling", "rotary_seq_len_interpolation_factor"] if model.position_embedding_type == "rope" else []
    names += ["rope_scaling_factor"] if model.use_rope_scaling else []
    names += [] if model.swiglu else ["bias_gelu_fusion", "openai_gelu"]
    return {name: getattr(model, name) for name in names}


def read_state(common: Mapping[str, Any]) -> dict[str, Any]:
    """Samples consumed and, if the checkpoint has them, the learning-rate schedule and the loss scale, as `Trainer` saves them."""
    args, scheduler = values_of(common.get("args")), common.get("opt_param_scheduler") or {}
    iteration, state = int(common.get("iteration") or 0), {}
    if "num_steps" in scheduler:
        state["learning_rate"] = {
            "samples": int(scheduler["num_steps"]),
            "peak": scheduler["max_lr"],
            "minimum": scheduler["min_lr"],
            "initial": args.get("lr_warmup_init", 0.0),
            "style": scheduler["lr_decay_style"],
            "warmup_samples": scheduler["lr_warmup_steps"],
            "decay_samples": scheduler["lr_decay_steps"],
            **_wsd(scheduler["lr_decay_style"], args),
            **_beside_the_rate(scheduler, args),
        }
    counted = args.get("consumed_train_samples")
    if counted is None:
        batch = args.get("global_batch_size")
        counted = iteration * batch if batch is not None else scheduler.get("num_steps", 0)
    settings = {name: args[name] for name in _SETTINGS if args.get(name) is not None}
    return {"consumed_samples": int(counted), "tokenizer": None, "settings": settings, "loss_scaler": _loss_scale(common), **state}


def _loss_scale(common: Mapping[str, Any]) -> dict[str, float] | None:
    """What the optimizer's state says of a dynamic loss scale."""
    found = (last_of_chain(common.get("optimizer")) or {}).get("grad_scaler") or {}
    numbers = {name: found[name] for name in LOSS_SCALE if found.get(name) is not None}
    return {name: float(torch.as_tensor(value).flatten()[0]) for name, value in numbers.items()} if "scale" in numbers else None


def grad_scaler_state(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The loss scale as Megatron's `DynamicGradScaler` saves it; None if ``state`` has none."""
    found = state.get("loss_scaler")
    return None if not found else {**{name: int(found[name]) for name in LOSS_SCALE[1:]}, "scale": torch.tensor([found["scale"]])}


def _wsd(style: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Shape and length of the last part of a warm-up, stable, decay schedule, which the schedule's own state leaves out."""
    if style != "WSD":
        return {}
    iterations, batch = args.get("lr_wsd_decay_iters"), args.get("global_batch_size")
    samples = args.get("lr_wsd_decay_samples") or (iterations * batch if iterations and batch else None)
    return {"wsd_style": args.get("lr_wsd_decay_style"), "wsd_samples": samples}


def _beside_the_rate(scheduler: Mapping[str, Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Rates of embedding and output layer, and weight decay that is not constant."""
    found: dict[str, Any] = {}
    if args.get("decoupled_lr") is not None:
        minimum = args.get("decoupled_min_lr")
        found |= {"decoupled_peak": args["decoupled_lr"], "decoupled_minimum": scheduler["min_lr"] if minimum is None else minimum}
    if scheduler.get("wd_incr_style", "constant") != "constant":
        names = {"start": "start_wd", "end": "end_wd", "style": "wd_incr_style", "samples": "wd_incr_steps"}
        found |= {f"weight_decay_{ours}": scheduler[theirs] for ours, theirs in names.items()}
    return found


def last_of_chain(optimizer: Any) -> Any:
    """AdamW's part of the state of a chain of optimizers, a list or a mapping by number, as Muon's is; any other state as it is."""
    if isinstance(optimizer, Mapping) and optimizer and all(isinstance(key, int) for key in optimizer):
        return optimizer[max(optimizer)]
    return optimizer[-1] if isinstance(optimizer, list | tuple) and optimizer else optimizer


def optimizer_steps(optimizer: Mapping[str, Any] | None, iteration: int) -> int:
    """Updates that Adam has made, by what the optimizer's state says, else one for each iteration."""
    optimizer = last_of_chain(optimizer)
    if not optimizer:
        return 0
    inner = optimizer.get("optimizer", optimizer)
    state = inner.get("state") or {}
    found = [state.get("common_step"), (state.get(0) or {}).get("step"), *(group.get("step") for group in inner.get("param_groups") or [])]
    step = next((value for value in found if value is not None), iteration)
    return int(step.item() if isinstance(step, torch.Tensor) else step)


def megatron_args(
    model: ModelConfig, tensor_parallel: int, padded_vocab_size: int, state: Mapping[str, Any], dtype: torch.dtype
) -> Namespace:
    """Arguments that describe ``model`` to Megatron, which compares them with its own on loading."""
    schedule, settings = state.get("learning_rate") or {}, state.get("settings") or {}
    values = {name: getattr(model, name) for name in _SAME_NAME}
    values |= {
        "ffn_hidden_size": model.ffn_width,
        "bias_gelu_fusion": model.bias_gelu_fusion and model.add_bias_linear,
        "kv_channels": model.head_width,
        "layernorm_zero_centered_gamma": model.apply_layernorm_1p,
        "max_position_embeddings": model.position_rows,
        "num_query_groups": model.query_groups,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "encoder_num_layers": model.num_layers,
        "encoder_seq_length": model.seq_length,
        "layernorm_epsilon": model.norm_epsilon,
        "norm_epsilon": model.norm_epsilon,
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "use_rotary_position_embeddings": False,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "add_qkv_bias": model.add_bias_linear,
        "padded_vocab_size": padded_vocab_size,
        "tensor_model_parallel_size": tensor_parallel,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "data_parallel_size": 1,
        "world_size": tensor_parallel,
        "use_distributed_optimizer": False,
        "params_dtype": dtype,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
        "iteration": 0,
        "consumed_train_samples": int(state.get("consumed_samples", 0)),
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "ckpt_fully_parallel_save": False,
        "lr_warmup_init": schedule.get("initial", 0.0),
    }
    values |= {name: settings[name] for name in _SETTINGS if settings.get(name) is not None}
    return Namespace(**values)


def scheduler_state(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """The learning-rate schedule as Megatron's `OptimizerParamScheduler` saves it; None if ``state`` has none."""
    schedule = state.get("learning_rate")
    if schedule is None:
        return None
    decay = (state.get("settings") or {}).get("weight_decay", 0.01)
    return {
        "max_lr": schedule["peak"],
        "lr_warmup_steps": schedule["warmup_samples"],
        "num_steps": schedule["samples"],
        "lr_decay_style": schedule["style"],
        "lr_decay_steps": schedule["decay_samples"],
        "min_lr": schedule["minimum"],
        "start_wd": schedule.get("weight_decay_start", decay),
        "end_wd": schedule.get("weight_decay_end", decay),
        "wd_incr_style": schedule.get("weight_decay_style", "constant"),
        "wd_incr_steps": schedule.get("weight_decay_samples", schedule["decay_samples"]),
    }


def grouped(state: Mapping[str, Any], model: ModelConfig, specs: Sequence[ParameterSpec]) -> dict[Group, list[ParameterSpec]]:
    """The members of each of Megatron's groups of parameters that has any, in its order."""
    parts = {
        "embeddings_decay": model.embedding_init_method_std is None,
        "decoupled": "decoupled_peak" in (state.get("learning_rate") or {}),
    }
    found = {group: [spec for spec in specs if Group.of(spec.name, len(spec.shape), **parts) == group] for group in GROUPS}
    return {group: members for group, members in found.items() if members}


def param_groups(state: Mapping[str, Any], groups: Iterable[Group], moments: Collection[str]) -> list[dict[str, Any]]:
    """Megatron's ``groups`` of parameters of the optimizer that keeps ``moments``, without the parameters' numbers."""
    schedule, settings = state.get("learning_rate") or {}, state.get("settings") or {}
    weight_decay = settings.get("weight_decay", 0.01)
    own: dict[str, Any] = {
        "betas": (settings.get("adam_beta1", 0.9), settings.get("adam_beta2", 0.999)),
        "eps": settings.get("adam_eps", 1e-8),
    }
    if "momentum_buffer" in moments:
        own = {"momentum": settings.get("sgd_momentum", 0.9), "dampening": 0.0, "nesterov": False}
    return [
        {
            "wd_mult": float(group.decays),
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": group.decoupled,
            "default_config": not group.decoupled,
            "max_lr": schedule.get("decoupled_peak" if group.decoupled else "peak"),
            "min_lr": schedule.get("decoupled_minimum" if group.decoupled else "minimum"),
            "lr": schedule.get("decoupled_minimum" if group.decoupled else "minimum", 0.0),  # the schedule sets it before each step
            **own,
            "weight_decay": weight_decay * group.decays,
            **({"amsgrad": False} if "eps" in own else {}),
            "maximize": False,
            "foreach": None,
            **({"capturable": False} if "eps" in own else {}),
            "differentiable": False,
            "fused": None,
            **({"decoupled_weight_decay": True} if "eps" in own else {}),
        }
        for group in groups
    ]


def rng_state(seed: int, tp_rank: int) -> list[dict[str, Any]]:
    """Random states of one tensor-parallel rank as a run of Megatron's with ``seed`` begins with, in the form that it saves them.

    This program has none; without them Megatron would need --no-load-rng. Seeds are Megatron's: the model-parallel one is
    2718 and the rank further on, the experts' 1024 and the rank.
    """
    numpy_state = numpy.random.RandomState(seed % 2**32).get_state()
    seeds = {"data-parallel-rng": seed, "model-parallel-rng": seed + 2718 + tp_rank, "expert-parallel-rng": seed + 1024 + tp_rank}
    state = {
        "random_rng_state": random.Random(seed).getstate(),
        "np_rng_state": numpy_state,
        "torch_rng_state": torch.Generator().manual_seed(seed).get_state(),
        "cuda_rng_state": _cuda_state(seed),
        "rng_tracker_states": {name: _cuda_state(each) for name, each in seeds.items()},
    }
    return [state]


def _cuda_state(seed: int) -> torch.Tensor:
    """State of a CUDA generator that has drawn nothing: the seed and an offset of 0, eight bytes each."""
    return torch.tensor([seed, 0], dtype=torch.int64).view(torch.uint8)


def seed_of(state: Mapping[str, Any]) -> int:
    """The seed of the run that a checkpoint's ``state`` tells of."""
    return int((state.get("settings") or {}).get("seed") or 1234)
