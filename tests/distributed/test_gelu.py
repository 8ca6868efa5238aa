"""GELU is the exact erf without biases, as in Megatron; checkpoints of before that keep the tanh that they were trained with."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from domino_lm.checkpoint.convert.conversion import convert, open_stored
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.megatron_state import megatron_args, read_model
from domino_lm.checkpoint.same_model import refuse_other_model
from domino_lm.model.build import build_stack
from domino_lm.model.families.transformer import without_redundant_settings
from domino_lm.model.mlp import GeluMlp
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from tests.damage import make_older
from tests.distributed.models import GPT
from tests.distributed.training_runs import built, write_tokens

NO_BIASES = replace(GPT, add_bias_linear=False)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.mark.parametrize(
    ("settings", "approximation"),
    [
        ({}, "tanh"),
        ({"bias_gelu_fusion": False}, "none"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, "tanh"),
        ({"add_bias_linear": False}, "none"),
        ({"add_bias_linear": False, "bias_gelu_fusion": False}, "none"),
        ({"add_bias_linear": False, "openai_gelu": True}, "tanh"),
    ],
)
def test_it_is_what_megatron_takes_and_settings_that_say_the_same_are_the_same_model(settings: dict[str, bool], approximation: str) -> None:
    model = replace(GPT, **settings)  # type: ignore[arg-type]
    mlps = [part for part in build_stack(model, Communicator.single(), seed=0).parts if isinstance(part, GeluMlp)]
    assert {mlp.approximate for mlp in mlps} == {model.gelu_approximation} == {approximation}
    shortest = without_redundant_settings(model)
    assert shortest.gelu_approximation == approximation
    assert {(m.bias_gelu_fusion, m.openai_gelu) for m in map(without_redundant_settings, [shortest, model])} == {
        (shortest.bias_gelu_fusion, shortest.openai_gelu)
    }


@pytest.mark.parametrize("openai", [False, True])
def test_megatrons_arguments_of_a_model_without_biases_describe_this_one(openai: bool) -> None:
    model = replace(NO_BIASES, openai_gelu=openai)
    theirs = vars(megatron_args(model, 1, 128, {}, torch.float32))
    assert theirs["bias_gelu_fusion"] is False  # Megatron turns it off without biases
    found = read_model({"args": theirs}, "here")
    assert found.gelu_approximation == model.gelu_approximation
    refuse_other_model(asdict(model), asdict(found), "here")


def test_a_checkpoint_of_the_first_format_goes_on_with_tanh_and_says_so(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh, flags = ParallelMesh.single(torch.device("cpu")), f"--disable-bias-linear --save {tmp_path} --load {tmp_path}"
    before = built(mesh, tokens, f"{flags} --openai-gelu --exit-interval 2 --eval-interval 0")
    before.fit()
    (state,) = tmp_path.glob("iter_*/state.json")
    make_older(state.parent)
    record = json.loads(state.read_text())
    assert record["state"]["model"].pop("openai_gelu")
    state.write_text(json.dumps({**record, "format_version": 1}))
    resumed = built(mesh, tokens, flags)
    assert "was trained with GELU by tanh; it goes on so, as with --openai-gelu" in capsys.readouterr().out
    assert resumed.run.model.openai_gelu
    assert resumed.stack.blocks[1][1].approximate == "tanh"  # type: ignore[attr-defined]
    assert open_stored(tmp_path).model.gelu_approximation == "tanh"


@pytest.mark.parametrize("openai", [False, True])
def test_a_gpt_without_biases_goes_to_hugging_face_and_back(tokens: Path, tmp_path: Path, openai: bool) -> None:
    mesh = ParallelMesh.single(torch.device("cpu"))
    flags = f"--disable-bias-linear {'--openai-gelu' if openai else ''} --save {tmp_path / 'a'} --exit-interval 1 --eval-interval 0"
    built(mesh, tokens, flags).fit()
    convert(load=tmp_path / "a", save=tmp_path / "hf", to="hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["activation_function"], config["add_bias_linear"]) == ("gelu_new" if openai else "gelu", False)
    convert(load=tmp_path / "hf", save=tmp_path / "b", to="native")
    there, back = open_stored(tmp_path / "a"), open_stored(tmp_path / "b")
    assert back.model.gelu_approximation == there.model.gelu_approximation
    for spec in there.specs():
        assert torch.equal(there.tensor(spec, "weight", 97, torch.float32), back.tensor(spec, "weight", 97, torch.float32))


def test_a_bias_where_the_file_says_that_there_is_none_is_refused(tokens: Path, tmp_path: Path) -> None:
    mesh = ParallelMesh.single(torch.device("cpu"))
    built(mesh, tokens, f"--save {tmp_path / 'a'} --exit-interval 2 --eval-interval 0").fit()
    convert(load=tmp_path / "a", save=tmp_path / "hf", to="hf")
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "add_bias_linear": False}))
    with pytest.raises(CheckpointError, match=r"add_bias_linear false, but .* has a bias that is not zero"):
        convert(load=tmp_path / "hf", save=tmp_path / "b", to="native")
