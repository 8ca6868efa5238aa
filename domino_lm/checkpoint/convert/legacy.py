"""Megatron's legacy checkpoints, read and written whole: one file for each tensor-parallel rank."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from domino_lm.checkpoint import megatron_state
from domino_lm.checkpoint.convert.distributed import PARALLEL_LINEARS
from domino_lm.checkpoint.convert.stored_model import StoredModel
from domino_lm.checkpoint.folder import LEGACY_FILE
from domino_lm.checkpoint.megatron_legacy import LegacyCheckpoint, Role
from domino_lm.checkpoint.publish import sync_file, sync_folder
from domino_lm.checkpoint.source import record_of_megatron
from domino_lm.config.settings import ModelConfig
from domino_lm.model.parameter import ParameterSpec

ShardOf = Callable[[ParameterSpec, Role, torch.dtype], Tensor]


def read_legacy(path: Path, model: ModelConfig | None = None) -> StoredModel:
    """A legacy checkpoint of Megatron's; ``model`` is used if it holds no arguments."""
    checkpoint = LegacyCheckpoint.open(path)
    record = record_of_megatron(checkpoint.common, checkpoint.vocab_rows, str(path))
    model = model or megatron_state.read_model(checkpoint.common, str(path))
    stored = StoredModel(
        kind="megatron-legacy",
        path=path,
        model=replace(model, vocab_size=model.vocab_size or checkpoint.vocab_rows),
        vocab_rows=checkpoint.vocab_rows,
        softmax_rows=checkpoint.vocab_rows,
        dtype=checkpoint.dtype,
        iteration=record["iteration"],
        optimizer_steps=record["optimizer_steps"] if checkpoint.has_optimizer else None,
        state=record["state"],
        moments=checkpoint.moments,
        read=checkpoint.whole,
    )
    checkpoint.check(stored.specs(), with_optimizer=False)
    return stored


def write_legacy(stored: StoredModel, folder: Path, tensor_parallel: int) -> None:
    """Write what Megatron reads with ``--ckpt-format torch`` at this tensor-parallel size; one rank's tensors at a time are in memory."""
    rows, specs = stored.model.padded_vocab_size(tensor_parallel), stored.specs()
    for rank in range(tensor_parallel):
        file = folder / f"mp_rank_{rank:02d}" / LEGACY_FILE
        file.parent.mkdir()
        torch.save(_rank_file(stored, specs, rank, tensor_parallel, rows), file)
        sync_file(file)
        sync_folder(file.parent)


def _rank_file(stored: StoredModel, specs: Sequence[ParameterSpec], rank: int, tensor_parallel: int, rows: int) -> dict[str, Any]:
    """One rank's file, keys in Megatron's order."""

    def shard(spec: ParameterSpec, role: Role, dtype: torch.dtype) -> Tensor:
        whole = stored.tensor(spec, role, rows, dtype)
        return spec.shard(whole, rank, tensor_parallel).clone(memory_format=torch.contiguous_format)

    content: dict[str, Any] = {
        "args": megatron_state.megatron_args(stored.model, tensor_parallel, rows, stored.state, stored.dtype),
        "checkpoint_version": megatron_state.CHECKPOINT_VERSION,
        "iteration": stored.iteration,
        "model": _model_part(stored, specs, shard),
    }
    if stored.optimizer_steps is not None:
        content["optimizer"] = _optimizer_part(stored, specs, shard)
        scheduler = megatron_state.scheduler_state(stored.state)
        if scheduler is not None:
            content["opt_param_scheduler"] = scheduler
    content["rng_state"] = megatron_state.rng_state(megatron_state.seed_of(stored.state), rank)
    content["num_floating_point_operations_so_far"] = 0
    return content


def _model_part(stored: StoredModel, specs: Sequence[ParameterSpec], shard: ShardOf) -> OrderedDict[str, Any]:
    """Weights by name, and the empty entries that parallel linear layers leave, without which Megatron does not load."""
    weights: OrderedDict[str, Any] = OrderedDict()
    for index, spec in enumerate(specs):
        weights[spec.name] = shard(spec, "weight", stored.dtype)
        module = spec.name.rpartition(".")[0]
        last_of_module = index + 1 == len(specs) or not specs[index + 1].name.startswith(f"{module}.")
        if last_of_module and any(module.endswith(f".{linear}") for linear in PARALLEL_LINEARS):
            weights[f"{module}._extra_state"] = None
    weights["output_layer._extra_state"] = None
    return weights


def _optimizer_part(stored: StoredModel, specs: Sequence[ParameterSpec], shard: ShardOf) -> dict[str, Any]:
    """The optimizer's state: numbers run through its groups; weights in half precision have fp32 copies beside them."""
    members = megatron_state.grouped(stored.state, stored.model, specs)
    grouped = list(members.values())
    numbers = {spec.name: number for number, spec in enumerate(spec for group in grouped for spec in group)}
    pairs = zip(megatron_state.param_groups(stored.state, members, stored.moments), grouped, strict=True)
    groups = [{**settings, "params": [numbers[spec.name] for spec in members]} for settings, members in pairs]
    counted = {"step": torch.tensor(float(stored.optimizer_steps or 0))} if "exp_avg" in stored.moments else {}
    state = {
        numbers[spec.name]: {**counted, **{name: shard(spec, name, torch.float32) for name in stored.moments}}
        for group in grouped
        for spec in group
    }
    optimizer: dict[str, Any] = {"state": state, "param_groups": groups}
    if stored.dtype.itemsize >= 4:
        return optimizer
    copies = [[shard(spec, "weight", torch.float32) for spec in group] for group in grouped]
    scaler = megatron_state.grad_scaler_state(stored.state) if stored.dtype == torch.float16 else None
    return {"optimizer": optimizer, "fp32_from_fp16_params": copies} | ({"grad_scaler": scaler} if scaler is not None else {})
