"""Megatron's own checkpoints: read at any tensor-parallel size, continued like a run that was never interrupted, and never run."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from domino_lm.checkpoint.convert.conversion import convert, open_stored
from domino_lm.checkpoint.convert.stored_model import StoredModel
from domino_lm.checkpoint.folder import detect_kind, find_checkpoint, iteration_folder
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.same_model import settings_of_model
from domino_lm.checkpoint.save_load import load_checkpoint, save_checkpoint
from domino_lm.checkpoint.torch_files import load_torch_file, values_of
from domino_lm.config.settings import CheckpointConfig, ConfigError, OptimizerConfig
from domino_lm.model.batch import MicroBatch
from domino_lm.model.build import build_stack
from domino_lm.model.families.transformer import without_redundant_settings
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.training.optimizer import Optimizer
from domino_lm.training.trainer import Trainer
from tests.golden.checkpoint_files import KINDS, WITH_OPTIMIZER, WITHOUT_OPTIMIZER, family, model_of, unpack
from tests.golden.model_files import load_arrays, load_weights
from tests.golden.test_curves import GoldenSamples, settings
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
TOLERANCE = 5e-6
STEPS, MORE_STEPS = 20, 4
ALONE = Communicator.single()
MESH = ParallelMesh(ALONE, ALONE, ALONE, torch.device("cpu"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("checkpoints"))


def trainer_of(mesh: ParallelMesh, name: str, load: str | None = None) -> Trainer:
    run = replace(settings(family(name), "baseline", mesh.tp.size), checkpoint=CheckpointConfig(load=load))
    stack = build_stack(run.model, mesh.tp, seed=0)
    return Trainer(run, mesh, stack, data=None, console=lambda line: None)  # type: ignore[arg-type]


def samples_of(mesh: ParallelMesh, name: str) -> Any:
    """The recorded samples, dealt from the first; reading them takes no time."""
    samples: Any = GoldenSamples(family(name), mesh)
    samples.blocked_s = 0.0
    return samples


def uninterrupted(mesh: ParallelMesh, name: str) -> list[float]:
    """Losses of our own run of 24 steps; the last four are on the first samples again."""
    trainer = trainer_of(mesh, name)
    load_weights(trainer.stack, load_arrays(f"{family(name)}_tp1")["state_dict"], mesh.tp)
    samples = samples_of(mesh, name)
    losses = [trainer.step(samples)[0].loss for _ in range(STEPS)]
    samples.next = 0
    return losses + [trainer.step(samples)[0].loss for _ in range(MORE_STEPS)]


def continued(mesh: ParallelMesh, name: str, folder: str) -> tuple[list[float], int, int]:
    """Losses of steps 21 to 24 after ``--load``; the iteration and samples that the run resumed at."""
    trainer = trainer_of(mesh, name, folder)
    trainer.load()
    resumed_at = trainer.iteration, trainer.consumed_samples
    samples = samples_of(mesh, name)
    return [trainer.step(samples)[0].loss for _ in range(MORE_STEPS)], *resumed_at


@pytest.fixture(scope="module")
def curves(ranks: Ranks) -> dict[str, list[float]]:
    return {kind: ranks(1).run(uninterrupted, kind)[0] for kind in ("gpt", "llama")}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", WITH_OPTIMIZER)
def test_a_checkpoint_of_megatron_goes_on_like_the_uninterrupted_run(
    ranks: Ranks, checkpoints: Path, curves: dict[str, list[float]], name: str, tp: int
) -> None:
    for losses, iteration, samples in ranks(tp).run(continued, name, str(checkpoints / name), tp=tp):
        assert losses == pytest.approx(curves[family(name)][STEPS:], abs=TOLERANCE, rel=0)
        assert (iteration, samples) == (20, 160)


@torch.no_grad()
def evaluation_loss(mesh: ParallelMesh, name: str, folder: str) -> float:
    """Mean loss over the first 32 samples at a checkpoint's weights."""
    stack = build_stack(settings(family(name), "baseline", mesh.tp.size).model, mesh.tp, seed=0)
    load_checkpoint(folder, stack, None, mesh)
    batches = GoldenSamples(family(name), mesh).take(16)
    losses = torch.stack([(stack.forward(batch) * batch.loss_mask).sum() for batch in batches])
    return float(losses.sum() / sum(batch.loss_mask.sum() for batch in batches))


@torch.no_grad()
def final_loss(kind: str) -> float:
    """The same at the weights that Megatron's recorded run ended with."""
    stack = build_stack(model_of(kind), ALONE, seed=0)
    load_weights(stack, load_arrays(f"train_{kind}_tp1_dp1")["final_state_dict"], ALONE)
    batches = GoldenSamples(kind, MESH).take(16)
    losses = torch.stack([(stack.forward(batch) * batch.loss_mask).sum() for batch in batches])
    return float(losses.sum() / sum(batch.loss_mask.sum() for batch in batches))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", WITHOUT_OPTIMIZER)
def test_a_checkpoint_without_optimizer_gives_the_loss_of_the_run_that_made_it(ranks: Ranks, checkpoints: Path, name: str, tp: int) -> None:
    expected = final_loss(family(name))
    for loss in ranks(tp).run(evaluation_loss, name, str(checkpoints / name), tp=tp):
        assert loss == pytest.approx(expected, abs=TOLERANCE, rel=0)


@pytest.mark.parametrize("name", WITHOUT_OPTIMIZER)
def test_a_checkpoint_without_optimizer_names_the_flag(checkpoints: Path, name: str) -> None:
    stack = build_stack(model_of(name), ALONE, seed=0)
    with pytest.raises(CheckpointError, match="no optimizer state; pass --no-load-optim"):
        load_checkpoint(checkpoints / name, stack, Optimizer(stack.parameters(), OptimizerConfig(lr=0.1), ALONE), MESH)


@pytest.mark.parametrize("name", KINDS)
def test_the_kind_is_detected(checkpoints: Path, name: str) -> None:
    assert detect_kind(checkpoints / name) == KINDS[name]
    assert detect_kind(checkpoints / name / "iter_0000020") == KINDS[name]
    assert find_checkpoint(checkpoints / name) == iteration_folder(checkpoints / name, 20)


def test_the_arithmetic_of_the_run_that_made_it_is_reported(checkpoints: Path) -> None:
    stack = build_stack(model_of("llama"), ALONE, seed=0)
    state = load_checkpoint(checkpoints / "llama_legacy_tp1", stack, None, MESH)
    assert state is not None
    assert state["model"] == {
        "num_attention_heads": 4,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "apply_layernorm_1p": False,
        "swiglu": True,
        "rotary_base": 10000.0,
        "use_rope_scaling": False,
        "rotary_seq_len_interpolation_factor": None,
    }


def test_a_run_of_another_arithmetic_is_refused_by_its_flag(checkpoints: Path) -> None:
    run = replace(settings("gpt_erf", "baseline", 1), checkpoint=CheckpointConfig(load=str(checkpoints / "gpt_legacy_tp1")))
    trainer = Trainer(run, MESH, build_stack(run.model, ALONE, seed=0), data=None, console=lambda line: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--bias-gelu-fusion True there, False here"):
        trainer.load()


def test_settings_that_say_what_defaults_say_are_the_same_model() -> None:
    model = replace(model_of("gpt"), ffn_hidden_size=None)
    explicit = replace(
        model, ffn_hidden_size=256, kv_channels=16, max_position_embeddings=32, group_query_attention=True, num_query_groups=4
    )
    assert without_redundant_settings(explicit) == without_redundant_settings(model)
    assert without_redundant_settings(replace(model, ffn_hidden_size=128)) != without_redundant_settings(model)


@pytest.mark.parametrize("name", [name for name in KINDS if "core0161" not in name])
def test_the_model_of_a_checkpoint_is_known_from_it(checkpoints: Path, name: str) -> None:
    found = settings_of_model(checkpoints / name)
    assert found is not None
    model = replace(model_of(name), hidden_dropout=0.0)
    assert without_redundant_settings(replace(model, **{**found, "vocab_size": 128})) == without_redundant_settings(model)
    assert {"num_layers", "hidden_size", "position_embedding_type", "normalization", "swiglu"} <= found.keys()


def test_a_checkpoint_that_does_not_say_its_model_asks_for_the_flags(checkpoints: Path) -> None:
    with pytest.raises(CheckpointError, match="give the model's flags"):
        settings_of_model(checkpoints / "gpt_torch_dist_core0161_tp2")


# --- the softmax: padded rows that took part keep taking part, and no others


@torch.no_grad()
def loss_with_vocabulary(mesh: ParallelMesh, folder: str, divisible_by: int, saved_again: str | None = None) -> float:
    """Loss of a run that knows of 100 tokens and pads them to more rows than the checkpoint's 128."""
    model = replace(model_of("llama"), vocab_size=100, make_vocab_size_divisible_by=divisible_by)
    stack = build_stack(model, mesh.tp, seed=0)
    load_checkpoint(folder, stack, None, mesh)
    if saved_again is not None:
        save_checkpoint(saved_again, 20, stack, Optimizer(stack.parameters(), OptimizerConfig(lr=0.1), mesh.tp), {}, mesh)
    tokens = torch.arange(64).view(32, 2) % 100
    return float(stack.forward(MicroBatch(tokens, tokens.roll(1, 0), torch.ones(32, 2))).mean())


@pytest.mark.parametrize(("tp", "divisible_by"), [(1, 128), (1, 200), (2, 64), (2, 256)])
def test_padding_of_another_size_does_not_change_megatrons_loss(
    ranks: Ranks, checkpoints: Path, tmp_path: Path, tp: int, divisible_by: int
) -> None:
    folder = str(checkpoints / "llama_legacy_tp1")
    expected = ranks(1).run(loss_with_vocabulary, folder, 128)[0]
    for loss in ranks(tp).run(loss_with_vocabulary, folder, divisible_by, str(tmp_path)):
        assert loss == pytest.approx(expected, abs=1e-6, rel=0)
    for loss in ranks(2).run(loss_with_vocabulary, str(tmp_path), 96):
        assert loss == pytest.approx(expected, abs=1e-6, rel=0)


def test_padding_that_leaves_rows_out_is_refused(checkpoints: Path) -> None:
    model = replace(model_of("llama"), vocab_size=100, make_vocab_size_divisible_by=1)
    with pytest.raises(CheckpointError, match=r"128 vocabulary rows take part .* this run keeps 100"):
        load_checkpoint(checkpoints / "llama_legacy_tp1", build_stack(model, ALONE, seed=0), None, MESH)


# --- conversions among kinds that hold everything


def contents(stored: StoredModel) -> dict[str, Any]:
    tensors = {(spec.name, role): stored.read(spec, role).numpy().tobytes() for spec in stored.specs() for role in stored.roles()}
    return {"tensors": tensors, "steps": stored.optimizer_steps, "rows": stored.softmax_rows, "iteration": stored.iteration}


@pytest.mark.parametrize("to", ["native", "megatron-legacy", "megatron-torch_dist"])
@pytest.mark.parametrize("name", [name for name in KINDS if "core0161" not in name])
def test_a_conversion_keeps_every_bit(checkpoints: Path, tmp_path: Path, name: str, to: Any) -> None:
    convert(load=checkpoints / name, save=tmp_path, to=to, vocab_size=128, tensor_parallel=2)
    before, after = open_stored(checkpoints / name), open_stored(tmp_path)
    assert after.kind == to
    assert contents(after) == contents(before)
    assert after.state.get("learning_rate") == before.state.get("learning_rate")
    assert after.state["consumed_samples"] == before.state["consumed_samples"]
    assert replace(after.model, vocab_size=None, mask_padded_vocab=False, make_vocab_size_divisible_by=1) == replace(
        before.model, vocab_size=None, mask_padded_vocab=False, make_vocab_size_divisible_by=1
    )


def test_half_precision_keeps_the_weights_that_are_trained_in_full(checkpoints: Path, tmp_path: Path) -> None:
    original = open_stored(checkpoints / "gpt_legacy_tp2")
    for kind in ("native", "megatron-legacy", "megatron-torch_dist"):
        to: Any = kind
        convert(load=checkpoints / "gpt_legacy_tp2", save=tmp_path / kind, to=to, vocab_size=128, dtype=torch.bfloat16)
        stored = open_stored(tmp_path / kind)
        assert stored.dtype == torch.bfloat16
        assert contents(stored) == contents(original)
        stack = build_stack(model_of("gpt"), ALONE, seed=0)
        load_checkpoint(tmp_path / kind, stack, Optimizer(stack.parameters(), OptimizerConfig(lr=0.1), ALONE), MESH)
        assert all(torch.equal(p, original.read(p.spec, "weight")) for p in stack.parameters())


def test_the_fp32_weights_of_megatrons_distributed_optimizer_are_read(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = open_stored(checkpoints / "gpt_legacy_tp2")
    monkeypatch.setattr(
        "domino_lm.checkpoint.convert.distributed.MASTER_PREFIX", "optimizer.state.param."
    )  # what it calls them, one a parameter
    convert(load=checkpoints / "gpt_legacy_tp2", save=tmp_path, to="megatron-torch_dist", vocab_size=128, dtype=torch.bfloat16)
    monkeypatch.undo()
    assert b"optimizer.state.param." in (tmp_path / "iter_0000020" / ".metadata").read_bytes()
    assert contents(open_stored(tmp_path)) == contents(original)
    stack = build_stack(model_of("gpt"), ALONE, seed=0)
    load_checkpoint(tmp_path, stack, Optimizer(stack.parameters(), OptimizerConfig(lr=0.1), ALONE), MESH)
    assert all(torch.equal(p, original.read(p.spec, "weight")) for p in stack.parameters())


def test_random_states_have_the_form_that_megatron_gives_them(checkpoints: Path, tmp_path: Path) -> None:
    convert(load=checkpoints / "gpt_legacy_tp1", save=tmp_path, to="megatron-legacy", vocab_size=128)
    states = []
    for folder in (checkpoints / "gpt_legacy_tp1", tmp_path):
        file = folder / "iter_0000020" / "mp_rank_00" / "model_optim_rng.pt"
        (state,) = load_torch_file(file, str(file))["rng_state"]
        tracked = {name: each.dtype for name, each in state["rng_tracker_states"].items()}
        kinds = {name: type(value) for name, value in state.items()}
        states.append((list(state), kinds, tracked, state["torch_rng_state"].shape))
    assert states[0] == states[1]


def test_a_checkpoint_without_arguments_needs_the_models_flags(checkpoints: Path, tmp_path: Path) -> None:
    load = checkpoints / "gpt_torch_dist_core0161_tp2"
    with pytest.raises(CheckpointError, match="give the model's flags"):
        convert(load=load, save=tmp_path, to="native")
    convert(load=load, save=tmp_path, to="native", model=model_of("gpt"))
    assert contents(open_stored(tmp_path))["tensors"] == contents(open_stored(load, model=model_of("gpt")))["tensors"]


def test_converted_moments_train_on_like_the_uninterrupted_run(
    ranks: Ranks, checkpoints: Path, curves: dict[str, list[float]], tmp_path: Path
) -> None:
    convert(load=checkpoints / "gpt_legacy_tp1", save=tmp_path / "a", to="megatron-torch_dist", vocab_size=128)
    convert(load=tmp_path / "a", save=tmp_path / "b", to="megatron-legacy", tensor_parallel=2)
    convert(load=tmp_path / "b", save=tmp_path / "c", to="native")
    for losses, iteration, samples in ranks(2).run(continued, "gpt", str(tmp_path / "c"), tp=2):
        assert losses == pytest.approx(curves["gpt"][STEPS:], abs=TOLERANCE, rel=0)
        assert (iteration, samples) == (20, 160)


# --- files in other forms


def rewritten(checkpoints: Path, tmp_path: Path, name: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a legacy checkpoint whose file has been changed as a dictionary."""
    shutil.copytree(checkpoints / name, tmp_path / name)
    file = tmp_path / name / "iter_0000020" / "mp_rank_00" / "model_optim_rng.pt"
    content = load_torch_file(file, str(file))
    content = {key: value for key, value in content.items() if key != "rng_state"}
    content["args"] = argparse.Namespace(**values_of(content["args"]))
    change(content)
    file.unlink()
    torch.save(content, file)
    return tmp_path / name


def rename(content: dict[str, Any], names: dict[str, str]) -> None:
    model = {}
    for key, value in content["model"].items():
        for old, new in names.items():
            key = key.replace(old, new)
        model[key] = value
    content["model"] = model


FUSED = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
BEFORE_CORE = {
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
    "pre_mlp_layernorm": "post_attention_layernorm",
}


def nest(content: dict[str, Any]) -> None:
    """The form of models from before Megatron's core."""
    rename(content, BEFORE_CORE)
    flat = content["model"]
    encoder = {key.removeprefix("decoder."): value for key, value in flat.items() if key.startswith("decoder.")}
    embedding: dict[str, Any] = {}
    for key in ("word_embeddings", "position_embeddings"):
        if f"embedding.{key}.weight" in flat:
            embedding[key] = {"weight": flat[f"embedding.{key}.weight"]}
    content["model"] = {"language_model": {"embedding": embedding, "encoder": encoder}}


@pytest.mark.parametrize("change", [lambda content: rename(content, FUSED), nest], ids=["norms fused", "before the core"])
def test_other_names_of_the_same_weights_are_read(checkpoints: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    changed = rewritten(checkpoints, tmp_path, "gpt_legacy_tp1", change)
    stored, original = open_stored(changed), open_stored(checkpoints / "gpt_legacy_tp1")
    assert all(torch.equal(stored.read(spec, "weight"), original.read(spec, "weight")) for spec in original.specs())


def set_argument(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: setattr(content["args"], name, value)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "pipeline": (set_argument("pipeline_model_parallel_size", 2), "saved with pipeline_model_parallel_size 2; only size 1"),
    "missing rank": (set_argument("tensor_model_parallel_size", 2), "saved by 2 tensor-parallel ranks, but 1 mp_rank_ folders are there"),
    "experts": (set_argument("num_experts", 8), "a model that this program does not build: num_experts 8"),
    "old order": (lambda content: content.update(checkpoint_version=1.0), "checkpoint_version 1.0 orders query, key and value rows"),
    "chunks": (lambda content: content.update(model0=content.pop("model")), "several model chunks"),
    "distributed optimizer": (
        lambda content: content["optimizer"].update(state={}),
        "keeps its optimizer in distrib_optim.pt, .* which is not read; save it once more with .*--dist-ckpt-optim-fully-reshardable",
    ),
    "wrong moments": (lambda content: content["optimizer"]["state"].update({0: content["optimizer"]["state"][20]}), "do not belong to"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_with_the_reason(checkpoints: Path, tmp_path: Path, case: str) -> None:
    change, words = REFUSED[case]
    folder = rewritten(checkpoints, tmp_path, "gpt_legacy_tp1", change)
    stack = build_stack(model_of("gpt"), ALONE, seed=0)
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(folder, stack, Optimizer(stack.parameters(), OptimizerConfig(lr=0.1), ALONE), MESH)


def test_pipeline_stages_are_refused_by_their_folders(checkpoints: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoints / "gpt_legacy_tp1", tmp_path / "save")
    (tmp_path / "save/iter_0000020/mp_rank_00").rename(tmp_path / "save/iter_0000020/mp_rank_00_001")
    with pytest.raises(CheckpointError, match=r"mp_rank_00_001: saved with pipeline parallelism .* --ckpt-format torch_dist"):
        load_checkpoint(tmp_path / "save", build_stack(model_of("gpt"), ALONE, seed=0), None, MESH)


@pytest.mark.parametrize("name", ["gpt_legacy_tp1", "gpt_torch_dist_tp2"])
def test_another_model_is_refused_with_both_shapes_and_changes_nothing(checkpoints: Path, name: str) -> None:
    stack = build_stack(replace(model_of("gpt"), ffn_hidden_size=128), ALONE, seed=0)
    before = [parameter.detach().clone() for parameter in stack.parameters()]
    with pytest.raises(CheckpointError, match=r"mlp.linear_fc1.*the run needs \[.*128.*\], the checkpoint holds \[.*256"):
        load_checkpoint(checkpoints / name, stack, None, MESH)
    assert all(torch.equal(a, b) for a, b in zip(stack.parameters(), before, strict=True))


# --- nothing in a file of Megatron's is run


class Hostile:
    """Unpickled by plain pickle, it calls what it was made with."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.call


def with_pickle(archive: bytes, content: bytes) -> bytes:
    """A file of torch.save with another pickle inside."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(changed, "w", zipfile.ZIP_STORED) as new:
        for item in old.infolist():
            new.writestr(item.filename, content if item.filename.endswith("/data.pkl") else old.read(item))
    return changed.getvalue()


@pytest.mark.parametrize("protocol", [0, 2])
@pytest.mark.parametrize("name", ["gpt_legacy_tp1", "gpt_torch_dist_core0161_tp2"])
def test_a_hostile_file_is_refused_and_not_run(checkpoints: Path, tmp_path: Path, name: str, protocol: int) -> None:
    shutil.copytree(checkpoints / name, tmp_path / "save")
    file = next((tmp_path / "save").rglob("common.pt" if "core0161" in name else "model_optim_rng.pt"))
    trap = tmp_path / "trap"
    file.write_bytes(with_pickle(file.read_bytes(), pickle.dumps({"args": Hostile(os.mkdir, str(trap))}, protocol)))
    with pytest.raises(CheckpointError, match="Nothing in it was run"):
        load_checkpoint(tmp_path / "save", build_stack(model_of("gpt"), ALONE, seed=0), None, MESH)
    assert not trap.exists()


@pytest.mark.parametrize("size_bytes", [0, 100, 700_000])
def test_a_cut_file_is_named(checkpoints: Path, tmp_path: Path, size_bytes: int) -> None:
    shutil.copytree(checkpoints / "gpt_legacy_tp2", tmp_path / "save")
    os.truncate(tmp_path / "save/iter_0000020/mp_rank_01/model_optim_rng.pt", size_bytes)
    with pytest.raises(CheckpointError, match=r"mp_rank_01/model_optim_rng.pt"):
        load_checkpoint(tmp_path / "save", build_stack(model_of("gpt"), ALONE, seed=0), None, MESH)
