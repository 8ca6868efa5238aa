"""Runs that skip, that only evaluate, that take other batches for it, and that update weights otherwise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from domino_lm.checkpoint.convert.conversion import convert, open_stored
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.config.settings import ParallelConfig
from domino_lm.launch import backend
from domino_lm.launch.summary import RunSummary
from domino_lm.parallel import mesh as meshes
from domino_lm.parallel.mesh import MissingBackendError, ParallelMesh
from domino_lm.pretrain import main
from domino_lm.training.trainer import Trainer
from tests.distributed.training_runs import REPOSITORY, TINY, built, configure, steps, write_tokens
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
CPU = torch.device("cpu")
MESH = ParallelMesh.single(CPU)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def fitted(tokens: Path, flags: str) -> tuple[Trainer, list[str]]:
    """A trainer after its run, and the lines that it printed."""
    trainer, lines = built(MESH, tokens, flags), []
    trainer.console = lines.append
    lines.append(str(trainer.fit()))
    return trainer, lines


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in trainer.stack.parameters()]


def test_skip_train_evaluates_a_checkpoint_and_changes_nothing(tokens: Path, tmp_path: Path) -> None:
    flags = f"--save {tmp_path} --load {tmp_path} --split 60,20,20"
    trained, lines = fitted(tokens, flags)
    evaluated, again = fitted(tokens, f"{flags} --train-iters 20 --lr 1 --eval-interval 0 --skip-train")
    said = [re.sub(r" on \w+ set", "", line) for line in again if "loss at" in line]
    assert said == [re.sub(r" on \w+ set", "", line) for line in lines if "loss at iteration 8" in line]
    assert len(said) == 2
    assert "nothing was trained, as --skip-train says: the weights of iteration 8 were evaluated" in again
    assert evaluated.iteration == 8
    assert all(torch.equal(a, b) for a, b in zip(weights(trained), weights(evaluated), strict=True))
    assert not any("saving" in line for line in again)


def test_an_iteration_is_left_out_with_its_data_and_its_learning_rate(tokens: Path) -> None:
    trainer = built(MESH, tokens, "--iterations-to-skip 3 5 --hidden-dropout 0 --attention-dropout 0 --train-iters 6")
    by_hand = built(MESH, tokens, "--hidden-dropout 0 --attention-dropout 0 --train-iters 6")
    batches = by_hand.training_batches()
    for iteration in range(1, 7):
        if iteration in (3, 5):
            batches.take(4)
        else:
            by_hand.step(batches)
    trainer.fit()
    assert (trainer.iteration, trainer.consumed_samples, trainer.optimizer.step_count) == (6, 48, 4)
    assert trainer.lr_schedule.samples == 32
    assert all(torch.equal(a, b) for a, b in zip(weights(trainer), weights(by_hand), strict=True))


def test_the_last_iterations_can_be_left_out_too(tokens: Path, tmp_path: Path) -> None:
    trainer, lines = fitted(tokens, f"--iterations-to-skip 7 8 --save {tmp_path}")
    assert trainer.iteration == 8
    assert "left out iteration 8 and its 8 samples, as --iterations-to-skip says" in lines
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "8"


@pytest.mark.parametrize(
    ("flags", "sequences"),
    [
        ("--eval-micro-batch-size 8", 16),
        pytest.param("--eval-micro-batch-size 1", 16, marks=pytest.mark.long),
        ("--eval-global-batch-size 12 --eval-micro-batch-size 3", 24),
    ],
)
def test_an_evaluation_in_other_batches_reads_the_same_samples(tokens: Path, flags: str, sequences: int) -> None:
    trainer, plain = built(MESH, tokens, flags), built(MESH, tokens, f"--eval-iters {sequences // 8}")
    assert trainer.evaluate(trainer.data.valid[0]) == pytest.approx(plain.evaluate(plain.data.valid[0]), rel=1e-6)
    assert len(trainer.data.valid[0]) == len(plain.data.valid[0])


OTHERWISE = {
    "sgd": "--optimizer sgd --sgd-momentum 0.8",
    "rates": "--decoupled-lr 5e-2 --decoupled-min-lr 1e-3 --embedding-init-method-std 0.1",
    "decay": "--start-weight-decay 0 --end-weight-decay 0.5 --weight-decay-incr-style cosine",
    "untied": "--decoupled-lr 5e-2 --untie-embeddings-and-output-weights --optimizer sgd",
}


def losses_and_resume(mesh: ParallelMesh, tokens: Path, flags: str, folder: str) -> tuple[list[float], list[float]]:
    """Losses of 8 steps, and those of 4 steps, a checkpoint, and 4 more."""
    whole = [report.loss for report in steps(built(mesh, tokens, flags), 8)]
    first = built(mesh, tokens, f"{flags} --save {folder}")
    halves = [report.loss for report in steps(first, 4)]
    first.save()
    second = built(mesh, tokens, f"{flags} --load {folder}")
    return whole, halves + [report.loss for report in steps(second, 4)]


@pytest.mark.parametrize("name", ["untied", "decay", *(pytest.param(name, marks=pytest.mark.long) for name in ("sgd", "rates"))])
def test_weights_updated_otherwise_are_resumed_to_the_bit(tokens: Path, tmp_path: Path, name: str) -> None:
    whole, resumed = losses_and_resume(MESH, tokens, OTHERWISE[name], str(tmp_path))
    assert resumed == whole
    assert whole != [report.loss for report in steps(built(MESH, tokens), 8)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["sgd", "rates"])
def test_no_layout_changes_them(ranks: Ranks, tokens: Path, tmp_path: Path, name: str) -> None:
    flags = f"{OTHERWISE[name]} --use-distributed-optimizer"
    whole, _ = losses_and_resume(MESH, tokens, OTHERWISE[name], str(tmp_path / "one"))
    for found, resumed in ranks(4).run(losses_and_resume, tokens, flags, str(tmp_path / "four"), tp=2):
        assert found == pytest.approx(whole, abs=2e-5)
        assert resumed == found


@pytest.mark.long
@pytest.mark.parametrize("to", ["megatron-legacy", "megatron-torch_dist"])
@pytest.mark.parametrize("name", OTHERWISE)
def test_they_go_on_after_a_way_through_megatrons_formats(tokens: Path, tmp_path: Path, name: str, to: Any) -> None:
    flags = OTHERWISE[name]
    trainer = built(MESH, tokens, f"{flags} --save {tmp_path / 'a'}")
    steps(trainer, 4)
    trainer.save()
    expected = [report.loss for report in steps(trainer, 2)]
    convert(load=tmp_path / "a", save=tmp_path / "m", to=to)
    resumed = built(MESH, tokens, f"{flags} --load {tmp_path / 'm'} --no-mask-padded-vocab")
    assert (resumed.iteration, resumed.lr_schedule.state_dict()) == (4, {**trainer.lr_schedule.state_dict(), "samples": 32})
    convert(load=tmp_path / "m", save=tmp_path / "b", to="native", vocab_size=97)
    again = built(MESH, tokens, f"{flags} --load {tmp_path / 'b'}")
    assert all(
        torch.equal(a, b) for a, b in zip(weights(again), weights(built(MESH, tokens, f"{flags} --load {tmp_path / 'a'}")), strict=True)
    )
    again.stack.head.true_columns = trainer.stack.head.true_columns  # Megatron lets padded rows take part
    assert [report.loss for report in steps(again, 2)] == expected


def test_megatrons_groups_stand_in_its_order(tokens: Path, tmp_path: Path) -> None:
    trainer = built(MESH, tokens, f"{OTHERWISE['untied']} --embedding-init-method-std 0.1 --save {tmp_path / 'a'}")
    steps(trainer, 1)
    trainer.save()
    convert(load=tmp_path / "a", save=tmp_path / "m", to="megatron-legacy")
    (file,) = (tmp_path / "m").rglob("model_optim_rng.pt")
    optimizer = torch.load(file, weights_only=False)["optimizer"]
    groups = [(group["wd_mult"], group["is_decoupled_lr"], group["max_lr"], len(group["params"])) for group in optimizer["param_groups"]]
    assert [group[:3] for group in groups] == [(1.0, False, 1e-2), (1.0, True, 5e-2), (0.0, True, 5e-2), (0.0, False, 1e-2)]
    assert [count for *_, count in groups[1:3]] == [1, 1]
    assert set(optimizer["state"][0]) == {"momentum_buffer"}
    assert optimizer["param_groups"][0]["momentum"] == 0.9


def test_the_moments_of_another_optimizer_are_refused_with_both_names(tokens: Path, tmp_path: Path) -> None:
    trainer = built(MESH, tokens, f"--save {tmp_path}")
    steps(trainer, 1)
    trainer.save()
    with pytest.raises(CheckpointError, match=r"moments of --optimizer adam, and this run has --optimizer sgd; .*--no-load-optim"):
        built(MESH, tokens, f"--optimizer sgd --load {tmp_path}")
    assert built(MESH, tokens, f"--optimizer sgd --load {tmp_path} --no-load-optim").iteration == 0
    assert open_stored(tmp_path).moments == ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("name", ["sgd", "rates", "decay"])
def test_what_differs_is_told_at_the_start(tokens: Path, name: str) -> None:
    told = str(RunSummary(configure(tokens, OTHERWISE[name]), 1))
    said = {
        "sgd": "SGD with momentum 0.8; weight decay is added to the gradient",
        "rates": "learning rate of word embedding and output layer: 0.05, at the end 0.001",
        "decay": "weight decay from 0 to 0.5 over the run, cosine",
    }
    assert said[name] in told


# --- backends and 8 bits on machines that do not have them


def started(flags: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, "-m", "domino_lm.pretrain", *f"{TINY} --mock-data --eval-interval 0 {flags}".split()]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.long
def test_nccl_without_a_gpu_is_one_error_for_all_ranks() -> None:
    found = started("--distributed-backend nccl --split 1,0,0")
    assert found.returncode != 0
    ours = found.stderr.split("ChildFailedError")[0]
    assert ours.count("error: --distributed-backend nccl carries data between GPUs, and PyTorch finds none on this machine; use gloo") == 1
    assert "Traceback" not in ours.split("torch/distributed")[0]


@pytest.mark.parametrize(
    ("backend_name", "device", "missing", "message"),
    [
        ("nccl", "cpu", "", "finds none on this machine; use gloo"),
        ("nccl", "cuda", "is_nccl_available", "built without it; use gloo"),
        ("gloo", "cpu", "is_gloo_available", "built without it; use nccl"),
        ("gloo", "cpu", "is_available", "built without its distributed package"),
    ],
)
def test_each_backend_that_is_missing_has_its_message(
    monkeypatch: pytest.MonkeyPatch, backend_name: Any, device: str, missing: str, message: str
) -> None:
    if missing:
        monkeypatch.setattr(torch.distributed, missing, lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MissingBackendError, match=message):
        ParallelMesh.create(ParallelConfig(distributed_backend=backend_name), torch.device(device))


def test_more_ranks_than_gpus_is_said_by_the_first_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(meshes.dist, "is_nccl_available", lambda: True)
    with pytest.raises(MissingBackendError, match=r"than the 2 GPU\(s\) that PyTorch finds; start at most 2") as raised:
        ParallelMesh.create(ParallelConfig(), torch.device("cuda", 3))
    assert raised.value.first_local_rank == 2


@pytest.mark.parametrize("name", ["mpi", "ucc", "nonsense"])
def test_a_backend_that_is_not_known_is_refused_with_those_that_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY.split(), "--mock-data", "--distributed-backend", name]) == 2
    assert f"--distributed-backend: invalid choice: '{name}' (choose from" in capsys.readouterr().err


def dry_run(flags: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], world: str = "2", gpu: bool = False) -> str:
    monkeypatch.setattr(backend, "GPU_DRIVERS", (Path("/proc/self/stat" if gpu else "/nowhere"),))
    monkeypatch.setenv("WORLD_SIZE", world)
    assert main([*TINY.split(), "--mock-data", "--dry-run", *flags.split()]) == 0
    return capsys.readouterr().out


def test_a_dry_run_says_that_nccl_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = "missing   --distributed-backend nccl carries data between GPUs, and this machine has none; use gloo, or leave it out."
    assert said in dry_run("--distributed-backend nccl", monkeypatch, capsys)
    assert "missing  " not in dry_run("--distributed-backend nccl", monkeypatch, capsys, gpu=True)
    alone = dry_run("--distributed-backend nccl", monkeypatch, capsys, world="1")
    assert "missing  " not in alone
    assert "--distributed-backend nccl: one rank talks to nobody" in alone


def test_fp8_on_a_cpu_says_that_it_is_emulated(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    emulated, scaled = "a CPU has no 8-bit GEMMs; they are emulated one by one", "Megatron's default is delayed scaling"
    told = dry_run("--fp8-format hybrid", monkeypatch, capsys)
    assert emulated in told
    assert scaled in told
    told = dry_run("--fp8-format hybrid", monkeypatch, capsys, gpu=True)
    assert emulated not in told
    assert scaled in told
