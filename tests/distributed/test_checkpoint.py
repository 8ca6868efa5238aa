"""Checkpoints of many ranks: any layout loads any other, Megatron's chunks, and failures that reach every rank."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from domino_lm.checkpoint import writing
from domino_lm.checkpoint.folder import find_checkpoint, iteration_folder
from domino_lm.checkpoint.index import CheckpointError, read_metadata
from domino_lm.checkpoint.manifest import Manifest
from domino_lm.checkpoint.save_load import load_checkpoint, save_checkpoint
from domino_lm.config.settings import ModelConfig, OptimizerConfig
from domino_lm.model.build import build_stack
from domino_lm.model.parameter import Parameter
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.parallel.random import name_seed
from domino_lm.training.optimizer import Optimizer
from tests.damage import flip_bit
from tests.distributed.models import GPT, LLAMA
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
# 17 words in multiples of 4 x TP: 20, 24 and 32 rows on 1, 2 and 4 tensor-parallel ranks.
SMALL_VOCABULARY = {"vocab_size": 17, "make_vocab_size_divisible_by": 4}
MODELS = {"gpt": replace(GPT, **SMALL_VOCABULARY), "llama": replace(LLAMA, num_query_groups=4, **SMALL_VOCABULARY)}
LAYOUTS = [(1, 1), (2, 2), (4, 4), (2, 1), (4, 2)]  # ranks, TP
TRACKER = "latest_checkpointed_iteration.txt"
LAYOUT_FILE = Path(__file__).parents[1] / "golden" / "model" / "torch_dist_layout_tp2.json"


class Run:
    """This rank's share of a model and its optimizer."""

    def __init__(self, mesh: ParallelMesh, model: ModelConfig, seed: int) -> None:
        self.mesh = mesh
        self.stack = build_stack(model, mesh.tp, seed)
        self.optimizer = Optimizer(self.stack.parameters(), OptimizerConfig(lr=0.01), mesh.tp)

    def step(self, number: int) -> None:
        """Update on a gradient that does not depend on the layout."""
        for parameter in self.stack.parameters():
            spec, full = parameter.spec, torch.zeros(parameter.spec.shape)
            full[: spec.vocab_rows].normal_(generator=torch.Generator().manual_seed(name_seed(number, spec.name)))
            parameter.main_grad = spec.shard(full, self.mesh.tp.rank, self.mesh.tp.size)
        self.optimizer.step(0.01)

    def unsharded(self) -> dict[str, str]:
        """Digests of the unsharded weights and moments over their true rows, on every rank."""
        found: dict[str, str] = {}
        parameters = self.stack.parameters()
        for kind, tensors in (("", parameters), ("m ", self.optimizer.exp_avg), ("v ", self.optimizer.exp_avg_sq)):
            found.update({kind + p.spec.name: self._digest(p, t) for p, t in zip(parameters, tensors, strict=True)})
        return found

    def _digest(self, parameter: Parameter, tensor: Tensor) -> str:
        gathered = self.mesh.tp.all_gather_start(tensor.detach().contiguous()).wait().unbind(0)
        full = parameter.spec.unshard(list(gathered))[: parameter.spec.vocab_rows]
        return hashlib.sha256(full.contiguous().numpy().tobytes()).hexdigest()


def save(mesh: ParallelMesh, model: ModelConfig, folder: str, iteration: int = 20) -> dict[str, str]:
    run = Run(mesh, model, seed=1)
    run.step(1)
    save_checkpoint(folder, iteration, run.stack, run.optimizer, {}, mesh)
    return run.unsharded()


def load(mesh: ParallelMesh, model: ModelConfig, folder: str) -> dict[str, str]:
    run = Run(mesh, model, seed=2)
    run.step(9)
    load_checkpoint(folder, run.stack, run.optimizer, mesh)
    assert run.optimizer.step_count == 1
    return run.unsharded()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("saved_by", LAYOUTS, ids=str)
def test_any_layout_loads_what_another_saved_to_the_bit(ranks: Ranks, tmp_path: Path, model: str, saved_by: tuple[int, int]) -> None:
    size, tp = saved_by
    saved = ranks(size).run(save, MODELS[model], str(tmp_path), tp=tp)[0]
    for size, tp in LAYOUTS:
        assert ranks(size).run(load, MODELS[model], str(tmp_path), tp=tp) == [saved] * size


def padded_moments(mesh: ParallelMesh, model: ModelConfig, folder: str) -> float:
    run = Run(mesh, model, seed=2)
    for moments in (*run.optimizer.exp_avg, *run.optimizer.exp_avg_sq):
        moments.fill_(7.0)
    load_checkpoint(folder, run.stack, run.optimizer, mesh)
    table = run.stack.parameters()[0]
    full = table.spec.unshard(list(mesh.tp.all_gather_start(run.optimizer.exp_avg[0]).wait().unbind(0)))
    return float(full[table.spec.vocab_rows :].abs().max())


def test_moments_of_padding_that_the_checkpoint_lacks_are_zero(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(save, MODELS["gpt"], str(tmp_path))
    assert ranks(4).run(padded_moments, MODELS["gpt"], str(tmp_path), tp=4) == [0.0] * 4


def resume(mesh: ParallelMesh, model: ModelConfig, folder: str) -> list[dict[str, str]]:
    uninterrupted, resumed = Run(mesh, model, seed=1), Run(mesh, model, seed=2)
    uninterrupted.step(1)
    save_checkpoint(folder, 1, uninterrupted.stack, uninterrupted.optimizer, {}, mesh)
    load_checkpoint(folder, resumed.stack, resumed.optimizer, mesh)
    for run in (uninterrupted, resumed):
        run.step(2)
        run.step(3)
    return [run.unsharded() for run in (uninterrupted, resumed)]


def test_steps_after_resuming_equal_the_uninterrupted_ones_to_the_bit(ranks: Ranks, tmp_path: Path) -> None:
    for uninterrupted, resumed in ranks(4).run(resume, MODELS["llama"], str(tmp_path), tp=2):
        assert resumed == uninterrupted


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_keys_shapes_and_chunks_are_megatrons(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    expected = json.loads(LAYOUT_FILE.read_text())[kind]
    shape = {"hidden_size": 64, "seq_length": 32, "max_position_embeddings": 32, "vocab_size": 128, "make_vocab_size_divisible_by": 64}
    model = replace(GPT, **shape) if kind == "gpt" else replace(LLAMA, **shape, ffn_hidden_size=176)
    ranks(4).run(save, model, str(tmp_path), tp=2)
    stored = read_metadata(tmp_path / "iter_0000020").state_dict_metadata
    found = {
        key: {"shape": list(tensor.size), "chunks": sorted([list(chunk.offsets), list(chunk.sizes)] for chunk in tensor.chunks)}
        for key, tensor in stored.items()
        if kind == "gpt" or not key.startswith("optimizer.")
    }
    assert found == expected


def test_replicas_share_the_writing(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4).run(save, MODELS["gpt"], str(tmp_path), tp=2)
    sizes = [(tmp_path / "iter_0000020" / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert max(sizes) < 0.4 * sum(sizes)


# --- failures


def outcomes(mesh: ParallelMesh, action: Callable[..., Any], arguments: Sequence[Any]) -> str:
    try:
        action(mesh, *arguments)
    except CheckpointError as error:
        return str(error)
    return "no error"


def save_with_a_full_disk_on_rank_1(mesh: ParallelMesh, model: ModelConfig, folder: str) -> None:
    if mesh.world.rank != 1:
        save(mesh, model, folder, iteration=40)
        return
    with mock.patch.object(writing, "_write_content", side_effect=OSError(28, "No space left on device")):
        save(mesh, model, folder, iteration=40)


def test_a_full_disk_on_one_rank_reaches_all_and_leaves_the_old_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4).run(save, MODELS["gpt"], str(tmp_path), tp=2)
    errors = ranks(4).run(outcomes, save_with_a_full_disk_on_rank_1, (MODELS["gpt"], str(tmp_path)), tp=2)
    assert all("__1_0.distcp: No space left on device (rank 1)" in error for error in errors)
    assert sorted(os.listdir(tmp_path)) == ["iter_0000020", TRACKER]
    assert find_checkpoint(tmp_path) == iteration_folder(tmp_path, 20)


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "save").write_text("a file")
    errors = ranks(2).run(outcomes, save, (MODELS["gpt"], str(tmp_path / "save")))
    assert all("Not a directory" in error for error in errors)


def test_data_that_one_rank_cannot_read_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(save, MODELS["gpt"], str(tmp_path))
    path = tmp_path / "iter_0000020" / "__1_0.distcp"
    path.write_bytes(b"\0" * path.stat().st_size)
    errors = ranks(2).run(outcomes, load, (MODELS["gpt"], str(tmp_path)))
    assert all("cannot be read from __1_0.distcp" in error and "(rank 1)" in error for error in errors)


def load_after_damage(mesh: ParallelMesh, model: ModelConfig, folder: str) -> dict[str, str]:
    with pytest.warns(UserWarning, match=r"names iteration 40, but .*cannot be read from __1_0.distcp.*\(rank 1\).* Taking iteration 20"):
        return load(mesh, model, folder)


def test_damage_that_one_rank_finds_makes_all_take_the_checkpoint_before(ranks: Ranks, tmp_path: Path) -> None:
    saved = ranks(2).run(save, MODELS["gpt"], str(tmp_path), tp=2)[0]
    ranks(2).run(save, MODELS["gpt"], str(tmp_path), 40, tp=2)
    flip_bit(tmp_path / "iter_0000040" / "__1_0.distcp")
    assert ranks(2).run(load_after_damage, MODELS["gpt"], str(tmp_path), tp=2) == [saved] * 2


def test_the_manifest_names_layout_and_files_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    ranks(4).run(save, MODELS["gpt"], str(tmp_path), tp=2)
    manifest = Manifest.read(tmp_path / "iter_0000020")
    assert manifest is not None
    assert manifest.layout == {"world": 4, "tensor_parallel": 2, "data_parallel": 2}
    assert manifest.files.keys() == set(os.listdir(tmp_path / "iter_0000020")) - {"domino_manifest.json"}


def test_no_complete_checkpoint_is_an_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2).run(save, MODELS["gpt"], str(tmp_path))
    os.truncate(tmp_path / "iter_0000020" / "__1_0.distcp", 10)
    errors = ranks(2).run(outcomes, load, (MODELS["gpt"], str(tmp_path)))
    assert all("__1_0.distcp: 10 bytes, the manifest says" in error for error in errors)
