"""What a run says of itself before it starts."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from domino_lm.config.arguments import parse_arguments
from domino_lm.config.presets import PRESETS
from domino_lm.config.settings import ModelConfig, RunConfig
from domino_lm.launch.summary import RunSummary, memory_estimate, without_effect
from domino_lm.model.build import build_stack
from domino_lm.model.families.lookup import family_of
from domino_lm.parallel.collectives import Communicator
from domino_lm.pretrain import main
from domino_lm.simulate.hardware import HARDWARE
from tests.unit.published_sizes import PUBLISHED

BASE = "--lr 1e-3 --micro-batch-size 2 --train-iters 10 --data-path x"


def run(flags: str) -> RunConfig:
    return parse_arguments(f"{BASE} {flags}".split())


@pytest.mark.parametrize("preset", ["debug-gpt", "debug-llama"])
def test_the_told_parameters_are_those_of_the_model_that_is_built(preset: str) -> None:
    model = ModelConfig(**{**PRESETS[preset], "vocab_size": 1000})  # type: ignore[arg-type]
    stack = build_stack(dataclasses.replace(model, make_vocab_size_divisible_by=1), Communicator.single(), seed=0)
    assert family_of(model).parameter_count() == sum(parameter.numel() for parameter in stack.parameters())


@pytest.mark.parametrize(("preset", "vocabulary", "published"), PUBLISHED, ids=[name for name, _, _ in PUBLISHED])
def test_a_preset_has_the_published_number_of_parameters(preset: str, vocabulary: int, published: float) -> None:
    model = ModelConfig(**{**PRESETS[preset], "vocab_size": vocabulary})  # type: ignore[arg-type]
    assert family_of(model).parameter_count() == pytest.approx(published, rel=0.03)


def test_every_kind_of_memory_and_the_layout_are_told() -> None:
    told = str(RunSummary(run("--preset llama2-70b --vocab-size 32000 --tensor-model-parallel-size 8"), 64, "cuda", "x"))
    assert "64 rank(s) = 8 tensor-parallel x 8 data-parallel; ranks 0 to 7 are the first model" in told
    assert all(f"{kind} " in told for kind in ("weights", "gradients", "optimizer", "activations"))
    assert "data-parallel reduction behind backward" in told


def test_the_estimate_counts_every_weight_four_times_and_shrinks_with_tensor_parallelism() -> None:
    one, two = (
        memory_estimate(run(f"--preset gpt3-125m --vocab-size 50257 --tensor-model-parallel-size {tp}"), tp, "cuda") for tp in (1, 2)
    )
    assert one.optimizer == one.weights + one.gradients == 2 * one.weights
    assert 1.8 < one.weights / two.weights < 2
    assert two.activations < one.activations


@pytest.mark.parametrize(
    ("flags", "weights", "gradients", "optimizer"),
    [
        ("", 4, 4, 8),
        ("--bf16", 2, 4, 12),
        ("--fp16", 2, 4, 12),
        ("--bf16 --grad-reduce-in-bf16", 2, 2, 12),
        ("--bf16 --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --adam-beta2 0.95", 2, 2, 8),
    ],
)
def test_the_estimate_counts_the_bytes_of_each_format(flags: str, weights: int, gradients: int, optimizer: int) -> None:
    whole = memory_estimate(run("--preset gpt3-125m --vocab-size 50257"), 1, "cuda")
    found = memory_estimate(run(f"--preset gpt3-125m --vocab-size 50257 {flags}"), 1, "cuda")
    unit = whole.weights / 4
    assert (found.weights, found.gradients, found.optimizer) == (weights * unit, gradients * unit, optimizer * unit)
    assert found.activations == whole.activations if not flags else found.activations < 0.8 * whole.activations


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("", "float32 on cuda"),
        ("--bf16", "bfloat16: weights, activations and tensor-parallel collectives; gradients in float32, master weights in float32"),
        ("--fp16", "dynamic loss scale from 4.29497e+09"),
        ("--fp16 --loss-scale 128", "constant loss scale 128"),
        ("--bf16 --hysteresis 3", "--hysteresis 3: no loss scale is dynamic"),
    ],
)
def test_formats_and_loss_scale_are_told(flags: str, told: str) -> None:
    assert told in str(RunSummary(run(f"--preset gpt3-125m --vocab-size 50257 {flags}"), 1, "cuda", "x"))


def test_recompute_and_sequence_parallelism_take_less_memory_by_the_estimate() -> None:
    flags = "--preset gpt3-125m --vocab-size 50257 --tensor-model-parallel-size 2"
    plain, recomputed, cut = (
        memory_estimate(run(f"{flags} {more}"), 2, "cuda").activations
        for more in ("", "--recompute-granularity full --recompute-method uniform", "--sequence-parallel")
    )
    assert recomputed < plain / 2
    assert cut < plain


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--preset debug-llama --max-position-embeddings 512", "--max-position-embeddings 512: RoPE"),
        ("--preset debug-gpt --rotary-base 5", "--rotary-base 5.0: positions are learned"),
        ("--preset debug-gpt --sequence-parallel", "--sequence-parallel True: one tensor-parallel rank"),
        ("--preset debug-gpt --ddp-bucket-size 5", "--ddp-bucket-size 5: a single replica"),
        ("--preset debug-gpt --timeline-iteration 5", "--timeline-iteration 5: --timeline names no file"),
        ("--preset debug-gpt --lr-decay-style constant --min-lr 1e-4", "--min-lr 0.0001: --lr-decay-style constant"),
    ],
)
def test_a_setting_without_effect_is_told_with_the_reason(flags: str, named: str) -> None:
    assert any(text.startswith(named) for text in without_effect(run(flags), 1))


def test_settings_at_their_defaults_are_not_told_as_without_effect() -> None:
    assert list(without_effect(run("--preset debug-gpt"), 1)) == []


def test_a_dry_run_says_everything_for_any_number_of_ranks_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    flags = f"--preset llama3-8b --vocab-size 128256 --tensor-model-parallel-size 8 --save {tmp_path}/new"
    assert main(f"{BASE} {flags} --dry-run".split()) == 0
    told = capsys.readouterr().out
    assert "16 rank(s) = 8 tensor-parallel x 2 data-parallel" in told
    assert "[optimizer]" in told
    assert not (tmp_path / "new").exists()


def test_attention_masks_take_memory_of_the_sequence_squared() -> None:
    def activations(flags: str) -> float:
        given = f"{BASE} --preset llama3-8b --vocab-size 128256 --tensor-model-parallel-size 8 --bf16 --global-batch-size 16 {flags}"
        return memory_estimate(parse_arguments(given.split()), 8, "cuda").activations

    plain, masked = activations(""), activations("--reset-attention-mask")
    length, layers, micro, count, heads = 8192, 32, 2, 8, 4
    read, kept, repeated = count * micro * length**2, layers * micro * length**2 * 2, layers * micro * length * 2 * heads * 128 * 2
    assert masked - plain == pytest.approx(read + kept + repeated, rel=0.1)


@pytest.mark.parametrize(
    ("flags", "said"), [("", "GEMMs in fp32 on GPUs: --bf16"), ("--tf32", "GEMMs in TF32 on GPUs"), ("--bf16", None), ("--fp16", None)]
)
def test_fp32_on_gpus_is_warned_of(
    flags: str, said: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    for backend, warned in (("nccl", said is not None), ("gloo", False)):
        assert main(f"{BASE} --preset debug-gpt --vocab-size 100 --distributed-backend {backend} {flags} --dry-run".split()) == 0
        told = capsys.readouterr().out
        assert ("warning: " in told) == warned
        assert not warned or f"warning: {said}" in told


def test_a_dry_run_says_what_auto_would_choose_and_on_which_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    flags = f"{BASE} --preset gpt3-1.3b --vocab-size 50257 --tensor-model-parallel-size 8 --schedule auto --dry-run"
    calibrated = tmp_path / "machine.json"
    HARDWARE["dgx-a100"].write_json(calibrated)
    for given, named in (
        ("", "dgx-h100 (assumed to be dgx-h100, since nothing is measured yet"),
        ("--domino-calibration dgx-b200", "dgx-b200 (as dgx-b200 says;"),
        (f"--domino-calibration {calibrated}", f"dgx-a100 (as {calibrated} says;"),
    ):
        assert main(f"{flags} {given}".split()) == 0
        told = capsys.readouterr().out
        assert f"what auto would choose on {named}" in told
        assert told.count("<- taken") == 1
        assert 'schedule = "auto"' in told


def test_a_dry_run_refuses_what_a_run_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{BASE} --preset debug-gpt --tensor-model-parallel-size 3 --dry-run".split()) == 2
    assert capsys.readouterr().err.count("error: ") == 1


def test_a_dry_run_needs_no_torch() -> None:
    flags = f"{BASE} --preset debug-gpt --vocab-size 100 --dry-run".split()
    code = f"import sys; from domino_lm.pretrain import main; main({flags!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("flags", "replicas", "bytes_of_a_weight"),
    [("", 1, 12), ("--bf16", 1, 14), ("--no-save-optim", 1, 4), ("", 4, 3), ("--use-distributed-optimizer", 2, 6)],
)
def test_the_copy_for_saves_is_counted_where_it_lies(flags: str, replicas: int, bytes_of_a_weight: float) -> None:
    settings = run(f"--preset gpt3-125m --vocab-size 50257 --save x --async-save --global-batch-size 8 {flags}")
    on_host, on_gpu = memory_estimate(settings, replicas, "cpu"), memory_estimate(settings, replicas, "cuda")
    weights = on_host.weights / settings.precision.element_bytes
    assert on_host.copy == pytest.approx(bytes_of_a_weight * weights)
    assert on_host.total == pytest.approx(on_host.weights + on_host.gradients + on_host.optimizer + on_host.activations + on_host.copy)
    assert on_gpu.copy == 0
    assert "copy for saves" in RunSummary(settings, replicas, "cpu", "x").memory()
    assert "of pinned main memory on each rank" in str(RunSummary(settings, replicas, "cuda", "x"))


def test_nothing_is_copied_for_saves_that_training_waits_for_or_that_there_are_not() -> None:
    for flags in ("--save x", "--async-save", "--save x --async-save --skip-train"):
        assert memory_estimate(run(f"--preset gpt3-125m --vocab-size 50257 {flags}"), 1, "cpu").copy == 0
