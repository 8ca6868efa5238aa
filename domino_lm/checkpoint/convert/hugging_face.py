"""Folders of Hugging Face models: config.json and safetensors files, read and written tensor by tensor."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from domino_lm.checkpoint.convert.hugging_face_layout import Layout, is_norm_weight, layout_for, read_settings
from domino_lm.checkpoint.convert.stored_model import StoredModel, parameter_specs
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.megatron_legacy import Role
from domino_lm.checkpoint.publish import sync_file, write_synced
from domino_lm.config.foreign_text import parse_json
from domino_lm.model.families.transformer import without_redundant_settings
from domino_lm.model.parameter import ParameterSpec

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""Largest size of one file, as Hugging Face writes them."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
KEPT_CONFIG = "hugging_face_config"
"""Where a native checkpoint keeps the config.json that its model came with, so that going back loses nothing of it."""


def read_hugging_face(path: Path) -> StoredModel:
    """A GPT-2 or LLaMA of Hugging Face's."""
    config = _read_json(path / CONFIG_FILE)
    layout = read_settings(config, str(path / CONFIG_FILE))
    files, model = _Tensors(path), layout.model
    _refuse_unread(path, layout, files)
    (table, _), *_ = layout.pieces("embedding.word_embeddings.weight")
    vocab_rows = files.shape(table)[0]
    if model.vocab_size is None or vocab_rows < model.vocab_size:
        raise CheckpointError(f"{path / CONFIG_FILE}: vocab_size {model.vocab_size}, but the embedding has {vocab_rows} rows")

    def read(spec: ParameterSpec, role: Role) -> Tensor:
        assert role == "weight", "a Hugging Face model has no moments"
        return layout.whole(spec.name, files.get)

    return StoredModel(
        kind="hf",
        path=path,
        model=without_redundant_settings(replace(model, mask_padded_vocab=True)),
        vocab_rows=vocab_rows,
        softmax_rows=vocab_rows,
        dtype=files.dtype(table),
        iteration=0,
        optimizer_steps=None,
        state={"consumed_samples": 0, "tokenizer": None, "settings": {}, KEPT_CONFIG: config},
        read=read,
    )


def _refuse_unread(path: Path, layout: Layout, files: "_Tensors") -> None:
    """Raise CheckpointError if the folder holds weights that the model of its config.json does not have."""
    used = {piece for spec in parameter_specs(layout.model) for piece, _ in layout.pieces(spec.name)}
    used |= {name.removeprefix("transformer.") for name in used}
    if not layout.model.untie_embeddings_and_output_weights:
        used.add("lm_head.weight")  # a copy of the embedding
    foreign = [name for name in files.names if name not in used and not name.endswith(_BUFFERS)]
    if foreign:
        raise CheckpointError(f"{path}: it holds {', '.join(foreign[:3])}, which the model of its {CONFIG_FILE} does not have")


def write_hugging_face(stored: StoredModel, folder: Path) -> None:
    """Write weights over the true vocabulary, and the config.json that belongs to them; moments have no place there."""
    layout = layout_for(stored.model)
    assert stored.model.vocab_size is not None
    shards: list[list[ParameterSpec]] = [[]]
    sizes = [0]
    for spec in stored.specs():
        size = torch.empty(stored.shape(spec, stored.model.vocab_size), device="meta", dtype=stored.dtype).nbytes
        if sizes[-1] and sizes[-1] + size > SHARD_BYTES:
            shards.append([])
            sizes.append(0)
        shards[-1].append(spec)
        sizes[-1] += size
    config = _config(stored, layout.settings())
    write_synced(folder / CONFIG_FILE, (json.dumps(config, indent=2, sort_keys=True) + "\n").encode())
    places: dict[str, str] = {}
    for number, specs in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for spec in specs:
            whole = _plain(stored, spec)
            tensors |= {piece: make(whole).clone(memory_format=torch.contiguous_format) for piece, make in layout.pieces(spec.name)}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        shutil.copymode(folder / CONFIG_FILE, folder / name)  # safetensors writes files that only their owner can read
        sync_file(folder / name)
        places |= dict.fromkeys(tensors, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": dict(sorted(places.items()))}
        write_synced(folder / INDEX_FILE, json.dumps(index, indent=2).encode())


def _plain(stored: StoredModel, spec: ParameterSpec) -> Tensor:
    """A weight as models of Hugging Face's have it: those of norms that are kept less 1 get it back, before they are rounded."""
    assert stored.model.vocab_size is not None
    if not (stored.model.apply_layernorm_1p and is_norm_weight(spec.name)):
        return stored.tensor(spec, "weight", stored.model.vocab_size, stored.dtype)
    return (stored.tensor(spec, "weight", stored.model.vocab_size, torch.float32) + 1).to(stored.dtype)


def _config(stored: StoredModel, settings: dict[str, Any]) -> dict[str, Any]:
    """The model's settings, over what its original config.json said besides."""
    kept = stored.state.get(KEPT_CONFIG) or {}
    if kept.get("model_type") == "mistral":
        settings = {**settings, "architectures": kept.get("architectures"), "model_type": "mistral"}
    if "rope_parameters" in kept:
        scaling = settings.pop("rope_scaling", {})
        settings["rope_parameters"] = {**kept["rope_parameters"], **scaling, "rope_theta": settings.pop("rope_theta")}
    if settings.get("activation_function") == "gelu_new" and kept.get("activation_function", "gelu") != "gelu":
        settings["activation_function"] = kept["activation_function"]
    dtype = str(stored.dtype).removeprefix("torch.")
    types = {name: dtype for name in ("torch_dtype", "dtype") if name in kept} or {"torch_dtype": dtype}
    return {**kept, **settings, **types}


class _Tensors:
    """Every tensor of a folder's safetensors files, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / INDEX_FILE).is_file():
            names = sorted(set(_read_json(folder / INDEX_FILE).get("weight_map", {}).values()))
        else:
            names = sorted(file.name for file in folder.glob("*.safetensors"))
        self._files: dict[str, Any] = {}
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{folder / INDEX_FILE}: data file {name!r} lies outside the folder")
            try:
                file = safe_open(folder / name, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{folder / name}: not a safetensors file, or damaged ({error})") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def get(self, name: str) -> Tensor:
        """The tensor ``name``; older GPT-2 files leave out the ``transformer.`` in front."""
        file, found = self._found(name)
        tensor: Tensor = file.get_tensor(found)
        return tensor

    def shape(self, name: str) -> list[int]:
        """Its shape, without reading it."""
        file, found = self._found(name)
        return list(file.get_slice(found).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Its data type, without reading it."""
        file, found = self._found(name)
        kind = file.get_slice(found).get_dtype()
        if kind not in _DTYPES:
            raise CheckpointError(f"{self.folder}: {found} is of type {kind}; {', '.join(_DTYPES)} are read")
        return _DTYPES[kind]

    @property
    def names(self) -> list[str]:
        """Every tensor of the folder."""
        return list(self._files)

    def _found(self, name: str) -> tuple[Any, str]:
        """The file that holds ``name``, and what it is called there."""
        for candidate in (name, name.removeprefix("transformer.")):
            if candidate in self._files:
                return self._files[candidate], candidate
        raise CheckpointError(f"{self.folder}: its config.json asks for {name}, which no safetensors file there holds")


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: it holds no JSON object")
    return value
