"""Megatron's ``--ckpt-format torch``: a folder with one file for each tensor-parallel rank, read as unsharded tensors."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor

from domino_lm.checkpoint.blocks import misfit, shape_fault
from domino_lm.checkpoint.folder import LEGACY_FILE, incomplete
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.torch_files import load_torch_file, values_of
from domino_lm.model.parameter import ParameterSpec
from domino_lm.model.parameter_groups import MOMENTS, Group, Moment
from domino_lm.parallel.collectives import Communicator

Role = Literal["weight", "master"] | Moment
# Other names of the same tensors: norms fused into the next linear layer, and models from before Megatron's core.
_RENAMES = (
    (r"^encoder\.", "decoder."),
    (r"self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r"input_layernorm.\1"),
    (r"mlp\.linear_fc1\.layer_norm_(weight|bias)$", r"pre_mlp_layernorm.\1"),
    (r"self_attention\.query_key_value\.", "self_attention.linear_qkv."),
    (r"(self_attention|attention)\.dense\.", "self_attention.linear_proj."),
    (r"mlp\.dense_h_to_4h\.", "mlp.linear_fc1."),
    (r"mlp\.dense_4h_to_h\.", "mlp.linear_fc2."),
    (r"(layers\.\d+)\.input_norm\.", r"\1.input_layernorm."),
    (r"\.post_attention_(layernorm|norm)\.", ".pre_mlp_layernorm."),
    (r"\.final_norm\.", ".final_layernorm."),
)


@dataclass(frozen=True)
class _Rank:
    """One file's tensors by Megatron's present names."""

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]  # what the optimizer keeps of each name; empty without optimizer
    masters: dict[str, Tensor]  # fp32 copies of the weights of a run in half precision


class LegacyCheckpoint:
    """An open checkpoint. ``common`` is what its first file holds; tensors are mapped and read when they are asked for."""

    def __init__(self, path: Path, common: Mapping[str, Any], ranks: Sequence[_Rank]) -> None:
        self.path = path
        self.common = common
        self._ranks = ranks

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map all files in ``path``. Raises CheckpointError if one is missing, damaged, or in a form that is not read."""
        fault = incomplete(path)
        if fault is not None:
            raise CheckpointError(f"{path.parent}: {fault}. Take another iteration")
        folders = sorted(path.glob("mp_rank_*"))
        files = [load_torch_file(folder / LEGACY_FILE, str(folder / LEGACY_FILE)) for folder in folders]
        _refuse_other_forms(path, files)
        try:
            ranks = [_read_rank(file, folder / LEGACY_FILE) for file, folder in zip(files, folders, strict=True)]
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{path}: its files are not in the form that Megatron writes ({reason}); nothing was loaded") from error
        return cls(path, files[0], ranks)

    @property
    def has_optimizer(self) -> bool:
        """Whether it holds moments."""
        return bool(self._ranks[0].moments)

    @property
    def moments(self) -> tuple[Moment, ...]:
        """What the optimizer keeps of each weight; empty without optimizer."""
        return moments_in(next(iter(self._ranks[0].moments.values()), {}))

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self._ranks[0].weights["embedding.word_embeddings.weight"].dtype

    @property
    def vocab_rows(self) -> int:
        """Rows of the word embedding, padding included."""
        return sum(rank.weights["embedding.word_embeddings.weight"].shape[0] for rank in self._ranks)

    @property
    def names(self) -> list[str]:
        """Weights in the order of the file."""
        return list(self._ranks[0].weights)

    def whole(self, spec: ParameterSpec, role: Role) -> Tensor:
        """The unsharded tensor of ``spec``, vocabulary rows as stored; weights in fp32 if the checkpoint has them so."""
        return spec.unshard([self._of(rank, spec.name, role) for rank in self._ranks])

    def check(self, specs: Sequence[ParameterSpec], with_optimizer: bool) -> None:
        """Raise CheckpointError, naming both shapes, if the tensors are not those of ``specs``."""
        if with_optimizer and isinstance(self.common.get("optimizer"), list):
            raise CheckpointError(
                f"{self.path}: the checkpoint keeps several optimizers in a chain, as Muon with AdamW is kept, which is not read from this format; "
                "save it with Megatron's --ckpt-format torch_dist, or pass --no-load-optim to load the weights alone"
            )
        if with_optimizer and not self.has_optimizer:
            if _is_distributed(self.common.get("optimizer") or {}, self.path / "mp_rank_00"):
                raise CheckpointError(
                    f"{self.path}: the checkpoint keeps its optimizer in distrib_optim.pt, cut by gradient buckets, which is not read; save it once "
                    "more with Megatron's --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable, or pass --no-load-optim to load the weights alone"
                )
            raise CheckpointError(f"{self.path}: the checkpoint holds no optimizer state; pass --no-load-optim to load the weights alone")
        faults = list(self._faults(specs))
        if faults:
            raise CheckpointError(misfit(self.path, faults))

    def fill(self, spec: ParameterSpec, role: Role, local: Tensor, tp: Communicator) -> None:
        """Copy this rank's part into ``local``; vocabulary rows that are not stored are zero."""
        whole = self.whole(spec, role)
        if spec.vocab_rows is None:
            local.copy_(spec.shard(whole, tp.rank, tp.size))
            return
        mine = whole[tp.rank * local.shape[0] :][: local.shape[0]]
        local.zero_()[: mine.shape[0]].copy_(mine)

    def _faults(self, specs: Sequence[ParameterSpec]) -> Iterator[str]:
        for spec in specs:
            found = [list(shard.shape) for rank in self._ranks if (shard := rank.weights.get(spec.name)) is not None]
            whole = list(found[0]) if len(found) == len(self._ranks) else None
            if whole is not None and spec.shard_dim is not None and len(whole) > spec.shard_dim:
                whole[spec.shard_dim] = sum(shape[spec.shard_dim] for shape in found if len(shape) > spec.shard_dim)
            fault = shape_fault(spec.shape, spec.vocab_rows, None if whole is None else tuple(whole))
            if fault is not None:
                yield f"{spec.name}: {fault}"
        for name in self._ranks[0].weights.keys() - {spec.name for spec in specs}:
            yield f"{name}: the checkpoint holds it, the run has no such tensor"

    @staticmethod
    def _of(rank: _Rank, name: str, role: Role) -> Tensor:
        if role in ("weight", "master"):
            return rank.masters.get(name, rank.weights[name])
        return rank.moments[name][role]


def _refuse_other_forms(path: Path, files: Sequence[Any]) -> None:
    """Raise CheckpointError for files of several pipeline stages or chunks, old orders of QKV rows, or too few ranks."""
    for folder, file in zip(sorted(path.glob("mp_rank_*")), files, strict=True):
        if not isinstance(file, dict) or not isinstance(file.get("model"), dict):
            what = "several model chunks (virtual pipeline stages)" if isinstance(file, dict) and "model0" in file else "no model"
            raise CheckpointError(f"{folder / LEGACY_FILE}: it holds {what}; only checkpoints of pipeline size 1 are read from this format")
    version = files[0].get("checkpoint_version", 0)
    if version < 2:
        raise CheckpointError(
            f"{path}: checkpoint_version {version} orders query, key and value rows in another way; "
            "load and save it once with a Megatron of 2021 or newer"
        )
    args = values_of(files[0].get("args"))
    for name in ("pipeline_model_parallel_size", "expert_model_parallel_size"):
        if (args.get(name) or 1) > 1:
            raise CheckpointError(
                f"{path}: saved with {name} {args[name]}; only size 1 is read from this format. Save it with Megatron's --ckpt-format torch_dist"
            )
    saved = args.get("tensor_model_parallel_size") or len(files)
    if saved != len(files):
        raise CheckpointError(
            f"{path}: saved by {saved} tensor-parallel ranks, but {len(files)} mp_rank_ folders are there; copy all of them"
        )


def _read_rank(file: Mapping[str, Any], where: Path) -> _Rank:
    weights = {name: tensor for name, tensor in _named_tensors(file["model"]) if isinstance(tensor, Tensor) and "_extra_state" not in name}
    optimizer = file.get("optimizer")
    if not optimizer or isinstance(optimizer, list) or _is_distributed(optimizer, where.parent):
        return _Rank(weights, {}, {})
    inner = optimizer.get("optimizer", optimizer)
    groups = _grouped_names(weights, inner["param_groups"], values_of(file.get("args")), where)
    moments = {name: inner["state"][number] for names in groups for number, name in names if number in inner["state"]}
    for name, state in moments.items():
        wrong = [list(state[kept].shape) for kept in moments_in(state) if state[kept].shape != weights[name].shape]
        if wrong:
            raise CheckpointError(
                f"{where}: the optimizer's moments of shape {wrong[0]} do not belong to {name} {list(weights[name].shape)}; "
                "its order of parameters is not known here. Pass --no-load-optim to load the weights alone"
            )
    copies = [copy for group in optimizer.get("fp32_from_fp16_params", []) for copy in group]
    order = [name for names in groups for _, name in names]
    masters = dict(zip(order, copies, strict=True)) if len(copies) == len(order) else {}
    return _Rank(weights, moments if len(moments) == len(weights) else {}, masters)


def moments_in(stored: Collection[str]) -> tuple[Moment, ...]:
    """The moments of the optimizer that left names or keys ``stored``; none if it was no optimizer that is known."""
    return next((kept for kept in MOMENTS.values() if all(name in stored for name in kept)), ())


def _is_distributed(optimizer: Mapping[str, Any], folder: Path) -> bool:
    """Whether moments lie elsewhere, cut by gradient buckets."""
    return (folder / "distrib_optim.pt").exists() or not optimizer.get("optimizer", optimizer).get("state", True)


def _grouped_names(
    weights: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]], args: Mapping[str, Any], where: Path
) -> list[list[tuple[int, str]]]:
    """Which number of the optimizer's state is which weight: those of a group stand in model order."""
    rate = args.get("decoupled_lr")
    embeddings_decay = args.get("embedding_init_method_std") in (None, args.get("init_method_std"))
    members: dict[Group, list[str]] = {}
    for name, weight in weights.items():
        of = Group.of(name, weight.dim(), embeddings_decay=embeddings_decay, decoupled=rate is not None)
        members.setdefault(of, []).append(name)
    found = []
    for group in groups:
        numbers = list(group["params"])
        decoupled = rate is not None and (bool(group.get("is_decoupled_lr")) or group.get("max_lr") == rate)
        names = members.get(Group(float(group.get("wd_mult", 1.0)) > 0, decoupled), [])
        if len(numbers) != len(names):
            raise CheckpointError(
                f"{where}: a group of the optimizer has {len(numbers)} parameters, the model {len(names)} of its kind; "
                "pass --no-load-optim to load the weights alone"
            )
        found.append(list(zip(numbers, names, strict=True)))
    return found


def _named_tensors(model: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of the (in old files nested) model dictionary under their present names."""
    for key, value in model.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            inner = re.sub(r"^(module\.)?(language_model\.)?", "", f"{name}.")
            yield from _named_tensors(value, inner)
            continue
        for pattern, present in _RENAMES:
            name = re.sub(pattern, present, name)
        yield name.removeprefix("module."), value
