"""Megatron's own code reads what we write, and trains on from it with our losses.

Needs megatron-core 0.16.1 in an environment of its own, whose Python ``MEGATRON_PYTHON`` names:
``python -m venv megatron && megatron/bin/pip install torch numpy packaging einops megatron-core==0.16.1``.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from domino_lm.checkpoint.convert.conversion import convert, open_stored
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.save_load import load_checkpoint, save_checkpoint
from domino_lm.config.settings import OptimizerConfig
from domino_lm.model.build import build_stack
from domino_lm.training.optimizer import Optimizer
from tests.golden.checkpoint_files import family, model_of, unpack
from tests.golden.model_files import FOLDER
from tests.golden.test_checkpoints import ALONE, MESH, STEPS, TOLERANCE, final_loss, uninterrupted
from tests.rank_pool import RankPool

PROGRAM = Path(__file__).parent / "megatron_peer.py"
PYTHON = os.environ.get("MEGATRON_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="needs megatron-core; set MEGATRON_PYTHON to a Python that has it"),
]


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """``megatron(task="train", ...)`` runs one job of `megatron_peer` and returns its answer."""
    folder = tmp_path_factory.mktemp("jobs")

    def run(**job: Any) -> dict[str, Any]:
        answer = folder / "answer.json"
        (folder / "job.json").write_text(json.dumps({"tp": 1, **job, "answer": str(answer)}))
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
        finished = subprocess.run(
            [str(PYTHON), "-W", "ignore", str(PROGRAM), str(folder / "job.json")],
            capture_output=True,
            text=True,
            timeout=170,
            env=environment,
            check=False,
        )
        assert finished.returncode == 0, finished.stderr[-3000:]
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    return run


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("checkpoints"))


def samples_of(kind: str) -> str:
    return str(FOLDER / f"train_{kind}_tp1_dp1.npz")


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
@pytest.mark.parametrize(("name", "tp"), [("gpt_torch_dist_tp2", 1), ("gpt_legacy_tp1", 2), ("llama_legacy_tp1", 2)])
def test_megatron_trains_on_from_what_we_write(
    ranks: Callable[[int], RankPool],
    megatron: Callable[..., dict[str, Any]],
    checkpoints: Path,
    tmp_path: Path,
    name: str,
    tp: int,
    form: str,
) -> None:
    kind: Any = f"megatron-{form}"
    convert(load=checkpoints / name, save=tmp_path / "native", to="native", vocab_size=128)
    written = convert(load=tmp_path / "native", save=tmp_path / "theirs", to=kind, tensor_parallel=tp)[1]
    job = {"task": "train", "model": family(name), "format": form, "folder": str(written), "tp": tp, "optimizer": True}
    answer = megatron(**job, padded_vocab=128, samples=samples_of(family(name)))
    expected = ranks(1).run(uninterrupted, family(name))[0][STEPS:]
    assert answer["losses"] == pytest.approx(expected, abs=TOLERANCE, rel=0)
    assert (answer["iteration"], answer["step"]) == (20, 24)


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
def test_megatron_reads_weights_without_an_optimizer(
    megatron: Callable[..., dict[str, Any]], checkpoints: Path, tmp_path: Path, form: str
) -> None:
    kind: Any = f"megatron-{form}"
    written = convert(load=checkpoints / "llama_torch_dist_tp2", save=tmp_path, to=kind, vocab_size=128)[1]
    job = {"task": "evaluate", "model": "llama", "format": form, "folder": str(written), "padded_vocab": 128}
    answer = megatron(**job, samples=samples_of("llama"))
    assert answer["loss"] == pytest.approx(final_loss("llama"), abs=TOLERANCE, rel=0)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_megatron_reads_every_tensor_of_a_native_checkpoint(megatron: Callable[..., dict[str, Any]], tmp_path: Path, kind: str) -> None:
    stack = build_stack(model_of(kind), ALONE, seed=3)
    optimizer = Optimizer(stack.parameters(), OptimizerConfig(lr=0.1), ALONE)
    for moment in (*optimizer.exp_avg, *optimizer.exp_avg_sq):
        moment.uniform_()
    folder = save_checkpoint(tmp_path / "native", 3, stack, optimizer, {}, MESH)
    megatron(task="plain", folder=str(folder), tensors=str(tmp_path / "tensors.pt"))
    found = torch.load(tmp_path / "tensors.pt", weights_only=True)
    for prefix, tensors in (
        ("", stack.parameters()),
        ("optimizer.state.exp_avg.", optimizer.exp_avg),
        ("optimizer.state.exp_avg_sq.", optimizer.exp_avg_sq),
    ):
        for parameter, tensor in zip(stack.parameters(), tensors, strict=True):
            whole, spec = found[prefix + parameter.spec.key], parameter.spec
            assert torch.equal(whole if spec.layer is None else whole[spec.layer], tensor)


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
def test_megatrons_bf16_optimizer_gets_weights_and_moments_in_full_precision(
    megatron: Callable[..., dict[str, Any]], checkpoints: Path, tmp_path: Path, form: str
) -> None:
    to: Any = f"megatron-{form}"
    stored, written = convert(load=checkpoints / "llama_legacy_tp1", save=tmp_path, to=to, vocab_size=128, dtype=torch.bfloat16)
    answer = megatron(task="half", model="llama", format=form, folder=str(written), padded_vocab=128, optimizer=True)
    expected = {
        f"{spec.name} {role}": hashlib.sha256(stored.read(spec, role).numpy().tobytes()).hexdigest()
        for spec in stored.specs()
        for role in stored.roles()
    }
    assert answer == expected


@pytest.mark.parametrize("form", ["legacy", "torch_dist"])
def test_megatron_takes_random_states_over_from_what_we_write(
    megatron: Callable[..., dict[str, Any]], checkpoints: Path, tmp_path: Path, form: str
) -> None:
    to: Any = f"megatron-{form}"
    written = convert(load=checkpoints / "gpt_legacy_tp1", save=tmp_path, to=to, vocab_size=128, tensor_parallel=2)[1]
    answer = megatron(task="random", format=form, folder=str(written), tp=2)
    expected = [
        random.Random(1234).random(),
        float(numpy.random.RandomState(1234).random_sample()),
        torch.rand((), generator=torch.Generator().manual_seed(1234), dtype=torch.float64).item(),
    ]
    assert answer["drawn"] == expected
    ours = {"cuda": [1234, 0], "data-parallel-rng": [1234, 0], "model-parallel-rng": [3952, 0], "expert-parallel-rng": [2258, 0]}
    assert answer["seeds"] == ours


def saved_by_the_distributed_optimizer(megatron: Callable[..., dict[str, Any]], folder: Path, sharding: str) -> dict[str, str]:
    job = {"task": "save", "model": "llama", "padded_vocab": 128, "world": 2, "sharding": sharding, "folder": str(folder)}
    digests: dict[str, str] = megatron(**job, samples=samples_of("llama"))["weights"]
    return digests


def test_the_state_of_megatrons_distributed_optimizer_is_read(megatron: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    weights = saved_by_the_distributed_optimizer(megatron, tmp_path / "iter_0000002", "fully_reshardable")
    stored = open_stored(tmp_path / "iter_0000002", model=model_of("llama"))
    assert (stored.optimizer_steps, stored.dtype) == (2, torch.bfloat16)
    stack = build_stack(model_of("llama"), ALONE, seed=0)
    optimizer = Optimizer(stack.parameters(), OptimizerConfig(lr=0.1), ALONE)
    load_checkpoint(tmp_path / "iter_0000002", stack, optimizer, MESH)
    assert optimizer.step_count == 2
    assert all(moment.any() for moment in (*optimizer.exp_avg, *optimizer.exp_avg_sq))
    rounded = 0
    for parameter in stack.parameters():
        narrow = parameter.detach().bfloat16().float()
        assert hashlib.sha256(narrow.numpy().tobytes()).hexdigest() == weights[parameter.spec.name]
        rounded += int(not torch.equal(narrow, parameter))
    assert rounded > 10  # the optimizer's own weights are finer than the model's


def test_its_state_by_buckets_is_refused_with_the_way_out(megatron: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    saved_by_the_distributed_optimizer(megatron, tmp_path / "iter_0000002", "dp_reshardable")
    stack = build_stack(model_of("llama"), ALONE, seed=0)
    words = r"only by gradient buckets, which is not read; save it once more with .*--dist-ckpt-optim-fully-reshardable"
    with pytest.raises(CheckpointError, match=words):
        load_checkpoint(tmp_path / "iter_0000002", stack, Optimizer(stack.parameters(), OptimizerConfig(lr=0.1), ALONE), MESH)
    load_checkpoint(tmp_path / "iter_0000002", stack, None, MESH)
