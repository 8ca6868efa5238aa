"""Runs in an environment of its own that has megatron-core: reads checkpoints with Megatron's code, and trains on from them.

``python megatron_peer.py JOB.json`` where the job says ``task`` and ``folder``, and writes its answer to ``answer``. Imports
nothing of this project.
"""

import contextlib
import hashlib
import itertools
import json
import os
import sys
import tempfile

import numpy

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # a compiler is not needed for tiny models, and stumbles over what stands in for a GPU

import torch
import torch.distributed as dist

MICRO_BATCH, BATCH, STEPS = 2, 8, 4


def plain(job, rank):
    """Every tensor that `load_plain_tensors` finds, into ``tensors``."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load_plain_tensors(job["folder"])
    torch.save({key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}, job["tensors"])
    return {"keys": len(loaded)}


def build(job):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    llama = job["model"] == "llama"
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2 if llama else 4,
        ffn_hidden_size=176 if llama else 256,
        gated_linear_unit=llama,
        activation_func=torch.nn.functional.silu if llama else torch.nn.functional.gelu,
        add_bias_linear=not llama,
        normalization="RMSNorm" if llama else "LayerNorm",
        bias_activation_fusion=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=job["tp"],
        layernorm_epsilon=1e-5,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm" if llama else None),
        vocab_size=job["padded_vocab"],
        max_sequence_length=32,
        position_embedding_type="rope" if llama else "learned_absolute",
        share_embeddings_and_output_weights=not llama,
        rotary_percent=1.0,
    )


def optimizer_of(model, half=False):
    """Megatron's optimizer in fp32, or around bf16 weights, groups as Megatron makes them."""
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    named = list(model.named_parameters())
    decaying = [p for n, p in named if not n.endswith(".bias") and p.dim() > 1]
    others = [p for n, p in named if n.endswith(".bias") or p.dim() == 1]
    common = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "max_lr": 4e-3, "min_lr": 4e-4}
    groups = [
        {"params": decaying, "wd_mult": 1.0, "weight_decay": 0.1, **common},
        {"params": others, "wd_mult": 0.0, "weight_decay": 0.0, **common},
    ]
    adam = torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95), eps=1e-8)

    def init_state(opt, config=None):
        for group in opt.param_groups:
            for p in group["params"]:
                if not opt.state[p]:
                    opt.state[p] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    if half:
        name_gpus_for_cpus()
        return Float16OptimizerWithFloat16Params(adam, OptimizerConfig(optimizer="adam", lr=4e-3, bf16=True), None, init_state)
    return FP32Optimizer(adam, OptimizerConfig(optimizer="adam", lr=4e-3), init_state)


def load(job, rank, model, optimizer):
    """Fill both from the checkpoint, by Megatron's own ways, strictly; the state beside them."""
    if job["format"] == "legacy":
        file = os.path.join(job["folder"], f"mp_rank_{rank:02d}", "model_optim_rng.pt")
        state = torch.load(file, map_location="cpu", weights_only=False)
        model.load_state_dict(state["model"], strict=True)
        if "optimizer" in state:
            optimizer.load_state_dict(state["optimizer"])
        return state
    from megatron.core import dist_checkpointing

    sharded = {"model": model.sharded_state_dict(metadata={"chained_optim_avoid_prefix": True})}
    if job["optimizer"]:
        sharded["optimizer"] = optimizer.sharded_state_dict(sharded["model"], is_loading=True)
    state = dist_checkpointing.load(sharded, job["folder"], strict="assume_ok_unexpected")
    model.load_state_dict(state["model"], strict=True)
    if job["optimizer"]:
        optimizer.load_state_dict(state["optimizer"])
    return state


def random_states(job, rank):
    """Take over the random states of a checkpoint as Megatron's trainer does, but for the GPU's; the numbers that follow."""
    import random

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    if job["format"] == "legacy":
        file = os.path.join(job["folder"], f"mp_rank_{rank:02d}", "model_optim_rng.pt")
        states = torch.load(file, map_location="cpu", weights_only=False)["rng_state"]
    else:
        stored = ShardedObject("rng_state", None, (1, job["tp"]), (0, rank), replica_id=0)
        states = dist_checkpointing.load({"rng_state": stored}, job["folder"], strict="assume_ok_unexpected")["rng_state"]
    (state,) = states
    random.setstate(state["random_rng_state"])
    numpy.random.set_state(state["np_rng_state"])
    torch.set_rng_state(state["torch_rng_state"])
    assert state["rng_tracker_states"]  # Megatron takes an empty one for a missing one
    gpu = {"cuda": state["cuda_rng_state"], **state["rng_tracker_states"]}
    seeds = {name: each.view(torch.int64).tolist() for name, each in gpu.items()}
    drawn = [random.random(), float(numpy.random.random()), torch.rand((), dtype=torch.float64).item()]
    return {"drawn": drawn, "seeds": seeds}


def scheduler_of(optimizer):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=4e-3,
        min_lr=4e-4,
        lr_warmup_steps=40,
        lr_decay_steps=160,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=160,
        wd_incr_style="constant",
    )


def batches(job):
    with numpy.load(job["samples"]) as arrays:
        tokens, mask = torch.from_numpy(arrays["tokens"]), torch.from_numpy(arrays["loss_mask"]).float()
    for start in range(0, BATCH * STEPS, MICRO_BATCH):
        rows = slice(start, start + MICRO_BATCH)
        yield tokens[rows, :-1], tokens[rows, 1:], mask[rows]


def token_losses(model, tokens, labels):
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    blocked = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)[None, None]
    return model(tokens, positions, blocked, labels=labels)


def train(job, rank):
    """Losses of four more steps, as Megatron reports them, from a checkpoint of 20."""
    model = build(job)
    optimizer = optimizer_of(model)
    state = load(job, rank, model, optimizer)
    scheduler = scheduler_of(optimizer)
    scheduler.load_state_dict(state["opt_param_scheduler"])
    samples, losses = batches(job), []
    for _ in range(STEPS):
        optimizer.optimizer.zero_grad()
        total, count = 0.0, 0.0
        for tokens, labels, mask in itertools.islice(samples, BATCH // MICRO_BATCH):
            summed = (token_losses(model, tokens, labels) * mask).sum()
            (summed / mask.sum() / (BATCH // MICRO_BATCH)).backward()
            total, count = total + summed.item(), count + mask.sum().item()
        clip(model)
        optimizer.optimizer.step()
        scheduler.step(BATCH)
        losses.append(total / count)
    return {"losses": losses, "iteration": state["iteration"], "step": int(next(iter(optimizer.optimizer.state.values()))["step"])}


def clip(model):
    """Scale to a norm of 1 over all ranks; what every rank holds whole counts once."""
    square = torch.zeros(())
    for p in model.parameters():
        if getattr(p, "tensor_model_parallel", False) or dist.get_rank() == 0:
            square += p.grad.square().sum()
    dist.all_reduce(square)
    scale = min(1.0, 1.0 / (square.sqrt().item() + 1e-6))
    for p in model.parameters():
        p.grad.mul_(scale)


@torch.no_grad()
def evaluate(job, rank):
    """Mean loss over the first samples at a checkpoint's weights."""
    model = build(job)
    load({**job, "optimizer": False}, rank, model, None)
    total, count = 0.0, 0.0
    for tokens, labels, mask in batches(job):
        total, count = total + (token_losses(model, tokens, labels) * mask).sum().item(), count + mask.sum().item()
    return {"loss": total / count}


def half(job, rank):
    """Digests of the fp32 weights, and of both moments, that the optimizer of a bf16 model holds after loading."""
    model = build(job).bfloat16()
    model.config.params_dtype = torch.bfloat16
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = optimizer_of(model, half=True)
    if job["format"] == "torch_dist":
        optimizer.init_state_fn(optimizer.optimizer)
    load(job, rank, model, optimizer)
    found = {}
    for halves, copies in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
        for parameter, copy in zip(halves, copies, strict=True):
            state = optimizer.optimizer.state[copy]
            for role, tensor in (("weight", copy), ("exp_avg", state["exp_avg"]), ("exp_avg_sq", state["exp_avg_sq"])):
                found[f"{names[parameter]} {role}"] = hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()
            assert torch.equal(parameter, copy.bfloat16())
    return found


def save_distributed(job, rank):
    """Two steps of Megatron's distributed optimizer around a bf16 model, saved in the form that the job names."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    name_gpus_for_cpus()
    filesystem_async._process_memory = lambda: 0  # asks a package that may not be there
    torch.manual_seed(0)
    model = build(job).bfloat16()
    model.config.params_dtype = torch.bfloat16
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), model
    )
    settings = {"lr": 4e-3, "min_lr": 4e-4, "weight_decay": 0.1, "clip_grad": 0.0, "use_distributed_optimizer": True}
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", bf16=True, params_dtype=torch.bfloat16, **settings), [ddp])
    samples = batches(job)
    for _ in range(2):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        tokens, labels, _mask = next(samples)
        token_losses(ddp, tokens, labels).mean().backward()
        ddp.finish_grad_sync()
        optimizer.step()
    metadata = {"distrib_optim_sharding_type": job["sharding"], "singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    state = {"model": model.sharded_state_dict(metadata=metadata), "iteration": 2, "checkpoint_version": 3.0}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], metadata=metadata)
    if rank == 0:
        os.makedirs(job["folder"])
    dist.barrier()
    dist_checkpointing.save(state, job["folder"], content_metadata=metadata)
    return {"weights": {name: digest(tensor) for name, tensor in model.named_parameters()}}


def digest(tensor):
    return hashlib.sha256(tensor.detach().float().numpy().tobytes()).hexdigest()


def name_gpus_for_cpus():
    """Its optimizers take no weights that are not on a GPU, by the name of their type."""
    kind_of = torch.Tensor.type
    torch.Tensor.type = lambda self, *args: kind_of(self, *args) if args else kind_of(self).replace("torch.", "torch.cuda.")
    for name in ("zeros", "ones", "full"):
        make = getattr(torch, name)
        on_cpu = lambda *a, make=make, **k: make(*a, **{key: value for key, value in k.items() if key != "device"})  # noqa: E731
        setattr(torch, name, on_cpu)
    torch.Tensor.cuda = lambda self, *_, **__: self


def do_without_a_gpu():
    """Megatron asks for the GPU by name in a few places; hand it the CPU."""
    make_tensor = torch.tensor
    torch.tensor = lambda *args, **settings: make_tensor(*args, **{k: v for k, v in settings.items() if k != "device"})
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None


def run(rank, job, store):
    torch.set_num_threads(1)
    do_without_a_gpu()
    tp, world = job["tp"], job.get("world", job["tp"])
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    parallel_state.initialize_model_parallel(tp)
    get_cuda_rng_tracker().fork = lambda *_: contextlib.nullcontext()  # nothing is dropped
    tasks = {"plain": plain, "train": train, "evaluate": evaluate, "half": half, "random": random_states, "save": save_distributed}
    answer = tasks[job["task"]](job, rank)
    if rank == 0:
        with open(job["answer"], "w") as file:
            json.dump(answer, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    with open(sys.argv[1]) as job_file:
        the_job = json.load(job_file)
    with tempfile.TemporaryDirectory() as folder:
        the_store = os.path.join(folder, "store")
        torch.multiprocessing.spawn(run, (the_job, the_store), nprocs=the_job.get("world", the_job["tp"]))
