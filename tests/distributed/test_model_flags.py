"""Norm weights less 1, stretched positions and other initial weights: the arithmetic, and what checkpoints make of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from domino_lm.checkpoint.convert.conversion import convert, open_stored
from domino_lm.checkpoint.megatron_state import megatron_args, read_model
from domino_lm.checkpoint.save_load import load_checkpoint, save_checkpoint
from domino_lm.config.settings import ModelConfig, OptimizerConfig, ScheduleConfig
from domino_lm.model.batch import MicroBatch
from domino_lm.model.build import build_stack
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.training.optimizer import Optimizer
from tests.distributed.models import GPT, LLAMA, global_samples, plan_gradients, reference_gradients, worst_difference
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
ALONE = Communicator.single()
MESH = ParallelMesh(ALONE, ALONE, ALONE, torch.device("cpu"))
VARIANTS = {
    "gpt less 1": replace(GPT, apply_layernorm_1p=True),
    "llama less 1": replace(LLAMA, apply_layernorm_1p=True),
    "llama stretched": replace(LLAMA, rotary_seq_len_interpolation_factor=3.0),
}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_those_of_the_formula(ranks: Ranks, name: str, tp: int) -> None:
    model = VARIANTS[name]
    expected_loss, expected = reference_gradients(model)
    for loss, found in ranks(tp).run(plan_gradients, model, ScheduleConfig(), tp=tp):
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        assert worst_difference(found, expected) < 1e-11
    plain = reference_gradients(replace(model, apply_layernorm_1p=False, rotary_seq_len_interpolation_factor=None))[0]
    assert (plain == pytest.approx(expected_loss, rel=1e-12)) is model.apply_layernorm_1p


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norm_weights_less_1_start_at_0_and_train_the_same_model(normalization: Any) -> None:
    plain = replace(GPT, normalization=normalization)
    stacks = [build_stack(model, ALONE, 3, torch.float64) for model in (plain, replace(plain, apply_layernorm_1p=True))]
    for one, other in zip(*(stack.parameters() for stack in stacks), strict=True):
        less = 1.0 if one.spec.name.endswith("layernorm.weight") else 0.0
        assert torch.equal(one.detach() - less, other.detach())


def test_initial_embeddings_have_their_own_deviation() -> None:
    wide = replace(GPT, hidden_size=256, vocab_size=1000, embedding_init_method_std=0.5, untie_embeddings_and_output_weights=True)
    found = {p.spec.name: p.detach().std().item() for p in build_stack(wide, ALONE, 3).parameters() if p.dim() == 2}
    assert found["embedding.word_embeddings.weight"] == pytest.approx(0.5 * (1000 / 1024) ** 0.5, rel=0.02)
    assert found["embedding.position_embeddings.weight"] == pytest.approx(0.5, rel=0.05)
    assert found["output_layer.weight"] == pytest.approx(0.12 * (1000 / 1024) ** 0.5, rel=0.02)
    assert found["decoder.layers.0.self_attention.linear_qkv.weight"] == pytest.approx(0.12, rel=0.02)


def test_xavier_draws_every_matrix_from_its_own_bounds() -> None:
    model = replace(LLAMA, hidden_size=128, init_method_xavier_uniform=True)
    for parameter in build_stack(model, ALONE, 3).parameters():
        if parameter.dim() == 2:
            rows, columns = parameter.spec.vocab_rows or parameter.shape[0], parameter.shape[1]
            values, bound = parameter.detach()[:rows], math.sqrt(6 / (rows + columns))
            assert 0.98 * bound < values.abs().max() <= bound
            assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    embedding = build_stack(replace(model, embedding_init_method_std=0.5), ALONE, 3).parameters()[0]
    assert embedding.detach()[:97].std().item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    "settings",
    [
        {"apply_layernorm_1p": True},
        {"rotary_seq_len_interpolation_factor": 4.0},
        {"embedding_init_method_std": 0.5},
        {"init_method_xavier_uniform": True},
    ],
    ids=str,
)
def test_megatrons_arguments_carry_them_both_ways(settings: dict[str, Any]) -> None:
    model = replace(LLAMA, **settings)
    theirs = vars(megatron_args(model, 1, 128, {}, torch.float32))
    assert settings.items() <= asdict(read_model({"args": theirs}, "here")).items()


def test_a_megatron_checkpoint_of_norms_less_1_is_known_by_either_name_and_one_of_no_such_norms_is_as_before() -> None:
    theirs = vars(megatron_args(LLAMA, 1, 128, {}, torch.float32))
    theirs.pop("apply_layernorm_1p")
    assert not read_model({"args": theirs}, "here").apply_layernorm_1p
    assert read_model({"args": {**theirs, "layernorm_zero_centered_gamma": True}}, "here").apply_layernorm_1p
    assert read_model({"args": {**theirs, "rotary_seq_len_interpolation_factor": 1}}, "here").rotary_seq_len_interpolation_factor is None


def saved(folder: Path, model: ModelConfig) -> Any:
    """A native checkpoint of a model whose norms are uneven; returns the model itself."""
    stack = build_stack(model, ALONE, 3)
    for parameter in stack.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    state = {"model": asdict(model), "consumed_samples": 0}
    save_checkpoint(folder, 5, stack, Optimizer(stack.parameters(), OptimizerConfig(lr=0.1), ALONE), state, MESH)
    return stack


@torch.no_grad()
def losses(stack: Any) -> torch.Tensor:
    tokens, labels, mask = (t.t().contiguous() for t in global_samples(97))
    return stack.forward(MicroBatch(tokens, labels, mask.float()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["llama less 1", "llama stretched"])
def test_it_converts_to_hugging_face_and_back_as_the_same_function(tmp_path: Path, name: str) -> None:
    stack = saved(tmp_path / "a", VARIANTS[name])
    convert(load=tmp_path / "a", save=tmp_path / "hf", to="hf")
    convert(load=tmp_path / "hf", save=tmp_path / "b", to="native")
    model = open_stored(tmp_path / "b").model
    assert not model.apply_layernorm_1p
    again = build_stack(replace(model, hidden_dropout=0.0, attention_dropout=0.0), ALONE, 0)
    load_checkpoint(tmp_path / "b", again, None, MESH)
    torch.testing.assert_close(losses(again), losses(stack), rtol=0, atol=1e-5)


@pytest.mark.parametrize("to", ["megatron-legacy", "megatron-torch_dist"])
def test_it_converts_to_megatron_and_back_to_the_bit(tmp_path: Path, to: Any) -> None:
    stack = saved(tmp_path / "a", VARIANTS["gpt less 1"])
    convert(load=tmp_path / "a", save=tmp_path / "m", to=to)
    convert(load=tmp_path / "m", save=tmp_path / "b", to="native", vocab_size=97)
    assert open_stored(tmp_path / "b").model.apply_layernorm_1p
    again = build_stack(VARIANTS["gpt less 1"], ALONE, 0)
    load_checkpoint(tmp_path / "b", again, None, MESH)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), stack.parameters(), strict=True))
