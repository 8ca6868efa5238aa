"""Twenty steps from Megatron's weights on Megatron's samples give Megatron's losses, learning rates and gradient norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest

from domino_lm.config.arguments import config_from_values
from domino_lm.config.settings import RunConfig
from domino_lm.model.batch import MicroBatch
from domino_lm.model.build import build_stack
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.training.trainer import Trainer
from domino_lm.watch.metrics import StepReport
from tests.golden.model_files import GOLDEN_MODELS, load_arrays, load_curves, load_weights
from tests.rank_pool import RankPool

TOLERANCE = 5e-6
MICRO_BATCH, BATCH, STEPS = 2, 8, 20
SCHEDULES: dict[str, dict[str, object]] = {"baseline": {"schedule": "baseline"}, "two rows": {"schedule": "domino", "domino_row_slices": 2}}
CUTS: dict[str, dict[str, object]] = {
    "two sequence rows": {"domino_row_dim": "sequence", "domino_row_slices": 2},
    "four sequence rows": {"domino_row_dim": "sequence", "domino_row_slices": 4, "sequence_parallel": True},
    "two columns": {"domino_row_slices": 1, "domino_column_slices": 2},
    "two rows, two columns": {"domino_row_slices": 2, "domino_column_slices": 2},
    "paired": {"domino_pair": "micro-batches", "recompute_granularity": "selective"},
    "two rows, sequence parallel": {"sequence_parallel": True, "recompute_granularity": "full", "recompute_method": "uniform"},
}
LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
KINDS = [kind for kind in GOLDEN_MODELS if kind != "gpt_erf"]  # the exact GELU differs in one function: on one and on four ranks
CASES = [*((kind, *layout) for kind in KINDS for layout in LAYOUTS), ("gpt_erf", 1, 1), ("gpt_erf", 2, 2)]
IN_TURN = [("llama", "two sequence rows"), ("llama", "two columns"), ("gpt", "two rows, sequence parallel"), ("llama", "paired")]
"""Each kind of cut with one of the models; everything else under the marker."""


def settings(kind: str, schedule: str, tp: int) -> RunConfig:
    """The run that `model/` records."""
    return config_from_values(
        {
            **asdict(replace(GOLDEN_MODELS[kind], make_vocab_size_divisible_by=128 // tp)),
            "lr": 4e-3,
            "min_lr": 4e-4,
            "lr_decay_style": "cosine",
            "lr_warmup_iters": 5,
            "adam_beta2": 0.95,
            "weight_decay": 0.1,
            "micro_batch_size": MICRO_BATCH,
            "global_batch_size": BATCH,
            "train_iters": STEPS,
            "tensor_model_parallel_size": tp,
            **{**SCHEDULES, **CUTS}[schedule],
        }
    )


class GoldenSamples:
    """Deals the recorded samples as Megatron does: micro-batch m of replica r takes 8t + m (2 DP) + 2r and the next."""

    def __init__(self, kind: str, mesh: ParallelMesh) -> None:
        files = load_arrays(f"train_{'llama' if kind == 'llama' else 'gpt'}_tp1_dp1")
        self.tokens, self.loss_mask = files["tokens"], files["loss_mask"].float()  # [160, s + 1], [160, s]
        self.mesh = mesh
        self.next = 0
        self.blocked_s = 0.0

    def take(self, count: int) -> list[MicroBatch]:
        stride = MICRO_BATCH * self.mesh.dp.size
        starts = [self.next + i * stride + MICRO_BATCH * self.mesh.dp.rank for i in range(count)]
        self.next += BATCH
        return [self._micro_batch(slice(start, start + MICRO_BATCH)) for start in starts]

    def _micro_batch(self, samples: slice) -> MicroBatch:
        tokens = self.tokens[samples].t()  # [s + 1, b]
        return MicroBatch(tokens[:-1].contiguous(), tokens[1:].contiguous(), self.loss_mask[samples].t().contiguous())


def train(mesh: ParallelMesh, kind: str, schedule: str) -> list[StepReport]:
    run = settings(kind, schedule, mesh.tp.size)
    stack = build_stack(run.model, mesh.tp, seed=0)
    start = load_arrays(f"{'llama' if kind == 'llama' else 'gpt'}_tp1")["state_dict"]
    load_weights(stack, start, mesh.tp)
    trainer = Trainer(run, mesh, stack, data=None, console=lambda line: None)  # type: ignore[arg-type]
    samples: Any = GoldenSamples(kind, mesh)
    return [trainer.step(samples)[0] for _ in range(STEPS)]


def curves_of(kind: str, tp: int, dp: int) -> dict[str, Any]:
    """Megatron's own run of this layout; of one rank where it has none, from which its layouts differ by less than 1e-6."""
    try:
        return load_curves(f"train_{kind}_tp{tp}_dp{dp}")
    except FileNotFoundError:
        return load_curves(f"train_{kind}_tp1_dp1")


@pytest.mark.parametrize(
    ("kind", "tp", "dp", "schedule"),
    [
        pytest.param(*case, schedule, marks=[] if (case[1] > 1) == (schedule == "two rows") else pytest.mark.exhaustive)
        for case in CASES
        for schedule in SCHEDULES
    ],
)
def test_twenty_steps_are_megatrons(ranks: Callable[[int], RankPool], kind: str, tp: int, dp: int, schedule: str) -> None:
    assert_megatrons(ranks, kind, tp, dp, schedule)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [*IN_TURN, *(pytest.param(kind, cut, marks=pytest.mark.exhaustive) for kind in KINDS for cut in CUTS if (kind, cut) not in IN_TURN)],
)
def test_twenty_steps_are_megatrons_under_every_cut(ranks: Callable[[int], RankPool], kind: str, schedule: str) -> None:
    assert_megatrons(ranks, kind, 2, 1, schedule)


def assert_megatrons(ranks: Callable[[int], RankPool], kind: str, tp: int, dp: int, schedule: str) -> None:
    megatron = curves_of(kind, tp, dp)
    for reports in ranks(tp * dp).run(train, kind, schedule, tp=tp):
        assert [r.loss for r in reports] == pytest.approx(megatron["lm_loss"], abs=TOLERANCE, rel=0)
        assert [r.grad_norm for r in reports] == pytest.approx(megatron["grad_norm"], abs=TOLERANCE, rel=0)
        assert [r.learning_rate for r in reports] == pytest.approx(megatron["lr_logged"], abs=1e-15, rel=0)
