"""``--deterministic-mode``: what it sets and refuses; and the table of what is equal to the bit names tests that exist."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from domino_lm.config.kernels import KernelConfig
from domino_lm.config.settings import ConfigError, ParallelConfig
from domino_lm.model.kernels import apex, backends
from domino_lm.model.kernels.backends import choose_kernels
from domino_lm.parallel import mesh
from domino_lm.parallel.determinism import set_variables
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.pretrain import main
from tests.documents import ROOT

TABLE = [line.split(" | ") for line in (ROOT / "docs" / "determinism.md").read_text().splitlines() if line.startswith("| ")][1:]


def test_the_mode_sets_what_cublas_and_nccl_need() -> None:
    environment: dict[str, str] = {}
    set_variables(environment)
    assert environment == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "TORCHINDUCTOR_DETERMINISTIC": "1"}
    chosen = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "Tree", "TORCHINDUCTOR_DETERMINISTIC": "0"}
    set_variables(environment := dict(chosen))
    assert environment == chosen


@pytest.mark.parametrize(("variable", "value"), [("CUBLAS_WORKSPACE_CONFIG", ":0:0"), ("NCCL_ALGO", "NVLS"), ("NCCL_ALGO", "Ring,NVLS")])
def test_what_is_not_reproducible_in_the_environment_is_refused(variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"--deterministic-mode: {variable}={value} is not reproducible; unset it, which takes "):
        set_variables({variable: value})


@pytest.fixture
def kernels_as_before() -> Iterator[None]:
    filled, benchmark = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.benchmark = filled, benchmark


@pytest.mark.usefixtures("kernels_as_before")
@pytest.mark.parametrize("deterministic", [False, True])
def test_variables_and_kernels_are_chosen_before_a_device_is(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    for name in ("WORLD_SIZE", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "TORCHINDUCTOR_DETERMINISTIC"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    seen: list[Any] = []

    def default_device() -> torch.device:
        seen.extend([os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.are_deterministic_algorithms_enabled()])
        return torch.device("cpu")

    monkeypatch.setattr(mesh, "default_device", default_device)
    ParallelMesh.create(ParallelConfig(), kernels=KernelConfig(deterministic_mode=deterministic))
    assert seen == [":4096:8" if deterministic else None, deterministic]


@pytest.mark.usefixtures("kernels_as_before")
def test_a_wrong_variable_ends_a_run_with_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NCCL_ALGO", "NVLS")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert main("--preset debug-gpt --mock-data --deterministic-mode --train-iters 2".split()) == 2
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert "NCCL_ALGO=NVLS" in error


@pytest.mark.usefixtures("kernels_as_before")
def test_a_run_trains_in_the_mode_and_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("TORCHINDUCTOR_DETERMINISTIC", "1")
    small = "--num-layers 1 --hidden-size 32 --seq-length 16 --micro-batch-size 2 --global-batch-size 2 --eval-interval 0 --train-iters 2"
    assert main(f"--preset debug-llama --mock-data --deterministic-mode {small} --lr-warmup-iters 0".split()) == 0
    assert "deterministic mode: the same bits in every run" in capsys.readouterr().out


def test_the_mode_takes_pytorchs_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*args: Any) -> Any:
        raise AssertionError("a library was looked for")

    monkeypatch.setattr(apex, "find", called)
    monkeypatch.setattr(backends, "find_quantiser", called)
    monkeypatch.setattr(backends, "accumulates_rightly", lambda *args: True)
    monkeypatch.setattr(backends, "multiplies_rightly", lambda *args: True)
    monkeypatch.setattr(backends, "shows_not_finite", lambda *args: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    settings = KernelConfig(deterministic_mode=True, fp8_format="hybrid")
    found = choose_kernels(settings, torch.device("cuda", 0), torch.bfloat16, 64)
    assert found.description == (
        "weight gradients accumulated in fp32 by PyTorch's mixed GEMM; norms by PyTorch; GEMMs in fp8 (hybrid), quantised by PyTorch"
    )


def test_the_names_in_the_table_are_tests_that_exist() -> None:
    named = [found for row in TABLE for found in re.findall(r"`([\w/]+\.py)::(test_\w+)`", row[2])]
    assert len(named) > 12
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in (Path(ROOT) / "tests" / file).read_text()] == []


def test_a_line_of_the_table_is_backed_by_a_test_or_promises_nothing() -> None:
    assert len(TABLE) > 12
    assert [row[0] for row in TABLE if "::test_" not in row[2] and "not promised" not in row[1]] == []


def test_the_table_has_a_line_for_each_thing_that_may_change() -> None:
    first = " ".join(row[0] for row in TABLE)
    for word in ("resume", "--num-workers", "data-parallel size", "schedules", "--compile", "GPUs"):
        assert word in first, word
