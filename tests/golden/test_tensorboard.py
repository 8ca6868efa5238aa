"""TensorBoard holds what Megatron's own event file holds: the same tags, steps and values, on one rank and on two; others have a / in theirs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from domino_lm.model.build import build_stack
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.training.trainer import Trainer
from domino_lm.watch.watch import Watch
from tests.golden.model_files import load_arrays, load_weights
from tests.golden.test_curves import STEPS, GoldenSamples, settings
from tests.rank_pool import RankPool

EVENTS = json.loads((Path(__file__).parent / "model" / "megatron_tensorboard.json").read_text())
TIMES = {"throughput", "iteration-time"}
ROUNDING = {"num-zeros"}
"""Gradient entries that are 0 by rounding alone differ by machine; LLaMA's are whole rows of tokens that do not occur."""


def record(mesh: ParallelMesh, kind: str, folder: Path) -> None:
    run = settings(kind, "two rows", mesh.tp.size)
    logging = dataclasses.replace(
        run.logging, tensorboard_dir=str(folder), log_throughput=True, log_params_norm=True, log_num_zeros_in_grad=True
    )
    run = dataclasses.replace(run, logging=logging)
    stack = build_stack(run.model, mesh.tp, seed=0)
    load_weights(stack, load_arrays(f"{kind}_tp1")["state_dict"], mesh.tp)
    trainer = Trainer(run, mesh, stack, data=None, console=lambda line: None)  # type: ignore[arg-type]
    watch = Watch(run, trainer.console, mesh.world, mesh.device, STEPS, 0, 0)
    samples: Any = GoldenSamples(kind, mesh)
    for _ in range(STEPS):
        watch.step(trainer.step(samples)[0])
    watch.close()


@pytest.mark.parametrize(
    ("kind", "world"),
    [("gpt", 1), ("llama", 2), *(pytest.param(*other, marks=pytest.mark.exhaustive) for other in (("gpt", 2), ("llama", 1)))],
)
def test_every_tag_step_and_value_is_megatrons(ranks: Callable[[int], RankPool], tmp_path: Path, kind: str, world: int) -> None:
    ranks(world).run(record, kind, tmp_path, tp=world)
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"] if "/" not in tag}
    expected = EVENTS[kind]["scalars"]
    assert sorted(found) == sorted(expected)
    for tag, points in expected.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in points], tag
        if tag in TIMES or (kind == "gpt" and tag.split(" vs ")[0] in ROUNDING):
            continue
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in points], rel=2e-5), tag
