"""Captured steps: what is captured and replayed when, and that a replay does what running op by op does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from domino_lm.config.kernels import KernelConfig
from domino_lm.config.settings import ConfigError, OptimizerConfig, ScheduleConfig
from domino_lm.model.build import build_stack
from domino_lm.model.kernels.backends import install_kernels
from domino_lm.model.kernels.fp8 import Fp8Format, Fp8Linear
from domino_lm.model.kernels.kernel_set import Kernels
from domino_lm.model.linear import Linear
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.graphs import GraphedExecutor, build_executor
from domino_lm.schedule.prepare import prepare_plan
from domino_lm.schedule.recorder import Recorder
from domino_lm.training.optimizer import Optimizer, Rates
from domino_lm.training.trainer import Trainer
from tests.distributed.models import GPT, LLAMA, MICRO_BATCH, SEED, micro_batches
from tests.distributed.training_runs import built, steps, write_tokens
from tests.rank_pool import RankPool
from tests.recorded_graphs import RecordedGraphs

CPU = torch.device("cpu")
ROWS2 = ScheduleConfig(schedule="domino", domino_row_slices=2)
MODEL = replace(GPT, hidden_dropout=0.2, attention_dropout=0.1)


class Run:
    """A tiny run of one rank whose learning rate changes every step and lies in device memory."""

    def __init__(
        self, graphs: RecordedGraphs | None, schedule: ScheduleConfig = ROWS2, model=MODEL, fp8: bool = False, dtype=torch.float64
    ) -> None:
        mesh = ParallelMesh.single(CPU)
        self.stack = build_stack(model, mesh.tp, SEED, dtype)
        if fp8:
            install_kernels(self.stack, Kernels(linear=Fp8Linear(Fp8Format.of("hybrid", CPU), Linear())))
        plan, gradients = prepare_plan(self.stack, mesh, schedule, MICRO_BATCH, model.seq_length)
        self.optimizer = Optimizer(self.stack.parameters(), OptimizerConfig(lr=1e-2), mesh.tp)
        self.rate = torch.zeros(())
        settings = {"seed": 5}
        if graphs is None:
            self.executor = Executor(plan, self.stack, mesh, gradients, self.update, **settings)
        else:
            self.executor = GraphedExecutor(plan, self.stack, mesh, gradients, self.update, warmup_steps=2, backend=graphs, **settings)

    def update(self, loss_sum: Tensor) -> list[Tensor]:
        return [self.optimizer.step(self.rate, torch.logical_not(torch.isfinite(loss_sum)).float()).grad_norm]

    def steps(self, count: int, recorded: int | None = None) -> list[float]:
        losses = []
        for iteration in range(count):
            self.rate.fill_(1e-2 / (1 + iteration))
            batches = micro_batches(Communicator.single())
            shifted = [replace(batch, tokens=(batch.tokens + iteration) % 97) for batch in batches]
            made = self.executor.run_step(shifted, iteration, Recorder() if iteration == recorded else None)
            losses += [made.loss_sum.item(), made.found[0].item()]
        return losses

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.stack.parameters()]


@pytest.mark.parametrize(
    "schedule",
    [ScheduleConfig(schedule="baseline"), ROWS2, ScheduleConfig(schedule="domino", domino_row_slices=4, domino_pair="row-groups")],
    ids=["baseline", "rows", "row-groups"],
)
@pytest.mark.parametrize("model", [MODEL, LLAMA], ids=["gpt-dropout", "llama"])
def test_replayed_steps_are_the_steps_that_run_op_by_op(schedule: ScheduleConfig, model) -> None:
    plain, replayed = Run(None, schedule, model), Run(RecordedGraphs(), schedule, model)
    assert replayed.steps(5) == pytest.approx(plain.steps(5), rel=1e-12)
    for a, b in zip(plain.weights(), replayed.weights(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


def test_a_number_of_the_host_would_be_baked_in() -> None:
    def losses(graphs: RecordedGraphs | None) -> list[float]:
        run = Run(graphs)
        rates = iter([1e-2, 2e-2, 3e-2, 4e-2, 5e-2])
        run.executor._binder._on_step = lambda loss_sum: [run.optimizer.step(next(rates)).grad_norm]
        return run.steps(5)

    plain, replayed = losses(None), losses(RecordedGraphs())
    assert replayed[:8] == pytest.approx(plain[:8], rel=1e-12)
    assert replayed[8] != pytest.approx(plain[8], rel=1e-4)


def test_a_micro_batch_and_the_last_with_the_steps_end_are_captured_once_and_replayed_in_order() -> None:
    graphs = RecordedGraphs()
    Run(graphs).steps(4)
    first = ["capture 0", "replay 0", "replay 0", "replay 0", "capture 1", "replay 1"]
    assert graphs.log == ["warm-up", "warm-up", *first, "replay 0", "replay 0", "replay 0", "replay 1"]


def test_the_graphs_read_buffers_that_inputs_are_copied_into() -> None:
    run = Run(RecordedGraphs())
    run.steps(3)
    assert isinstance(run.executor, GraphedExecutor)
    held = run.executor._static
    assert held is not None
    pointers = [held.tokens.data_ptr(), held.labels.data_ptr(), held.loss_mask.data_ptr()]
    run.steps(2)
    assert run.executor._static is held
    assert pointers == [held.tokens.data_ptr(), held.labels.data_ptr(), held.loss_mask.data_ptr()]
    last = micro_batches(Communicator.single())[-1]
    assert torch.equal(held.tokens, (last.tokens + 1) % 97)


def test_a_recorded_step_runs_op_by_op_and_the_next_one_captures_anew() -> None:
    graphs, plain = RecordedGraphs(), Run(None)
    assert Run(graphs).steps(6, recorded=4) == pytest.approx(plain.steps(6), rel=1e-12)
    assert graphs.log[-7:] == ["warm-up", "capture 2", "replay 2", "replay 2", "replay 2", "capture 3", "replay 3"]


def test_8_bit_weights_are_made_before_a_replay_and_not_inside_it() -> None:
    graphs = RecordedGraphs()
    plain, replayed = (Run(g, model=GPT, fp8=True, dtype=torch.float32) for g in (None, graphs))
    assert replayed.steps(4) == pytest.approx(plain.steps(4), rel=1e-5)


def test_interleaved_micro_batches_cannot_be_captured() -> None:
    run = Run(RecordedGraphs(), ScheduleConfig(schedule="domino", domino_row_slices=1, domino_pair="micro-batches"))
    with pytest.raises(ConfigError, match="something passes from one to the next"):
        run.steps(3)


def test_a_cpu_run_refuses_cuda_graphs() -> None:
    mesh = ParallelMesh.single(CPU)
    stack = build_stack(GPT, mesh.tp, SEED)
    plan, gradients = prepare_plan(stack, mesh, ROWS2, MICRO_BATCH, GPT.seq_length)
    with pytest.raises(ConfigError, match="--cuda-graph captures work of a GPU, but this run computes on cpu"):
        build_executor(KernelConfig(cuda_graph=True), mesh, plan, stack, gradients)


def captured(kernels: KernelConfig, mesh: ParallelMesh, *args: Any, **settings: Any) -> Executor:
    """What `build_executor` makes on a GPU, with graphs of the CPU."""
    plan, stack, *others = args
    return GraphedExecutor(plan, stack, mesh, *others, **settings, warmup_steps=kernels.cuda_graph_warmup_steps, backend=RecordedGraphs())


@pytest.mark.parametrize("flags", ["", "--bf16", "--fp16 --initial-loss-scale 65536 --loss-scale-window 2", "--fp8-format hybrid"])
def test_a_trainer_whose_steps_are_replayed_reports_what_the_plain_one_does(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, mesh = write_tokens(tmp_path), ParallelMesh.single(CPU)
    shown = f"{flags} --log-params-norm --log-num-zeros-in-grad"
    monkeypatch.setattr(Trainer, "_rates", lambda trainer: Rates(trainer._learning_rates[0]))  # fp32 in both: 8 bits amplify any difference
    plain = steps(built(mesh, tokens, shown), 7)
    monkeypatch.setattr("domino_lm.training.trainer.build_executor", captured)
    replayed = steps(built(mesh, tokens, f"{shown} --cuda-graph"), 7)
    for found, expected in zip(replayed, plain, strict=True):
        for name in ("loss_sum", "grad_norm", "learning_rate", "loss_scale", "params_norm", "skipped", "tokens"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-5), name
    assert (len({report.loss_scale for report in plain}) > 1) == ("fp16" in flags)


def recorded_steps(mesh: ParallelMesh, tokens: Path, folder: Path) -> tuple[list[int], list[str]]:
    """The steps that this rank is told to record, which are not replayed, and what it prints."""
    lines: list[str] = []
    trainer = built(mesh, tokens, f"--timeline {folder}/step --timeline-iteration 5 --eval-interval 0 --log-interval 100")
    trainer.console, run_step, recorded = lines.append, trainer.executor.run_step, []

    def noted(batches: Any, iteration: int, recorder: Any = None) -> Any:
        recorded.extend([iteration + 1] if recorder is not None else [])
        return run_step(batches, iteration, recorder)

    trainer.executor.run_step = noted  # type: ignore[method-assign]
    trainer.fit()
    return recorded, lines


def test_every_rank_records_the_step_of_the_timeline_and_rank_0_writes_it(ranks: Callable[[int], RankPool], tmp_path: Path) -> None:
    (first, printed), (second, silent) = ranks(2).run(recorded_steps, write_tokens(tmp_path), tmp_path, tp=2)
    assert first == second == [5]
    assert [line for line in printed if "wrote the timeline of step 5" in line]
    assert not [line for line in silent if "timeline" in line]
