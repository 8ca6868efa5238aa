"""A soft-capped head, and a norm and a multiplier behind each branch: differentiable cores that plans handle like any other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from domino_lm.config.settings import ModelConfig, ScheduleConfig
from domino_lm.model.batch import RowContext
from domino_lm.model.head import Head
from domino_lm.model.norm import NormPart
from domino_lm.model.parameter import Parameter, ParameterFactory, ParameterSpec
from domino_lm.model.stack import Stack
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from tests.distributed.models import GPT, MODELS, SEED, autograd_gradients, float64_stack, plan_gradients, worst_difference
from tests.distributed.test_schedules import CUTS, RECOMPUTE
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
CAP = 0.5


class CappedHead(Head):
    def core(self, h: Tensor, ctx: RowContext) -> Tensor:
        return CAP * (h / CAP).tanh()  # [s, b, v/t]


class PostNorm(NormPart):
    """``norm`` with an RMSNorm of its own and a multiplier behind the branch."""

    def __init__(self, norm: NormPart, post: Parameter) -> None:
        vars(self).update(vars(norm))
        self.post = post

    def core(self, h: Tensor, ctx: RowContext) -> Tensor:
        return 0.7 * F.rms_norm(h, self.post.shape, self.post)  # [s, b, h]


def with_cores(model: ModelConfig, tp: Communicator) -> Stack:
    stack = float64_stack(model, tp)
    make = ParameterFactory(tp, SEED, torch.float64, torch.device("cpu"))

    def post(norm: NormPart) -> PostNorm:
        spec = ParameterSpec(name=f"post {norm.site}", key=f"post {norm.site}", shape=(model.hidden_size,))
        return PostNorm(norm, make.normal(spec, 1.0))

    head = CappedHead(tp, stack.head.weight, model.vocab_size)
    return Stack(stack.embedding, [(post(norm), sharded) for norm, sharded in stack.blocks], post(stack.final_norm), head)


def difference(mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig) -> tuple[float, float]:
    """Of loss and gradients under the plan, to those of plain autograd."""
    plan_loss, plan = plan_gradients(mesh, model, schedule, seed=5, build=with_cores)
    loss, autograd = autograd_gradients(mesh, model, seed=5, build=with_cores)
    return abs(plan_loss / loss - 1), worst_difference(plan, autograd)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("name", ["baseline", "rows2", "rows2_columns2", "sequence2", "row_groups", "paired"])
@pytest.mark.parametrize("model", [pytest.param(GPT, marks=pytest.mark.exhaustive), MODELS["llama"]], ids=MODELS.keys())
def test_gradients_are_those_of_autograd_on_two_ranks(ranks: Ranks, model: ModelConfig, name: str, sequence_parallel: bool) -> None:
    kept = RECOMPUTE["full" if sequence_parallel else "selective"]
    schedule = replace(CUTS[name], sequence_parallel=sequence_parallel, **kept)
    for found in ranks(2).run(difference, replace(model, hidden_dropout=0.2), schedule):
        assert max(found) < 1e-12


@pytest.mark.parametrize("name", ["baseline", "rows2", "sequence2"])
def test_gradients_are_those_of_autograd_on_one_rank(ranks: Ranks, name: str) -> None:
    (found,) = ranks(1).run(difference, GPT, replace(CUTS[name], **RECOMPUTE["full"]))
    assert max(found) < 1e-12


def same_on_any_ranks(mesh: ParallelMesh) -> float:
    """Of autograd over tensor-parallel ranks to autograd on one, where nothing is cut; the head's padding included."""
    sharded = autograd_gradients(mesh, GPT, build=with_cores)
    alone = autograd_gradients(ParallelMesh.single(torch.device("cpu")), GPT, build=with_cores)
    return max(abs(sharded[0] / alone[0] - 1), worst_difference(sharded[1], alone[1]))


def test_a_core_of_the_head_sees_the_logits_whatever_ranks_hold_them(ranks: Ranks) -> None:
    assert max(ranks(2).run(same_on_any_ranks)) < 1e-12


def test_a_core_changes_the_model(ranks: Ranks) -> None:
    (capped,), (plain,) = (ranks(1).run(_loss, cores) for cores in (True, False))
    assert abs(capped / plain - 1) > 1e-3


def _loss(mesh: ParallelMesh, cores: bool) -> float:
    return autograd_gradients(mesh, GPT, build=with_cores if cores else float64_stack)[0]
