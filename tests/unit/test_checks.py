"""Wrong combinations are refused before anything is built, with flags, values and the way out."""

from __future__ import annotations

import ast
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from domino_lm.config.arguments import parse_arguments
from domino_lm.config.batch_plan import global_batch_size
from domino_lm.config.settings import ConfigError, RunConfig
from domino_lm.launch import checks
from domino_lm.launch.checks import check_run
from domino_lm.model import family
from domino_lm.model.families import transformer
from domino_lm.schedule import cuts

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
        ("--model nowhere:Model", 1, ["--model nowhere:Model", "there is no module nowhere", "PYTHONPATH"]),
        ("--model Model", 1, ["--model Model does not name a class", "module:Class"]),
        ("--model os:Model", 1, ["--model os:Model: os has no Model", "docs/any-transformer.md"]),
        ("--model os:getcwd", 1, ["--model os:getcwd: getcwd is no subclass of domino_lm.model.family.Family", "docs/any-transformer.md"]),
        ("--model domino_lm.model.family:Family", 1, ["Family lacks shapes and stack", "docs/any-transformer.md"]),
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
        ("--bf16 --fp16", 1, ["--bf16", "--fp16", "leave one out"]),
        ("--loss-scale 128", 1, ["--loss-scale 128", "fp32", "--fp16"]),
        ("--fp16 --loss-scale 0", 1, ["--loss-scale 0.0 must be above 0"]),
        ("--fp16 --initial-loss-scale 2 --min-loss-scale 4", 1, ["--min-loss-scale 4", "--initial-loss-scale 2"]),
        ("--grad-reduce-in-bf16", 1, ["--grad-reduce-in-bf16", "--bf16"]),
        ("--fp16 --main-grads-dtype bf16", 1, ["--main-grads-dtype bf16", "--bf16"]),
        ("--bf16 --main-params-dtype fp16", 1, ["--main-params-dtype fp16", "1/2048"]),
        ("--exp-avg-dtype fp16", 1, ["--exp-avg-dtype fp16", "6e-8", "bf16 or fp32"]),
        ("--exp-avg-sq-dtype bf16", 1, ["--exp-avg-sq-dtype bf16", "--adam-beta2 0.999", "at most 0.96875"]),
        ("--min-lr 1", 1, ["--min-lr 1.0", "--lr 0.001"]),
        ("--lr-warmup-iters 10", 1, ["--lr-warmup-iters 10", "10 iterations"]),
        ("--lr-warmup-iters 1 --lr-warmup-fraction 0.1", 1, ["--lr-warmup-fraction", "--lr-warmup-iters 1"]),
        ("--lr nan", 1, ["--lr nan"]),
        ("--lr 0", 1, ["--lr 0.0 must be above 0"]),
        ("--hidden-dropout 1", 1, ["--hidden-dropout 1.0", "below 1"]),
        ("--micro-batch-size 0", 1, ["--micro-batch-size 0"]),
        ("--tokenizer-type GPT2BPETokenizer", 1, ["GPT2BPETokenizer", "--vocab-file and --merge-file"]),
        ("--eod-mask-loss", 1, ["--eod-mask-loss", "--tokenizer-type"]),
        ("--decoupled-lr 1e-5 --min-lr 1e-4", 1, ["--min-lr 0.0001", "--decoupled-lr 1e-05", "lower --decoupled-min-lr"]),
        ("--decoupled-lr 1e-5 --decoupled-min-lr 1e-4", 1, ["--decoupled-min-lr 0.0001", "--decoupled-lr 1e-05"]),
        ("--decoupled-lr 1e-5 --lr-warmup-init 1e-4", 1, ["--lr-warmup-init 0.0001", "--decoupled-lr 1e-05"]),
        ("--start-weight-decay 0.1", 1, ["--start-weight-decay 0.1", "--weight-decay-incr-style linear or cosine"]),
        ("--end-weight-decay 0.1 --weight-decay-incr-style linear", 1, ["--weight-decay-incr-style linear", "give both"]),
        (
            "--start-weight-decay 0 --end-weight-decay 0.1 --weight-decay-incr-style linear --cuda-graph",
            1,
            ["--weight-decay-incr-style linear", "--cuda-graph", "leave one out"],
        ),
        ("--optimizer sgd --apex-optimizer", 1, ["--apex-optimizer", "--optimizer sgd", "leave one out"]),
        ("--optimizer sgd --exp-avg-dtype bf16", 1, ["--exp-avg-dtype bf16", "--optimizer sgd"]),
        ("--optimizer muon --use-distributed-optimizer", 2, ["--optimizer muon", "--use-distributed-optimizer", "leave one out"]),
        (
            "--optimizer muon --data-parallel-sharding-strategy optim_grads",
            2,
            ["--optimizer muon", "--data-parallel-sharding-strategy", "leave one out"],
        ),
        ("--optimizer muon --cuda-graph", 1, ["--cuda-graph", "--optimizer muon", "leave one out"]),
        ("--muon-num-ns-steps 0", 1, ["--muon-num-ns-steps 0", "above 0"]),
        ("--sgd-momentum 1", 1, ["--sgd-momentum 1.0", "below 1"]),
        ("--iterations-to-skip 3 0", 1, ["--iterations-to-skip 0", "from 1"]),
        ("--skip-train --eval-iters 0", 1, ["--skip-train", "--eval-iters 0"]),
        ("--eval-micro-batch-size 3", 1, ["--global-batch-size 2", "--eval-micro-batch-size 3", "--eval-global-batch-size 3"]),
        ("--eval-global-batch-size 5", 1, ["--eval-global-batch-size 5", "--micro-batch-size 2", "--eval-global-batch-size 4 or 6"]),
        ("--rotary-seq-len-interpolation-factor 2", 1, ["--rotary-seq-len-interpolation-factor", "--position-embedding-type rope"]),
        ("--tokenizer-type NullTokenizer --tokenizer-hf-no-include-special-tokens", 1, ["no meaning", "HuggingFaceTokenizer"]),
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
        ("--no-save-optim", 1, ["--no-save-optim", "give --save"]),
        ("--keep-last 2", 1, ["--keep-last", "give --save"]),
        ("--save x --save-interval 10 --save-retain-interval 25", 1, ["--save-retain-interval 25", "--save-interval 10", "a multiple"]),
        ("--ckpt-step 0", 1, ["--ckpt-step 0 must be above 0"]),
        ("--use-checkpoint-opt_param-scheduler", 1, ["--use-checkpoint-opt-param-scheduler", "give --load"]),
        ("--load x --use-checkpoint-opt_param-scheduler --override-opt_param-scheduler", 1, ["from either side", "leave one out"]),
        ("--use-rope-scaling", 1, ["--use-rope-scaling", "--position-embedding-type rope"]),
        ("--exit-on-missing-checkpoint", 1, ["--exit-on-missing-checkpoint", "--load"]),
        ("--split 0,1,1", 1, ["--split 0,1,1", "first number must be above 0"]),
        ("--split 90,-1", 1, ["--split '90,-1'", "969,30,1"]),
        ("--split 0,0,0", 1, ["--split '0,0,0'", "above 0"]),
        ("--mock-data", 1, ["--data-path and --mock-data", "give one of"]),
        ("--train-data-path y", 1, ["--data-path and --train-data-path", "give one of"]),
        ("--data-path 1 x two y", 1, ["--data-path", "two"]),
        ("--no-data-sharding", 1, ["--no-data-sharding", "--dataloader-type cyclic"]),
        ("--tokenizer-model t.model", 1, ["--tokenizer-model t.model", "give --tokenizer-type"]),
        ("--train-samples 1", 1, ["--train-samples", "--train-iters"]),
        ("--lr-warmup-init 2", 1, ["--lr-warmup-init 2.0", "--lr 0.001"]),
        ("--global-batch-size 8 --rampup-batch-size 16 2 10", 1, ["--rampup-batch-size 16 2 10", "does not reach", "8"]),
        ("--swiglu --hidden-size 4 --num-attention-heads 1", 1, ["--swiglu", "MLP of width 0", "--ffn-hidden-size"]),
        ("--num-workers -1", 1, ["--num-workers -1 must be 0 or more"]),
        ("--eval-iters -1", 1, ["--eval-iters -1 must be 0 or more; --full-validation evaluates on the whole validation split"]),
        ("--high-priority-stream-groups tp pp", 1, ["--high-priority-stream-groups pp", "tp and dp"]),
        ("--cuda-graph --domino-pair micro-batches", 2, ["--cuda-graph", "--domino-pair micro-batches", "row-groups"]),
        ("--overlap-param-gather", 2, ["--overlap-param-gather", "--use-distributed-optimizer"]),
        (
            "--use-distributed-optimizer --data-parallel-sharding-strategy no_shard",
            2,
            ["--use-distributed-optimizer", "--data-parallel-sharding-strategy no_shard", "leave one out"],
        ),
        ("--cuda-graph --data-parallel-sharding-strategy optim_grads", 2, ["--cuda-graph", "optim_grads", "use optim"]),
        ("--cuda-graph --use-distributed-optimizer --overlap-param-gather", 2, ["--cuda-graph", "--overlap-param-gather", "leave one out"]),
        ("--cuda-graph --cuda-graph-warmup-steps 0", 1, ["--cuda-graph-warmup-steps 0", "at least one step"]),
    ],
)
def test_a_wrong_combination_names_flags_values_and_the_way_out(flags: str, world_size: int, names: list[str]) -> None:
    message = faults(flags, world_size)
    assert [name for name in names if name not in message] == [], message


APART = "--preset gpt3-125m --lr 1e-3 --micro-batch-size 2"


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--train-iters 1 --valid-data-path y", ["leave out training", "--train-data-path"]),
        ("--train-iters 1 --train-data-path y --split 9,1,0", ["--split 9,1,0", "leave --split out"]),
        ("--data-path x", ["--train-iters or --train-samples", "neither is given"]),
        ("--train-iters 1 --data-path x", ["the vocabulary size is unknown", "--tokenizer-type", "--vocab-size"]),
        ("--train-iters 1 --data-path x --tokenizer-type NullTokenizer", ["NullTokenizer also needs --vocab-size"]),
        ("--data-path x --train-samples 1", ["--train-samples 1", "one batch of 2"]),
        ("--data-path x --train-samples 9 --lr-decay-iters 5", ["--lr-decay-iters 5", "use --lr-decay-samples"]),
        ("--data-path x --train-samples 9 --lr-decay-style WSD", ["--lr-wsd-decay-samples"]),
        ("--train-iters 1", ["no flag says where the data is", "--data-path"]),
    ],
)
def test_a_run_without_data_or_length_is_refused(flags: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        check_run(parse_arguments(f"{APART} {flags}".split()), 1)
    assert [name for name in names if name not in str(raised.value)] == [], str(raised.value)


def test_every_refusal_in_the_source_has_a_case_here() -> None:
    """Runs the cases of this file and looks which of the source's refusals they reach."""
    sources = {module.__file__: Path(module.__file__).read_text() for module in (checks, cuts, family, transformer)}
    refusals = {(file, node.lineno) for file, text in sources.items() for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Yield)}
    cases = [
        (f"{BASE} {flags}", world_size) for flags, world_size, _ in cases_of(test_a_wrong_combination_names_flags_values_and_the_way_out)
    ]
    cases += [(f"{APART} {flags}", 1) for flags, _ in cases_of(test_a_run_without_data_or_length_is_refused)]
    runs = [(parse_arguments(flags.split()), world_size) for flags, world_size in cases]
    reached: set[tuple[str, int]] = set()

    def watch(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in sources:
            return None
        if event == "line":
            reached.add((frame.f_code.co_filename, frame.f_lineno))
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        for settings, world_size in runs:
            with suppress(ConfigError):
                check_run(settings, world_size)
    finally:
        sys.settrace(before)
    assert [f"{file}:{line}: {sources[file].splitlines()[line - 1].strip()}" for file, line in sorted(refusals - reached)] == []


def cases_of(test: Any) -> list[Any]:
    """Arguments of a parametrized test."""
    (mark,) = test.pytestmark
    return list(mark.args[1])


def test_the_data_and_the_vocabulary_must_be_named() -> None:
    with pytest.raises(ConfigError) as raised:
        check_run(parse_arguments("--preset gpt3-125m --lr 1 --micro-batch-size 1 --train-iters 1".split()), 1)
    assert "--data-path" in str(raised.value)
    assert "--tokenizer-type" in str(raised.value)


def test_every_fault_is_listed_at_once() -> None:
    message = faults("--tensor-model-parallel-size 3 --domino-row-slices 5 --no-save-optim", 3)
    assert message.startswith("4 settings cannot work:")
    assert all(flag in message for flag in ("--num-attention-heads 4", "MLP width 512", "--domino-row-slices 5", "--no-save-optim"))


def test_numbers_out_of_range_do_not_hide_other_faults() -> None:
    message = faults("--eval-iters -1 --num-layers 0 --bf16 --fp16")
    assert message.startswith("3 settings cannot work:")
    assert all(text in message for text in ("--eval-iters -1 must", "--num-layers 0 must", "--bf16 and --fp16"))


def test_the_batch_defaults_to_one_micro_batch_a_replica() -> None:
    assert global_batch_size(run("--tensor-model-parallel-size 2"), 8) == 2 * 4
