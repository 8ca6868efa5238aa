"""Native and Megatron's torch_dist checkpoints, read and written whole: the same tensors beside other records."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from domino_lm.checkpoint import megatron_state
from domino_lm.checkpoint.blocks import Block, blocks_of, plan_reads, read_blocks
from domino_lm.checkpoint.convert.stored_model import StoredModel, tensors
from domino_lm.checkpoint.folder import BACKEND_FILE, Kind
from domino_lm.checkpoint.index import CheckpointError, read_metadata
from domino_lm.checkpoint.manifest import FileHashes, Manifest, StoredFiles
from domino_lm.checkpoint.megatron_distributed import COMMON_FILE, MASTER_PREFIX, read_common
from domino_lm.checkpoint.megatron_legacy import Role
from domino_lm.checkpoint.publish import sync_file, write_synced
from domino_lm.checkpoint.record import STATE_FILE, native_record, read_native_record
from domino_lm.checkpoint.save_load import SHARDED_BACKEND, write_native_files
from domino_lm.checkpoint.source import WORD_EMBEDDINGS, moments_of, prefix_of, read_megatron_record, word_embeddings
from domino_lm.checkpoint.writing import write_blocks
from domino_lm.config.settings import ModelConfig
from domino_lm.model.families.transformer import without_redundant_settings
from domino_lm.model.parameter import ParameterSpec
from domino_lm.parallel.collectives import Communicator

ALONE = Communicator.single()
PARALLEL_LINEARS = "self_attention.linear_proj self_attention.linear_qkv mlp.linear_fc1 mlp.linear_fc2".split()


def read_native(path: Path) -> StoredModel:
    """A checkpoint of this program."""
    files = StoredFiles(path)
    record = read_native_record(files)
    state = record["state"]
    if not isinstance(state, dict) or "model" not in state:
        raise CheckpointError(f"{path / STATE_FILE}: it does not say the model's settings; it was not saved by this program's trainer")
    try:
        model = without_redundant_settings(ModelConfig(**state["model"]))
    except TypeError as error:
        raise CheckpointError(f"{path / STATE_FILE}: its model's settings are not those of this version ({error})") from error
    if model.model is not None:
        raise CheckpointError(
            f"{path} holds --model {model.model}; only GPT and LLaMA are converted, other models stay in native checkpoints"
        )
    return _stored("native", files, read_metadata(path, files.read), record, replace(model, vocab_size=record["vocab_size"]))


def read_torch_dist(path: Path, model: ModelConfig | None = None) -> StoredModel:
    """A torch_dist checkpoint of Megatron's; ``model`` is used if it holds no arguments."""
    metadata = read_metadata(path)
    record = read_megatron_record(path, metadata)
    model = model or megatron_state.read_model(read_common(path, metadata), str(path))
    return _stored(
        "megatron-torch_dist", StoredFiles(path), metadata, record, replace(model, vocab_size=model.vocab_size or record["softmax_rows"])
    )


def _stored(kind: Kind, files: StoredFiles, metadata: Metadata, record: Mapping[str, Any], model: ModelConfig) -> StoredModel:
    path, table = files.folder, word_embeddings(files.folder, metadata)
    rows = table.size[0]
    return StoredModel(
        kind=kind,
        path=path,
        model=model,
        vocab_rows=rows,
        softmax_rows=record["softmax_rows"] or (record["vocab_size"] if model.mask_padded_vocab else rows),
        dtype=table.properties.dtype,
        iteration=record["iteration"],
        optimizer_steps=record["optimizer_steps"] if moments_of(metadata) else None,
        state=record["state"],
        moments=moments_of(metadata),
        read=_reader(files, metadata, rows),
    )


def write_native(stored: StoredModel, folder: Path) -> None:
    """Write everything into ``folder``: tensors as stored, in the form that `save_checkpoint` gives them."""
    model, rows = stored.model, stored.softmax_rows
    state = {**stored.state, "model": {**asdict(model), "mask_padded_vocab": rows == model.vocab_size}}
    files = _write_tensors(stored, folder, stored.vocab_rows, {})
    layout = {"world": 1, "tensor_parallel": 1, "data_parallel": 1}
    record = native_record(stored.iteration, model.vocab_size, rows, stored.optimizer_steps or 0, state)
    write_native_files(folder, record, Manifest(run_id="", iteration=stored.iteration, layout=layout, files=files))


def write_torch_dist(stored: StoredModel, folder: Path, tensor_parallel: int) -> None:
    """Write what Megatron reads with ``--ckpt-format torch_dist`` at any size; the vocabulary is padded for ``tensor_parallel`` ranks."""
    rows = stored.model.padded_vocab_size(tensor_parallel)
    empty = _saved([None])  # Megatron's extra state of a linear layer without fp8
    layers = stored.model.num_layers
    objects = {f"decoder.layers.{name}._extra_state/shard_{i}_{layers}": empty for name in PARALLEL_LINEARS for i in range(layers)}
    for rank in range(tensor_parallel):
        objects[f"rng_state/shard_0.{rank}_1.{tensor_parallel}"] = _saved(
            [megatron_state.rng_state(megatron_state.seed_of(stored.state), rank)]
        )
    _write_tensors(stored, folder, rows, objects)
    backend = {**SHARDED_BACKEND, "common_backend": "torch", "common_backend_version": 1}
    write_synced(folder / BACKEND_FILE, json.dumps(backend).encode())
    torch.save(_common_state(stored, tensor_parallel, rows), folder / COMMON_FILE)
    sync_file(folder / COMMON_FILE)


def _common_state(stored: StoredModel, tensor_parallel: int, rows: int) -> dict[str, Any]:
    common: dict[str, Any] = {
        "args": megatron_state.megatron_args(stored.model, tensor_parallel, rows, stored.state, stored.dtype),
        "checkpoint_version": megatron_state.CHECKPOINT_VERSION,
        "iteration": stored.iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    if stored.optimizer_steps is not None:
        counted = {"common_step": torch.tensor(float(stored.optimizer_steps))} if "exp_avg" in stored.moments else {}
        members = megatron_state.grouped(stored.state, stored.model, stored.specs())
        optimizer: dict[str, Any] = {"state": counted, "param_groups": megatron_state.param_groups(stored.state, members, stored.moments)}
        common["optimizer"] = optimizer if stored.dtype.itemsize >= 4 else {"optimizer": optimizer}
        scaler = megatron_state.grad_scaler_state(stored.state)
        if stored.dtype == torch.float16 and scaler is not None:
            common["optimizer"]["grad_scaler"] = scaler
        scheduler = megatron_state.scheduler_state(stored.state)
        if scheduler is not None:
            common["opt_param_scheduler"] = scheduler
    return common


def _write_tensors(stored: StoredModel, folder: Path, rows: int, objects: Mapping[str, bytes]) -> dict[str, FileHashes]:
    """Plan all tensors, then read and write them one at a time; returns the hashes of what was written."""
    reads: dict[tuple[str, tuple[int, ...]], tuple[ParameterSpec, Role, torch.dtype]] = {}
    blocks = []
    for prefix, spec, role, dtype in _planned(stored):
        shape = stored.shape(spec, rows)
        whole = replace(spec, shape=shape, shard_dim=None)
        (block,) = blocks_of(whole, torch.empty(shape, dtype=dtype, device="meta"), ALONE, prefix)
        blocks.append(block)
        reads[block.place] = spec, role, dtype

    def resolve(block: Block) -> Tensor:
        spec, role, dtype = reads[block.place]
        return stored.tensor(spec, role, rows, dtype).view(block.values.shape)

    return write_blocks(folder, blocks, ALONE, objects, resolve)


def _planned(stored: StoredModel) -> list[tuple[str, ParameterSpec, Role, torch.dtype]]:
    """Prefix of the key, parameter, role and data type of each tensor; half-precision weights that are trained come in fp32 too."""
    half_and_trained = stored.dtype.itemsize < 4 and stored.optimizer_steps is not None
    planned = []
    for spec, role in tensors(stored, stored.roles()):
        planned.append((prefix_of(role), spec, role, stored.dtype if role == "weight" else torch.float32))
        if role == "weight" and half_and_trained:
            planned.append((MASTER_PREFIX, spec, role, torch.float32))
    return planned


def _reader(files: StoredFiles, metadata: Metadata, rows: int) -> Callable[[ParameterSpec, Role], Tensor]:
    """Reads whole tensors; weights in fp32 if the checkpoint keeps them so beside its own."""
    masters = MASTER_PREFIX + WORD_EMBEDDINGS in metadata.state_dict_metadata

    def read(spec: ParameterSpec, role: Role) -> Tensor:
        prefix = MASTER_PREFIX if masters and role == "weight" else prefix_of(role)
        stored = metadata.state_dict_metadata.get(prefix + spec.key)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{files.folder}: the model's settings ask for {prefix + spec.key}, which the checkpoint does not hold")
        shape = spec.shape if spec.vocab_rows is None else (rows, *spec.shape[1:])
        values = torch.empty(shape, dtype=stored.properties.dtype)
        blocks = list(blocks_of(replace(spec, shape=shape, shard_dim=None, vocab_rows=None), values, ALONE, prefix))
        read_blocks(files, metadata, blocks, plan_reads(files.folder, metadata, blocks, complete=False))
        return values

    return read


def _saved(value: Any) -> bytes:
    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()
