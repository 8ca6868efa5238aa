"""Muon on several ranks: one update whatever the layout, whole runs, checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from domino_lm.checkpoint.convert.conversion import convert, open_stored
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.megatron_distributed import COMMON_FILE
from domino_lm.checkpoint.record import STATE_FILE
from domino_lm.config.settings import ModelConfig, OptimizerConfig, ScheduleConfig
from domino_lm.launch.summary import RunSummary, memory_estimate
from domino_lm.model.parameter_groups import is_layer_matrix, layer_matrices
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.prepare import prepare_plan
from domino_lm.simulate.hardware import HARDWARE
from domino_lm.simulate.matrix_updates import MatrixUpdates
from domino_lm.simulate.predict import Setting, planned
from domino_lm.training.optimizer import Optimizer, Rates
from domino_lm.training.planned_muon import PlannedMuon
from domino_lm.training.trainer import Trainer
from tests.distributed.models import GPT, LLAMA, MICRO_BATCH, float64_stack, micro_batches
from tests.distributed.test_any_transformer import MODEL as PAGE
from tests.distributed.test_any_transformer import page_stack, save_page
from tests.distributed.training_runs import built, configure, steps, write_tokens
from tests.documents import attempt, commands_for
from tests.rank_pool import RankPool

Ranks = Callable[[int], RankPool]
MESH = ParallelMesh.single(torch.device("cpu"))
CONFIG = OptimizerConfig(lr=0.02, weight_decay=0.1, optimizer="muon", muon_nesterov=True, clip_grad=0.5, adam_eps=1e-2)
"""With an epsilon that keeps AdamW from scaling up the rounding of key biases' gradients, which are 0."""

MUON = "--optimizer muon --muon-extra-scale-factor 0.2"
GROUPED = replace(LLAMA, num_attention_heads=8, num_query_groups=4, hidden_size=32)
PLAIN, ROWS = ScheduleConfig(schedule="baseline"), ScheduleConfig(domino_row_slices=2)
SEQUENCE = ScheduleConfig(domino_row_slices=2, sequence_parallel=True)


def trained(
    mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig, config: OptimizerConfig = CONFIG, by_plan: bool = True
) -> dict[str, Tensor]:
    """Unsharded weights and momentum after three steps in float64, updated by the plan's ops, or after the plan by the optimizer alone."""
    stack = page_stack(mesh.tp) if model.model else float64_stack(model, mesh.tp)
    matrices = layer_matrices(stack.parts)
    plan, gradients = prepare_plan(stack, mesh, schedule, MICRO_BATCH, model.seq_length, whole_matrices=tuple(matrices) if by_plan else ())
    optimizer = Optimizer(stack.parameters(), config, mesh.tp, matrix_parts=matrices)
    rates = Rates(config.lr)

    def step(loss_sum: Tensor) -> list[Tensor]:
        info = optimizer.finish(rates) if by_plan else optimizer.step(rates)
        return [info.grad_norm]

    by_ops = PlannedMuon(optimizer, lambda loss_sum: torch.zeros(()), lambda: rates)
    executor = Executor(plan, stack, mesh, gradients, step, matrices=by_ops if by_plan else None)
    for iteration in range(3):
        executor.run_step(micro_batches(mesh.dp), iteration)
    tensors = {f"weight {p.spec.name}": (p, p.detach()) for p in stack.parameters()}
    for piece, kept in zip(optimizer.pieces, optimizer.kept, strict=True):
        tensors |= {f"{name} {piece.parameter.spec.name}": (piece.parameter, moment) for name, moment in kept.items()}
    return {
        name: p.spec.unshard(list(mesh.tp.all_gather_start(tensor.contiguous()).wait().unbind()))[: p.spec.vocab_rows]
        for name, (p, tensor) in tensors.items()
    }


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture(autouse=True)
def _model_of_your_own() -> None:
    save_page()


@pytest.mark.parametrize(
    ("model", "schedule", "tp"),
    [
        (GPT, ROWS, 2),
        (GROUPED, SEQUENCE, 2),
        (PAGE, PLAIN, 2),
        pytest.param(GROUPED, PLAIN, 4, marks=pytest.mark.exhaustive),
        pytest.param(LLAMA, PLAIN, 2, marks=pytest.mark.exhaustive),
    ],
    ids=["gpt-rows", "grouped-sequence-parallel", "model-of-your-own", "grouped-4", "llama-baseline"],
)
def test_an_update_does_not_depend_on_tensor_parallelism(ranks: Ranks, model: ModelConfig, schedule: ScheduleConfig, tp: int) -> None:
    alone = trained(MESH, model, replace(schedule, sequence_parallel=False))
    for found in ranks(tp).run(trained, model, schedule, tp=tp):
        assert_equal(found, alone)


@pytest.mark.parametrize("changes", [{"muon_split_qkv": False}, {"muon_scale_mode": "unit_rms_norm"}], ids=["fused", "rms"])
def test_nor_do_its_variants(ranks: Ranks, changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    alone, usual = trained(MESH, GROUPED, PLAIN, config), trained(MESH, GROUPED, PLAIN)
    name = "weight decoder.layers.0.self_attention.linear_qkv.weight"
    assert (alone[name] - usual[name]).abs().max() > 1e-4
    for found in ranks(2).run(trained, GROUPED, PLAIN, config, tp=2):
        assert_equal(found, alone)


def test_the_plans_ops_update_as_the_optimizer_alone_does(ranks: Ranks) -> None:
    for by_ops, alone in zip(ranks(2).run(trained, GPT, ROWS, tp=2), ranks(2).run(trained, GPT, ROWS, CONFIG, False, tp=2), strict=True):
        assert all(torch.equal(by_ops[name], alone[name]) for name in alone)


def test_replicas_update_alike(ranks: Ranks) -> None:
    alone = trained(MESH, GPT, PLAIN)
    for found in ranks(2).run(trained, GPT, PLAIN, tp=1):
        assert_equal(found, alone)


def plan_that_runs(mesh: ParallelMesh, model: ModelConfig, schedule: ScheduleConfig) -> str:
    stack = page_stack(mesh.tp) if model.model else float64_stack(model, mesh.tp)
    return str(prepare_plan(stack, mesh, schedule, MICRO_BATCH, model.seq_length, whole_matrices=tuple(layer_matrices(stack.parts)))[0])


@pytest.mark.parametrize("model", [GPT, PAGE], ids=["gpt", "model-of-your-own"])
def test_the_plan_that_runs_is_the_one_that_is_predicted(ranks: Ranks, model: ModelConfig) -> None:
    setting = Setting(
        model=model, hardware=HARDWARE["dgx-h100"], tensor_parallel=2, micro_batch_size=MICRO_BATCH, matrices=MatrixUpdates.of(CONFIG)
    )
    expected = str(planned(setting, SEQUENCE)[0])
    assert "orthogonalize" in expected
    assert ranks(2).run(plan_that_runs, model, SEQUENCE, tp=2) == [expected] * 2


def test_matrices_of_layers_are_muons_and_all_else_is_adamws() -> None:
    found = trained(MESH, GPT, PLAIN)
    layers = [f"decoder.layers.{i}.{name}.weight" for i in (0, 1) for name in LINEARS]
    assert {name.removeprefix("momentum_buffer ") for name in found if name.startswith("momentum")} == set(layers)
    others = {name.removeprefix("weight ") for name in found if name.startswith("weight ")} - set(layers)
    assert {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight", "decoder.layers.0.mlp.linear_fc1.bias"} <= others
    assert {name.removeprefix("exp_avg_sq ") for name in found if name.startswith("exp_avg_sq")} == others


LINEARS = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


# --- whole runs


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def losses(trainer: Trainer, count: int) -> list[float]:
    return [report.loss for report in steps(trainer, count)]


def test_a_run_learns_and_faster_than_with_weights_that_stand(tokens: Path) -> None:
    trainer = built(MESH, tokens, f"{MUON} --lr 2e-2 --hidden-dropout 0 --attention-dropout 0")
    matrices = [p for p in trainer.stack.parameters() if is_layer_matrix(p.spec)]
    before = [p.detach().clone() for p in matrices]
    found = losses(trainer, 8)
    assert found[-1] < found[0] - 1.0
    assert all((a - b).abs().mean() > 1e-3 for a, b in zip(before, matrices, strict=True))
    assert trainer.optimizer.step_count == 8


def resumed(mesh: ParallelMesh, tokens: Path, flags: str, folder: str) -> tuple[list[float], list[float]]:
    """Losses of 4 steps, and those of 2, a checkpoint and 2 more."""
    whole, first = losses(built(mesh, tokens, flags), 4), built(mesh, tokens, f"{flags} --save {folder}")
    begun = losses(first, 2)
    first.save()
    return whole, begun + losses(built(mesh, tokens, f"{flags} --load {folder}"), 2)


@pytest.mark.parametrize(
    "flags", ["--bf16 --muon-nesterov", pytest.param("--clip-grad 0.1 --lr-decay-style cosine", marks=pytest.mark.long)]
)
def test_a_run_is_resumed_to_the_bit(ranks: Ranks, tokens: Path, tmp_path: Path, flags: str) -> None:
    whole, again = resumed(MESH, tokens, f"{MUON} {flags}", str(tmp_path / "one"))
    assert again == whole
    for found, halves in ranks(2).run(resumed, tokens, f"{MUON} {flags} --no-muon-split-qkv", str(tmp_path / "two"), tp=2):
        assert halves == found


def loaded(mesh: ParallelMesh, tokens: Path, folder: str) -> list[float]:
    return losses(built(mesh, tokens, f"{MUON} --load {folder} --hidden-dropout 0 --attention-dropout 0"), 3)


def test_a_checkpoint_goes_on_in_another_layout(ranks: Ranks, tokens: Path, tmp_path: Path) -> None:
    trainer = built(MESH, tokens, f"{MUON} --save {tmp_path} --hidden-dropout 0 --attention-dropout 0")
    losses(trainer, 3)
    trainer.save()
    alone = losses(trainer, 3)
    for found in ranks(2).run(loaded, tokens, str(tmp_path), tp=2):
        assert found == pytest.approx(alone, abs=2e-5)


def test_momentum_lies_under_megatrons_keys(tokens: Path, tmp_path: Path) -> None:
    trainer = built(MESH, tokens, f"{MUON} --bf16 --save {tmp_path}")
    losses(trainer, 1)
    trainer.save()
    stored = FileSystemReader(tmp_path / "iter_0000001").read_metadata().state_dict_metadata
    found = {key.removeprefix("optimizer.state.") for key in stored if key.startswith("optimizer.state.")}
    matrices = {f"decoder.layers.{name}.weight" for name in LINEARS}
    weights = {key for key in stored if not key.startswith("optimizer.")}
    assert {key.removeprefix("momentum_buffer.") for key in found if key.startswith("momentum_buffer.")} == matrices
    for kept in ("exp_avg.", "exp_avg_sq."):
        assert {key.removeprefix(kept) for key in found if key.startswith(kept)} == weights - matrices
    assert {key.removeprefix("fp32_param.") for key in found if key.startswith("fp32_param.")} == weights
    assert open_stored(tmp_path).moments == ("exp_avg", "exp_avg_sq", "momentum_buffer")


def test_a_checkpoint_of_megatrons_chain_of_optimizers_goes_on(tokens: Path, tmp_path: Path) -> None:
    """Megatron's torch_dist holds the same tensors; the state beside them has Muon's part under 0 and AdamW's under 1."""
    trainer = built(MESH, tokens, f"{MUON} --save {tmp_path}")
    losses(trainer, 3)
    trainer.save()
    alone = losses(trainer, 2)
    folder = tmp_path / "iter_0000003"
    for name in (STATE_FILE, "domino_manifest.json", COMMON_FILE):
        (folder / name).unlink()
    adamw = {"state": {"common_step": torch.tensor(3.0)}, "param_groups": []}
    schedule = trainer.lr_schedule.state_dict()
    scheduler = {
        "max_lr": schedule["peak"],
        "lr_warmup_steps": schedule["warmup_samples"],
        "num_steps": 24,
        "lr_decay_style": schedule["style"],
        "lr_decay_steps": schedule["decay_samples"],
        "min_lr": schedule["minimum"],
        "start_wd": 0.01,
        "end_wd": 0.01,
        "wd_incr_style": "constant",
        "wd_incr_steps": schedule["decay_samples"],
    }
    chain = {0: {"state": {}, "param_groups": []}, 1: adamw}
    common = {"iteration": 3, "checkpoint_version": 3.0, "optimizer": chain, "opt_param_scheduler": scheduler, "args": None}
    torch.save({**common, "args": {"consumed_train_samples": 24}}, folder / COMMON_FILE)
    again = built(MESH, tokens, f"{MUON} --load {tmp_path} --no-mask-padded-vocab")
    again.stack.head.true_columns = trainer.stack.head.true_columns
    assert (again.iteration, again.optimizer.step_count) == (3, 3)
    assert losses(again, 2) == alone


def test_moments_of_another_optimizer_are_refused(tokens: Path, tmp_path: Path) -> None:
    trainer = built(MESH, tokens, f"{MUON} --save {tmp_path}")
    losses(trainer, 1)
    trainer.save()
    with pytest.raises(CheckpointError, match=r"moments of --optimizer muon, and this run has --optimizer adam; .*--no-load-optim"):
        built(MESH, tokens, f"--load {tmp_path}")
    with pytest.raises(CheckpointError, match=r"momentum of Muon.*--no-optimizer"):
        convert(load=tmp_path, save=tmp_path / "m", to="megatron-legacy")
    convert(load=tmp_path, save=tmp_path / "m", to="megatron-legacy", optimizer=False)
    assert open_stored(tmp_path / "m").moments == ()
    convert(load=tmp_path, save=tmp_path / "n", to="native")
    assert losses(built(MESH, tokens, f"{MUON} --load {tmp_path / 'n'}"), 2) == losses(trainer, 2)


def test_a_step_that_is_not_finite_leaves_matrices_and_momentum(tokens: Path) -> None:
    trainer = built(MESH, tokens, f"{MUON} --bf16")
    losses(trainer, 1)
    before = [
        t.clone()
        for t in (*(p.detach() for p in trainer.stack.parameters()), *(m for kept in trainer.optimizer.kept for m in kept.values()))
    ]
    norm = trainer.stack.parts[1]
    weight = next(iter(norm.parameters()))
    kept = weight.detach().clone()
    weight.data.fill_(float("inf"))
    (report,) = steps(trainer, 1)
    weight.data.copy_(kept)
    after = [*(p.detach() for p in trainer.stack.parameters()), *(m for kept in trainer.optimizer.kept for m in kept.values())]
    assert report.skipped
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_the_estimate_counts_one_moment_of_a_matrix_and_two_of_all_else(tokens: Path) -> None:
    run = configure(tokens, f"{MUON} --bf16")
    trainer = built(MESH, tokens, f"{MUON} --bf16")
    masters = sum(piece.main.nbytes for piece in trainer.optimizer.pieces)
    kept = sum(moment.nbytes for moments in trainer.optimizer.kept for moment in moments.values())
    assert memory_estimate(run, 1, "cpu").optimizer == masters + kept
    assert "Muon for the matrices of layers: momentum 0.9, 5 Newton-Schulz steps" in str(RunSummary(run, 1))


@pytest.mark.long
def test_the_command_of_the_page_learns(tmp_path: Path) -> None:
    (command,) = commands_for("test_the_command_of_the_page_learns")
    found = attempt(tmp_path, command)
    assert found.returncode == 0, found.stderr
    first, last = map(float, re.findall(r"(?:first loss|last) ([\d.]+)", found.stdout)[-2:])
    assert last < first / 2
