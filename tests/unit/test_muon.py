"""Newton-Schulz against singular values, Muon's update against its formula, its plan and its price."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from domino_lm.config.arguments import parse_arguments
from domino_lm.config.settings import OptimizerConfig
from domino_lm.launch.summary import plan_of_step
from domino_lm.model.parameter import Parameter, ParameterSpec
from domino_lm.model.shapes import PartShape
from domino_lm.parallel.collectives import Communicator
from domino_lm.schedule.ops import Kind, Op
from domino_lm.schedule.passes import orthogonalize, step_templates
from domino_lm.schedule.plan import Plan
from domino_lm.schedule.validate import PlanError, validate
from domino_lm.simulate.costs import Work, cost
from domino_lm.simulate.hardware import HARDWARE, Gemm, Pass
from domino_lm.simulate.matrix_updates import MatrixUpdates
from domino_lm.simulate.memory import memory_of
from domino_lm.simulate.predict import BASELINE, Setting, named_model, planned, predict, sliced
from domino_lm.training.newton_schulz import COEFFICIENTS, orthogonal, product_dtype
from domino_lm.training.optimizer import Optimizer

CONFIG = OptimizerConfig(lr=0.03, weight_decay=0.1, optimizer="muon", clip_grad=0.0)


def random(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_singular_values(matrix: Tensor, kind: str, steps: int = 5) -> Tensor:
    """The same without a product of the matrix with itself: each singular value through the polynomials."""
    left, values, right = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    for step in range(steps):
        a, b, c = COEFFICIENTS[kind][step % len(COEFFICIENTS[kind])]
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (1, 7)])
@pytest.mark.parametrize(("kind", "steps"), [("quintic", 5), ("quintic", 7), ("simple", 5)])
def test_newton_schulz_keeps_singular_vectors_and_moves_values_by_its_polynomials(shape: tuple[int, int], kind: str, steps: int) -> None:
    matrix = random(*shape)
    torch.testing.assert_close(orthogonal(matrix, steps, COEFFICIENTS[kind]), by_singular_values(matrix, kind, steps), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "off"), [("quintic", 0.05), ("simple", 0.35)])
def test_singular_values_end_near_1(kind: str, off: float, dtype: torch.dtype) -> None:
    for shape in ((64, 32), (32, 128)):
        made = orthogonal(random(*shape, dtype=torch.float32), 5, COEFFICIENTS[kind], dtype)
        assert (torch.linalg.svdvals(made) - 1).abs().max() < off
        assert made.dtype == torch.float32


def test_a_matrix_of_zeros_stays_and_its_scale_changes_nothing() -> None:
    matrix, coefficients = random(6, 4), COEFFICIENTS["quintic"]
    assert not orthogonal(torch.zeros(6, 4), 5, coefficients).any()
    torch.testing.assert_close(orthogonal(1e-3 * matrix, 5, coefficients), orthogonal(matrix, 5, coefficients), rtol=0, atol=1e-12)


def test_a_cpu_multiplies_in_fp32_and_precision_outside_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert product_dtype(torch.zeros(2, 2), "medium") == torch.float32
    asked = []
    monkeypatch.setattr(torch, "addmm", lambda *args, **settings: asked.append(torch.get_float32_matmul_precision()) or args[0])
    before = torch.get_float32_matmul_precision()
    for tf32, inside in ((True, "high"), (False, "highest")):
        orthogonal(torch.ones(2, 2), 1, COEFFICIENTS["simple"], tf32=tf32)
        assert set(asked) == {inside}
        asked.clear()
    assert torch.get_float32_matmul_precision() == before


# --- the update


def parameters(dtype: torch.dtype = torch.float64) -> list[Parameter]:
    """A weight that holds two groups of queries, key and value [2 x (4 + 2 + 2), 6], one matrix [6, 10], a bias and an embedding."""
    specs = [
        ParameterSpec(name="embedding.word_embeddings.weight", key="e", shape=(9, 6)),
        ParameterSpec(name="layers.0.qkv.weight", key="q", layer=0, num_layers=1, shape=(16, 6), matrix_rows=(4, 2, 2)),
        ParameterSpec(name="layers.0.out.weight", key="o", layer=0, num_layers=1, shape=(6, 10)),
        ParameterSpec(name="layers.0.out.bias", key="b", layer=0, num_layers=1, shape=(6,)),
    ]
    found = [Parameter.of(random(*spec.shape, seed=i).to(dtype), spec) for i, spec in enumerate(specs)]
    for parameter in found:
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.promote_types(dtype, torch.float32))
    return found


def set_gradients(found: list[Parameter], step: int, scale: float = 1.0) -> list[Tensor]:
    for i, parameter in enumerate(found):
        parameter.main_grad.copy_(scale * random(*parameter.shape, seed=100 * step + i))
    return [parameter.main_grad.clone() for parameter in found]


def optimizer_of(found: list[Parameter], **changes: Any) -> Optimizer:
    return Optimizer(found, replace(CONFIG, **changes), Communicator.single())


FACTORS = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}


def by_formula(weight: Tensor, gradients: list[Tensor], rows: list[list[int]], nesterov: bool, mode: str) -> Tensor:
    """A weight after all steps; ``rows`` are those of each matrix that it holds."""
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.9 * momentum + 0.1 * gradient
        direction = 0.1 * gradient + 0.9 * momentum if nesterov else momentum
        update = torch.zeros_like(weight)
        for matrix in rows:
            update[matrix] = FACTORS[mode](len(matrix), weight.shape[1]) * by_singular_values(direction[matrix], "quintic")
        weight = weight - 0.03 * 0.1 * weight - 0.03 * 0.5 * update
    return weight


@pytest.mark.parametrize("nesterov", [False, True], ids=["momentum", "nesterov"])
@pytest.mark.parametrize("mode", FACTORS)
@pytest.mark.parametrize("split", [True, False], ids=["split", "fused"])
def test_updates_equal_the_formula_by_singular_values(nesterov: bool, mode: Any, split: bool) -> None:
    found = parameters()
    begin = [p.detach().clone() for p in found]
    optimizer = optimizer_of(found, muon_nesterov=nesterov, muon_scale_mode=mode, muon_split_qkv=split, muon_extra_scale_factor=0.5)
    gradients = [set_gradients(found, step) and [p.main_grad.clone() for p in found] for step in (1, 2, 3)]
    for step in (1, 2, 3):
        set_gradients(found, step)
        optimizer.step(0.03)
    queries, keys, values = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]
    rows = {1: [queries, keys, values] if split else [list(range(16))], 2: [list(range(6))]}
    for number, matrices in rows.items():
        expected = by_formula(begin[number], [step[number] for step in gradients], matrices, nesterov, mode)
        torch.testing.assert_close(found[number].detach(), expected, rtol=0, atol=1e-12)
    assert optimizer.step_count == 3


@pytest.mark.parametrize(("mode", "extra", "name"), [("shape_scaling", 1.0, "original"), ("spectral", 0.2, "match_rms_adamw")])
def test_updates_are_those_of_pytorchs_muon(mode: Any, extra: float, name: str) -> None:
    found = parameters(torch.float32)
    theirs = torch.nn.Parameter(found[2].detach().clone())
    peer = torch.optim.Muon([theirs], lr=0.03, weight_decay=0.1, momentum=0.9, nesterov=True, adjust_lr_fn=name)
    settings = {"muon_scale_mode": mode, "muon_extra_scale_factor": extra, "muon_coefficient_type": "simple", "muon_nesterov": True}
    optimizer, begin = optimizer_of(found, **settings), theirs.detach().clone()
    for step in (1, 2, 3):
        set_gradients(found, step)
        theirs.grad = found[2].main_grad.clone()
        optimizer.step(0.03)
        peer.step()
    moved = (found[2].detach() - begin).norm()
    assert (found[2].detach() - theirs).norm() < 0.02 * moved  # theirs multiplies in bf16


def test_all_other_weights_move_as_adamw_moves_them() -> None:
    mixed, plain = parameters(), parameters()
    first, second = optimizer_of(mixed), optimizer_of(plain, optimizer="adam")
    for step in (1, 2):
        for found, optimizer in ((mixed, first), (plain, second)):
            set_gradients(found, step)
            optimizer.step(0.03)
    assert all(torch.equal(mixed[i], plain[i]) for i in (0, 3))
    assert [list(kept) for kept in first.kept] == [
        ["exp_avg", "exp_avg_sq"],
        ["momentum_buffer"],
        ["momentum_buffer"],
        ["exp_avg", "exp_avg_sq"],
    ]


def test_clipping_scales_what_momentum_takes_in() -> None:
    plain, clipped = parameters(), parameters()
    first, second = optimizer_of(plain), optimizer_of(clipped, clip_grad=0.5)
    set_gradients(plain, 1)
    norm = float(first.gradient_norm())
    set_gradients(clipped, 1)
    first.step(0.03)
    assert float(second.step(0.03).grad_norm) == pytest.approx(norm)
    for one, other in zip(first.moments["momentum_buffer"], second.moments["momentum_buffer"], strict=True):
        torch.testing.assert_close(other, one * 0.5 / norm, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    found = parameters()
    optimizer = optimizer_of(found, muon_nesterov=True)
    set_gradients(found, 1)
    optimizer.step(0.03)
    before = [t.clone() for t in (*map(torch.Tensor.detach, found), *(m for kept in optimizer.kept for m in kept.values()))]
    set_gradients(found, 2)
    found[1].main_grad[0, 0] = bad
    assert optimizer.step(0.03).found_inf == 1
    after = [*map(torch.Tensor.detach, found), *(m for kept in optimizer.kept for m in kept.values())]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert optimizer.step_count == 1


def test_masters_of_narrow_weights_move_and_are_rounded_into_them() -> None:
    narrow, wide = parameters(torch.bfloat16), parameters(torch.float32)
    for one, other in zip(narrow, wide, strict=True):
        other.data.copy_(one)
    first, second = optimizer_of(narrow), optimizer_of(wide)
    for step in (1, 2):
        for found, optimizer in ((narrow, first), (wide, second)):
            set_gradients(found, step)
            optimizer.step(0.03)
    for piece, weight in zip(first.pieces, wide, strict=True):
        assert torch.equal(piece.main, weight)
        assert torch.equal(piece.parameter, weight.to(torch.bfloat16))


# --- the plan and its price

MUON = MatrixUpdates()


def setting_of(matrices: MatrixUpdates | None = MUON, **changes: Any) -> Setting:
    model = named_model("debug-llama", num_layers=2, vocab_size=512)
    sizes = {"tensor_parallel": 2, "micro_batch_size": 2, "micro_batches": 2, **changes}
    return Setting(model=model, hardware=HARDWARE["dgx-h100"], matrices=matrices, **sizes)


def ops_of(plan: Plan) -> list[str]:
    """The step's end after the reductions."""
    texts = [str(op).partition(" ")[2] for op in plan.ops]
    return texts[texts.index("momentumS0.*") :]


def test_matrices_are_updated_part_by_part_each_gather_behind_the_update_before() -> None:
    assert ops_of(planned(setting_of(), BASELINE)[0]) == [
        "momentumS0.*",
        "startS2.*:gather_momentum",
        "waitS2.*:gather_momentum",
        "startS4.*:gather_momentum",
        "orthogonalizeS2.*",
        "waitS4.*:gather_momentum",
        "startS6.*:gather_momentum",
        "orthogonalizeS4.*",
        "waitS6.*:gather_momentum",
        "startS8.*:gather_momentum",
        "orthogonalizeS6.*",
        "waitS8.*:gather_momentum",
        "orthogonalizeS8.*",
        "stepS0.*",
    ]


@pytest.mark.parametrize(
    "schedule", [BASELINE, sliced(2), sliced(2, sequence_parallel=True), sliced(1, domino_pair="micro-batches")], ids=lambda s: str(s)[:40]
)
def test_every_order_is_sound_and_updates_once_in_a_step(schedule: Any) -> None:
    plan, shapes = planned(setting_of(data_parallel=2), schedule)
    validate(plan)
    ops = [op for template in step_templates(plan, 3) for op in template]
    assert [op.part for op in ops if op.kind is Kind.ORTHOGONALIZE] == [2, 4, 6, 8]
    assert [op.kind for op in ops].count(Kind.MOMENTUM) == 1
    assert all(Op.parse(str(op)) == op for op in ops)
    assert all(cost(op, shapes) is not None for op in ops)


def test_a_plan_that_updates_before_all_momentum_is_there_is_refused() -> None:
    plan, _ = planned(setting_of(), BASELINE)
    update = next(op for op in plan.ops if op.kind is Kind.ORTHOGONALIZE)
    early = [update, *(op for op in plan.ops if op != update)]
    with pytest.raises(PlanError, match=r"orthogonalizeS2\.\*, reads momentum of all ranks"):
        validate(plan.with_ops(early))
    with pytest.raises(PlanError, match=r"orthogonalized S2\.0, which no earlier op writes"):
        validate(plan.with_ops(op for op in plan.ops if op != update and "S2.*:gather" not in str(op)))


def test_the_hash_tells_plans_with_and_without_muon_apart_and_leaves_those_without_as_they_were() -> None:
    without, planned_muon = planned(setting_of(None), BASELINE)[0], planned(setting_of(), BASELINE)[0]
    assert without.digest() != planned_muon.digest() != orthogonalize(without, (2, 4)).digest()
    assert "orthogonalized" not in repr(without.slicing)
    assert "momentum" not in repr(without.slicing)


LAYER = PartShape("attention", 64, "all_reduce", "all_reduce", inner=64, mid=32, attention_width=32)
"""Of one of two ranks: 64 queries and twice 32 keys and values of the unsharded model, from 64 channels."""


def test_newton_schulz_is_priced_by_its_three_products_a_step() -> None:
    square, keys = [Gemm(64, 64, 64)] * 3, [Gemm(32, 32, 64), Gemm(32, 32, 32), Gemm(32, 64, 32)]
    found = MatrixUpdates(steps=2).gemms(LAYER, 2)
    assert found == (*square * 2, *keys * 2, *keys * 2, *square * 2)
    fused = MatrixUpdates(steps=1, split_qkv=False).gemms(LAYER, 2)
    assert fused == (Gemm(64, 64, 128), Gemm(64, 64, 64), Gemm(64, 128, 64), *square)
    assert sum(gemm.flops for gemm in fused) == 2 * (2 * 64 * 64 * 128 + 64**3) + 6 * 64**3


def test_every_op_of_the_update_has_its_price() -> None:
    plan, shapes = planned(setting_of(), BASELINE)
    part = shapes.parts[2]
    own = 128 * (128 + 128 // 2)  # rows of 64 queries, 32 keys, 32 values, and 64 columns, of 128 channels
    assert (part.inner, part.mid, part.hidden) == (128, 64, 128)
    assert cost(Op.parse("m0 startS2.*:gather_momentum"), shapes) == Work(traffic="all_gather", transfer_bytes=2 * own * 4, link="tp")
    update = cost(Op.parse("m0 orthogonalizeS2.*"), shapes)
    assert update.gemms == MatrixUpdates().gemms(part, 2)
    assert update.passes == (Pass("step", 2 * own * 28 + own * 12, 10),)
    total = sum(shapes.parts[i].hidden * (shapes.parts[i].inner + shapes.parts[i].mid) for i in (2, 4, 6, 8))
    assert cost(Op.parse("m0 momentumS0.*"), shapes) == Work(passes=(Pass("step", total * 20, 10),))
    assert cost(Op.parse("m0 stepS0.*"), shapes) == Work(passes=(Pass("step", (shapes.parameters - total) * 32, 10),))
    assert memory_of(plan.ops, shapes).optimizer == 12 * (shapes.parameters - total) + 8 * total


def test_a_step_of_muon_is_predicted_longer_and_of_less_memory() -> None:
    adamw, muon = predict(setting_of(None)), predict(setting_of())
    assert muon.step_s > adamw.step_s
    assert muon.exposed_s("S") > adamw.exposed_s("S")
    assert muon.memory.optimizer < adamw.memory.optimizer


def test_a_printed_plan_says_what_is_gathered_and_what_is_updated() -> None:
    flags = (
        "--preset debug-gpt --tensor-model-parallel-size 2 --vocab-size 512 --lr 1e-3 --micro-batch-size 4 --train-iters 10 --data-path x"
    )
    text = plan_of_step(parse_arguments(f"{flags} --optimizer muon".split()), 2, "cpu")
    for remark in (
        "gradient norm, clipping, momentum of all matrices",
        "gather momentum of MLP, 512.0 KiB, 2 TP ranks, behind attention update",
        "receives momentum of attention, exposed",
        "attention: Newton-Schulz on its whole matrices, and their update",
        "optimizer of all other weights",
    ):
        assert remark in text
    layer = plan_of_step(parse_arguments(f"{flags} --optimizer muon".split()), 2, "cpu", 1)
    assert "orthogonalizeS6.*" in layer
    assert "orthogonalizeS2.*" not in layer
