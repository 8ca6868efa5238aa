"""The script for a GPU, rehearsed on the CPU, and the link that it emulates."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.emulated_link import EmulatedCommunicator, FreeLink, ThreadLink
from benchmarks.gpu_bench import REHEARSAL, Bench, Row, known_hardware
from benchmarks.gpu_check import BUDGET_S, SECTIONS, main, run
from domino_lm.simulate.hardware import HARDWARE
from domino_lm.simulate.links import Fabric

FABRIC = HARDWARE["dgx-h100"].fabric


@pytest.mark.long
def test_a_rehearsal_runs_every_section_and_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--rehearse", "--sections", "correctness", "MFU", "overhead", "overlap", "--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert printed.endswith(f"{REHEARSAL}\n")
    assert printed.startswith(f"device         {REHEARSAL}\n")
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "gpu_check_rehearsal_on_cpu__not_a_gpu_result.json",
        "gpu_check_rehearsal_on_cpu__not_a_gpu_result.md",
    ]
    rows = json.loads(next(tmp_path.glob("*.json")).read_text())["rows"]
    assert {row["section"] for row in rows} == {"correctness", "MFU", "memory", "overhead", "overlap"}
    assert [row for row in rows if row["verdict"] == "FAULT"] == []
    assert sum(row["section"] == "overlap" for row in rows) == 1 + len(gpu_check.CUTS)
    assert REHEARSAL in next(tmp_path.glob("*.md")).read_text()


def test_a_rehearsal_leaves_no_result_beside_those_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "write_results", lambda *arguments: pytest.fail("wrote a result"))
    monkeypatch.setitem(SECTIONS, "overlap", lambda bench, deadline_s: iter([Row("overlap", "a", "b")]))
    assert main(["--rehearse", "--sections", "overlap"]) == 0


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("error: no GPU is visible to PyTorch; --rehearse tries the script itself")


def test_all_sections_fit_into_eight_minutes_with_the_start() -> None:
    assert BUDGET_S.keys() == SECTIONS.keys()
    assert sum(BUDGET_S.values()) <= 460


def test_a_section_that_fails_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: Bench, deadline_s: float):
        yield Row("MFU", "first", "1")
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setitem(SECTIONS, "MFU", broken)
    monkeypatch.setitem(SECTIONS, "overlap", lambda bench, deadline_s: iter([Row("overlap", "a", "b")]))
    cpu = torch.device("cpu")
    rows = run(Bench(cpu, True, known_hardware(cpu)), ["MFU", "overlap"], lambda row: None)
    assert [(row.section, row.verdict) for row in rows] == [("MFU", ""), ("MFU", "FAULT"), ("overlap", "")]
    assert rows[1].found == "RuntimeError: out of memory"


def test_collectives_take_the_links_time_one_after_the_other() -> None:
    assert isinstance(FABRIC, Fabric)
    tp = EmulatedCommunicator(8, ThreadLink(), replace(FABRIC, overhead_s=0.1))
    tensor = torch.ones(4)
    expected_s = tp.seconds("all_reduce", tensor.nbytes)
    start_s = time.perf_counter()
    first, second = tp.all_reduce_start(tensor), tp.all_reduce_start(tensor)
    assert time.perf_counter() - start_s < expected_s
    first.wait()
    assert time.perf_counter() - start_s >= expected_s
    second.wait()
    assert time.perf_counter() - start_s >= 2 * expected_s


def test_the_emulated_rank_sees_shapes_of_all_ranks() -> None:
    assert isinstance(FABRIC, Fabric)
    tp = EmulatedCommunicator(4, FreeLink(), FABRIC)
    assert tp.all_gather_start(torch.ones(3, 2)).wait().shape == (4, 3, 2)
    assert tp.all_gather_tokens_start(torch.ones(3, 2)).wait().shape == (12, 2)
    assert tp.reduce_scatter_start(torch.ones(8, 2)).wait().shape == (2, 2)
    assert tp.all_gather_object("a") == ["a"] * 4
