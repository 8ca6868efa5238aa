"""The distributed optimizer: the losses of plain data parallelism, less memory, checkpoints that any layout loads."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from domino_lm.config.settings import OptimizerConfig, ScheduleConfig, Sharding
from domino_lm.launch.summary import memory_estimate
from domino_lm.parallel.buckets import Bucket
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.ops import DP_LINK
from domino_lm.schedule.prepare import prepare_plan
from domino_lm.schedule.recorder import Recorder
from domino_lm.schedule.timeline import Timeline
from domino_lm.training.optimizer import Optimizer
from domino_lm.training.trainer import Trainer
from tests.distributed.models import GPT, MICRO_BATCH, MODELS, Gradients, float64_stack, micro_batches, unsharded, worst_difference
from tests.distributed.test_schedules import COMBINATIONS
from tests.distributed.test_verify import verified
from tests.distributed.training_runs import built, steps, write_tokens
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
SHARDINGS: list[Sharding] = ["optim", "optim_grads"]
PLAIN = ScheduleConfig(schedule="domino", domino_row_slices=2, ddp_bucket_size=5_000)
"""Buckets so small that some hold a part of a layer, and shares so odd that ranks meet within a row of a matrix."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def curve(mesh: ParallelMesh, model: str, schedule: ScheduleConfig, per_token: bool, count: int) -> tuple[list[float], Gradients]:
    """Losses and gradient norms of ``count`` steps in float64, and the weights after them."""
    stack = float64_stack(MODELS[model], mesh.tp)
    plan, gradients = prepare_plan(stack, mesh, schedule, MICRO_BATCH, GPT.seq_length)
    config = OptimizerConfig(lr=0.02, clip_grad=0.0, weight_decay=0.1)  # the clip's factor is fp32
    optimizer = Optimizer(stack.parameters(), config, mesh.tp, gradients=gradients, world=mesh.world)
    found: list[float] = []
    executor = Executor(plan, stack, mesh, gradients, lambda _: [optimizer.step(0.02).grad_norm], per_token_loss=per_token)
    for iteration in range(count):
        made = executor.run_step(micro_batches(mesh.dp), iteration)
        found += [made.found[0].item(), mesh.dp.all_reduce(made.loss_sum.clone()).item()]
    executor.complete_gathers()
    return found, unsharded(stack, mesh.tp, [parameter.detach() for parameter in stack.parameters()])


def assert_same_curve(found: tuple[list[float], Gradients], plain: tuple[list[float], Gradients]) -> None:
    assert found[0] == pytest.approx(plain[0], rel=1e-12)
    assert worst_difference(found[1], plain[1]) < 1e-9  # of a key bias, whose gradient is rounding alone


@pytest.mark.parametrize(
    ("model", "per_token"),
    [pytest.param("gpt", False, marks=pytest.mark.exhaustive), ("llama", True)],
    ids=["gpt", "llama, mean of tokens"],
)
def test_twenty_steps_are_those_of_plain_data_parallelism(ranks: Ranks, model: str, per_token: bool) -> None:
    plain = ranks(2).run(curve, model, PLAIN, per_token, 20, tp=1)
    for sharding, overlap in (("optim", False), ("optim", True), ("optim_grads", True)):
        schedule = replace(PLAIN, data_parallel_sharding_strategy=sharding, overlap_param_gather=overlap)
        for found in ranks(2).run(curve, model, schedule, per_token, 20, tp=1):
            assert_same_curve(found, plain[0])


def assert_same_on_four_ranks(ranks: Ranks, schedule: ScheduleConfig, steps: int) -> None:
    plain = ranks(4).run(curve, "gpt", replace(schedule, ddp_bucket_size=5_000), False, steps, tp=2)[0]
    for sharding in SHARDINGS:
        shared = replace(schedule, ddp_bucket_size=5_000, data_parallel_sharding_strategy=sharding, overlap_param_gather=True)
        for found in ranks(4).run(curve, "gpt", shared, False, steps, tp=2):
            assert_same_curve(found, plain)


@pytest.mark.parametrize("name", [pytest.param("rows2-sp-full", marks=pytest.mark.exhaustive), "paired-tp-keep", "sequence2-sp-keep"])
def test_steps_are_the_same_beside_tensor_parallelism(ranks: Ranks, name: str) -> None:
    """With sequence parallelism a bucket of the norms' gradients is summed over TP before its shares are."""
    assert_same_on_four_ranks(ranks, COMBINATIONS[name], 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("overlap", [False, True], ids=["reduced at once", "reduced behind backward"])
@pytest.mark.parametrize("name", COMBINATIONS)
def test_steps_are_the_same_under_every_schedule(ranks: Ranks, name: str, overlap: bool) -> None:
    assert_same_on_four_ranks(ranks, replace(COMBINATIONS[name], overlap_grad_reduce=overlap), 2)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_gradients_of_shares_are_put_together_to_be_verified(ranks: Ranks, sharding: Sharding) -> None:
    schedule = replace(COMBINATIONS["rows2-sp-keep"], data_parallel_sharding_strategy=sharding, overlap_param_gather=True)
    assert [normal for _, normal in ranks(4).run(verified, schedule, tp=2)] == [True] * 4


# --- whole runs

LLAMA_FLAGS = "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights"
SHARED = "--use-distributed-optimizer --overlap-param-gather --ddp-bucket-size 5000"
FLAGS = {
    "plain": "--ddp-bucket-size 5000",
    "optim": SHARED,
    "optim_grads": f"{SHARED} --data-parallel-sharding-strategy optim_grads",
}


def run(mesh: ParallelMesh, tokens: Path, flags: str, count: int) -> list[tuple[float, ...]]:
    """What each step reports, and the evaluated loss in between, which must wait for parameters that still travel."""
    trainer = built(mesh, tokens, f"{flags} --log-params-norm --log-num-zeros-in-grad")
    (valid,) = trainer.data.valid
    found: list[tuple[float, ...]] = []
    for report in (steps(trainer, 1)[0] for _ in range(count)):
        found.append((report.loss, report.grad_norm, report.params_norm or 0.0, report.num_zeros or 0.0, trainer.evaluate(valid)))
    return found


@pytest.mark.parametrize(("sharding", "precision"), [("optim", ""), ("optim_grads", "--bf16")])
def test_a_run_reports_what_a_plain_one_does(ranks: Ranks, tokens: Path, sharding: str, precision: str) -> None:
    plain = ranks(4).run(run, tokens, f"{FLAGS['plain']} {precision}", 4, tp=2)[0]
    for found in ranks(4).run(run, tokens, f"{FLAGS[sharding]} {precision}", 4, tp=2):
        assert len(found) == 4
        for mine, expected in zip(found, plain, strict=True):
            assert mine[:3] == pytest.approx(expected[:3], rel=1e-2 if precision else 1e-5)
            assert mine[3] == pytest.approx(expected[3], abs=5)  # entries that cancel exactly depend on the order of the sum
            assert mine[4] == pytest.approx(expected[4], rel=1e-2 if precision else 1e-5)


def saved(mesh: ParallelMesh, tokens: Path, flags: str) -> dict[str, torch.Tensor]:
    """Train two steps and save; this model's unsharded weights and moments."""
    trainer = built(mesh, tokens, flags)
    steps(trainer, 2)
    trainer.save()
    return whole_state(trainer)


def loaded(mesh: ParallelMesh, tokens: Path, flags: str) -> dict[str, torch.Tensor]:
    return whole_state(built(mesh, tokens, flags))


def whole_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Weights, master weights and moments of the unsharded model over its true rows, wherever they lie."""
    mesh, optimizer = trainer.mesh, trainer.optimizer
    trainer.executor.complete_gathers()
    state = {f"weight {p.spec.name}": (p, p.detach()) for p in trainer.stack.parameters()}
    for kind in ("main", "exp_avg", "exp_avg_sq"):
        held = [piece.main for piece in optimizer.pieces] if kind == "main" else getattr(optimizer, kind)
        for parameter in trainer.stack.parameters():
            full = torch.zeros(parameter.numel(), dtype=torch.float64)
            for piece, tensor in zip(optimizer.pieces, held, strict=True):
                if piece.parameter is parameter:
                    full[piece.start : piece.stop] = tensor.view(-1)
            shared = optimizer.pieces[0].is_owned
            state[f"{kind} {parameter.spec.name}"] = (parameter, (mesh.dp.all_reduce(full) if shared else full).view(parameter.shape))
    found = {}
    for name, (parameter, local) in state.items():
        shards = mesh.tp.all_gather_start(local.contiguous()).wait().unbind(0)
        found[name] = parameter.spec.unshard(shards)[: parameter.spec.vocab_rows].clone()
    return found


def assert_same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def assert_loads(ranks: Ranks, tokens: Path, flags: str, folder: Path, saver: str, loaders: list[tuple[str, int, int]]) -> None:
    """What ``saver`` saves on TP 2 x DP 2, each of ``loaders`` (sharding, ranks, TP) loads to the bit."""
    expected = ranks(4).run(saved, tokens, f"{FLAGS[saver]} {flags} --save {folder}", tp=2)[0]
    for loader, world, tp in loaders:
        for found in ranks(world).run(loaded, tokens, f"{FLAGS[loader]} {flags} --load {folder}", tp=tp):
            assert_same_state(found, expected)


LOADED_IN_TURN = {
    "plain": ("", [("optim", 4, 2), ("optim_grads", 2, 1)]),
    "optim": ("", [("plain", 1, 1), ("optim", 4, 1), ("optim_grads", 4, 2)]),
    "optim_grads": ("--bf16", [("plain", 4, 2), ("optim", 2, 1), ("optim_grads", 4, 1)]),
}


@pytest.mark.parametrize("saver", FLAGS)
def test_a_checkpoint_loads_to_the_bit_at_another_layout_and_sharding(ranks: Ranks, tokens: Path, tmp_path: Path, saver: str) -> None:
    flags, loaders = LOADED_IN_TURN[saver]
    assert_loads(ranks, tokens, flags, tmp_path, saver, loaders)


@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", ["", "--bf16", f"{LLAMA_FLAGS} --bf16"], ids=["fp32", "bf16", "llama, bf16"])
@pytest.mark.parametrize("saver", FLAGS)
def test_checkpoints_load_to_the_bit_at_any_layout_and_sharding(ranks: Ranks, tokens: Path, tmp_path: Path, saver: str, flags: str) -> None:
    loaders = [(loader, *layout) for loader in FLAGS for layout in [(1, 1), (2, 1), (4, 2), (4, 1)]]
    assert_loads(ranks, tokens, flags, tmp_path, saver, loaders)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_weights_of_fp32_become_master_weights_of_shares(ranks: Ranks, tokens: Path, tmp_path: Path, sharding: str) -> None:
    """The checkpoint holds no master weights, so that its weights are read twice: rounded, and exact into this rank's share."""
    expected = ranks(2).run(saved, tokens, f"{FLAGS['plain']} --save {tmp_path}", tp=1)[0]
    for found in ranks(2).run(loaded, tokens, f"{FLAGS[sharding]} --bf16 --load {tmp_path}", tp=1):
        for name, tensor in expected.items():
            exact = tensor.bfloat16() if name.startswith("weight ") else tensor
            assert torch.equal(found[name], exact)


def resumed(mesh: ParallelMesh, tokens: Path, folder: str, flags: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    whole = built(mesh, tokens, flags)
    whole.fit()
    for _ in range(2):
        trainer = built(mesh, tokens, f"{flags} --save {folder} --load {folder} --exit-interval 4")
        trainer.fit()
    return whole_state(whole), whole_state(trainer)


@pytest.mark.parametrize("sharding", [pytest.param("optim", marks=pytest.mark.exhaustive), "optim_grads"])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(ranks: Ranks, tokens: Path, tmp_path: Path, sharding: str) -> None:
    for whole, parts in ranks(4).run(resumed, tokens, str(tmp_path), FLAGS[sharding], tp=2):
        assert_same_state(parts, whole)


def recorded(mesh: ParallelMesh, tokens: Path, flags: str) -> tuple[list[str], int]:
    """What travelled between replicas in a recorded step, and in how many micro-batches its timeline falls."""
    trainer, recorder = built(mesh, tokens, flags), Recorder()
    batches = trainer.training_batches()
    for each in (None, recorder):
        trainer.step(batches, recorder=each)
    trainer.executor.complete_gathers()
    timeline = Timeline.of(recorder.spans)
    return [str(span.op).partition(" ")[2] for span in timeline.on(DP_LINK)], len(timeline.micro_batches())


def test_a_timeline_shows_reductions_and_gathers(ranks: Ranks, tokens: Path) -> None:
    for travelled, passes in ranks(4).run(recorded, tokens, FLAGS["optim"], tp=2):
        buckets = range(len(travelled) // 2)
        assert travelled[: len(buckets)] == [f"startS{bucket}.*:reduce_scatter" for bucket in buckets]
        assert sorted(travelled[len(buckets) :]) == sorted(f"startS{bucket}.*:all_gather" for bucket in buckets)
        assert passes == 2


# --- memory

MEASURED = "--num-layers 4 --hidden-size 64 --ddp-bucket-size 40000"


def live_bytes() -> int:
    """Memory of all tensors that Python holds, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # not what an object says of itself: deprecated ones of torch's warn then
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measured(mesh: ParallelMesh, tokens: Path, flags: str) -> tuple[dict[str, int], dict[str, float], int, int]:
    """Bytes of a rank by kind, gradients at their peak; the formula's; and what all that was built holds between two steps, by kind and in all."""
    before, peaks = live_bytes(), [0]
    trainer = built(mesh, tokens, f"{flags} {MEASURED}")
    buckets, optimizer = trainer.executor.gradients, trainer.optimizer
    acquire = Bucket.acquire

    def noted(bucket: Bucket) -> None:
        acquire(bucket)
        peaks.append(buckets.held_bytes)

    with mock.patch.object(Bucket, "acquire", noted):
        steps(trainer, 2)
    trainer.executor.complete_gathers()
    weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in trainer.stack.parameters()}
    state = [*optimizer.exp_avg, *optimizer.exp_avg_sq, *(piece.main for piece in optimizer.pieces if piece.is_master)]
    found = {
        "weights": sum(weights.values()),
        "gradients": max(*peaks, buckets.held_bytes),
        "optimizer": sum(tensor.nbytes for tensor in state),
    }
    estimate = memory_estimate(trainer.run, mesh.world.size, "cpu")
    at_rest = found["weights"] + buckets.held_bytes + found["optimizer"]
    return found, {kind: getattr(estimate, kind) for kind in found}, at_rest, live_bytes() - before


@pytest.mark.parametrize(
    ("sharding", "precision"),
    [("plain", "--bf16"), pytest.param("optim", "", marks=pytest.mark.exhaustive), ("optim", "--bf16"), ("optim_grads", "")],
)
def test_a_rank_holds_what_the_formula_says(ranks: Ranks, tokens: Path, sharding: str, precision: str) -> None:
    for found, formula, at_rest, live in ranks(4).run(measured, tokens, f"{FLAGS[sharding]} {precision}", tp=1):
        assert found == pytest.approx(formula, rel=0.05)
        assert live == pytest.approx(at_rest, rel=0.05)
