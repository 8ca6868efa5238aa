"""What ops cost: conservation of work under any cut, and the machines' arithmetic."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domino_lm.config.settings import ConfigError, ModelConfig
from domino_lm.model.families.lookup import family_of
from domino_lm.schedule.cuts import cut
from domino_lm.schedule.ops import Kind, Op
from domino_lm.schedule.plan import Plan, build_plan
from domino_lm.simulate.costs import RowShape, cost, model_parts, shapes_of
from domino_lm.simulate.hardware import HARDWARE, CoreAttention, Device, Gemm, Hardware, MeasuredDevice, find_hardware, read_hardware
from domino_lm.simulate.links import PASSES, Fabric, Group, MeasuredFabric
from domino_lm.simulate.memory import memory_of
from domino_lm.simulate.predict import BASELINE, Setting, optimum, predict
from domino_lm.tools import simulate
from domino_lm.tools.sweep import Grid, Point, sweep, write_csv

QUIET = settings(deadline=None)
ROOT = Path(__file__).resolve().parent.parent.parent
H100 = HARDWARE["dgx-h100"]
GPT = ModelConfig(num_layers=2, hidden_size=1024, num_attention_heads=16, seq_length=256, vocab_size=1000, attention_dropout=0.0)
LLAMA = replace(
    GPT,
    swiglu=True,
    group_query_attention=True,
    num_query_groups=4,
    position_embedding_type="rope",
    normalization="RMSNorm",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)


def plan_of(rows: int = 1, cols: int = 1, micro_batch: int = 4) -> Plan:
    return build_plan(family_of(GPT).chain, cut(micro_batch, rows), cols)


def totals(model: ModelConfig, plan: Plan, tp: int) -> tuple[float, float]:
    """FLOPs of all GEMMs and attention, and bytes of all tensor-parallel collectives."""
    shapes = shapes_of(model, plan, tp, H100, 4)
    works = [cost(op, shapes) for op in plan.ops]
    flops = sum(gemm.flops for work in works for gemm in work.gemms) + sum(work.attention.flops for work in works if work.attention)
    return flops, sum(work.transfer_bytes for work in works)


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
@QUIET
@given(rows=st.integers(1, 4), cols=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 4]))
def test_cutting_changes_neither_flops_nor_traffic(model: ModelConfig, rows: int, cols: int, tp: int) -> None:
    assert totals(model, plan_of(rows, cols), tp) == pytest.approx(totals(model, plan_of(), tp))


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_gemms_make_six_flops_a_weight_and_token(model: ModelConfig) -> None:
    shapes = shapes_of(model, plan_of(), 1, H100, 4)
    flops = sum(gemm.flops for op in plan_of().ops for gemm in cost(op, shapes).gemms)
    padded = replace(model, vocab_size=model.padded_vocab_size(1))
    attention = 12.0 * model.num_layers * model.seq_length * model.num_attention_heads * model.head_width
    assert flops == pytest.approx((family_of(padded).flops_per_token() - attention) * 4 * model.seq_length)


@pytest.mark.parametrize(("model", "layers"), [(GPT, 40), (LLAMA, 32)], ids=["gpt", "llama"])
def test_parameters_are_those_of_the_model(model: ModelConfig, layers: int) -> None:
    model = replace(model, num_layers=layers)
    h, f, v, s = model.hidden_size, model.ffn_width, model.padded_vocab_size(1), model.seq_length
    if model is LLAMA or model.swiglu:
        layer = h * (h + 2 * model.query_groups * model.head_width) + h * h + 3 * h * f + 2 * h
        expected = layers * layer + h + 2 * v * h
    else:
        expected = layers * (12 * h * h + 13 * h) + 2 * h + v * h + s * h
    assert sum(part.parameters for part in model_parts(model, 1, H100)) == pytest.approx(expected, rel=2e-4)


def test_rows_of_a_sequence_share_its_attention() -> None:
    whole = RowShape(3, 1024)
    pieces = [RowShape(3, 256, offset) for offset in range(0, 1024, 256)]
    assert sum(piece.attended for piece in pieces) == pytest.approx(whole.attended)


def test_an_op_without_meaning_is_refused() -> None:
    shapes = shapes_of(GPT, plan_of(), 2, H100, 4)
    with pytest.raises(ValueError, match=r"lossB2\.0 has no cost"):
        cost(Op(Kind.LOSS, "B", 2, 0), shapes)


@QUIET
@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(32, 4096))
def test_a_larger_gemm_never_takes_less(m: int, n: int, k: int) -> None:
    device = H100.device
    assert device.gemm_s(Gemm(m + 128, n, k), 2) >= device.gemm_s(Gemm(m, n, k), 2) - 1e-12


@QUIET
@given(st.integers(1, 3), st.integers(1, 8), st.integers(64, 8192), st.integers(2, 4))
def test_cutting_a_gemm_that_fills_its_waves_never_gains(waves: int, columns: int, k: int, pieces: int) -> None:
    device, m, n = H100.device, 256 * 132 * waves, 128 * columns
    assert sum(device.gemm_s(Gemm(size, n, k), 2) for size in cut(m, pieces)) >= device.gemm_s(Gemm(m, n, k), 2) - 1e-12


def test_a_gemm_of_one_wave_and_a_tile_takes_two_waves() -> None:
    device = H100.device
    assert isinstance(device, Device)
    full = replace(device, kernel_s=0.0, memory_bytes_per_s=1e18)
    one, more = Gemm(256 * 132, 128, 8192), Gemm(256 * 133, 128, 8192)
    assert full.gemm_s(more, 2) > 1.4 * full.gemm_s(one, 2)


def test_large_gemms_reach_the_efficiency_that_is_stated() -> None:
    device = H100.device
    gemm = Gemm(16384, 16384, 8192)
    assert isinstance(device, Device)
    assert gemm.flops / device.gemm_s(gemm, 2) == pytest.approx(device.peak_flops * device.gemm_efficiency, rel=0.03)


def test_attention_of_short_sequences_is_less_efficient() -> None:
    short, long = (H100.device.attention_s(CoreAttention(1e12, length, False)) for length in (512, 16384))
    assert short > 1.3 * long


@QUIET
@given(st.sampled_from(sorted(PASSES)), st.integers(1, 12), st.floats(1e3, 1e9))
def test_more_bytes_never_travel_faster(collective: str, doublings: int, size_bytes: float) -> None:
    for hardware in HARDWARE.values():
        group = hardware.fabric.groups(2**doublings, 1)[0]
        fabric = hardware.fabric
        assert fabric.transfer(collective, 2 * size_bytes, group).seconds >= fabric.transfer(collective, size_bytes, group).seconds


def test_a_ring_reaches_its_bus_bandwidth() -> None:
    fabric = HARDWARE["dgx-a100"].fabric
    assert isinstance(fabric, Fabric)
    size_bytes = 1e10
    seconds = fabric.transfer("all_reduce", size_bytes, Group(8, 8)).seconds
    assert 2 * 7 / 8 * size_bytes / seconds == pytest.approx(fabric.local.rate, rel=0.01)


def test_the_switch_sums_faster_than_a_ring() -> None:
    fabric = H100.fabric
    assert isinstance(fabric, Fabric)
    ring = replace(fabric, switch_bytes_per_s=None)
    assert fabric.transfer("all_reduce", 1e8, Group(8, 8)).seconds < ring.transfer("all_reduce", 1e8, Group(8, 8)).seconds


def test_a_reduce_scatter_and_an_all_gather_carry_what_an_all_reduce_does() -> None:
    fabric = HARDWARE["dgx-a100"].fabric
    group = Group(8, 8)
    halves = sum(fabric.transfer(name, 1e9, group).seconds for name in ("reduce_scatter", "all_gather"))
    assert halves == pytest.approx(fabric.transfer("all_reduce", 1e9, group).seconds, rel=0.01)


def test_nodes_make_an_all_reduce_slower() -> None:
    one, two, four = (H100.fabric.transfer("all_reduce", 1e8, H100.fabric.groups(ranks, 1)[0]).seconds for ranks in (8, 16, 32))
    assert one < two < four


def test_one_rank_sends_nothing() -> None:
    assert H100.fabric.transfer("all_reduce", 1e9, Group(1, 1)).seconds == 0.0


def test_an_unknown_collective_is_named() -> None:
    with pytest.raises(ConfigError, match="traffic 'all_to_all' of a collective; known are all_reduce"):
        H100.fabric.transfer("all_to_all", 1.0, Group(2, 2))


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    made = measured_hardware()
    made.write_json(tmp_path / "cal.json")
    assert read_hardware(tmp_path / "cal.json") == made


def test_measured_sizes_are_given_back() -> None:
    made = measured_hardware()
    assert made.fabric.transfer("all_reduce", 1e6, Group(2, 1)).seconds == pytest.approx(1e-3)
    assert made.device.gemm_s(Gemm(1000, 1000, 500), 4) == pytest.approx(1e9 / 2e10)


@pytest.mark.parametrize(("name", "said"), [("dgx-x", "known are dgx-a100"), ("none.json", "cannot be read")])
def test_an_unknown_machine_is_refused(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_hardware(name)


def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(ConfigError, match="not a calibration file"):
        read_hardware(tmp_path / "a.json")


def test_rows_hold_no_more_activations_than_the_whole() -> None:
    whole, rows = (memory_of(plan.ops, shapes_of(GPT, plan, 2, H100, 4)).activations for plan in (plan_of(), plan_of(2)))
    assert rows <= 1.05 * whole


def test_attention_dropout_costs_the_score_matrix() -> None:
    dropping = replace(GPT, attention_dropout=0.1)
    plain, explicit = (memory_of(plan_of().ops, shapes_of(model, plan_of(), 2, H100, 4)).activations for model in (GPT, dropping))
    scores = 4 * (GPT.num_attention_heads // 2) * GPT.seq_length**2
    kept = GPT.num_layers * (4 + 2 + 1) * scores  # softmax in fp32, the same after dropout in bf16, a byte of mask
    assert kept < explicit - plain < kept + 3 * 4 * scores + 0.2 * kept


def test_the_predicted_share_of_communication_is_the_published_one() -> None:
    """GPT-3 13B on 1, 2 and 4 DGX-H100, constants from datasheets alone."""
    model = ModelConfig(num_layers=40, hidden_size=5120, num_attention_heads=40, seq_length=1024, vocab_size=50257, attention_dropout=0.0)
    with (ROOT / "tests/golden/paper/comm_share.csv").open() as file:
        published = {int(row["gpus"]): float(row["comm_share"]) for row in csv.DictReader(file) if row["model"] == "gpt3-13b"}
    for gpus, share in published.items():
        setting = Setting(model=model, hardware=H100, tensor_parallel=gpus, micro_batch_size=16)
        silent, step = optimum(setting), predict(setting, BASELINE)
        assert 1 - silent.step_s / step.step_s == pytest.approx(share, abs=0.07)


def test_a_sweep_keeps_what_can_run(tmp_path: Path) -> None:
    grid = Grid(devices=(8, 16), tensor_parallel=(1, 8), rows=(1, 2), cols=(1,), micro_batch_size=(1, 2), seq_length=(256,))
    points = sweep(GPT, H100, grid, processes=1)
    write_csv(points, tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(points) == 2 * (2 + 3)  # two micro-batches uncut at TP 1; at TP 8 two rows need two sequences
    assert tuple(rows[0]) == Point._fields


def test_a_sweep_leaves_out_what_training_refuses() -> None:
    grid = Grid(devices=(8,), tensor_parallel=(4, 8), rows=(1,), cols=(1,), micro_batch_size=(1,), seq_length=(256,))
    assert [point.tensor_parallel for point in sweep(LLAMA, H100, grid, processes=1)] == [LLAMA.query_groups]


@pytest.mark.parametrize("example", re.findall(r"simulate\.py (.*)", simulate.__doc__ or ""))
def test_the_examples_of_the_help_can_be_simulated(example: str) -> None:
    simulate.parse_arguments(shlex.split(example))


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("--preset gpt3-13b --hardware gb200-nvl72", 8),
        ("--preset llama3-70b --hardware gb200-nvl72", 8),
        ("--preset gpt3-13b --nodes 4", 8),
        ("--preset gpt3-13b --devices 12", 4),
        ("--preset gpt3-13b --nodes 4 --tensor-model-parallel-size 2", 2),
    ],
)
def test_a_node_shares_the_model_as_far_as_its_widths_allow(flags: str, size: int) -> None:
    assert simulate.parse_arguments(shlex.split(flags)).setting.tensor_parallel == size


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "tools/simulate.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_tool_predicts_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    flags = ["--preset", "debug-gpt", "--nodes", "1", "--tensor-model-parallel-size", "4", "--micro-batch-size", "2", "--compare", "--json"]
    done = subprocess.run(
        [sys.executable, "tools/simulate.py", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert {"serial", "baseline", "rows 2"} <= set(json.loads(done.stdout)["schedules"])


def test_the_tool_writes_a_predicted_timeline(tmp_path: Path) -> None:
    done = run_tool(
        "--preset", "debug-gpt", "--tensor-model-parallel-size", "4", "--micro-batch-size", "2", "--timeline", str(tmp_path / "t.json")
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "t.json").stat().st_size > 1000
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--preset", "debug-gpt", "--hardware", "abacus"], "--hardware abacus is neither known"),
        (["--preset", "debug-gpt", "--tensor-model-parallel-size", "3"], "--tensor-model-parallel-size 3"),
        (["--num-layers", "2"], "--hidden-size"),
        (["--preset", "debug-gpt", "--nodes", "0"], "--nodes gives 0 devices"),
        (["--preset", "debug-gpt", "--num-attention-heads", "0"], "--num-attention-heads 0 must be above 0"),
    ],
    ids=["hardware", "layout", "model", "nodes", "heads"],
)
def test_the_tool_refuses_with_one_message(flags: list[str], said: str) -> None:
    done = run_tool(*flags)
    assert done.returncode != 0
    assert done.stderr.startswith("error: ")
    assert said in done.stderr


def measured_hardware() -> Hardware:
    device = MeasuredDevice(
        gemm_rates=((1e6, 1e10), (1e9, 2e10)),
        pass_rates={"default": 1e10},
        attention_flops_per_s=(1e10, 1e10),
        op_s=1e-6,
        memory_bytes=1e10,
        peak_flops=2e10,
    )
    return Hardware(
        name="here", device=device, fabric=MeasuredFabric(points=((1e3, 1e-5, 0.0), (1e6, 1e-3, 1e-4)), ranks=2), element_bytes=4
    )
