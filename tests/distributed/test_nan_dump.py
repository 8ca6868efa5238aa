"""What `--dump-on-nan` finds and writes of a step that is not finite, under every schedule, and that it can be shown again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from domino_lm.config.arguments import parse_arguments
from domino_lm.config.settings import ModelConfig, ScheduleConfig
from domino_lm.model.batch import MicroBatch
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.pretrain import main
from domino_lm.schedule import inspection
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.inspection import Finding, InspectingExecutor, Statistics
from domino_lm.schedule.ops import Kind, Op
from domino_lm.schedule.prepare import prepare_plan
from domino_lm.tools import verify
from domino_lm.tools.replay import compare, run_again
from domino_lm.training.nan_report import newest_dump, origin_of, read_report, report_text
from domino_lm.training.saving import TrainingError
from tests.distributed.models import GPT, LLAMA, MICRO_BATCH, float64_stack, micro_batches
from tests.distributed.test_host_reads import SCHEDULES
from tests.distributed.training_runs import TINY, built, program, steps, write_tokens
from tests.documents import ROOT, attempt, commands_for
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
OTHERS = {
    "optim_grads": ScheduleConfig(
        schedule="domino", domino_row_slices=2, data_parallel_sharding_strategy="optim_grads", ddp_bucket_size=3000
    ),
    "row groups": ScheduleConfig(schedule="domino", domino_row_slices=4, domino_pair="row-groups"),
    "deferred": ScheduleConfig(schedule="domino", domino_row_slices=3, domino_defer_wgrad=True),
}
RARE = 96
"""A token that one sample holds."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def inspecting(mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig) -> InspectingExecutor:
    stack = float64_stack(model, mesh.tp)
    plan, gradients = prepare_plan(stack, mesh, schedule, MICRO_BATCH, model.seq_length)
    return InspectingExecutor(plan, stack, mesh, gradients)


def rare_in(batches: list[MicroBatch], micro_batch: int, sample: int) -> list[MicroBatch]:
    """``batches`` with the rare token at the last place of one sample, and nowhere else."""
    found = [replace(batch, tokens=batch.tokens.clamp(max=RARE - 1)) for batch in batches]
    found[micro_batch].tokens[-1, sample] = RARE
    return found


def look(
    mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig, sound: bool
) -> tuple[Finding | None, bool, tuple[int, ...], bool]:
    """What a step finds whose rare token has an embedding of inf, unless it is ``sound``; whether its loss is that of a plain step."""
    executor = inspecting(mesh, model, schedule)
    batches = rare_in(micro_batches(mesh.dp), 1, 3)
    if not sound:
        table = executor.stack.embedding.weight
        if 0 <= RARE - mesh.tp.rank * table.shape[0] < table.shape[0]:
            table.detach()[RARE - mesh.tp.rank * table.shape[0], 0] = torch.inf
    loss = executor.run_step(batches, 1).loss_sum
    executor.complete_gathers()
    plain = Executor(executor.plan, executor.stack, mesh, executor.gradients)
    equal = torch.equal(loss, plain.run_step(batches, 1).loss_sum)
    plain.complete_gathers()
    return executor.finding, equal, executor.plan.slicing.row_sizes, executor.plan.slicing.sequence_rows


EACH = [(tp, name) for tp in (1, 2) for name in SCHEDULES | OTHERS]
QUICK = [(1, "baseline"), (2, "sequence parallel"), (2, "paired")]


@pytest.mark.parametrize(("tp", "name"), [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.exhaustive) for case in EACH])
def test_the_first_op_part_and_row_is_found_under_every_schedule(ranks: Ranks, name: str, tp: int) -> None:
    schedule = (SCHEDULES | OTHERS)[name]
    schedule = replace(schedule, sequence_parallel=schedule.sequence_parallel and tp > 1)
    found = ranks(2).run(
        look, replace(GPT, untie_embeddings_and_output_weights=True, make_vocab_size_divisible_by=8), schedule, False, tp=tp
    )
    findings = [finding for finding, *_ in found]
    origin = origin_of(findings)
    assert origin is not None
    first, row_sizes, along_sequence = findings[origin], found[0][2], found[0][3]
    assert first is not None
    op = Op.parse(first.op)
    assert (op.kind, op.phase, first.part, first.micro_batch, first.name) == (Kind.TAIL, "F", 0, 1, "Embedding")
    assert first.row == (len(row_sizes) - 1 if along_sequence else next(r for r in range(len(row_sizes)) if sum(row_sizes[: r + 1]) > 3))
    assert first.outputs["partial"].inf == 1
    assert first.weights["embedding.word_embeddings.weight"].inf == 1
    assert tp == 1 or origin % 2 == 1


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "2x2" else pytest.mark.exhaustive) for name in SCHEDULES | OTHERS])
def test_nothing_is_found_in_a_sound_step_which_is_the_plain_one_to_the_bit(ranks: Ranks, name: str) -> None:
    found = ranks(2).run(look, LLAMA, (SCHEDULES | OTHERS)[name], True, tp=2)
    assert [(finding, equal) for finding, equal, *_ in found] == [(None, True)] * 2


def poisoned(mesh: ParallelMesh, part: int, attribute: str, gradient: bool) -> Finding | None:
    executor = inspecting(mesh, GPT, SCHEDULES["rows"])
    weight = getattr(executor.stack.parts[part], attribute)
    if gradient:
        inner = executor.stack.parts[part].wgrad  # type: ignore[attr-defined]

        def wgrad(ctx: Any, dh: Tensor) -> None:
            inner(ctx, dh)
            weight.main_grad.view(-1)[7] = torch.nan

        executor.stack.parts[part].wgrad = wgrad  # type: ignore[attr-defined]
    else:
        weight.detach().view(-1)[7] = torch.nan
    executor.run_step(micro_batches(mesh.dp), 1)
    return executor.finding


@pytest.mark.parametrize(
    ("part", "attribute", "gradient", "op"),
    [
        (4, "w_in", False, "m0 bodyF4.0"),
        (5, "weight", False, "m0 localF5.0"),
        pytest.param(4, "w_out", False, "m0 tailF4.0", marks=pytest.mark.exhaustive),
        pytest.param(10, "weight", False, "m0 bodyF10.0", marks=pytest.mark.exhaustive),
        (8, "w_in", True, "m0 wgradB8.0"),
        pytest.param(2, "w_out", True, "m0 wgradB2.0", marks=pytest.mark.exhaustive),
    ],
)
def test_a_bad_weight_or_gradient_is_found_where_it_is_used_or_formed(
    ranks: Ranks, part: int, attribute: str, gradient: bool, op: str
) -> None:
    findings = ranks(1).run(poisoned, part, attribute, gradient)
    assert findings[0] is not None
    assert findings[0].op == op
    assert all(value.nan == value.inf == 0 for value in findings[0].inputs.values())
    assert findings[0].inputs


def test_statistics_are_of_what_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, "CHUNK", 3)
    found = Statistics.of(torch.tensor([[1.0, -2.0, torch.inf, 4.0], [torch.nan, 0.0, 3.0, -torch.inf]]))
    assert found == Statistics((2, 4), "float32", -2.0, 4.0, 1.2, pytest.approx(6**0.5), 1, 2)
    assert str(Statistics.of(torch.full((2,), torch.nan))) == "[2] float32: nothing finite, 2 nan, 0 inf"
    assert Statistics.of(torch.tensor([3, 5])) == Statistics((2,), "int64", 3.0, 5.0, 4.0, pytest.approx(17**0.5), 0, 0)
    assert inspection.first_not_finite(torch.tensor([[0.0, 1.0], [0.0, 1.0], [torch.inf, 0.0]])) == (2, 0)


def break_and_dump(mesh: ParallelMesh, tokens: Path, flags: str, bad: tuple[int, ...]) -> tuple[list[str], str]:
    """Two sound steps, then a weight of the second MLP is inf on the ``bad`` ranks; what is printed, and how the run ends."""
    trainer, lines = built(mesh, tokens, flags), []
    trainer.console = lines.append if mesh.world.rank == 0 else lambda line: None
    steps(trainer, 2)
    trainer.executor.complete_gathers()
    if mesh.world.rank in bad:
        trainer.stack.parts[8].w_in.detach().view(-1)[7] = torch.inf  # type: ignore[attr-defined]
        trainer.optimizer.read_parameters()
    try:
        trainer.fit()
    except TrainingError as error:
        return lines, str(error)
    return lines, "no error"


def shown_again(mesh: ParallelMesh, folder: Path) -> tuple[str, bool]:
    """By all ranks, or by those of the replica in which it began."""
    path = newest_dump(folder)
    report = read_report(path)
    run = parse_arguments(["--config", str(path / "config.toml")])
    first = report["weights_of_replica"] * mesh.tp.size if mesh.world.size < report["ranks"] else 0
    return compare(report["first"], run_again(path, report, run, mesh), first)


@pytest.mark.parametrize(
    ("world", "tp", "bad", "flags"),
    [
        (2, 2, (1,), "--domino-row-slices 2 --bf16"),
        pytest.param(2, 1, (0, 1), "--use-distributed-optimizer --overlap-param-gather --dataloader-type cyclic", marks=pytest.mark.long),
        pytest.param(4, 2, (1,), "--domino-row-slices 1", marks=pytest.mark.long),
    ],
    ids=["TP 2", "DP 2", "TP 2 x DP 2"],
)
def test_a_dump_names_op_samples_and_rank_and_is_shown_again(
    ranks: Ranks, tokens: Path, tmp_path: Path, world: int, tp: int, bad: tuple[int, ...], flags: str
) -> None:
    everything = f"{flags} --dump-on-nan {tmp_path} --max-skipped-steps 1 --eval-interval 0"
    (lines, error), *_ = ranks(world).run(break_and_dump, tokens, everything, bad, tp=tp)
    assert "in 2 step(s) in a row" in error
    report = read_report(newest_dump(tmp_path))
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000003"]  # the first bad step, and no other
    assert (report["iteration"], report["steps_before"], report["ranks"]) == (3, 2, world)
    first = report["first"]
    assert (first["rank"], first["part"], first["row"], first["micro_batch"]) == (bad[0], 8, 0, 0)
    assert first["op"].endswith("bodyF8.0")
    assert first["weights"]["decoder.layers.1.mlp.linear_fc1.weight"]["inf"] == 1
    assert len(report["samples_of_replicas"]) == world // tp
    everybody = sorted(number for replica in report["samples_of_replicas"] for numbers in replica for number in numbers)
    assert everybody == list(range(16, 24)) if "cyclic" not in flags else len(set(everybody)) == 8
    assert first["samples"] == report["samples_of_replicas"][first["data_parallel_rank"]][0][: len(first["samples"])]
    assert any(report_text(report) in line for line in lines)
    for started in {world, tp}:
        assert [again for _, again in ranks(started).run(shown_again, tmp_path, tp=tp)] == [True] * started


def passing_fault(mesh: ParallelMesh, tokens: Path, folder: Path) -> dict[str, Any]:
    """The report of a step whose first loss alone was spoilt."""
    trainer = built(mesh, tokens, f"--dump-on-nan {folder}")
    take, seen = trainer.stack.head.loss, []

    def once(*args: Any) -> Any:
        d_logits, loss = take(*args)
        seen.append(1)
        return d_logits, loss * torch.nan if len(seen) == 1 else loss

    trainer.stack.head.loss = once  # type: ignore[method-assign]
    steps(trainer, 1)
    return read_report(newest_dump(folder))


def test_a_fault_that_does_not_come_again_is_called_passing(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    report = ranks(1).run(passing_fault, tokens, tmp_path)[0]
    assert report["first"] is None
    assert "the fault has passed" in report_text(report)


def test_a_run_that_is_finite_looks_at_nothing(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*args: Any, **settings: Any) -> None:
        raise AssertionError("a step was looked at")

    monkeypatch.setattr(InspectingExecutor, "__init__", called)
    assert main(f"{TINY} --data-path {tokens} --dump-on-nan {tmp_path / 'dump'} --train-iters 3 --eval-interval 0".split()) == 0
    bad = f"{TINY} --data-path {tokens} --init-method-std 1e30 --train-iters 3 --eval-interval 0"
    assert main(f"{bad} --max-skipped-steps 9".split()) == 1  # without the flag neither
    assert list(tmp_path.glob("dump/*")) == []


def test_the_tool_shows_a_dump_again_and_says_so_if_it_cannot(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"--init-method-std 1e30 --dump-on-nan {tmp_path} --max-skipped-steps 0 --eval-interval 0"
    assert main(f"{TINY} --data-path {tokens} {flags}".split()) == 1
    out = capsys.readouterr().out
    assert f"domino-lm-verify --replay {tmp_path}/iter_0000001 shows it again" in out

    def tool() -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["domino-lm-verify", "--replay", str(tmp_path)])
        code = verify.main()
        return code, "".join(capsys.readouterr())

    code, said = tool()
    assert code == 0
    assert "run again: the same" in said
    report = tmp_path / "iter_0000001" / "report.json"
    other = json.loads(report.read_text())
    other["first"]["op"] = "m0 bodyF8.1"
    report.write_text(json.dumps(other))
    assert tool()[0] == 3
    report.write_text(json.dumps({**other, "ranks": 4}))
    code, said = tool()
    assert (code, said.count("error: ")) == (2, 1)
    assert "was written by 4 rank(s), of which 4 hold one model, and 1 were started" in said
    for damaged in ("{", "[]", "{}", '{"first": 3}'):
        report.write_text(damaged)
        code, said = tool()
        assert (code, said.count("error: ")) == (2, 1)
        assert "no whole dump" in said
    report.unlink()
    assert tool()[0] == 2


def test_a_folder_that_cannot_be_written_is_found_at_the_start(tokens: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{TINY} --data-path {tokens} --dump-on-nan /proc/nowhere".split()) == 2
    assert "--dump-on-nan /proc/nowhere cannot be written" in capsys.readouterr().err


@pytest.mark.long
def test_a_broken_weight_is_found_and_shown_again_as_the_page_says(tmp_path: Path) -> None:
    train, replay = (
        attempt(tmp_path, command) for command in commands_for("test_a_broken_weight_is_found_and_shown_again_as_the_page_says")
    )
    assert train.returncode == 1, train.stderr
    assert "the first output that is not is that of" in train.stdout
    assert replay.returncode == 0, replay.stderr
    assert "run again: the same" in replay.stdout


@pytest.mark.long
def test_the_programs_write_and_show_a_dump_under_torchrun(tokens: Path, tmp_path: Path) -> None:
    flags = f"--tensor-model-parallel-size 2 --init-method-std 1e30 --max-skipped-steps 0 --dump-on-nan {tmp_path}"
    out, err = program(tokens, flags, 2).communicate(timeout=300)
    assert f"domino-lm-verify --replay {tmp_path}/iter_0000001 shows it again" in out, err
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "domino_lm.tools.verify"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    shown = subprocess.run([*command, "--replay", str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("run again: the same") == 1
