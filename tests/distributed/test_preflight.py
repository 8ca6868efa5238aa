"""What preflight finds, on two ranks whose surroundings are made to differ, and that it always ends."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.tools import node_checks, preflight
from domino_lm.tools.node_checks import Limits, Report, check, own_facts
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
PROGRAM = Path(__file__).parents[2] / "tools" / "preflight.py"
QUICK = Limits(patience_s=0.2, min_free_gib=0.0)


def looked_at(mesh: ParallelMesh, limits: Limits) -> Report:
    return check(mesh, limits)


def test_ranks_that_are_alike_are_fit(ranks: Ranks, tmp_path: Path) -> None:
    report, other = ranks(2).run(looked_at, replace(QUICK, shared=(str(tmp_path),)))
    assert report.faults == other.faults == []
    assert {row[0]: row[1] for row in report.rows} == {row[0]: "ok" for row in report.rows}
    found = {row[0]: row[2] for row in report.rows}
    assert found["PyTorch"] == torch.__version__
    assert found["groups"] == "1 tensor-parallel group(s) of 2"
    assert "GB/s" in found["TP all-reduce"]
    assert found["DP all-reduce"] == "one rank"
    assert found[f"shared {tmp_path}"] == "seen by all ranks"
    assert list(tmp_path.iterdir()) == []


def test_one_rank_alone_is_looked_at_too() -> None:
    assert check(ParallelMesh.single(torch.device("cpu")), QUICK).faults == []


def other_version(mesh: ParallelMesh) -> Report:
    return check(mesh, QUICK, lambda device: own_facts(device) | ({"PyTorch": "2.6.0"} if mesh.world.rank == 1 else {}))


def test_another_version_on_one_rank_is_a_fault(ranks: Ranks) -> None:
    report, other = ranks(2).run(other_version)
    assert report == other
    (fault,) = report.faults
    assert fault.startswith(f"PyTorch differs: {torch.__version__} on ")
    assert "2.6.0 on" in fault
    assert "(rank 1); install the same everywhere" in fault


def own_folder(mesh: ParallelMesh, folder: str) -> Report:
    return check(mesh, replace(QUICK, shared=(f"{folder}/{mesh.world.rank}",)))


def test_a_folder_that_each_node_has_for_itself_is_a_fault(ranks: Ranks, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for report in ranks(2).run(own_folder, str(tmp_path)):
        (fault,) = report.faults
        assert "is not one folder for all: rank 0 on" in fault
        assert "does not see the file of rank 1" in fault
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_folder_that_is_missing_on_one_rank_is_a_fault(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    assert "cannot write there: No such file or directory" in " ".join(ranks(2).run(own_folder, str(tmp_path))[0].faults)


def wrong_clock(mesh: ParallelMesh) -> list[str]:
    real = node_checks.time
    if mesh.world.rank == 1:
        node_checks.time = SimpleNamespace(**{name: getattr(real, name) for name in dir(real)} | {"time": lambda: real.time() + 7})
    try:
        return check(mesh, QUICK).faults
    finally:
        node_checks.time = real


def test_a_clock_that_is_off_is_a_fault(ranks: Ranks) -> None:
    faults, _ = ranks(2).run(wrong_clock)
    assert faults[0].startswith("the clock of rank 1 is +7.0 s off rank 0's")


def test_a_full_disk_is_a_fault(ranks: Ranks, tmp_path: Path) -> None:
    report, _ = ranks(2).run(looked_at, Limits(shared=(str(tmp_path),), min_free_gib=1e9))
    assert "GiB free on" in report.faults[0]


def test_a_slow_tensor_parallel_group_is_a_fault(ranks: Ranks) -> None:
    report, _ = ranks(2).run(looked_at, replace(QUICK, min_gbytes_per_s=1e6))
    assert "the tensor-parallel group of rank" in report.faults[0]


def run(environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    whole = {**os.environ, **environment}
    return subprocess.run([sys.executable, str(PROGRAM), *flags], env=whole, capture_output=True, text=True, timeout=100)


def test_the_program_ends_with_0_and_says_fit(tmp_path: Path) -> None:
    done = run({}, "--shared", str(tmp_path), "--min-free-gib", "0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("preflight: fit\n")


def test_ranks_that_never_join_end_the_program_with_one_line() -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731"}
    start_s = time.monotonic()
    done = run(alone, "--timeout-seconds", "2")
    assert done.returncode == 1
    assert time.monotonic() - start_s < 60
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: preflight: rank 0 on")
    assert "not all 2 ranks joined within 2 s" in last


def test_a_layout_that_does_not_divide_is_a_wrong_flag() -> None:
    done = run({"RANK": "0", "WORLD_SIZE": "4"}, "--tensor-model-parallel-size", "3")
    assert done.returncode == 2
    assert done.stderr.startswith("error: preflight: --tensor-model-parallel-size 3 does not divide the 4 ranks")


@pytest.mark.parametrize("faults", [["one."], ["one.", "two."]])
def test_the_last_line_names_the_first_fault(faults: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    for fault in faults:
        report.add("thing", "seen", fault)
    assert preflight._conclude(report, 0) == 1
    more = " (and 1 more above)" if len(faults) > 1 else ""
    assert capsys.readouterr().err == f"error: preflight: one.{more}\n"


@pytest.mark.long
def test_the_command_of_the_document_looks_at_two_ranks() -> None:
    text = (PROGRAM.parents[1] / "docs" / "gpu.md").read_text()
    (command,) = re.findall(r"^torchrun (.*preflight\.py.*)$", text, re.M)
    words = [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)]
    done = subprocess.run(words, cwd=PROGRAM.parents[1], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("preflight: fit\n")
    assert len([line for line in done.stdout.splitlines() if line.startswith("Python")]) == 1
