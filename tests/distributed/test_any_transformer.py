"""The model on the page `docs/any-transformer.md` does all that GPT and LLaMA do, by its name and its file alone."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from domino_lm.checkpoint.convert.conversion import convert
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.config.settings import ConfigError, OptimizerConfig, RunConfig, ScheduleConfig, TrainingConfig
from domino_lm.model.batch import MicroBatch
from domino_lm.model.build import build_stack, compare_with_shapes
from domino_lm.model.families.lookup import family_of
from domino_lm.model.stack import Stack
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.pretrain import main
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.prepare import prepare_plan
from domino_lm.simulate.hardware import HARDWARE
from domino_lm.simulate.predict import Setting, planned
from domino_lm.tools.comparison import verify
from tests.distributed.models import (
    GPT,
    MICRO_BATCH,
    MICRO_BATCHES,
    SEED,
    grad_of,
    micro_batches,
    unsharded,
    worst_difference,
)
from tests.distributed.test_memory import ESTIMATED, WIDE, estimated, peak
from tests.distributed.test_schedules import CUTS, RECOMPUTE
from tests.distributed.test_training import weights_after
from tests.distributed.training_runs import write_tokens
from tests.documents import ROOT, attempt, commands_for
from tests.rank_pool import RankPool
from tests.unit.test_convert import saved

Ranks = Callable[[int], RankPool]
PAGE = ROOT / "docs" / "any-transformer.md"
NAME = "parallel_blocks:ParallelBlocks"
MODEL = replace(GPT, model=NAME)


def code_of_page() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return code


@pytest.fixture(autouse=True)
def _file_of_page() -> None:
    save_page()


def save_page() -> None:
    """The page's code as the module that its name says, in this process."""
    module = ModuleType(NAME.partition(":")[0])
    exec(compile(code_of_page(), str(PAGE), "exec"), module.__dict__)
    sys.modules[module.__name__] = module


def page_stack(tp: Communicator) -> Stack:
    save_page()
    return build_stack(MODEL, tp, SEED, torch.float64)


def plan_gradients(mesh: ParallelMesh, schedule: ScheduleConfig) -> dict[str, Tensor]:
    stack = page_stack(mesh.tp)
    plan, gradients = prepare_plan(stack, mesh, schedule, MICRO_BATCH, MODEL.seq_length)
    Executor(plan, stack, mesh, gradients).run_step(micro_batches(mesh.dp), 1)
    return unsharded(stack, mesh.tp, [parameter.main_grad for parameter in stack.parameters()])


def autograd_gradients() -> dict[str, Tensor]:
    """On one rank, where nothing is sharded and nothing has to be summed."""
    single = Communicator.single()
    stack = page_stack(single)
    for batch in micro_batches(single):
        loss = (stack.forward(batch) * batch.loss_mask).sum() / batch.loss_mask.sum().clamp_min(1)
        (loss / MICRO_BATCHES).backward()
    return unsharded(stack, single, [grad_of(parameter) for parameter in stack.parameters()])


def difference(mesh: ParallelMesh, schedule: ScheduleConfig) -> float:
    return worst_difference(plan_gradients(mesh, schedule), autograd_gradients())


def test_the_model_is_written_in_under_80_lines() -> None:
    assert len([line for line in code_of_page().splitlines() if line.strip()]) < 80


IN_TURN = [(name, bool(i % 2)) for i, name in enumerate(CUTS)]
"""Every cut, half of them under sequence parallelism; the other halves run under the marker."""


@pytest.mark.parametrize(
    ("name", "sequence_parallel"),
    [*IN_TURN, *(pytest.param(name, not other, marks=pytest.mark.exhaustive) for name, other in IN_TURN)],
)
def test_its_gradients_do_not_depend_on_the_schedule(ranks: Ranks, name: str, sequence_parallel: bool) -> None:
    kept = RECOMPUTE["full" if sequence_parallel else "selective"]
    schedule = replace(CUTS[name], sequence_parallel=sequence_parallel, **kept)
    assert max(ranks(2).run(difference, schedule)) < 1e-12


def plan_that_runs(mesh: ParallelMesh, schedule: ScheduleConfig) -> str:
    return str(prepare_plan(page_stack(mesh.tp), mesh, schedule, MICRO_BATCH, MODEL.seq_length)[0])


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_the_predicted_plan_is_the_one_that_runs(ranks: Ranks, tensor_parallel: int, sequence_parallel: bool) -> None:
    schedule = ScheduleConfig(schedule="domino", sequence_parallel=sequence_parallel, ddp_bucket_size=1000)
    setting = Setting(model=MODEL, hardware=HARDWARE["dgx-h100"], tensor_parallel=tensor_parallel, micro_batch_size=MICRO_BATCH)
    assert str(planned(setting, schedule)[0]) == ranks(tensor_parallel).run(plan_that_runs, schedule)[0]


def page_peak(mesh: ParallelMesh, schedule: ScheduleConfig) -> int:
    save_page()
    return peak(mesh, schedule, replace(WIDE, model=NAME))


@pytest.mark.parametrize("name", ["baseline", pytest.param("two rows", marks=pytest.mark.exhaustive), "full"])
def test_its_activations_take_what_is_estimated_within_a_tenth(ranks: Ranks, name: str) -> None:
    measured = min(ranks(2).run(page_peak, ESTIMATED[name]))
    assert estimated(replace(WIDE, model=NAME), ESTIMATED[name], 1, 2).activations == pytest.approx(measured, rel=0.1)


def page_weights(mesh: ParallelMesh, tokens: Path, *runs: str) -> list[Tensor]:
    save_page()
    return weights_after(mesh, tokens, *(f"--model {NAME} {flags}" for flags in runs))


@pytest.mark.parametrize("world", [1, 2])
def test_a_resumed_run_ends_as_the_unbroken_one_to_the_bit(ranks: Ranks, world: int, tmp_path: Path) -> None:
    tokens, saved = write_tokens(tmp_path), f"--save {tmp_path / 'save'} --load {tmp_path / 'save'}"
    unbroken = ranks(world).run(page_weights, tokens, "", tp=world)
    resumed = ranks(world).run(page_weights, tokens, f"{saved} --exit-interval 4", saved, tp=world)
    for expected, found in zip(unbroken, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def batches(mesh: ParallelMesh, step: int) -> Sequence[MicroBatch]:
    return micro_batches(mesh.dp)


def verified(mesh: ParallelMesh) -> tuple[str, bool]:
    save_page()
    training = TrainingConfig(micro_batch_size=MICRO_BATCH, global_batch_size=MICRO_BATCH * MICRO_BATCHES, train_iters=1)
    run = RunConfig(model=MODEL, schedule=CUTS["rows2"], optimizer=OptimizerConfig(lr=1e-3), training=training)
    return verify(run, mesh, batches, 2, torch.float64)


def test_it_is_verified(ranks: Ranks) -> None:
    assert [normal for _, normal in ranks(2).run(verified)] == [True, True]


def test_a_dry_run_tells_its_sizes_memory_plan_and_what_it_does_not_leave_open(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = f"--model {NAME} --preset debug-gpt --vocab-size 512 --lr 1e-3 --micro-batch-size 4 --train-iters 10 --mock-data"
    flags += " --tensor-model-parallel-size 2 --schedule auto --attention-dropout 0.2 --dry-run --print-plan"
    assert main(flags.split()) == 0
    said = capsys.readouterr().out
    for told in (rf"model +{NAME}: \d+ layers", r"memory .* activations", r"baseline .*<- taken|rows 2 .*<- taken", r"block: first GEMM"):
        assert re.search(told, said), told
    assert f"--attention-dropout 0.2: --model {NAME} has 0.0" in said


def test_its_checkpoints_are_not_converted(tmp_path: Path) -> None:
    load = saved(tmp_path / "load", MODEL)
    with pytest.raises(CheckpointError, match=f"holds --model {NAME}; only GPT and LLaMA are converted"):
        convert(load=load, save=tmp_path / "hf", to="hf")


@pytest.mark.parametrize(
    ("part", "field", "wrong"),
    [(2, "parameters", 5), (2, "core_parameters", 0), (4, "couples_tokens", False), (6, "backward_collective", None)],
)
def test_a_record_that_is_not_its_parts_is_refused(part: int, field: str, wrong: object) -> None:
    stack, shapes = page_stack(Communicator.single()), list(family_of(MODEL).chain)
    with pytest.raises(ConfigError, match=f"{NAME}: its stack has 7 parts, its shapes are 6"):
        compare_with_shapes(stack.parts, shapes[1:], NAME)
    shapes[part] = shapes[part]._replace(**{field: wrong})
    with pytest.raises(ConfigError, match=f"{NAME}: part {part} has {field} .*, its shape says {wrong}"):
        compare_with_shapes(stack.parts, shapes, NAME)


@pytest.mark.long
def test_the_page_runs_as_it_is_typed(tmp_path: Path) -> None:
    (tmp_path / "parallel_blocks.py").write_text(code_of_page())
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    done = attempt(tmp_path, "set -e\n" + "\n".join(commands_for("test_the_page_runs_as_it_is_typed")))
    assert done.returncode == 0, done.stdout + done.stderr
    for said in (
        "block: first GEMM",
        "wrote the timeline of step 3 to runs/step",
        "resumed from runs/blocks at iteration 10",
        "all is normal",
    ):
        assert said in done.stdout
    first, *others = re.findall(r"validation loss at iteration 20 on test set \| lm loss value: (\S+)", done.stdout)
    assert [float(loss) for loss in others] == pytest.approx([float(first)] * 2, abs=1e-5)
    assert float(first) < math.log(500) - 0.5
