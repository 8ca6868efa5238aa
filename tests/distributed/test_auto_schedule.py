"""`--schedule auto` on several ranks: one choice, or one refusal, for all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from domino_lm.config.arguments import parse_arguments
from domino_lm.config.settings import ConfigError, ScheduleConfig
from domino_lm.launch.auto_schedule import settle_schedule
from domino_lm.parallel.mesh import ParallelMesh
from tests.rank_pool import RankPool

FLAGS = "--preset llama2-7b --num-layers 2 --vocab-size 32000 --lr 1e-3 --train-iters 2 --micro-batch-size 4 --mock-data --schedule auto"


def settled(mesh: ParallelMesh, flags: str) -> tuple[ScheduleConfig, str]:
    run, table = settle_schedule(parse_arguments(f"{FLAGS} {flags}".split()), mesh)
    return run.schedule, table


def refused(mesh: ParallelMesh, flags: str) -> str:
    try:
        settled(mesh, flags)
    except ConfigError as error:
        return str(error)
    return ""


def test_all_ranks_take_what_rank_0_finds_fastest(ranks: Callable[[int], RankPool]) -> None:
    first, second = ranks(2).run(settled, "--tensor-model-parallel-size 2 --domino-calibration dgx-h100", tp=2)
    assert first == second
    assert first[0].schedule != "auto"
    assert "<- taken" in first[1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--domino-calibration nowhere.txt", "--domino-calibration nowhere.txt is neither known"),
        ("--domino-calibration dgx-h100 --ffn-hidden-size 800000", "--schedule auto: every schedule needs more"),
    ],
)
def test_a_refusal_reaches_every_rank(ranks: Callable[[int], RankPool], flags: str, said: str) -> None:
    assert all(said in message for message in ranks(2).run(refused, f"--tensor-model-parallel-size 2 {flags}", tp=2))
