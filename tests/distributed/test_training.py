"""Whole runs: resuming, evaluating, skipping, stopping, refusing."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from domino_lm.config.settings import ConfigError
from domino_lm.model.batch import MicroBatch
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.pretrain import main
from domino_lm.training.saving import TrainingError
from domino_lm.watch.metrics import StepReport
from tests.distributed.training_runs import TINY, built, program, steps, write_tokens
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def weights_after(mesh: ParallelMesh, tokens: Path, *runs: str) -> list[torch.Tensor]:
    """This rank's weights and moments after the last of ``runs``, each of which trains until its flags end it."""
    for flags in runs:
        trainer = built(mesh, tokens, flags)
        trainer.fit()
    return [t.detach().clone() for t in (*trainer.stack.parameters(), *trainer.optimizer.exp_avg, *trainer.optimizer.exp_avg_sq)]


@pytest.mark.parametrize(("world", "tp"), [(1, 1), (4, 2)], ids=["one rank", "TP 2 x DP 2"])
def test_a_run_stopped_and_resumed_twice_equals_the_uninterrupted_one_to_the_bit(
    ranks: Ranks, tokens: Path, tmp_path: Path, world: int, tp: int
) -> None:
    whole = ranks(world).run(weights_after, tokens, "", tp=tp)
    resume = f"--save {tmp_path} --load {tmp_path}"
    parts = (f"{resume} --exit-interval 3", f"{resume} --exit-interval 5", resume)
    resumed = ranks(world).run(weights_after, tokens, *parts, tp=tp)
    for expected, found in zip(whole, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_checkpoint_resumes_in_another_layout(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    ranks(4).run(weights_after, tokens, f"--save {tmp_path} --exit-interval 4", tp=2)
    single, pair = (ranks(n).run(next_losses, tokens, f"--load {tmp_path}", tp=n)[0] for n in (1, 2))
    assert single == pytest.approx(pair, abs=1e-5)


def next_losses(mesh: ParallelMesh, tokens: Path, flags: str) -> list[float]:
    return [report.loss for report in steps(built(mesh, tokens, flags), 3)]


def test_evaluation_repeats_to_the_bit_and_leaves_training_alone(ranks: Ranks, tokens: Path) -> None:
    ranks(4).run(evaluate_between_steps, tokens, tp=2)


def evaluate_between_steps(mesh: ParallelMesh, tokens: Path) -> None:
    plain, evaluated = built(mesh, tokens), built(mesh, tokens)
    (valid,) = evaluated.data.valid
    first, second = (evaluated.evaluate(valid) for _ in range(2))
    assert first == second
    assert [r.loss_sum for r in steps(plain, 3)] == [r.loss_sum for r in steps(evaluated, 3)]


def test_the_evaluated_loss_does_not_depend_on_the_layout(ranks: Ranks, tokens: Path) -> None:
    losses = [ranks(world).run(first_evaluation, tokens, tp=tp)[0] for world, tp in [(1, 1), (2, 2), (2, 1), (4, 2)]]
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-5)


def first_evaluation(mesh: ParallelMesh, tokens: Path) -> float:
    trainer = built(mesh, tokens)
    (valid,) = trainer.data.valid
    return trainer.evaluate(valid)


class Masked:
    """Micro-batches of a trainer with the loss masks that ``mask(step, number)`` gives, a number for each sample of the step."""

    def __init__(self, batches: Any, mask: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        self.batches, self.mask, self.step = batches, mask, 0
        self.blocked_s = 0.0

    def take(self, count: int) -> list[MicroBatch]:
        found = []
        for batch in self.batches.take(count):
            numbers = torch.arange(batch.size) + batch.sample_offset
            found.append(dataclasses.replace(batch, loss_mask=self.mask(self.step, numbers).expand(batch.tokens.shape).contiguous()))
        self.step += 1
        return found


def masked_steps(mesh: ParallelMesh, tokens: Path, flags: str, mask: Callable[[int, torch.Tensor], torch.Tensor]) -> list[StepReport]:
    trainer = built(mesh, tokens, flags)
    batches: Any = Masked(trainer.training_batches(), mask)
    return [trainer.step(batches)[0] for _ in range(3)]


def uneven(step: int, numbers: torch.Tensor) -> torch.Tensor:
    """One token counts in the first sample, all of them in the last."""
    positions = torch.arange(16).unsqueeze(1)  # [s, 1]
    return (positions <= numbers * 2).float()  # [s, b]


def nothing_in_step_1(step: int, numbers: torch.Tensor) -> torch.Tensor:
    return torch.full(numbers.shape, float(step != 1))


def test_the_token_mean_does_not_depend_on_how_samples_are_dealt(ranks: Ranks, tokens: Path) -> None:
    flags = "--calculate-per-token-loss --hidden-dropout 0 --attention-dropout 0"
    one = ranks(1).run(masked_steps, tokens, f"{flags} --micro-batch-size 8", uneven, tp=1)[0]
    four = ranks(4).run(masked_steps, tokens, f"{flags} --micro-batch-size 1", uneven, tp=2)[0]
    assert [r.grad_norm for r in four] == pytest.approx([r.grad_norm for r in one], rel=1e-4)
    assert [r.loss for r in four] == pytest.approx([r.loss for r in one], rel=1e-5)
    assert [r.tokens for r in four] == [r.tokens for r in one]


def test_the_reported_loss_weighs_tokens_alike_under_either_objective(ranks: Ranks, tokens: Path) -> None:
    means = ranks(2).run(masked_steps, tokens, "", uneven, tp=1)[0]
    per_token = ranks(2).run(masked_steps, tokens, "--calculate-per-token-loss", uneven, tp=1)[0]
    assert means[0].loss == per_token[0].loss
    assert means[0].grad_norm != pytest.approx(per_token[0].grad_norm, rel=1e-3)


def test_a_step_without_a_counted_token_reports_zero_and_harms_nothing(ranks: Ranks, tokens: Path) -> None:
    before, empty, after = ranks(2).run(masked_steps, tokens, "", nothing_in_step_1, tp=2)[0]
    assert (empty.loss, empty.tokens, empty.grad_norm, empty.skipped) == (0.0, 0, 0.0, False)
    assert 0 < after.loss < before.loss + 1


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all_ranks(ranks: Ranks, tokens: Path) -> None:
    for first, bad, after in ranks(4).run(steps_with_a_bad_one, tokens, tp=2):
        assert [first.skipped, bad.skipped, after.skipped] == [False, True, False]
        assert bad.learning_rate == first.learning_rate < after.learning_rate
        assert after.loss < 10


def steps_with_a_bad_one(mesh: ParallelMesh, tokens: Path) -> list[StepReport]:
    trainer = built(mesh, tokens)
    weight = trainer.stack.parameters()[-1].detach().view(-1)[0]
    found = steps(trainer, 1)
    before = weight.clone()
    if mesh.world.rank == 3:
        weight.fill_(torch.inf)
    found += steps(trainer, 1)
    weight.copy_(before)
    return found + steps(trainer, 1)


def test_steps_that_stay_not_finite_end_the_run_on_all_ranks(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    messages = ranks(4).run(break_one_weight, tokens, f"--save {tmp_path} --max-skipped-steps 2", tp=2)
    assert len(set(messages)) == 1
    assert "3 step(s) in a row, the last at iteration 5" in messages[0]
    assert "--max-skipped-steps 2" in messages[0]
    assert "iteration 2" in messages[0]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000002"]


def break_one_weight(mesh: ParallelMesh, tokens: Path, flags: str) -> str:
    trainer = built(mesh, tokens, flags)
    steps(trainer, 2)
    trainer.save()
    if mesh.world.rank == 1:
        with torch.no_grad():
            trainer.stack.parameters()[-1].view(-1)[0] = torch.inf
    try:
        trainer.fit()
    except TrainingError as error:
        return str(error)
    return "no error"


def test_weights_alone_start_a_new_schedule(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    ranks(1).run(weights_after, tokens, f"--save {tmp_path} --exit-interval 4")
    ranks(1).run(assert_fresh_schedule, tokens, f"--load {tmp_path} --no-load-optim")


def assert_fresh_schedule(mesh: ParallelMesh, tokens: Path, flags: str) -> None:
    trainer = built(mesh, tokens, flags)
    assert (trainer.iteration, trainer.lr_schedule.value(), trainer.optimizer.step_count) == (0, 0.0, 0)


@pytest.mark.parametrize(("flag", "taken"), [("", None), ("--override-opt-param-scheduler", 6e-5)])
def test_another_learning_rate_is_refused_on_resume_or_followed_from_the_first_step(
    ranks: Ranks, tokens: Path, tmp_path: Path, flag: str, taken: float | None
) -> None:
    ranks(1).run(weights_after, tokens, f"--save {tmp_path} --exit-interval 4 --lr-decay-style constant")
    changed = f"--load {tmp_path} --lr 6e-5 --min-lr 0 --lr-decay-style constant {flag}"
    assert ranks(1).run(resumed_rate, tokens, changed) == [taken]


def resumed_rate(mesh: ParallelMesh, tokens: Path, flags: str) -> float | None:
    try:
        return built(mesh, tokens, flags).lr_schedule.value()
    except ConfigError:
        return None


def test_a_checkpoint_of_another_model_is_refused_by_name(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    ranks(1).run(weights_after, tokens, f"--save {tmp_path} --exit-interval 4")
    (message,) = ranks(1).run(refusal, tokens, f"--load {tmp_path} --no-bias-gelu-fusion")
    assert "--bias-gelu-fusion True there, False here" in message


def refusal(mesh: ParallelMesh, tokens: Path, flags: str) -> str:
    with pytest.raises(ConfigError) as raised:
        built(mesh, tokens, flags)
    return str(raised.value)


@pytest.fixture
def running() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts programs, and ends those that a failed test leaves behind."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: Any) -> subprocess.Popen[str]:
        started.append(program(*args))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.slow
def test_torchrun_prints_a_wrong_setting_once_and_fails(running: Any, tokens: Path) -> None:
    process = running(tokens, "--tensor-model-parallel-size 2 --domino-row-slices 3", 2)
    out, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert (out + err).count("error: --domino-row-slices 3 asks for more rows") == 1
    assert "domino_lm/pretrain.py" not in err  # no traceback of ours


@pytest.mark.long
@pytest.mark.parametrize("target", ["one rank", "torchrun"])
def test_sigterm_saves_once_and_ends_all_ranks(running: Any, tokens: Path, tmp_path: Path, target: str) -> None:
    process = running(tokens, f"--tensor-model-parallel-size 2 --train-iters 100000 --eval-interval 0 --save {tmp_path}", 2)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "iteration        3/" in line:
            break
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]) if target == "one rank" else process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    text = "".join(lines) + out
    assert text.count("successfully saved checkpoint") == 1
    (saved,) = re.findall(r"saving checkpoint at iteration +(\d+)", text)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == saved
    if target == "one rank":
        assert process.returncode == 0


@pytest.mark.slow
def test_the_plain_program_trains_evaluates_and_leaves_its_files(running: Any, tokens: Path, tmp_path: Path) -> None:
    flags = f"--save {tmp_path}/save --tensorboard-dir {tmp_path}/log --timeline {tmp_path}/step --domino-row-slices 2"
    process = running(tokens, flags)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "schedule  baseline, 2 rows of 1 + 1 sequences" in out
    assert len(re.findall(r"^ \[.*\] iteration +\d+/ +8 \| consumed samples", out, re.M)) == 8
    assert re.findall(r"validation loss at (.*?) \|", out) == ["iteration 4", "iteration 8"]
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert (tmp_path / "step.png").stat().st_size > 0
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "8"
    assert list((tmp_path / "log").glob("events.out.tfevents.*"))


THREADS_AFTER_MAIN = """
import os, pathlib, sys
from domino_lm.pretrain import main
code = main(sys.argv[1:])
names = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
os.write(1, f"gloo threads left: {sum('gloo' in name for name in names)}\\n".encode())  # in one piece, since ranks share the pipe
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.long
def test_no_thread_of_a_process_group_outlives_the_program(running: Any, tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(THREADS_AFTER_MAIN)
    process = running(tokens, "--tensor-model-parallel-size 2 --train-iters 3 --eval-interval 0", 2, [str(tmp_path / "program.py")])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("gloo threads left: 0") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data-path /nowhere/tokens", "/nowhere/tokens"),
        ("--load /nowhere --exit-on-missing-checkpoint", "--exit-on-missing-checkpoint"),
        ("--vocab-size 50", "50"),
        ("--save /proc/nowhere", "--save /proc/nowhere cannot be written"),
        ("--split 0,1,0", "--split"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 does not divide the 1 ranks"),
        (
            "--data-path TOKENS TOKENS --train-iters 800",
            "6,400 are needed, and without weights each source is read once: lower --train-iters",
        ),
        ("--data-path TOKENS TOKENS --eval-iters 100", "the valid data holds"),
    ],
)
def test_a_run_that_cannot_start_exits_with_one_message(tokens: Path, flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{TINY} --data-path {tokens} {flags.replace('TOKENS', str(tokens))}".split()) != 0
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert message in error
