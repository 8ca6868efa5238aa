"""bf16 and fp16 against float64: gradients under every schedule, whole runs, overflows, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from domino_lm.config.settings import ModelConfig, ScheduleConfig
from domino_lm.launch.summary import memory_estimate
from domino_lm.model.build import build_stack
from domino_lm.model.stack import Stack
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.prepare import prepare_plan
from domino_lm.training.saving import TrainingError
from domino_lm.watch.metrics import StepReport
from tests import reference
from tests.distributed.models import MICRO_BATCH, MICRO_BATCHES, MODELS, SEED, Gradients, global_samples, grad_of, micro_batches, unsharded
from tests.distributed.test_schedules import CUTS, RECOMPUTE
from tests.distributed.training_runs import built, steps, write_tokens
from tests.host_reads import host_reads
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
SCALES = {"bf16": 1.0, "fp16": 2.0**12}
SCHEDULES = {name: CUTS[name] for name in ("baseline", "rows2", "rows2_columns2", "sequence2", "sequence4", "row_groups", "paired")} | {
    "rows2_sequence_parallel": ScheduleConfig(domino_row_slices=2, sequence_parallel=True),
    "sequence2_sequence_parallel": ScheduleConfig(domino_row_slices=2, domino_row_dim="sequence", sequence_parallel=True),
    "rows2_recompute": ScheduleConfig(domino_row_slices=2, **RECOMPUTE["full"]),
}
OFF_BY = {"bf16": 0.025, "fp16": 0.003}
"""Largest |a - b| / |b| of a gradient tensor to float64, or to the baseline; found: 0.017 and 0.0021, under a wrong schedule 0.1 and more."""

GPT_FLAGS, LLAMA_FLAGS = "", "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
PLAIN = "--hidden-dropout 0 --attention-dropout 0 --eval-interval 0"


def stack_of(model: ModelConfig, mesh: ParallelMesh, dtype: torch.dtype) -> Stack:
    """Initial weights in ``dtype``, those that begin as 0 or 1 moved off it."""
    stack = build_stack(model, mesh.tp, SEED, dtype)
    for parameter in stack.parameters():
        if parameter.dim() == 1:
            size = parameter.spec.shape[0]
            wave = 0.1 * torch.sin(torch.arange(size) * 1.7)
            parameter.data.add_(parameter.spec.shard(wave, mesh.tp.rank, mesh.tp.size).to(dtype))
    return stack


def narrow_gradients(mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig, kind: str) -> tuple[float, Gradients]:
    """Summed loss and unsharded gradients of one step in bf16 or fp16."""
    stack = stack_of(model, mesh, NARROW[kind])
    plan, gradients = prepare_plan(stack, mesh, schedule, MICRO_BATCH, model.seq_length)
    executor = Executor(plan, stack, mesh, gradients, loss_scale=torch.tensor(SCALES[kind]))
    loss = executor.run_step(micro_batches(mesh.dp), 1)
    assert all(parameter.main_grad.dtype == torch.float32 for parameter in stack.parameters())
    grads = [parameter.main_grad.double() / SCALES[kind] for parameter in stack.parameters()]
    return mesh.dp.all_reduce(loss.loss_sum.clone()).item(), unsharded(stack, mesh.tp, grads)


@cache
def exact_gradients(model: ModelConfig, kind: str) -> tuple[float, Gradients]:
    """The same of the same rounded weights, by the unsharded reference in float64."""
    stack = stack_of(model, ParallelMesh.single(torch.device("cpu")), NARROW[kind])
    weights = {p.spec.name: p.detach()[: p.spec.vocab_rows].double().requires_grad_() for p in stack.parameters()}
    tokens, labels, mask = global_samples(97)
    losses = reference.token_losses(weights, model, tokens, labels) * mask
    (losses.view(MICRO_BATCHES, -1).sum(1) / mask.view(MICRO_BATCHES, -1).sum(1).clamp_min(1)).mean().backward()
    return losses.sum().item(), {name: grad_of(weight) for name, weight in weights.items()}


def furthest(found: Gradients, expected: Gradients) -> float:
    """Largest |a - b| / |b| over all tensors, Euclidean norms."""
    assert found.keys() == expected.keys()
    return max(((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected)


def distances(mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig, kind: str) -> tuple[float, float, float]:
    """How far loss and gradients are from float64, and gradients from the baseline's."""
    loss, found = narrow_gradients(mesh, model, schedule, kind)
    exact_loss, exact = exact_gradients(model, kind)
    _, baseline = narrow_gradients(mesh, model, CUTS["baseline"], kind)
    return abs(loss / exact_loss - 1), furthest(found, exact), furthest(found, baseline)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize(
    ("kind", "tp"),
    [("bf16", 2), pytest.param("bf16", 1, marks=pytest.mark.exhaustive), pytest.param("fp16", 2, marks=pytest.mark.exhaustive)],
)
def test_narrow_gradients_are_near_float64_under_every_schedule(ranks: Ranks, model: ModelConfig, name: str, kind: str, tp: int) -> None:
    for loss, exact, baseline in ranks(tp).run(distances, model, SCHEDULES[name], kind, tp=tp):
        assert loss < OFF_BY[kind] / 25
        assert max(exact, baseline) < OFF_BY[kind]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize(("kind", "tp"), [("bf16", 1), ("fp16", 2)])
def test_narrow_gradients_are_near_float64_in_every_format(ranks: Ranks, model: ModelConfig, kind: str, tp: int) -> None:
    """Float64 parity holds for every order; what a format adds shows in one."""
    for loss, exact, baseline in ranks(tp).run(distances, model, SCHEDULES["rows2_columns2"], kind, tp=tp):
        assert loss < OFF_BY[kind] / 25
        assert max(exact, baseline) < OFF_BY[kind]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def losses_of(mesh: ParallelMesh, tokens: Path, flags: str, count: int) -> list[float]:
    return [report.loss for report in steps(built(mesh, tokens, flags), count)]


@pytest.mark.parametrize(
    ("flags", "model", "tp"),
    [
        ("--bf16", GPT_FLAGS, 1),
        pytest.param("--bf16", GPT_FLAGS, 2, marks=pytest.mark.exhaustive),
        pytest.param("--bf16", LLAMA_FLAGS, 2, marks=pytest.mark.exhaustive),
        pytest.param("--fp16 --initial-loss-scale 1024", GPT_FLAGS, 2, marks=pytest.mark.exhaustive),
        ("--fp16 --initial-loss-scale 1024", LLAMA_FLAGS, 1),
        pytest.param("--bf16 --grad-reduce-in-bf16 --exp-avg-dtype bf16", LLAMA_FLAGS, 2, marks=pytest.mark.exhaustive),
    ],
    ids=["bf16-gpt-1", "bf16-gpt-2", "bf16-llama-2", "fp16-gpt-2", "fp16-llama-1", "bf16_state-llama-2"],
)
def test_20_steps_in_narrow_formats_learn_as_in_fp32(ranks: Ranks, tokens: Path, flags: str, model: str, tp: int) -> None:
    run = f"{model} --train-iters 20 --eval-interval 0"
    exact, found = (ranks(tp).run(losses_of, tokens, f"{run} {extra}", 20, tp=tp)[0] for extra in ("", flags))
    assert exact[-1] < exact[0] - 1
    assert found == pytest.approx(exact, rel=1e-3)  # found: 4.3e-4


def test_a_global_batch_of_64_micro_batches_learns_as_one_of_large_ones(ranks: Ranks, tokens: Path) -> None:
    flags = f"{PLAIN} --bf16 --global-batch-size 64"
    many, few = (ranks(1).run(losses_of, tokens, f"{flags} --micro-batch-size {size}", 4)[0] for size in (1, 16))
    assert many == pytest.approx(few, rel=2e-3)


def overflow(mesh: ParallelMesh, tokens: Path, flags: str, rank: int) -> tuple[list[StepReport], bool]:
    """Three steps, of which the second has an infinite gradient on one rank alone; and whether it left all state as it was."""
    trainer = built(mesh, tokens, flags)
    found = steps(trainer, 1)
    before = state_of(trainer)
    step = trainer.optimizer.step

    def with_overflow(*args: Any) -> Any:
        if mesh.world.rank == rank:
            trainer.stack.parameters()[2].main_grad.view(-1)[0] = torch.inf
        return step(*args)

    trainer.optimizer.step = with_overflow  # type: ignore[method-assign,assignment]
    found += steps(trainer, 1)
    kept = all(torch.equal(a, b) for a, b in zip(before, state_of(trainer), strict=True))
    trainer.optimizer.step = step  # type: ignore[method-assign]
    return found + steps(trainer, 1), kept


def state_of(trainer: Any) -> list[Tensor]:
    """Weights, master weights and moments of this rank."""
    optimizer = trainer.optimizer
    tensors = (*trainer.stack.parameters(), *(piece.main for piece in optimizer.pieces), *optimizer.exp_avg, *optimizer.exp_avg_sq)
    return [tensor.detach().clone() for tensor in tensors]


def test_an_overflow_on_one_tensor_parallel_rank_is_skipped_on_all_and_halves_the_scale(ranks: Ranks, tokens: Path) -> None:
    flags = "--fp16 --initial-loss-scale 1024 --hysteresis 1"
    for (first, bad, after), kept in ranks(2).run(overflow, tokens, flags, 1, tp=2):
        assert [report.skipped for report in (first, bad, after)] == [False, True, False]
        assert [report.loss_scale for report in (first, bad, after)] == [1024, 512, 512]
        assert kept
        assert bad.learning_rate == first.learning_rate < after.learning_rate


def until_it_ends(mesh: ParallelMesh, tokens: Path, flags: str) -> str:
    trainer = built(mesh, tokens, flags)
    try:
        return str(trainer.fit())
    except TrainingError as error:
        return str(error)


def reads_of_a_step(mesh: ParallelMesh, flags: str, tokens: Path) -> list[str]:
    """What the host reads in a step before its edge: an update under a dynamic loss scale included."""
    trainer = built(mesh, tokens, flags)
    micro_batches = trainer.training_batches().take(1)
    with host_reads() as found:
        trainer.executor.run_step(micro_batches, 1)
    return found


def test_a_step_under_a_dynamic_loss_scale_is_not_waited_for(ranks: Ranks, tokens: Path) -> None:
    assert ranks(2).run(reads_of_a_step, "--fp16 --exp-avg-dtype bf16", tokens, tp=2) == [[], []]


@pytest.mark.long
def test_overflows_that_lower_the_scale_do_not_end_a_run(ranks: Ranks, tokens: Path) -> None:
    flags = f"{PLAIN} --fp16 --max-skipped-steps 0 --train-iters 40 --hysteresis 1"
    assert all("finished" in message for message in ranks(2).run(until_it_ends, tokens, flags, tp=2))


def test_overflows_at_the_lowest_scale_end_a_run_as_other_bad_steps_do(ranks: Ranks, tokens: Path) -> None:
    flags = f"{PLAIN} --fp16 --hysteresis 1 --initial-loss-scale 1e30 --min-loss-scale 2.5e29 --max-skipped-steps 2"
    for message in ranks(2).run(until_it_ends, tokens, flags, tp=2):
        assert "3 step(s) in a row, the last at iteration 5" in message
        assert "loss scale 2.5e+29" in message


def break_a_weight(mesh: ParallelMesh, tokens: Path, flags: str) -> tuple[str, int]:
    """How a run ends whose weights give a loss that is not finite from its second step on, and after how many steps."""
    trainer = built(mesh, tokens, flags)
    steps(trainer, 1)
    with torch.no_grad():
        trainer.stack.parameters()[0].fill_(torch.nan)
    try:
        return str(trainer.fit()), trainer.iteration
    except TrainingError as error:
        return str(error), trainer.iteration


@pytest.mark.parametrize("kind", ["", "--bf16", "--fp16 --initial-loss-scale 1024"])
def test_a_flag_ends_the_run_at_the_first_loss_that_is_not_finite_in_every_format(ranks: Ranks, tokens: Path, kind: str) -> None:
    for message, iteration in ranks(2).run(break_a_weight, tokens, f"{PLAIN} {kind} --check-for-nan-in-loss-and-grad", tp=2):
        assert iteration == 2
        assert "--check-for-nan-in-loss-and-grad ends the run" in message


def test_a_flag_skips_steps_that_are_not_finite_without_end(ranks: Ranks, tokens: Path) -> None:
    for message, iteration in ranks(2).run(break_a_weight, tokens, f"{PLAIN} --bf16 --no-check-for-nan-in-loss-and-grad", tp=2):
        assert iteration == 8
        assert "finished" in message


def states_after(mesh: ParallelMesh, tokens: Path, *runs: str) -> list[Tensor]:
    """Everything that a run trains and scales by, after the last of ``runs``."""
    for flags in runs:
        trainer = built(mesh, tokens, flags)
        trainer.fit()
    scale = [] if trainer.loss_scale is None else [torch.tensor(list(trainer.loss_scale.state_dict().values()))]
    return [*state_of(trainer), *scale]


SCALE_THAT_MOVES = "--hysteresis 2 --initial-loss-scale 4e6 --loss-scale-window 2"  # down and up again in eight steps


@pytest.mark.parametrize(
    ("world", "tp", "flags"),
    [
        (1, 1, "--bf16"),
        pytest.param(2, 2, "--bf16", marks=pytest.mark.exhaustive),
        pytest.param(4, 2, f"--fp16 {SCALE_THAT_MOVES}", marks=pytest.mark.exhaustive),
        (2, 2, f"--fp16 {SCALE_THAT_MOVES}"),
        (2, 1, "--bf16 --grad-reduce-in-bf16 --exp-avg-dtype bf16"),
    ],
)
def test_a_narrow_run_resumes_to_the_bit(ranks: Ranks, tokens: Path, tmp_path: Path, flags: str, world: int, tp: int) -> None:
    whole = ranks(world).run(states_after, tokens, flags, tp=tp)
    resume = f"{flags} --save {tmp_path} --load {tmp_path}"
    resumed = ranks(world).run(states_after, tokens, f"{resume} --exit-interval 3", f"{resume} --exit-interval 5", resume, tp=tp)
    for expected, found in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def bytes_held(mesh: ParallelMesh, tokens: Path, flags: str) -> tuple[tuple[int, int, int], tuple[float, float, float]]:
    """Bytes of weights, gradients and optimizer as they lie in memory, and by the estimate."""
    trainer = built(mesh, tokens, flags)
    optimizer, estimate = trainer.optimizer, memory_estimate(trainer.run, mesh.world.size, "cpu")
    masters = [piece.main for piece in optimizer.pieces if piece.is_master]
    weights = sum(parameter.nbytes for parameter in trainer.stack.parameters())
    gradients = sum(parameter.main_grad.nbytes for parameter in trainer.stack.parameters())
    kept = sum(tensor.nbytes for tensor in (*masters, *optimizer.exp_avg, *optimizer.exp_avg_sq))
    return (weights, gradients, kept), (estimate.weights, estimate.gradients, estimate.optimizer)


@pytest.mark.parametrize("flags", ["", "--bf16", "--bf16 --grad-reduce-in-bf16 --exp-avg-dtype bf16"])
def test_the_estimate_of_what_stays_in_memory_is_exact_in_every_format(ranks: Ranks, tokens: Path, flags: str) -> None:
    for held, estimated in ranks(2).run(bytes_held, tokens, flags, tp=2):
        assert held == estimated


def main_weights(mesh: ParallelMesh, tokens: Path, flags: str, count: int) -> list[Tensor]:
    """What the optimizer updates, after ``count`` steps of a run that is then saved where it says so."""
    trainer = built(mesh, tokens, flags)
    steps(trainer, count)
    trainer.save()
    return [piece.main.clone() for piece in trainer.optimizer.pieces]


@pytest.mark.parametrize(("first", "second"), [("--bf16", ""), ("", "--bf16"), ("--bf16", "--fp16"), ("--fp16", "--bf16")])
def test_the_optimizers_weights_pass_from_one_format_to_another_unrounded(
    ranks: Ranks, tokens: Path, tmp_path: Path, first: str, second: str
) -> None:
    scale = "--loss-scale 1024"
    flags = [f"{kind} {scale}" if kind == "--fp16" else kind for kind in (first, second)]
    saved = ranks(1).run(main_weights, tokens, f"{flags[0]} --save {tmp_path}", 3)[0]
    loaded = ranks(1).run(main_weights, tokens, f"{flags[1]} --load {tmp_path}", 0)[0]
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))


@pytest.mark.exhaustive
def test_a_narrow_checkpoint_resumes_in_another_layout(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    ranks(4).run(main_weights, tokens, f"--bf16 --save {tmp_path}", 3, tp=2)
    single, pair = (ranks(n).run(losses_of, tokens, f"--bf16 --load {tmp_path}", 3, tp=n)[0] for n in (1, 2))
    assert single == pytest.approx(pair, rel=2e-3)


def test_weights_alone_become_the_master_weights(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    saved = ranks(1).run(main_weights, tokens, f"--bf16 --save {tmp_path}", 3)[0]
    loaded = ranks(1).run(main_weights, tokens, f"--bf16 --load {tmp_path} --finetune", 0)[0]
    assert all(torch.equal(a.bfloat16().float(), b) for a, b in zip(saved, loaded, strict=True))
