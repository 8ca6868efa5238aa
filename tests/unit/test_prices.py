"""Each formula of the cost model against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from domino_lm.config.settings import ModelConfig, Sharding
from domino_lm.schedule.ops import Op
from domino_lm.schedule.passes import gather_parameters, recompute, reduce_gradients
from domino_lm.schedule.plan import Plan, build_plan
from domino_lm.simulate.costs import RowShape, Shapes, Work, cost, shapes_of
from domino_lm.simulate.hardware import CoreAttention, Device, Gemm, Hardware, MeasuredDevice, Pass
from domino_lm.simulate.links import Fabric, Group, Link, MeasuredFabric
from domino_lm.simulate.memory import memory_of
from domino_lm.simulate.simulator import OpTime, replay
from tests.chains import critical_path_s, transformer_chain

# Round numbers: 4 units of 0.5e12 useful FLOP/s each; 0.8e12 useful bytes/s of memory; links of 50e9 and 5e9 bytes/s.
DEVICE = Device(
    peak_flops=4e12,
    gemm_efficiency=0.5,
    units=4,
    memory_bytes_per_s=1e12,
    memory_efficiency=0.8,
    memory_bytes=1e9,
    kernel_s=1e-6,
    launch_s=2e-6,
    attention_efficiency=0.6,
    attention_half_length=100.0,
)
FABRIC = Fabric(
    node_size=4,
    local=Link(bytes_per_s=100e9, efficiency=0.5, latency_s=1e-3),
    network=Link(bytes_per_s=10e9, efficiency=0.5, latency_s=5e-3),
    overhead_s=7e-3,
    compute_share=0.25,
)
MACHINE = Hardware(name="by hand", device=DEVICE, fabric=FABRIC)
GB = 1e9


@pytest.mark.parametrize(
    ("collective", "seconds"),
    [("all_reduce", 2 * 3 / 4 / 50 + 6e-3), ("reduce_scatter", 3 / 4 / 50 + 3e-3), ("all_gather", 3 / 4 / 50 + 3e-3)],
)
def test_a_ring_in_one_node_sends_its_share_in_each_hop(collective: str, seconds: float) -> None:
    assert FABRIC.flat_ring_s(collective, GB, Group(4, 4)) == pytest.approx(seconds, rel=1e-12)


def test_a_ring_over_two_nodes_keeps_the_pace_of_the_slower_fabric() -> None:
    """14 hops for 8 ranks, 4 of them over the network; four ports carry 1.75 GB out of each node."""
    found = FABRIC.flat_ring_s("all_reduce", GB, Group(8, 4))
    assert found == pytest.approx(1.75 / (4 * 5) + 10 * 1e-3 + 4 * 5e-3, rel=1e-12)
    fast = replace(FABRIC, network=replace(FABRIC.network, bytes_per_s=1000e9))
    assert fast.flat_ring_s("all_reduce", GB, Group(8, 4)) == pytest.approx(1.75 / 50 + 10 * 1e-3 + 4 * 5e-3, rel=1e-12)


@pytest.mark.parametrize(
    ("collective", "seconds"),
    [
        ("all_reduce", 6 / 4 / 50 + 6e-3 + 4 / 3 * 0.25 / 5 + 4 * 5e-3),
        ("all_gather", 3 / 4 / 50 + 3e-3 + 2 / 3 * 0.25 / 5 + 2 * 5e-3),
    ],
)
def test_two_levels_reduce_inside_three_nodes_and_between_them(collective: str, seconds: float) -> None:
    assert FABRIC.hierarchical_s(collective, GB, Group(12, 4)) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(("nodes", "depth"), [(1, 0), (2, 1), (4, 2), (5, 3)])
def test_a_trees_depth_is_the_logarithm_of_the_nodes(nodes: int, depth: int) -> None:
    """Up and down: 3 neighbours inside a node, ``depth`` hops of 5 ms between nodes; one node's rate is that of its links."""
    rate = 50 if nodes == 1 else 20
    assert FABRIC.tree_s(GB, Group(4 * nodes, 4)) == pytest.approx(2 / rate + 6e-3 + 2 * depth * 5e-3, rel=1e-12)


def test_a_switch_takes_two_hops_however_many_ranks_there_are() -> None:
    switched = replace(FABRIC, switch_bytes_per_s=200e9)
    assert switched.switch_s(GB, Group(4, 4)) == pytest.approx(2 * 3 / 4 / 200 + 2e-3, rel=1e-12)


def test_a_collective_takes_its_overhead_and_the_fastest_algorithm() -> None:
    group = Group(12, 4)
    ways = [FABRIC.flat_ring_s("all_reduce", GB, group), FABRIC.hierarchical_s("all_reduce", GB, group), FABRIC.tree_s(GB, group)]
    assert FABRIC.transfer("all_reduce", GB, group) == (7e-3 + min(ways), 0.25, 0.0)
    assert FABRIC.transfer("all_reduce", GB, Group(4, 4)).seconds == pytest.approx(7e-3 + 1.5 / 50 + 6e-3)  # the ring
    assert FABRIC.transfer("all_gather", GB, Group(4, 4)).seconds == pytest.approx(7e-3 + 0.75 / 50 + 3e-3)
    switched = replace(FABRIC, switch_bytes_per_s=200e9)
    assert switched.transfer("all_reduce", GB, Group(4, 4)).seconds == pytest.approx(7e-3 + 1.5 / 200 + 2e-3)


def test_a_small_all_reduce_takes_the_way_with_the_fewest_hops() -> None:
    """Latency alone, for 16 ranks on 4 nodes: ring 22 + 8 x 5 ms, two levels 6 + 6 x 5 ms, tree 6 + 4 x 5 ms."""
    assert FABRIC.transfer("all_reduce", 0.0, Group(16, 4)).seconds == pytest.approx(7e-3 + 26e-3)


@pytest.mark.parametrize(
    ("sizes", "groups"), [((2, 8), (Group(2, 2), Group(8, 2))), ((8, 2), (Group(8, 4), Group(2, 1))), ((1, 3), (Group(1, 1), Group(3, 3)))]
)
def test_tensor_parallel_ranks_are_neighbours(sizes: tuple[int, int], groups: tuple[Group, Group]) -> None:
    assert FABRIC.groups(*sizes) == groups


def test_measured_collectives_lie_on_straight_lines_and_count_what_travels() -> None:
    fabric = MeasuredFabric(points=((1000.0, 1e-3, 0.0), (2000.0, 3e-3, 1e-3), (4000.0, 5e-3, 2e-3)), ranks=2)
    assert fabric.transfer("all_reduce", 1500.0, Group(2, 1)) == pytest.approx((2e-3, 0.25, 0.25))
    assert fabric.transfer("all_reduce", 5000.0, Group(2, 1)).seconds == pytest.approx(6e-3)
    assert fabric.transfer("all_gather", 3000.0, Group(2, 1)).seconds == pytest.approx(2e-3)  # half of an all-reduce
    assert fabric.transfer("all_reduce", 1000.0, Group(4, 1)).seconds == pytest.approx(2e-3)  # 3/4 of the buffer in place of 1/2
    assert fabric.transfer("all_reduce", 0.0, Group(2, 1)).seconds == pytest.approx(0.5e-3)  # never below half the smallest


def test_a_gemm_runs_in_waves_of_its_best_tile() -> None:
    """Four tiles of 256 x 128 on four units are one wave; five would be two, and ten half tiles in three waves are faster."""
    tile_s = 2 * 256 * 128 * 1000 / 0.5e12
    assert DEVICE.gemm_s(Gemm(1024, 128, 1000), 2) == pytest.approx(1e-6 + tile_s, rel=1e-12)
    assert DEVICE.gemm_s(Gemm(1280, 128, 1000), 2) == pytest.approx(1e-6 + 3 * tile_s / 2 / 0.95, rel=1e-12)


def test_a_gemm_with_few_tiles_is_split_along_k() -> None:
    """Two tiles of 128 x 128 on four units: two pieces of k for each, which cost a tenth to add up."""
    assert DEVICE.gemm_s(Gemm(256, 128, 1024), 2) == pytest.approx(1e-6 + 2 * 128 * 128 * 1024 / (0.5e12 * 0.95) / 2 / 0.9, rel=1e-12)


def test_a_thin_gemm_takes_the_time_to_move_its_operands() -> None:
    device = replace(DEVICE, memory_bytes_per_s=1e9)
    assert device.gemm_s(Gemm(10, 1000, 2000), 4) == pytest.approx(1e-6 + 4 * (20_000 + 2_000_000 + 10_000) / 0.8e9, rel=1e-12)


def test_attention_reaches_half_its_rate_at_the_half_length() -> None:
    assert DEVICE.attention_s(CoreAttention(1e9, 100, False)) == pytest.approx(1e-6 + 1e9 / 1.2e12, rel=1e-12)
    assert DEVICE.attention_s(CoreAttention(1e9, 300, False)) == pytest.approx(1e-6 + 1e9 / 1.8e12, rel=1e-12)
    assert DEVICE.attention_s(CoreAttention(1e9, 100, True)) == pytest.approx(1e-6 + 1e9 / 1.2e12 / 0.86, rel=1e-12)


def test_a_pass_takes_its_bytes_and_its_kernels() -> None:
    assert DEVICE.pass_s(Pass("norm", 8e6, 3)) == pytest.approx(3e-6 + 1e-5, rel=1e-12)


def test_measured_rates_are_linear_in_the_logarithm_of_the_flops() -> None:
    device = MeasuredDevice(
        gemm_rates=((2e6, 1e9), (2e8, 3e9)),
        pass_rates={"default": 1e9, "norm": 2e9},
        attention_flops_per_s=(1e9, 4e9),
        op_s=1e-6,
        memory_bytes=1e9,
        peak_flops=3e9,
    )
    assert device.gemm_s(Gemm(100, 100, 1000), 4) == pytest.approx(2e7 / 2e9)  # half the way between the sizes' logarithms
    assert device.gemm_s(Gemm(10, 10, 10), 4) == pytest.approx(2e3 / 1e9)
    assert device.gemm_s(Gemm(1000, 1000, 1000), 4) == pytest.approx(2e9 / 3e9)
    assert [device.attention_s(CoreAttention(8e9, 1, backward)) for backward in (False, True)] == [8.0, 2.0]
    assert [device.pass_s(Pass(name, 4e9)) for name in ("norm", "other")] == [2.0, 4.0]


def test_an_op_takes_the_sum_of_its_kernels_and_the_host_their_number() -> None:
    gemm, attention, moved = Gemm(256, 256, 4096), CoreAttention(1e9, 100, False), Pass("norm", 8e6, 3)
    work = Work((gemm, gemm), attention, (moved,))
    assert work.seconds(MACHINE) == pytest.approx(2 * DEVICE.gemm_s(gemm, 2) + DEVICE.attention_s(attention) + DEVICE.pass_s(moved))
    assert (work.launches, Work(traffic="all_reduce").launches, Work().launches) == (6, 1, 0)


# One layer of 4 heads of width 16 on 2 ranks, micro-batch 2 in 2 rows of 32 tokens, 2 column blocks; bf16.
# A rank holds 2 heads, so that qkv is 96 and attention's output 32 wide; the MLP is 128 wide; 500 words are padded to 512.
GPT = ModelConfig(num_layers=1, hidden_size=64, num_attention_heads=4, seq_length=32, vocab_size=500, attention_dropout=0.0)
LLAMA = replace(
    GPT,
    swiglu=True,
    ffn_hidden_size=80,
    group_query_attention=True,
    num_query_groups=2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
)
TOKENS, PAIRS = 32, 32 * 33 / 2


def sliced(cols: int = 2, rows: tuple[int, ...] = (1, 1), **settings: bool) -> Plan:
    return build_plan(transformer_chain(1), rows, cols, **settings)


def shapes(model: ModelConfig = GPT, plan: Plan | None = None, hardware: Hardware = MACHINE, dp: int = 1) -> Shapes:
    return shapes_of(model, plan or sliced(), 2, hardware, 2, dp)


GPT_WORK = {
    "bodyF0.0": Work(),
    "tailF0.0c1": Work(passes=(Pass("lookup", 4 * 64 * 2 * TOKENS / 2, 2),)),
    "startF0.0": Work(traffic="all_reduce", transfer_bytes=TOKENS * 32 * 2, link="tp"),
    "waitF0.0": Work(),
    "localF1.0": Work(passes=(Pass("norm", 4 * 64 * 2 * TOKENS, 2),)),
    "bodyF2.1": Work((Gemm(TOKENS, 96, 64),), CoreAttention(4 * PAIRS * 32, 32, False)),
    "tailF2.0c1": Work((Gemm(TOKENS, 32, 32),)),
    "startF2.0c1": Work(traffic="all_reduce", transfer_bytes=TOKENS * 32 * 2, link="tp"),
    "bodyF4.0": Work((Gemm(TOKENS, 128, 64),), None, (Pass("gelu", (128 + 128) * 2 * TOKENS),)),
    "tailF4.0": Work((Gemm(TOKENS, 32, 128),)),
    "bodyF6.0": Work((Gemm(TOKENS, 256, 64),), None, (Pass("softmax", 256 * (2 + 20) * TOKENS, 5),)),
    "startF6.0:statistics": Work(traffic="all_gather", transfer_bytes=12 * 2 * TOKENS, link="tp"),
    "lossF6.0": Work(passes=(Pass("softmax", 256 * (12 + 2) * TOKENS, 3),)),
    "tailB6.0": Work((Gemm(TOKENS, 32, 256),)),
    "startB6.0c1": Work(traffic="all_reduce", transfer_bytes=TOKENS * 32 * 2, link="tp"),
    "wgradB6.0": Work((Gemm(256, 64, TOKENS),), None, (Pass("accumulate", 256 * 64 * 10, 1),)),
    "localB5.0": Work(passes=(Pass("norm_grad", 6 * 64 * 2 * TOKENS, 3), Pass("layout", 2 * 64 * 2 * TOKENS))),
    "bodyB4.0": Work((Gemm(TOKENS, 128, 64),), None, (Pass("gelu_grad", (2 * 128 + 128) * 2 * TOKENS),)),
    "tailB4.0": Work((Gemm(TOKENS, 32, 128),)),
    "bodyB2.0": Work((Gemm(TOKENS, 32, 64),), CoreAttention(10 * PAIRS * 32, 32, True)),
    "tailB2.0": Work((Gemm(TOKENS, 32, 96),)),
    "wgradB2.0": Work(
        (Gemm(64, 32, TOKENS), Gemm(96, 64, TOKENS)), None, (Pass("bias_grad", 96 * 2 * TOKENS), Pass("accumulate", (96 + 32) * 64 * 10, 2))
    ),
    "bodyB0.0": Work(passes=(Pass("lookup_grad", 2 * 64 * 2 * TOKENS),)),
    "wgradB0.0": Work(passes=(Pass("lookup_grad", (64 * 2 + 2 * 64 * 4) * TOKENS),)),
}


@pytest.mark.parametrize("name", GPT_WORK)
def test_ops_of_a_gpt_layer_ask_for_this_work(name: str) -> None:
    assert cost(Op.parse(f"m0 {name}"), shapes()) == GPT_WORK[name]


LLAMA_WORK = {  # 32 of queries, 16 each of the one group's keys and values
    "bodyF2.0": Work((Gemm(TOKENS, 64, 64),), CoreAttention(4 * PAIRS * 32, 32, False), (Pass("rotate", 2 * (32 + 16) * 2 * TOKENS, 2),)),
    "bodyF4.0": Work((Gemm(TOKENS, 80, 64),), None, (Pass("swiglu", (80 + 40) * 2 * TOKENS),)),
    "bodyB4.0": Work((Gemm(TOKENS, 40, 64),), None, (Pass("swiglu_grad", (160 + 40) * 2 * TOKENS),)),
    "wgradB4.0": Work((Gemm(64, 40, TOKENS), Gemm(80, 64, TOKENS)), None, (Pass("accumulate", (80 + 40) * 64 * 10, 2),)),
}


@pytest.mark.parametrize("name", LLAMA_WORK)
def test_ops_of_a_llama_layer_ask_for_this_work(name: str) -> None:
    assert cost(Op.parse(f"m0 {name}"), shapes(LLAMA)) == LLAMA_WORK[name]


def test_sequence_parallelism_shares_norms_and_gathers_uncut_blocks() -> None:
    split = shapes(plan=sliced(sequence_parallel=True))
    norm, layout = Pass("norm", 4 * 64 * 2 * TOKENS / 2, 2), Pass("layout", 2 * 64 * 2 * TOKENS / 2)
    assert cost(Op.parse("m0 localF1.0"), split) == Work(passes=(norm, layout))
    assert cost(Op.parse("m0 startF1.0:reduce_scatter"), split).transfer_bytes == TOKENS * 32 * 2
    assert cost(Op.parse("m0 startF2.0:all_gather"), split) == Work(traffic="all_gather", transfer_bytes=TOKENS * 64 * 2, link="tp")


def test_eager_kernels_move_every_intermediate_once_more() -> None:
    """Forward 3 tensors to join, 2 for the bias, 4 for dropout, 2 for the norm; backward 3, and 3 + 1 + 3 to join."""
    eager = shapes(hardware=replace(MACHINE, fused=False))
    unit = 64 * 2 * TOKENS
    assert cost(Op.parse("m0 localF3.0"), eager) == Work(passes=(Pass("join", 9 * unit, 4), Pass("norm", 2 * unit)))
    backward = (Pass("norm_grad", 3 * unit, 2), Pass("join_grad", 7 * unit, 3), Pass("layout", 2 * unit))
    assert cost(Op.parse("m0 localB3.0"), eager) == Work(passes=backward)
    layout = Pass("layout", 2 * (96 + 32) * 2 * TOKENS, 3)
    assert cost(Op.parse("m0 bodyF2.0"), eager).passes == (layout,)


def test_attention_dropout_spells_out_the_square_of_scores() -> None:
    """2 heads a rank; 10 reads and writes of each score forward, 7 backward, masked ones included."""
    explicit = shapes(replace(GPT, attention_dropout=0.1))
    forward, backward = (cost(Op.parse(f"m0 body{phase}2.0"), explicit) for phase in "FB")
    assert (forward.attention, backward.attention) == (CoreAttention(4 * 1024 * 32, 32, False), CoreAttention(10 * 1024 * 32, 32, True))
    assert forward.passes == (Pass("scores", 10 * 2 * 1024 * 2, 5),)
    assert backward.passes == (Pass("scores", 7 * 2 * 1024 * 2, 3),)


def test_a_later_row_of_a_sequence_attends_to_all_before_it() -> None:
    row = RowShape(3, 8, 24)
    assert (row.tokens, row.attended, row.square) == (24, 3 * (8 * 24 + 36), 3 * 8 * 32)
    later = cost(Op.parse("m0 bodyF2.1"), shapes(plan=sliced(1, (20, 12), sequence_rows=True)))
    assert later.attention == CoreAttention(4 * 2 * (12 * 20 + 78) * 32, 32, False)


def test_recompute_repeats_what_was_not_kept() -> None:
    """A whole part repeats its GEMM and its core, a core alone no GEMM, a norm reads the residual stream that it keeps."""
    plan = recompute(sliced(), full=[4], core=[2])
    again = shapes(plan=plan)
    assert cost(Op.parse("m0 recomputeB4.0"), again) == cost(Op.parse("m0 bodyF4.0"), again)
    assert cost(Op.parse("m0 recomputeB2.0"), again) == Work(attention=CoreAttention(4 * PAIRS * 32, 32, False))
    assert cost(Op.parse("m0 recomputeB3.0"), again) == Work(passes=(Pass("norm", 2 * 64 * 2 * TOKENS),))


# Table 256 x 64 and 32 positions; four norm vectors of 64 and two biases; qkv 96 x 64 and 96, out 64 x 32; MLP 128 x 64 x 2 and 128
GPT_PARAMETERS = 256 * 64 + 32 * 64 + 3 * 2 * 64 + 2 * 64 + (96 + 32) * 64 + 96 + 2 * 128 * 64 + 128


def with_step(sharding: Sharding = "no_shard") -> Plan:
    """One bucket of everything but the embedding, and one of the embedding."""
    return reduce_gradients(sliced(), [frozenset(range(1, 7)), frozenset([0])], True, [], sharding)


def test_the_optimizer_moves_32_bytes_a_weight_and_replicas_share_them() -> None:
    assert shapes().parameters == GPT_PARAMETERS
    assert cost(Op.parse("m0 stepS0.*"), shapes(plan=with_step())) == Work(passes=(Pass("step", 32 * GPT_PARAMETERS, 10),))
    shared = gather_parameters(with_step("optim"), overlap=True)
    assert cost(Op.parse("m0 stepS0.*"), shapes(plan=shared, dp=4)) == Work(passes=(Pass("step", 8 * GPT_PARAMETERS, 10),))


def test_buckets_travel_in_fp32_and_parameters_in_their_own_type() -> None:
    plan = gather_parameters(with_step("optim"), overlap=True)
    start, gather = (cost(Op.parse(f"m0 startS1.*:{name}"), shapes(plan=plan, dp=4)) for name in ("reduce_scatter", "all_gather"))
    assert start == Work(traffic="reduce_scatter", transfer_bytes=256 * 64 * 4, link="dp")
    assert gather == Work(traffic="all_gather", transfer_bytes=256 * 64 * 2, link="dp")


@pytest.mark.parametrize(("element_bytes", "optimizer_bytes"), [(2, 12), (4, 8)])
def test_the_optimizer_keeps_two_moments_and_of_narrow_weights_a_master(element_bytes: int, optimizer_bytes: int) -> None:
    plan, hardware = with_step(), replace(MACHINE, element_bytes=element_bytes)
    memory = memory_of(plan.ops, shapes(plan=plan, hardware=hardware))
    assert memory.weights == element_bytes * GPT_PARAMETERS
    assert memory.gradients == 4 * GPT_PARAMETERS
    assert memory.optimizer == optimizer_bytes * GPT_PARAMETERS
    shared = gather_parameters(with_step("optim"), overlap=True)
    assert memory_of(shared.ops, shapes(plan=shared, hardware=hardware, dp=4)).optimizer == optimizer_bytes * GPT_PARAMETERS / 4


NOTHING = OpTime(0.0, 0.0, 0.0, 0.0)


def ops_until_the_first_wait() -> Plan:
    plan = sliced(1, (1,))
    return plan.with_ops(plan.ops[:4])  # body, tail, start, wait


def test_the_device_waits_for_a_host_whose_launches_add_up() -> None:
    step = replay(ops_until_the_first_wait(), [OpTime(0.25, 0.0, 0.0, 1.0)] * 3 + [NOTHING])
    assert list(step.compute) == [(1.0, 1.25), (2.0, 2.25), (3.0, 3.25), (3.25, 3.25)]


def test_a_busy_device_hides_the_host() -> None:
    step = replay(ops_until_the_first_wait(), [OpTime(5.0, 0.0, 0.0, 1.0)] * 3 + [NOTHING])
    assert [interval.end_s for interval in step.compute] == [6.0, 11.0, 16.0, 16.0]


def test_a_wait_lasts_until_the_collective_has_ended() -> None:
    step = replay(ops_until_the_first_wait(), [OpTime(1.0, 0.0, 0.0, 0.0), NOTHING, OpTime(0.0, 3.0, 0.0, 0.0), NOTHING])
    assert step.transfers[2] == (1.0, 4.0)
    assert (step.compute[3], step.makespan_s, step.exposed_s("F"), step.busy_s("tp")) == ((1.0, 4.0), 4.0, 3.0, 3.0)
    assert (step.busy_s("compute"), critical_path_s(step), step.limit_s) == (1.0, 4.0, 3.0)


def test_collectives_of_one_link_follow_each_other() -> None:
    plan = sliced(2, (1,))
    starts = [i for i, op in enumerate(plan.ops) if op.kind == "start"][:2]
    times = [OpTime(0.0, 2.0, 0.0, 0.0) if i in starts else NOTHING for i in range(len(plan.ops))]
    step = replay(plan, times)
    assert [step.transfers[i] for i in starts] == [(0.0, 2.0), (2.0, 4.0)]


@pytest.mark.parametrize(
    ("starts", "seconds", "end_s"),
    [
        (["startF2.0"], 0.5, 1.0),  # at half speed, all of it beside the collective
        (["startF2.0"], 3.0, 4.0),  # 1 s of work in the first 2 s, then 2 s alone
        (["startF2.0", "startS0.*"], 0.25, 1.0),  # both links leave a quarter of the device
    ],
)
def test_compute_beside_collectives_runs_at_the_speed_that_they_leave(starts: list[str], seconds: float, end_s: float) -> None:
    shares = {"startF2.0": 0.5, "startS0.*": 0.25}
    plan = sliced().with_ops(Op.parse(f"m0 {name}") for name in [*starts, "localF3.0"])
    step = replay(plan, [*(OpTime(0.0, 2.0, shares[name], 0.0) for name in starts), OpTime(seconds, 0.0, 0.0, 0.0)])
    assert step.compute[-1] == (0.0, end_s)
