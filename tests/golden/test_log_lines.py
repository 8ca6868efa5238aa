"""Log lines are Megatron's own, word for word, so that what parses its logs parses ours; numbers are those of the same run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from domino_lm.model.build import build_stack
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.training.trainer import Trainer
from domino_lm.watch.metrics import validation_line
from domino_lm.watch.watch import Watch
from tests.golden.model_files import FOLDER, load_arrays, load_weights
from tests.golden.test_curves import STEPS, GoldenSamples, settings
from tests.rank_pool import RankPool

NUMBER = r"-?\d[\d.]*(?:E[+-]\d+)?"
OF_THE_MACHINE = ("elapsed time per iteration (ms)", "throughput per GPU (TFLOP/s/GPU)")
BY_ROUNDING = ("num zeros",)
"""Gradient entries that are 0 by rounding alone differ from machine to machine."""


def lines_of(mesh: ParallelMesh, kind: str, asked_for: bool) -> list[str]:
    """What rank 0 logs of the recorded run."""
    run = settings(kind, "baseline", mesh.tp.size)
    logging = dataclasses.replace(
        run.logging, log_interval=1, log_throughput=asked_for, log_params_norm=asked_for, log_num_zeros_in_grad=asked_for
    )
    run = dataclasses.replace(run, logging=logging)
    stack = build_stack(run.model, mesh.tp, seed=0)
    load_weights(stack, load_arrays(f"{kind}_tp1")["state_dict"], mesh.tp)
    said: list[str] = []
    trainer = Trainer(run, mesh, stack, data=None, console=said.append)  # type: ignore[arg-type]
    watch = Watch(run, trainer.console, mesh.world, mesh.device, STEPS, 0, 0)
    samples: Any = GoldenSamples(kind, mesh)
    for _ in range(STEPS):
        watch.step(trainer.step(samples)[0])
    watch.close()
    return said


def recorded(name: str) -> list[str]:
    return [line for line in (FOLDER / f"megatron_log_{name}.txt").read_text().splitlines() if "| consumed samples:" in line]


def words(line: str) -> str:
    """A line with its time and its numbers left out; the spaces before numbers stay."""
    return re.sub(NUMBER, lambda match: " " * len(match[0]), re.sub(r"^ \[.*?\]", "[]", line))


def width_free(line: str) -> str:
    """The same where numbers of the machine may be of any width."""
    for name in (*OF_THE_MACHINE, *BY_ROUNDING):
        line = re.sub(re.escape(name) + rf": {NUMBER}", f"{name}: 1.0", line)
    return words(line)


def numbers(line: str) -> dict[str, list[float]]:
    """Each field's name and its numbers."""
    fields = [field.partition(":") for field in re.sub(r"^ \[.*?\]", "", line).split("|")]
    return {name.strip(): [float(number) for number in re.findall(NUMBER, value or name)] for name, _, value in fields}


@pytest.mark.parametrize(
    ("name", "kind", "world", "tp"),
    [
        ("gpt_tp1", "gpt", 1, 1),
        ("gpt_tp2", "gpt", 2, 2),
        ("gpt_tp2dp2", "gpt", 4, 2),
        ("llama_tp1", "llama", 1, 1),
        pytest.param("llama_tp2", "llama", 2, 2, marks=pytest.mark.exhaustive),
    ],
)
def test_every_line_is_megatrons(ranks: Callable[[int], RankPool], name: str, kind: str, world: int, tp: int) -> None:
    expected = recorded(name)
    found = [line for line in ranks(world).run(lines_of, kind, "num zeros" in expected[0], tp=tp)[0] if "| consumed samples:" in line]
    assert list(map(width_free, found)) == list(map(width_free, expected))
    for iteration, (mine, theirs) in enumerate(zip(found, expected, strict=True), start=1):
        datetime.strptime(mine[2 : mine.index("]")], "%Y-%m-%d %H:%M:%S.%f")
        values, wanted = numbers(mine), numbers(theirs)
        assert values.keys() - {f"iteration {iteration}/ 20"} == wanted.keys() - {f"iteration {iteration}/ 20"}
        for field in wanted.keys() - {*OF_THE_MACHINE, *BY_ROUNDING}:
            if (field, iteration) == ("lm loss", 2):
                continue  # Megatron prints the mean of its first two iterations there
            assert values[field] == pytest.approx(wanted[field], rel=0, abs=1.1e-3 if "norm" in field else 5e-6), (field, iteration)


def test_the_second_iteration_has_its_own_loss(ranks: Callable[[int], RankPool]) -> None:
    found = [numbers(line) for line in ranks(1).run(lines_of, "gpt", False)[0] if "| consumed samples:" in line]
    first, second = (line["lm loss"][0] for line in found[:2])
    assert second == pytest.approx(5.350037, abs=5e-6)
    assert (first + second) / 2 == pytest.approx(5.349748, abs=5e-6)  # what Megatron printed


def test_validation_lines_are_megatrons() -> None:
    theirs = [line for line in (FOLDER / "megatron_log_validation.txt").read_text().splitlines() if line.startswith(" validation")]
    ours = [validation_line(2, 4.641648), validation_line(3, 4.650767, "validation"), validation_line(3, 4.610137, "test")]
    assert list(map(words, ours)) == list(map(words, theirs))
    for mine, their in zip(ours, theirs, strict=True):
        assert [float(n) for n in re.findall(NUMBER, mine)] == pytest.approx([float(n) for n in re.findall(NUMBER, their)], rel=2e-6)
