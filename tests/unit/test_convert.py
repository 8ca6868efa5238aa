"""Conversions as a whole: the tool's flags, refusals, and folders that are complete or absent."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from domino_lm.checkpoint.convert.conversion import convert, open_stored
from domino_lm.checkpoint.convert.stored_model import parameter_specs
from domino_lm.checkpoint.folder import detect_kind
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.save_load import save_checkpoint
from domino_lm.config.settings import ModelConfig, OptimizerConfig
from domino_lm.model.build import build_stack
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.tools.convert_checkpoint import main
from domino_lm.training.optimizer import Optimizer
from tests.distributed.models import GPT, LLAMA
from tests.full_disk import files_of_at_most

ALONE = Communicator.single()
MESH = ParallelMesh(ALONE, ALONE, ALONE, torch.device("cpu"))
KINDS = ["native", "megatron-legacy", "megatron-torch_dist", "hf"]


def saved(folder: Path, model: ModelConfig = LLAMA) -> Path:
    """A native checkpoint of iteration 7."""
    stack = build_stack(model, ALONE, seed=1)
    optimizer = Optimizer(stack.parameters(), OptimizerConfig(lr=0.1), ALONE)
    for parameter in stack.parameters():
        parameter.main_grad = torch.ones_like(parameter)
    optimizer.step(0.1)
    schedule = {"samples": 56, "peak": 0.1, "minimum": 0.0, "initial": 0.0, "style": "cosine", "warmup_samples": 8, "decay_samples": 160}
    state = {
        "consumed_samples": 56,
        "learning_rate": schedule,
        "model": asdict(model),
        "tokenizer": None,
        "settings": {"weight_decay": 0.1},
    }
    save_checkpoint(folder, 7, stack, optimizer, state, MESH)
    return folder


def tool(*words: object) -> int:
    return main([str(word) for word in words])


@pytest.mark.parametrize("to", KINDS)
def test_the_tool_converts_and_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str) -> None:
    load = saved(tmp_path / "load")
    assert tool("--load", load, "--save", tmp_path / "save", "--to", to, "--target-tensor-parallel-size", 2) == 0
    assert detect_kind(tmp_path / "save") == to
    said = capsys.readouterr().out
    assert "read native from" in said
    assert "iteration 7" in said
    assert f"wrote {to} to {tmp_path / 'save'}" in said


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--to", "native", "--frobnicate"], 2, "--frobnicate is not a flag of this program"),
        (["--to", "native", "--lr", "1"], 2, "--lr: not flags of this tool, nor of a model"),
        (["--to", "native", "--num-layers", "2"], 2, "--hidden-size, --num-attention-heads, --seq-length: missing"),
        (
            ["--to", "megatron-legacy", "--target-tensor-parallel-size", "3"],
            1,
            "does not divide --num-attention-heads 4; use a size of 1, 2 or 4",
        ),
        (["--to", "hf", "--vocab-size", "900"], 1, "--vocab-size 900: .* holds 128 vocabulary rows"),
        (["--to", "hf", "--iteration", "9"], 1, "the folder iter_0000009 does not exist"),
    ],
    ids=str,
)
def test_the_tool_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, message: str) -> None:
    load = saved(tmp_path / "load")
    assert tool("--load", load, "--save", tmp_path / "save", *words) == code
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "save").exists()


def test_a_folder_without_a_checkpoint_is_named_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint found. Looked for .*iter_.*mp_rank_00.*safetensors"):
        convert(load=tmp_path, save=tmp_path / "save", to="native")


@pytest.mark.parametrize("to", KINDS)
def test_nothing_that_exists_is_overwritten(tmp_path: Path, to: Any) -> None:
    load = saved(tmp_path / "load")
    convert(load=load, save=tmp_path / "save", to=to)
    before = sorted(path.name for path in (tmp_path / "save").rglob("*"))
    with pytest.raises(CheckpointError, match="exists already and is not overwritten"):
        convert(load=load, save=tmp_path / "save", to=to, dtype=torch.bfloat16)
    assert sorted(path.name for path in (tmp_path / "save").rglob("*")) == before


@pytest.mark.parametrize("to", KINDS)
def test_a_full_disk_leaves_nothing_behind_and_the_tracker_alone(tmp_path: Path, to: Any) -> None:
    load, save = saved(tmp_path / "load"), tmp_path / "save"
    save.mkdir()
    with files_of_at_most(10_000), pytest.raises(CheckpointError, match=r"File too large|could not be written"):
        convert(load=load, save=save, to=to)
    assert list(save.iterdir()) == []


def test_the_optimizer_may_be_left_out(tmp_path: Path) -> None:
    convert(load=saved(tmp_path / "load"), save=tmp_path / "save", to="megatron-torch_dist", optimizer=False)
    assert open_stored(tmp_path / "save").optimizer_steps is None


def test_a_source_with_a_missing_file_is_refused(tmp_path: Path) -> None:
    load = saved(tmp_path / "load")
    os.truncate(load / "iter_0000007" / "__0_0.distcp", 100)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: 100 bytes, the index needs"):
        convert(load=load / "iter_0000007", save=tmp_path / "save", to="hf")


def test_a_model_that_hugging_face_does_not_have_is_refused_with_the_reason(tmp_path: Path) -> None:
    mixed = replace(GPT, swiglu=True, ffn_hidden_size=44)
    with pytest.raises(CheckpointError, match="GPT-2 has LayerNorm and GELU"):
        convert(load=saved(tmp_path / "load", mixed), save=tmp_path / "save", to="hf")
    assert not (tmp_path / "save").exists()


def test_a_copy_of_a_checkpoint_that_lost_its_state_is_not_taken_for_megatrons(tmp_path: Path) -> None:
    folder = saved(tmp_path / "load") / "iter_0000007"
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "state.json").unlink()
    assert detect_kind(tmp_path / "copy") == "native"


def test_parameters_are_listed_in_megatrons_order() -> None:
    names = [spec.name for spec in parameter_specs(GPT)]
    layer = [name.removeprefix("decoder.layers.0.") for name in names if name.startswith("decoder.layers.0.")]
    assert names[:2] == ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight"]
    assert layer == [
        f"{module}.{field}"
        for module in (
            "input_layernorm",
            "self_attention.linear_proj",
            "self_attention.linear_qkv",
            "pre_mlp_layernorm",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
        for field in ("weight", "bias")
    ]
    assert names[-2:] == ["decoder.final_layernorm.weight", "decoder.final_layernorm.bias"]
