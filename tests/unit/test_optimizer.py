"""AdamW from main_grad: decay groups, clipping, the norm, and what a gradient that is not finite changes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from domino_lm.config.settings import OptimizerConfig
from domino_lm.model.build import build_stack
from domino_lm.model.parameter import Parameter, ParameterSpec
from domino_lm.model.parameter_groups import Group
from domino_lm.parallel.collectives import Communicator
from domino_lm.training.loss_scale import LossScale
from domino_lm.training.optimizer import Optimizer, Rates
from tests.distributed.models import GPT
from tests.golden.model_files import load_curves

CONFIG = OptimizerConfig(lr=0.01, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, clip_grad=1.0)
SHAPES = {"matrix.weight": (6, 4), "matrix.bias": (6,), "norm.weight": (4,)}


def make_parameters(dtype: torch.dtype = torch.float64) -> list[Parameter]:
    generator = torch.Generator().manual_seed(5)
    parameters = []
    for name, shape in SHAPES.items():
        parameter = Parameter.of(torch.randn(shape, generator=generator, dtype=dtype), ParameterSpec(name=name, key=name, shape=shape))
        parameter.main_grad = torch.zeros(shape, dtype=dtype)
        parameters.append(parameter)
    return parameters


def make_optimizer(parameters: list[Parameter], **changes: Any) -> Optimizer:
    return Optimizer(parameters, dataclasses.replace(CONFIG, **changes), Communicator.single())


def set_gradients(parameters: list[Parameter], step: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.main_grad.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return [parameter.main_grad.clone() for parameter in parameters]


def by_hand(scale: float, steps: int) -> list[Tensor]:
    """Weights after clipped, decoupled AdamW, written from its formula."""
    parameters = make_parameters()
    weights = [p.detach().clone() for p in parameters]
    first, second = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    for step in range(1, steps + 1):
        gradients = set_gradients(parameters, step, scale)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        clip = min(1.0, CONFIG.clip_grad / (norm + 1e-6))
        for w, g, m, v in zip(weights, gradients, first, second, strict=True):
            m.mul_(0.9).add_(0.1 * clip * g)
            v.mul_(0.95).add_(0.05 * (clip * g).square())
            w.mul_(1 - 0.01 * (0.1 if w.dim() == 2 else 0.0))
            w.sub_(0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + CONFIG.adam_eps))
    return weights


@pytest.mark.parametrize("scale", [0.01, 10.0], ids=["unclipped", "clipped"])
def test_updates_equal_adamw_by_its_formula(scale: float) -> None:
    parameters = make_parameters()
    optimizer = make_optimizer(parameters)
    for step in (1, 2, 3):
        set_gradients(parameters, step, scale)
        optimizer.step(0.01)
    for parameter, expected in zip(parameters, by_hand(scale, steps=3), strict=True):
        # The clipping factor is kept in fp32: 1e-7 of a gradient.
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-12 if scale < 1 else 1e-8)


def test_decay_groups_are_megatrons() -> None:
    names = {True: set(), False: set()}
    for parameter in build_stack(GPT, Communicator.single(), 1).parameters():
        names[Group.of(parameter.spec.name, parameter.dim()).decays].add(parameter.spec.name)
    decaying, plain = load_curves("train_gpt_tp1_dp1")["weight_decay_groups"]
    assert names == {True: set(decaying["names"]), False: set(plain["names"])}


def test_norm_is_that_of_all_gradients_together() -> None:
    parameters = make_parameters()
    gradients = set_gradients(parameters, 1)
    expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    torch.testing.assert_close(make_optimizer(parameters).gradient_norm(), expected, rtol=1e-14, atol=0)


def test_step_reports_the_norm_before_clipping() -> None:
    parameters = make_parameters()
    gradients = set_gradients(parameters, 1, scale=100.0)
    info = make_optimizer(parameters).step(0.01)
    torch.testing.assert_close(info.grad_norm, torch.cat([g.flatten() for g in gradients]).norm(), rtol=1e-14, atol=0)


def test_clip_grad_0_clips_nothing() -> None:
    parameters = make_parameters()
    gradients = set_gradients(parameters, 1, scale=100.0)
    make_optimizer(parameters, clip_grad=0.0).step(0.01)
    assert all(torch.equal(p.main_grad, g) for p, g in zip(parameters, gradients, strict=True))


def test_a_learning_rate_of_0_moves_moments_and_no_weight() -> None:
    parameters = make_parameters()
    before = [p.detach().clone() for p in parameters]
    optimizer = make_optimizer(parameters)
    set_gradients(parameters, 1)
    optimizer.step(0.0)
    assert all(torch.equal(p.detach(), b) for p, b in zip(parameters, before, strict=True))
    assert all(moment.count_nonzero() > 0 for moment in optimizer.exp_avg)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    parameters = make_parameters(torch.float32)
    optimizer = make_optimizer(parameters)
    set_gradients(parameters, 1)
    optimizer.step(0.01)
    before = [t.clone() for t in (*map(torch.Tensor.detach, parameters), *optimizer.exp_avg, *optimizer.exp_avg_sq)]
    set_gradients(parameters, 2)
    parameters[0].main_grad[0, 0] = bad
    info = optimizer.step(0.01)
    after = [*map(torch.Tensor.detach, parameters), *optimizer.exp_avg, *optimizer.exp_avg_sq]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert (optimizer.step_count, float(info.found_inf)) == (1, 1.0)


def test_the_autograd_gradient_stays_free() -> None:
    parameters = make_parameters()
    set_gradients(parameters, 1)
    make_optimizer(parameters).step(0.01)
    assert all(parameter.grad is None for parameter in parameters)


def test_a_learning_rate_on_the_device_gives_the_same_weights() -> None:
    weights = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        parameters = make_parameters()
        set_gradients(parameters, 1)
        make_optimizer(parameters).step(lr)
        weights.append(torch.cat([p.detach().flatten() for p in parameters]))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-14, atol=0)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_gradients_of_a_scaled_loss_leave_the_moments_of_a_plain_one(clip: float) -> None:
    """Adam's update hardly depends on a factor of its gradients; its moments do, to the bit for a power of 2."""
    plain, scaled = make_parameters(), make_parameters()
    set_gradients(plain, 1)
    set_gradients(scaled, 1, 1024.0)
    first, config = make_optimizer(plain, clip_grad=clip), dataclasses.replace(CONFIG, clip_grad=clip)
    second = Optimizer(scaled, config, Communicator.single(), loss_scale=LossScale(1024.0, torch.device("cpu")))
    assert first.step(0.01).grad_norm == second.step(0.01).grad_norm
    for kept in ("exp_avg", "exp_avg_sq"):
        assert all(torch.equal(a, b) for a, b in zip(getattr(first, kept), getattr(second, kept), strict=True))


def test_a_loss_that_is_not_finite_keeps_everything_though_gradients_are() -> None:
    parameters = make_parameters()
    optimizer, before = make_optimizer(parameters), [parameter.detach().clone() for parameter in parameters]
    set_gradients(parameters, 1)
    info = optimizer.step(0.01, torch.tensor(2.0))  # on two replicas
    assert (info.found_inf, optimizer.step_count) == (1.0, 0)
    assert torch.isfinite(info.grad_norm)
    assert all(torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True))
    assert all(not moment.any() for moment in (*optimizer.exp_avg, *optimizer.exp_avg_sq))


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_equals_its_formula_with_the_decay_added_to_the_gradient(momentum: float) -> None:
    parameters = make_parameters()
    optimizer = make_optimizer(parameters, optimizer="sgd", sgd_momentum=momentum, clip_grad=0.0)
    assert list(optimizer.moments) == ["momentum_buffer"]
    weights = [p.detach().clone() for p in parameters]
    kept = [torch.zeros_like(w) for w in weights]
    for step in (1, 2, 3):
        gradients = set_gradients(parameters, step)
        optimizer.step(0.01)
        for w, g, m in zip(weights, gradients, kept, strict=True):
            m.mul_(momentum).add_(g + (0.1 if w.dim() == 2 else 0.0) * w)
            w.sub_(0.01 * m)
    for parameter, expected in zip(parameters, weights, strict=True):
        torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-12)
    assert optimizer.step_count == 3


def test_sgd_changes_nothing_on_a_gradient_that_is_not_finite() -> None:
    parameters = make_parameters()
    optimizer = make_optimizer(parameters, optimizer="sgd")
    set_gradients(parameters, 1)
    optimizer.step(0.01)
    before = [t.clone() for t in (*map(torch.Tensor.detach, parameters), *optimizer.moments["momentum_buffer"])]
    set_gradients(parameters, 2)
    parameters[0].main_grad[0, 0] = math.nan
    assert optimizer.step(0.01).found_inf == 1
    after = [*map(torch.Tensor.detach, parameters), *optimizer.moments["momentum_buffer"]]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert optimizer.step_count == 1


def named_parameters() -> list[Parameter]:
    shapes = {
        "embedding.word_embeddings.weight": (8, 4),
        "embedding.position_embeddings.weight": (5, 4),
        "decoder.layers.0.mlp.linear_fc1.weight": (6, 4),
        "decoder.layers.0.mlp.linear_fc1.bias": (6,),
        "output_layer.weight": (8, 4),
    }
    parameters = []
    for number, (name, shape) in enumerate(shapes.items()):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        parameters.append(Parameter.of(values, ParameterSpec(name=name, key=name, shape=shape)))
        parameters[-1].main_grad = torch.zeros(shape, dtype=torch.float64)
    return parameters


def test_each_group_is_updated_at_its_rate_and_its_decay() -> None:
    """As by optimizers of its own for each weight."""
    parameters, apart = named_parameters(), named_parameters()
    together = Optimizer(
        parameters, dataclasses.replace(CONFIG, decoupled_lr=1.0, clip_grad=0.0), Communicator.single(), embeddings_decay=False
    )
    singles = [Optimizer([parameter], dataclasses.replace(CONFIG, clip_grad=0.0), Communicator.single()) for parameter in apart]
    for step in (1, 2):
        set_gradients(parameters, step)
        set_gradients(apart, step)
        together.step(Rates(0.01, 0.03, 0.2))
        for single in singles:
            name = single.parameters[0].spec.name
            own = 0.03 if name.startswith(("embedding.word", "output")) else 0.01
            single.step(Rates(own, None, 0.0 if name.startswith("embedding") else 0.2))
    for parameter, expected in zip(parameters, apart, strict=True):
        torch.testing.assert_close(parameter.detach(), expected.detach(), rtol=0, atol=1e-12)
