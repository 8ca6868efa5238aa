"""What a run in bf16 or fp16 saves, and what the converter and Megatron's formats make of it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from domino_lm.checkpoint.convert.conversion import convert
from domino_lm.checkpoint.index import read_metadata
from domino_lm.checkpoint.save_load import load_checkpoint, save_checkpoint
from domino_lm.config.settings import OptimizerConfig
from domino_lm.model.build import build_stack
from domino_lm.model.stack import Stack
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.training.loss_scale import LossScale
from domino_lm.training.optimizer import Optimizer
from tests.distributed.models import LLAMA as LLAMA_97

ALONE = Communicator.single()
MESH = ParallelMesh.single(torch.device("cpu"))
NARROW = [torch.bfloat16, torch.float16]
LLAMA = replace(LLAMA_97, make_vocab_size_divisible_by=64)
MEGATRON = ["megatron-legacy", "megatron-torch_dist"]
SCALE = {"scale": 4096.0, "growth_tracker": 5, "hysteresis_tracker": 1}


def trained(dtype: torch.dtype, moments: torch.dtype = torch.float32) -> tuple[Stack, Optimizer]:
    stack = build_stack(LLAMA, ALONE, 1, dtype)
    optimizer = Optimizer(stack.parameters(), OptimizerConfig(lr=0.1), ALONE, moment_dtypes=(moments, moments))
    for parameter in stack.parameters():
        parameter.main_grad = torch.full_like(parameter, 0.37, dtype=torch.float32)
    optimizer.step(0.01)
    return stack, optimizer


def saved(folder: Path, dtype: torch.dtype, moments: torch.dtype = torch.float32) -> Optimizer:
    stack, optimizer = trained(dtype, moments)
    schedule = {"samples": 56, "peak": 0.1, "minimum": 0.0, "initial": 0.0, "style": "cosine", "warmup_samples": 8, "decay_samples": 160}
    state = {"consumed_samples": 56, "learning_rate": schedule, "model": asdict(LLAMA), "tokenizer": None, "settings": {}}
    save_checkpoint(folder, 7, stack, optimizer, {**state, "loss_scaler": SCALE}, MESH)
    return optimizer


def loaded(folder: Path, dtype: torch.dtype) -> tuple[Stack, Optimizer, dict[str, Any]]:
    stack = build_stack(LLAMA, ALONE, 2, dtype)
    optimizer = Optimizer(stack.parameters(), OptimizerConfig(lr=0.1), ALONE)
    state = load_checkpoint(folder, stack, optimizer, MESH)
    assert state is not None
    return stack, optimizer, state


def mains(optimizer: Optimizer) -> list[torch.Tensor]:
    return [piece.main for piece in optimizer.pieces]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_weights_are_saved_narrow_and_master_weights_under_megatrons_key(tmp_path: Path, dtype: torch.dtype) -> None:
    saved(tmp_path, dtype)
    stored = read_metadata(tmp_path / "iter_0000007").state_dict_metadata
    key = "embedding.word_embeddings.weight"
    dtypes = [stored[f"{prefix}{key}"].properties.dtype for prefix in ("", "optimizer.state.fp32_param.", "optimizer.state.exp_avg.")]  # type: ignore[union-attr]
    assert dtypes == [dtype, torch.float32, torch.float32]


@pytest.mark.parametrize("to", MEGATRON)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_megatrons_formats_keep_weights_narrow_and_the_rest_in_fp32(tmp_path: Path, dtype: torch.dtype, to: Any) -> None:
    optimizer = saved(tmp_path / "load", dtype, torch.bfloat16)
    convert(load=tmp_path / "load", save=tmp_path / "save", to=to, tensor_parallel=2)
    folder = tmp_path / "save" / "iter_0000007"
    name = "output_layer.weight"
    if to == "megatron-legacy":
        file = torch.load(folder / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)
        dtypes = {file["model"][name].dtype}, {copy.dtype for group in file["optimizer"]["fp32_from_fp16_params"] for copy in group}
        moments = {state["exp_avg"].dtype for state in file["optimizer"]["optimizer"]["state"].values()}
        args = file["args"]
    else:
        stored = read_metadata(folder).state_dict_metadata
        dtypes = {stored[name].properties.dtype}, {stored[f"optimizer.state.fp32_param.{name}"].properties.dtype}  # type: ignore[union-attr]
        moments = {stored[f"optimizer.state.exp_avg.{name}"].properties.dtype}  # type: ignore[union-attr]
        args = torch.load(folder / "common.pt", weights_only=False)["args"]
    assert (dtypes, moments) == (({dtype}, {torch.float32}), {torch.float32})
    assert (args.params_dtype, args.bf16, args.fp16) == (dtype, dtype == torch.bfloat16, dtype == torch.float16)
    assert optimizer.exp_avg[0].dtype == torch.bfloat16


@pytest.mark.parametrize("to", MEGATRON)
@pytest.mark.parametrize("dtype", [*NARROW, torch.float32], ids=str)
def test_a_run_of_any_format_takes_the_master_weights_of_megatrons_files(tmp_path: Path, dtype: torch.dtype, to: Any) -> None:
    optimizer = saved(tmp_path / "load", torch.float16)
    convert(load=tmp_path / "load", save=tmp_path / "save", to=to, tensor_parallel=2)
    stack, found, _ = loaded(tmp_path / "save", dtype)
    for expected, piece in zip(optimizer.pieces, found.pieces, strict=True):
        rows = expected.parameter.spec.vocab_rows
        assert torch.equal(piece.main[:rows], expected.main[:rows])
        assert torch.equal(piece.weights, piece.main.to(dtype))
    assert all(parameter.dtype == dtype for parameter in stack.parameters())


@pytest.mark.parametrize("to", MEGATRON)
def test_a_loss_scale_passes_through_megatrons_formats(tmp_path: Path, to: Any) -> None:
    saved(tmp_path / "load", torch.float16)
    convert(load=tmp_path / "load", save=tmp_path / "save", to=to, tensor_parallel=2)
    scale = LossScale(2.0**32, torch.device("cpu"), dynamic=True)
    scale.load_state_dict(loaded(tmp_path / "save", torch.float16)[2]["loss_scaler"])
    assert scale.state_dict() == SCALE


def test_moments_pass_between_formats_of_the_optimizer(tmp_path: Path) -> None:
    optimizer = saved(tmp_path, torch.bfloat16, torch.bfloat16)
    _, found, _ = loaded(tmp_path, torch.bfloat16)
    assert all(torch.equal(a.float(), b) for a, b in zip(optimizer.exp_avg, found.exp_avg, strict=True))
