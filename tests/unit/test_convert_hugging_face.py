"""Hugging Face models: the logits that `transformers` gives them, at any tensor-parallel size, and back to the bit."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from domino_lm.checkpoint.convert.conversion import convert, open_stored
from domino_lm.checkpoint.convert.hugging_face import INDEX_FILE
from domino_lm.checkpoint.folder import detect_kind
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.save_load import load_checkpoint
from domino_lm.model.batch import MicroBatch
from domino_lm.model.build import build_stack
from domino_lm.parallel.mesh import ParallelMesh
from tests.damage import reseal
from tests.golden.make_hugging_face_models import FOLDER, MODELS, logits_of
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
TOLERANCE = 1e-5


def converted(load: Path, save: Path, to: Any, **settings: Any) -> Path:
    return convert(load=load, save=save, to=to, **settings)[1]


def recorded(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    with numpy.load(FOLDER / f"{name}_logits.npz") as arrays:
        return torch.from_numpy(arrays["tokens"]), torch.from_numpy(arrays["logits"])


@torch.no_grad()
def our_logits(mesh: ParallelMesh, folder: str, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, padded v] of a native or Megatron checkpoint."""
    model = open_stored(Path(folder)).model
    stack = build_stack(replace(model, hidden_dropout=0.0, attention_dropout=0.0), mesh.tp, seed=0)
    load_checkpoint(folder, stack, None, mesh)
    batch = MicroBatch(tokens.t().contiguous(), tokens.t().contiguous(), torch.ones(tokens.t().shape))
    row = batch.whole()
    local = stack.head.logits(stack.hidden_states(row), row)  # [s, b, v/t]
    return torch.cat(mesh.tp.all_gather_object(local), -1).transpose(0, 1)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(ranks: Ranks, tmp_path: Path, name: str, tp: int) -> None:
    converted(FOLDER / name, tmp_path, "native")
    tokens, expected = recorded(name)
    for logits in ranks(tp).run(our_logits, str(tmp_path), tokens):
        assert (logits[..., : expected.shape[-1]] - expected).abs().max() < TOLERANCE


def test_frequencies_scaled_as_llama_3_1_has_them_show_in_the_logits(ranks: Ranks, tmp_path: Path) -> None:
    folder = converted(FOLDER / "llama31", tmp_path, "native")
    record = json.loads((folder / "state.json").read_text())
    assert record["state"]["model"].items() >= {"use_rope_scaling": True, "rope_scaling_factor": 32.0}.items()
    record["state"]["model"]["use_rope_scaling"] = False
    (folder / "state.json").write_text(json.dumps(record))
    reseal(folder)
    tokens, expected = recorded("llama31")
    (logits,) = ranks(1).run(our_logits, str(tmp_path), tokens)
    assert (logits[..., : expected.shape[-1]] - expected).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("tp", [1, 2])
def test_padding_does_not_take_part(ranks: Ranks, tmp_path: Path, tp: int) -> None:
    converted(FOLDER / "llama", tmp_path, "native")
    tokens, expected = recorded("llama")
    for logits in ranks(tp).run(our_logits, str(tmp_path), tokens):
        assert logits.shape[-1] == 128 * tp
        assert (logits[..., expected.shape[-1] :] == -torch.inf).all()


def assert_same_model(found: Path, expected: Path) -> None:
    theirs, ours = load_file(expected / "model.safetensors"), load_file(found / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in theirs)


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_the_same_model_to_the_bit(tmp_path: Path, name: str) -> None:
    converted(FOLDER / name, tmp_path / "native", "native")
    converted(tmp_path / "native", tmp_path / "hf", "hf")
    assert_same_model(tmp_path / "hf", FOLDER / name)
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == json.loads((FOLDER / name / "config.json").read_text())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("through", ["megatron-legacy", "megatron-torch_dist"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_come_back_from_megatrons_kinds_to_the_bit(tmp_path: Path, name: str, through: str, tp: int) -> None:
    converted(FOLDER / name, tmp_path / "there", through, tensor_parallel=tp)
    assert detect_kind(tmp_path / "there") == through
    converted(tmp_path / "there", tmp_path / "hf", "hf")
    assert_same_model(tmp_path / "hf", FOLDER / name)


KINDS = ["native", "megatron-legacy", "megatron-torch_dist", "hf"]


@pytest.mark.parametrize("name", ["gpt2", "llama31"])
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_every_kind_becomes_every_other_at_another_tensor_parallel_size(tmp_path: Path, source: str, target: str, name: str) -> None:
    converted(FOLDER / name, tmp_path / "source", source, tensor_parallel=2)
    converted(tmp_path / "source", tmp_path / "target", target, tensor_parallel=1)
    assert (detect_kind(tmp_path / "source"), detect_kind(tmp_path / "target")) == (source, target)
    converted(tmp_path / "target", tmp_path / "hf", "hf")
    assert_same_model(tmp_path / "hf", FOLDER / name)


def test_megatrons_vocabulary_is_padded_for_the_size_asked_for(tmp_path: Path) -> None:
    converted(FOLDER / "llama", tmp_path, "megatron-legacy", tensor_parallel=2)
    stored = open_stored(tmp_path)
    assert (stored.model.vocab_size, stored.vocab_rows) == (97, 256)


@pytest.mark.parametrize("to", ["native", "megatron-legacy", "megatron-torch_dist", "hf"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_of_the_type_asked_for(tmp_path: Path, to: str, dtype: torch.dtype) -> None:
    converted(FOLDER / "llama", tmp_path / "half", to, dtype=dtype)
    stored = open_stored(tmp_path / "half")
    weights = [stored.read(spec, "weight") for spec in stored.specs()]
    assert {weight.dtype for weight in weights} == {dtype}


def test_a_half_precision_model_is_written_in_full_precision_when_asked(tmp_path: Path) -> None:
    converted(FOLDER / "llama", tmp_path / "half", "native", dtype=torch.bfloat16)
    written = converted(tmp_path / "half", tmp_path / "hf", "hf", dtype=torch.float32)
    assert {tensor.dtype for tensor in load_file(written / "model.safetensors").values()} == {torch.float32}
    assert json.loads((written / "config.json").read_text())["dtype"] == "float32"


def test_a_model_in_many_files_is_read(tmp_path: Path) -> None:
    tensors = load_file(FOLDER / "llama" / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[:7], "b.safetensors": names[7:]}
    for file, keys in parts.items():
        save_file({key: tensors[key] for key in keys}, tmp_path / file)
    places = {key: file for file, keys in parts.items() for key in keys}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": places}))
    shutil.copy(FOLDER / "llama" / "config.json", tmp_path)
    stored, whole = open_stored(tmp_path), open_stored(FOLDER / "llama")
    assert all(torch.equal(stored.read(spec, "weight"), whole.read(spec, "weight")) for spec in whole.specs())


def test_a_large_model_is_written_in_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("domino_lm.checkpoint.convert.hugging_face.SHARD_BYTES", 30_000)
    written = converted(FOLDER / "llama", tmp_path / "hf", "hf")
    assert len(list(written.glob("model-*-of-*.safetensors"))) > 2
    stored, whole = open_stored(written), open_stored(FOLDER / "llama")
    assert all(torch.equal(stored.read(spec, "weight"), whole.read(spec, "weight")) for spec in whole.specs())


def changed(tmp_path: Path, name: str, **settings: Any) -> Path:
    """A copy of a model with other words in its config.json."""
    folder = tmp_path / "changed"
    shutil.copytree(FOLDER / name, folder)
    config = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}}, "scaled by 'yarn'"),
        ("llama", {"rope_parameters": {**MODELS["llama31"]["rope_parameters"], "low_freq_factor": 2.0}}, "scaled with low_freq_factor 2.0"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "scaled by 'dynamic'"),
        ("llama", {"attention_bias": True}, "attention_bias True with mlp_bias False"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("llama", {"model_type": "qwen2"}, "model_type 'qwen2' is not read"),
        ("llama", {"intermediate_size": 64}, r"linear_fc1.weight has the shape \[96, 32\], the model's settings say \[128, 32\]"),
        ("llama", {"num_hidden_layers": 3}, "asks for model.layers.2"),
        ("llama", {"num_hidden_layers": 1}, "holds model.layers.1"),
        ("llama", {"vocab_size": 200}, "vocab_size 200, but the embedding has 97 rows"),
        ("gpt2", {"activation_function": "relu"}, "activation_function 'relu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_this_program_does_not_compute_is_refused(tmp_path: Path, name: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        converted(changed(tmp_path, name, **settings), tmp_path / "native", "native")
    assert not (tmp_path / "native" / "iter_0000000").exists()


def test_training_does_not_read_the_folder_and_says_what_does(tmp_path: Path, ranks: Ranks) -> None:
    with pytest.raises(AssertionError, match=r"domino-lm-convert --load"):
        ranks(1).run(load_directly, str(FOLDER / "llama"))


def load_directly(mesh: ParallelMesh, folder: str) -> None:
    model = open_stored(Path(folder)).model
    load_checkpoint(folder, build_stack(model, mesh.tp, seed=0), None, mesh)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("name", MODELS)
def test_transformers_still_computes_the_recorded_logits_of_what_we_write(tmp_path: Path, name: str) -> None:
    converted(FOLDER / name, tmp_path / "native", "native")
    converted(tmp_path / "native", tmp_path / "hf", "hf")
    assert (logits_of(tmp_path / "hf") - recorded(name)[1]).abs().max() < TOLERANCE
