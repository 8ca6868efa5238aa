"""Wrong combinations are refused before anything is built, with flags, values and the way out."""

from __future__ import annotations

import pytest

from domino_lm.arguments import parse_arguments
from domino_lm.checks import check_run, global_batch_size
from domino_lm.config import ConfigError, RunConfig

BASE = "--preset debug-gpt --lr 1e-3 --micro-batch-size 2 --train-iters 10 --data-path x --vocab-size 100"


def run(flags: str = "") -> RunConfig:
    return parse_arguments(f"{BASE} {flags}".split())


def faults(flags: str, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as raised:
        check_run(run(flags), world_size)
    return str(raised.value)


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2", "--preset debug-llama --tensor-model-parallel-size 2"])
def test_sound_settings_pass(flags: str) -> None:
    check_run(run(flags), 2)


@pytest.mark.parametrize(
    ("flags", "world_size", "names"),
    [
        ("--tensor-model-parallel-size 2", 3, ["--tensor-model-parallel-size 2", "3 ranks", "use 1 or 3", "a multiple of 2 ranks"]),
        ("--tensor-model-parallel-size 3", 3, ["--tensor-model-parallel-size 3", "--num-attention-heads 4", "1, 2 or 4"]),
        ("--preset debug-llama --tensor-model-parallel-size 4", 4, ["--num-query-groups 2", "1 or 2"]),
        ("--group-query-attention --num-query-groups 3", 1, ["--num-query-groups 3", "--num-attention-heads 4"]),
        ("--num-query-groups 2", 1, ["--num-query-groups", "--group-query-attention"]),
        ("--hidden-size 130", 1, ["--hidden-size 130", "--num-attention-heads 4", "--kv-channels"]),
        ("--tensor-model-parallel-size 2 --ffn-hidden-size 129", 2, ["MLP width 129", "--ffn-hidden-size", "multiple of 2"]),
        ("--global-batch-size 10", 4, ["--global-batch-size 10", "--micro-batch-size 2", "data-parallel size 4 = 8", "8 or 16"]),
        ("--domino-row-slices 3", 1, ["--domino-row-slices 3", "--micro-batch-size 2", "at most 2"]),
        ("--domino-row-slices 2 --schedule baseline", 1, ["--domino-row-slices 2", "--schedule baseline"]),
        ("--domino-column-slices 2 --schedule baseline", 1, ["--domino-column-slices 2", "--schedule baseline"]),
        ("--schedule auto --domino-row-slices 2", 2, ["--domino-row-slices 2", "--schedule auto", "chooses the cut"]),
        ("--domino-calibration x.json", 2, ["--domino-calibration x.json", "--schedule auto"]),
        ("--domino-column-slices 3", 1, ["--domino-column-slices 3", "--hidden-size 128", "1, 2, 4"]),
        ("--domino-row-dim sequence --domino-row-slices 999", 1, ["999 rows", "--seq-length", "or fewer"]),
        ("--micro-batch-size 1 --domino-pair row-groups", 2, ["--domino-pair row-groups", "--micro-batch-size 1", "micro-batches"]),
        ("--sequence-parallel --tensor-model-parallel-size 2 --seq-length 127", 2, ["--sequence-parallel", "127", "multiple of 2"]),
        ("--recompute-method block", 1, ["--recompute-method", "--recompute-granularity full"]),
        ("--recompute-granularity full", 1, ["--recompute-method uniform", "block"]),
        ("--recompute-granularity full --recompute-method block", 1, ["--recompute-num-layers from 1 to"]),
        ("--seq-length 256 --max-position-embeddings 128", 1, ["--seq-length 256", "--max-position-embeddings 128", "at least 256"]),
        ("--position-embedding-type rope --kv-channels 3", 1, ["rope", "--kv-channels"]),
        ("--min-lr 1", 1, ["--min-lr 1.0", "--lr 0.001"]),
        ("--lr-warmup-iters 10", 1, ["--lr-warmup-iters 10", "10 iterations"]),
        ("--lr-warmup-iters 1 --lr-warmup-fraction 0.1", 1, ["--lr-warmup-fraction", "--lr-warmup-iters 1"]),
        ("--lr nan", 1, ["--lr nan"]),
        ("--lr 0", 1, ["--lr 0.0 must be above 0"]),
        ("--hidden-dropout 1", 1, ["--hidden-dropout 1.0", "below 1"]),
        ("--micro-batch-size 0", 1, ["--micro-batch-size 0"]),
        ("--tokenizer-type GPT2BPETokenizer", 1, ["GPT2BPETokenizer", "--vocab-file and --merge-file"]),
        ("--eod-mask-loss", 1, ["--eod-mask-loss", "--tokenizer-type"]),
        ("--save-interval 5", 1, ["--save-interval 5", "--save"]),
        ("--train-samples 10", 1, ["--train-iters or --train-samples", "both are given"]),
        ("--lr-warmup-samples 8", 1, ["--lr-warmup-samples 8", "--train-iters", "use --lr-warmup-iters"]),
        ("--lr-decay-style WSD", 1, ["WSD", "--lr-wsd-decay-iters"]),
        ("--lr-wsd-decay-iters 3", 1, ["--lr-wsd-decay-iters", "WSD", "cosine"]),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 11", 1, ["--lr-wsd-decay-iters 11", "10 iterations"]),
        ("--lr-warmup-fraction 1.5", 1, ["--lr-warmup-fraction 1.5", "below 1"]),
        ("--rampup-batch-size 2 2", 1, ["--rampup-batch-size 2 2", "three numbers"]),
        ("--global-batch-size 8 --rampup-batch-size 2 4 10", 1, ["--rampup-batch-size 2 4 10", "--global-batch-size 8"]),
        ("--global-batch-size 8 --rampup-batch-size 2 2 10", 2, ["--rampup-batch-size 2 2 10", "= 4"]),
        ("--manual-gc-interval 5", 1, ["--manual-gc-interval 5", "--manual-gc"]),
        ("--exit-duration-in-mins 0", 1, ["--exit-duration-in-mins 0.0 must be above 0"]),
        ("--peak-tflops 0", 1, ["--peak-tflops 0.0 must be above 0"]),
        ("--finetune", 1, ["--finetune", "--load"]),
        ("--exit-on-missing-checkpoint", 1, ["--exit-on-missing-checkpoint", "--load"]),
    ],
)
def test_a_wrong_combination_names_flags_values_and_the_way_out(flags: str, world_size: int, names: list[str]) -> None:
    message = faults(flags, world_size)
    assert [name for name in names if name not in message] == [], message


def test_the_data_and_the_vocabulary_must_be_named() -> None:
    with pytest.raises(ConfigError) as raised:
        check_run(parse_arguments("--preset debug-gpt --lr 1 --micro-batch-size 1 --train-iters 1".split()), 1)
    assert "--data-path" in str(raised.value)
    assert "--tokenizer-type" in str(raised.value)


def test_every_fault_is_listed_at_once() -> None:
    message = faults("--tensor-model-parallel-size 3 --domino-row-slices 5 --save-interval 2", 3)
    assert message.startswith("4 settings cannot work:")
    assert all(flag in message for flag in ("--num-attention-heads 4", "MLP width 512", "--domino-row-slices 5", "--save-interval 2"))


def test_the_batch_defaults_to_one_micro_batch_a_replica() -> None:
    assert global_batch_size(run("--tensor-model-parallel-size 2"), 8) == 2 * 4
