"""What a run says of itself before it starts."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from domino_lm.arguments import parse_arguments
from domino_lm.config import ModelConfig, RunConfig
from domino_lm.model.stack import build_stack
from domino_lm.parallel.collectives import Communicator
from domino_lm.presets import PRESETS
from domino_lm.pretrain import main
from domino_lm.summary import RunSummary, memory_estimate, parameter_count, without_effect
from tests.unit.published_sizes import PUBLISHED

BASE = "--lr 1e-3 --micro-batch-size 2 --train-iters 10 --data-path x"


def run(flags: str) -> RunConfig:
    return parse_arguments(f"{BASE} {flags}".split())


@pytest.mark.parametrize("preset", ["debug-gpt", "debug-llama"])
def test_the_told_parameters_are_those_of_the_model_that_is_built(preset: str) -> None:
    model = ModelConfig(**{**PRESETS[preset], "vocab_size": 1000})  # type: ignore[arg-type]
    stack = build_stack(dataclasses.replace(model, make_vocab_size_divisible_by=1), Communicator.single(), seed=0)
    assert parameter_count(model) == sum(parameter.numel() for parameter in stack.parameters())


@pytest.mark.parametrize(("preset", "vocabulary", "published"), PUBLISHED, ids=[name for name, _, _ in PUBLISHED])
def test_a_preset_has_the_published_number_of_parameters(preset: str, vocabulary: int, published: float) -> None:
    model = ModelConfig(**{**PRESETS[preset], "vocab_size": vocabulary})  # type: ignore[arg-type]
    assert parameter_count(model) == pytest.approx(published, rel=0.03)


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


def test_a_dry_run_refuses_what_a_run_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{BASE} --preset debug-gpt --tensor-model-parallel-size 3 --dry-run".split()) == 2
    assert capsys.readouterr().err.count("error: ") == 1


def test_a_dry_run_needs_no_torch() -> None:
    flags = f"{BASE} --preset debug-gpt --vocab-size 100 --dry-run".split()
    code = f"import sys; from domino_lm.pretrain import main; main({flags!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False, capture_output=True).returncode == 0
