"""The comparison's arithmetic, its refusals, and a network that leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from benchmarks import head_to_head, report, shaped_network
from benchmarks.case import MEGATRON, NO_COMM, OURS, SERIAL, Case, model_of, variants_of
from benchmarks.figures import Round, Spread, Turn, key, limits_s, summarize
from benchmarks.report import markdown, panel
from benchmarks.shaped_network import Link, NetworkError, ShapedNetwork, remove_leftovers

ROOT = Path(__file__).resolve().parents[2]
GPT = Case("gpt", model_of("gpt", hidden=512, layers=4, seq=256, vocab=512), 2, 1, 4)
can_shape = os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc", "taskset"))
needs_network = pytest.mark.skipif(not can_shape, reason="needs root, and ip and tc of iproute2")


def turn(forward_s: float, backward_s: float, busy_s: float = 1.0, cpu_s: float = 1.0) -> Turn:
    return Turn({"F": forward_s, "B": backward_s, "step": forward_s + backward_s}, busy_s, cpu_s)


def one_round(slowness: float = 1.0) -> Round:
    """Serial takes 4 s, ours 3 s, no communication 2 s: half of the communication is hidden."""
    return {
        key(OURS, SERIAL): turn(2.0 * slowness, 2.0 * slowness, busy_s=2.8, cpu_s=2.8),
        key(OURS, "rows2"): turn(1.5 * slowness, 1.5 * slowness, busy_s=2.5, cpu_s=2.5),
        key(OURS, NO_COMM): turn(1.0 * slowness, 1.0 * slowness, busy_s=2.0, cpu_s=2.0),
        key(MEGATRON, "default"): turn(3.0 * slowness, 1.5 * slowness),
    }


def figure(rounds: list[Round], name: str, phase: str = "step") -> float:
    return summarize(GPT, rounds, 1e9)["variants"][key(OURS, "rows2")][name][phase].median


@pytest.mark.parametrize(
    ("name", "phase", "expected"),
    [
        ("speedup", "step", 4 / 3),
        ("fraction_of_optimum", "F", 2 / 3),
        ("hidden_share", "step", 0.5),
        ("speedup_over_megatron", "F", 2.0),
        ("speedup_over_megatron", "B", 1.0),
    ],
)
def test_figures_follow_their_formulas(name: str, phase: str, expected: float) -> None:
    assert figure([one_round()], name, phase) == pytest.approx(expected)


def test_a_round_that_is_slow_as_a_whole_changes_no_ratio() -> None:
    rounds = [one_round(), one_round(3.0), one_round(1.2)]
    assert figure(rounds, "speedup") == pytest.approx(4 / 3)
    assert figure(rounds, "fraction_of_optimum") == pytest.approx(2 / 3)


def test_the_limit_of_a_slow_link_is_the_wire() -> None:
    limits = limits_s(GPT, [one_round()], bytes_per_s=1e6)
    assert limits["F"] == pytest.approx(GPT.wire_bytes("F") / 1e6)
    assert limits["step"] == limits["F"] + limits["B"]


def test_the_limit_of_a_fast_link_is_compute_and_the_transports_cpu() -> None:
    assert limits_s(GPT, [one_round()], bytes_per_s=1e15)["step"] == pytest.approx(2.0 + 0.5)  # two rows take less than serial


def test_pairing_bounds_both_phases_together() -> None:
    model = [
        {**one_round(), key(OURS, NO_COMM): turn(0.5, 1.5, busy_s=2.0, cpu_s=2.0), key(OURS, SERIAL): turn(2.0, 2.0, busy_s=2.0, cpu_s=2.0)}
    ]
    limits = limits_s(GPT, model, bytes_per_s=GPT.wire_bytes("F") / 1.0)
    assert limits["step"] == pytest.approx(1.0 + 1.5, rel=1e-2)
    assert limits["paired"] == pytest.approx(2.0, rel=1e-2)


def test_cpu_of_other_programs_is_not_taken_for_the_transports() -> None:
    loud = {
        **one_round(),
        key(OURS, "rows2"): turn(1.5, 1.5, busy_s=9.0, cpu_s=2.4),
        key(OURS, NO_COMM): turn(1.0, 1.0, busy_s=4.0, cpu_s=2.0),
    }
    assert summarize(GPT, [loud], 1e9)["transport_cpu_s"] == pytest.approx(0.4)


def test_a_ring_sends_each_buffer_once_between_two_ranks_and_more_between_four() -> None:
    activations = 256 * 4 * 512 * 4
    assert GPT.wire_bytes("B") == 9 * activations
    four = Case("gpt", GPT.model, 4, 1, 4)
    assert four.wire_bytes("B") == 9 * activations * 1.5


def test_a_spread_holds_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)


def test_a_case_travels_as_text() -> None:
    assert Case.from_json(GPT.to_json()) == GPT


def test_a_micro_batch_of_one_has_no_variant_that_cuts_samples() -> None:
    names = variants_of(OURS, Case("gpt", GPT.model, 2, 1, 1))
    assert SERIAL in names
    assert not any(name.startswith("row") for name in names)


def test_an_unknown_variant_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"--variants rows9.*serial, baseline"):
        head_to_head.wanted_variants(GPT, [OURS], ["rows9"])


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ("--hidden 100", "multiples of 64"),
        ("--family llama --hidden 64", "multiples of 128"),
        ("--hidden 192", "does not divide .*heads 3"),
    ],
)
def test_sizes_that_cannot_be_shared_are_refused_before_anything_starts(flags: str, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert head_to_head.main(flags.split()) == 1
    assert re.search(fault, capsys.readouterr().err)


def test_the_optimum_and_the_serial_plan_are_always_measured() -> None:
    assert head_to_head.wanted_variants(GPT, [MEGATRON], ["baseline"])[OURS] == [SERIAL, "baseline", NO_COMM]


class Answers:
    """A gang that answers `save` and `check` with a loss and a gradient difference."""

    def __init__(self, loss: float, gradient: float = 0.0) -> None:
        self.answer = {"loss": loss, "gradient_difference": gradient}

    def call(self, method: str, **arguments: str) -> list[dict[str, float]]:
        return [self.answer]


@pytest.mark.parametrize(("loss", "gradient"), [(6.00002, 0.0), (float("nan"), 0.0), (6.0, 1e-3)])
def test_programs_that_compute_something_else_are_not_compared(tmp_path: Path, loss: float, gradient: float) -> None:
    gangs = {OURS: Answers(6.0), MEGATRON: Answers(loss, gradient)}
    with pytest.raises(head_to_head.MismatchError, match="megatron_core default"):
        head_to_head.check_numerics(gangs, {OURS: [SERIAL], MEGATRON: ["default", NO_COMM]}, tmp_path)  # type: ignore[arg-type]


def test_the_table_has_a_row_for_every_variant() -> None:
    results = {
        **head_to_head.describe(GPT, ["--rounds", "1"]),
        "numerics": {key(OURS, SERIAL): {"loss_difference": 0.0, "gradient_difference": 0.0}},
        "dispatch_s_per_op": 1e-6,
        "links": [{"gbit_per_s": 1.0, "mtu": 1500, "delay_ms": 0.0, "rounds": [1], "summary": summarize(GPT, [one_round()], 1e9)}],
    }
    table = markdown(json.loads(json.dumps(results)))
    assert "head_to_head.py --rounds 1" in table
    assert "| domino_lm: 2 rows | 3000 (3000 to 3000) | 1500 / 1500 | 2500 | 0.67 / 0.67 / **0.67**" in table
    assert "| Megatron-core: default | 4500" in table


def test_the_picture_is_titled_by_all_that_differs_and_explains_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(report, "write_png", lambda figure, _: drawn.append(figure))
    summary = summarize(GPT, [{**one_round(), key(OURS, "row_groups"): turn(1.5, 1.5)}], 1e9)
    links = [{"gbit_per_s": 1.0, "delay_ms": 2.0, "summary": summary}]
    report.draw(json.loads(json.dumps({**head_to_head.describe(GPT, []), "links": links})), tmp_path / "case.png")
    title = drawn[0].get_suptitle().splitlines()[0]
    assert title == "GPT, hidden 512, 4 layers, sequence 256, vocabulary 512, micro-batch 4 x 1, TP 2, DP 1"
    assert drawn[0].axes[0].get_title("left") == "1 Gbit/s, 2 ms, forward"
    lines = {text.get_text() for text in drawn[0].legends[0].get_texts()}
    assert lines == {"1: all communication hidden", "limit of our schedules", "limit of paired micro-batches", "quartiles"}


def test_a_variant_keeps_its_line_in_phases_that_it_has_no_bar_in() -> None:
    turns = {**one_round(), key(OURS, "row_groups"): turn(1.5, 1.5)}
    figures = json.loads(json.dumps(summarize(GPT, [turns], 1e9)))
    axes = Figure().subplots()
    panel(axes, {"gbit_per_s": 1.0, "summary": figures}, "F")
    labels = [label.get_text() for label in axes.get_yticklabels()]
    drawn = {labels[round(bar.get_y() + bar.get_height() / 2)]: bar.get_width() for bar in axes.patches}
    assert "domino_lm: 2 groups of 2 rows" in labels
    assert drawn == {"domino_lm: serial": pytest.approx(0.5), "domino_lm: 2 rows": pytest.approx(2 / 3)}


def test_without_root_the_network_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NetworkError, match="need root"):
        ShapedNetwork(2, Link(1.0))


def test_without_tc_the_network_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(NetworkError, match="tc not found; install them: apt-get install iproute2"):
        ShapedNetwork(2, Link(1.0))


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def start_maker() -> subprocess.Popen[str]:
    """A process that has made a network with a sleeping rank in it, and waits."""
    script = "import time; from benchmarks.shaped_network import *\nwith ShapedNetwork(3, Link(1)) as n: n.start(1, ['sleep', '99']); print(1, flush=True); time.sleep(99)"
    maker = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    assert maker.stdout.readline() == "1\n"
    assert f"-{maker.pid}-1" in namespaces()
    return maker


@needs_network
def test_a_terminated_run_takes_its_network_with_it() -> None:
    maker = start_maker()
    maker.terminate()
    assert maker.wait(timeout=20) == 128 + signal.SIGTERM
    assert f"-{maker.pid}-" not in namespaces()


@needs_network
def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    maker = start_maker()
    maker.kill()
    maker.wait(timeout=20)
    assert f"{shaped_network.PREFIX}-{maker.pid}-1" in remove_leftovers()
    assert f"-{maker.pid}-" not in namespaces()


@needs_network
def test_a_link_carries_no_more_than_its_rate() -> None:
    with ShapedNetwork(2, Link(0.2)) as network:
        assert 0.05e9 < network.measure() < 0.22e9
        network.shape(Link(0.05))
        assert 0.01e9 < network.measure() < 0.055e9


@needs_network
def test_a_command_runs_on_every_rank_of_a_bridge() -> None:
    command = [sys.executable, "benchmarks/shaped_network.py", "--ranks", "3", "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] rank {rank} of 3" for rank in range(3)]


@pytest.mark.long
@needs_network
def test_a_comparison_writes_every_round_and_leaves_no_network(tmp_path: Path) -> None:
    output = tmp_path / "tiny"
    size = "--hidden 128 --layers 1 --seq 16 --vocab 256 --micro-batch-size 2 --gbit 1 --rounds 2 --steps 1"
    command = [sys.executable, "benchmarks/head_to_head.py", *size.split(), "--programs", OURS, "--variants", "rows2", "auto"]
    start_s = time.monotonic()
    done = subprocess.run([*command, "--output", str(output)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(output.with_suffix(".json").read_text())
    turns = [set(each["turns"]) for each in results["links"][0]["rounds"]]
    assert turns == 2 * [{key(OURS, name) for name in (SERIAL, "rows2", "auto", NO_COMM)}]
    assert output.with_suffix(".png").stat().st_size > 0
    assert time.monotonic() - start_s < 300
