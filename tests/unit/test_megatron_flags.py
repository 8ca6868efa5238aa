"""Megatron's own command lines: what needs no setting here is told, what is not there is refused, and the page says which is which."""

from __future__ import annotations

from pathlib import Path

import pytest

from domino_lm.config.arguments import build_parser, parse_command
from domino_lm.config.megatron_flags import MANY, classify, find, help_text, megatron_flags
from domino_lm.config.schema import settings
from domino_lm.config.settings import ConfigError
from domino_lm.launch.checks import check_run
from tests.unit.megatron_page import is_ours, page

PAGE = Path(__file__).parents[2] / "docs" / "megatron-flags.md"
REQUIRED = "--preset debug-gpt --lr 1e-3 --micro-batch-size 2 --train-iters 10"
ROWS = megatron_flags()

# Every flag of Megatron's example scripts for GPT-3 175B and Llama-3 8B, in the order of the scripts; torchrun's left out.
GPT3_175B = """
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --attention-backend auto
--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9
--adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6
--lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
--data-path data_text_document --vocab-file vocab.json --merge-file merges.txt --split 949,50,1 --log-interval 100 --save-interval 10000
--eval-interval 1000 --save checkpoints --load checkpoints --eval-iters 10 --tensorboard-dir logs
"""
LLAMA3_8B = """
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention
--num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000
--rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused
--apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1 --global-batch-size 128
--train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4
--decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
--grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
--exit-duration-in-mins 235 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --fp8-format hybrid
--fp8-amax-history-len 1024 --fp8-amax-compute-algo max --fp8-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1
--sequence-parallel --mock-data --tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2
--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32
--eval-interval 100 --save-interval 1000 --log-throughput --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
--distributed-timeout-minutes 60 --save checkpoints --load checkpoints --tensorboard-dir logs
"""


def refusals(line: str) -> list[str]:
    """What the program says against a command line, each flag's refusal apart; nothing where it is taken."""
    try:
        parse_command(line.split())
    except ConfigError as error:
        return [text.split()[0].rstrip(":") for text in str(error).split("; --")]
    return []


def test_the_page_is_made_of_the_table() -> None:
    assert page() == PAGE.read_text(), "the flags changed; if that is meant, record them: python tests/unit/test_arguments.py"


def test_help_on_megatrons_flags_says_every_row_of_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--num-layers", "2", "--help-megatron"])
    text = capsys.readouterr().out
    assert [row.flag for row in ROWS if row.flag not in text or row.why.split()[0] not in text] == []
    assert max(map(len, help_text(100).splitlines())) <= 100


@pytest.mark.parametrize("script", [GPT3_175B, LLAMA3_8B], ids=["GPT-3 175B", "Llama-3 8B"])
def test_every_flag_of_megatrons_scripts_has_a_class(script: str) -> None:
    _, unknown = build_parser().parse_known_args(script.split())
    assert classify(unknown)[2] == []


def test_the_script_for_gpt3_runs_without_its_pipeline() -> None:
    without = GPT3_175B.replace("--pipeline-model-parallel-size 16", "--pipeline-model-parallel-size 1")
    run = parse_command(without.split()).run
    check_run(run, 64)
    assert run.tokenizer.tokenizer_type == "GPT2BPETokenizer"
    with pytest.raises(ConfigError, match="--pipeline-model-parallel-size 16: pipeline parallelism is not there: use --tensor-model"):
        parse_command(GPT3_175B.split())


def test_the_script_for_llama3_runs_as_it_is() -> None:
    command = parse_command(LLAMA3_8B.split())
    check_run(command.run, 8)
    said = [text for text in command.ignored if text.startswith("--fp8-amax-history-len")]
    assert "Megatron's default, delayed scaling, takes it from a history" in said[0]


def test_flags_that_ask_for_nothing_else_are_ignored_with_their_reason() -> None:
    line = f"{REQUIRED} --use-mcore-models --transformer-impl local --pipeline-model-parallel-size 1 --seed 3 --attention-backend=auto"
    command = parse_command(line.split())
    assert command.run.training.seed == 3
    assert [text.split(":")[0] for text in command.ignored] == [
        "--use-mcore-models",
        "--transformer-impl local",
        "--pipeline-model-parallel-size 1",
        "--attention-backend auto",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2: pipeline parallelism is not there"),
        ("--head-lr-mult 2", r"--head-lr-mult 2: .* by --decoupled-lr \(only 1.0 or 1 is accepted\)"),
        ("--ckpt-format fsdp_dtensor", "domino-lm-convert writes others"),
        ("--data-impl lazy", "--data-impl lazy: token files are pairs of .bin and .idx: make them anew"),
        ("--activations-checkpoint-method uniform", "say --recompute-granularity full --recompute-method"),
        ("--activations-checkpoint-num-layers 2", "say --recompute-num-layers"),
        ("--checkpoint-num-layers 2", "say --recompute-num-layers"),
        ("--zero-stage 2", "--zero-stage 2: say --use-distributed-optimizer .* optim_grads"),
        ("--num-epochs 3", "--num-epochs 3: say --train-iters or --train-samples"),
        ("--use-mpi", "--use-mpi: torchrun's RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR"),
        ("--deepspeed --deepspeed_config ds.json", "--deepspeed_config ds.json: DeepSpeed does not run here"),
        ("--moe-router-topk 2", "--moe-router-topk 2: experts are not there"),
        ("--fim-data --fim-rate 0.5", "--fim-data: samples are not rearranged[^\n]*\n.*--fim-rate 0.5: samples"),
        ("--no-position-embedding", "--no-position-embedding: models without positions are not there"),
        ("--batch-size 4", "--batch-size 4: say --micro-batch-size"),
        ("--recompute-modules core_attn mlp", "--recompute-modules core_attn mlp: "),
    ],
)
def test_what_is_not_there_is_refused_by_name(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_command(f"{REQUIRED} {flags}".split())


@pytest.mark.parametrize(
    "flags",
    [
        "--recompute-modules core_attn",
        "--no-position-embedding --position-embedding-type rope",
        "--no-load-rng --no-save-rng --auto-detect-ckpt-format --ckpt-format torch_dist",
        "--cp-comm-type p2p p2p --seed 3",
        "--one-logger-project name --wandb-entity me",
        "--data-impl mmap --mmap-warmup --DDP-impl local --no-contiguous-buffers-in-local-ddp --fp32-allreduce",
        "--no-query-key-layer-scaling --log-batch-size-to-tensorboard --local_rank 0 --zero-stage 0 --checkpoint-num-layers 1",
        "--ckpt-format torch",
    ],
)
def test_what_asks_for_nothing_is_accepted(flags: str) -> None:
    assert parse_command(f"{REQUIRED} {flags}".split()).ignored


def test_a_value_too_many_is_no_value_of_the_flag() -> None:
    with pytest.raises(ConfigError, match="stray: a value without a flag"):
        parse_command(f"{REQUIRED} --use-mcore-models stray".split())


def test_an_unknown_flag_suggests_the_nearest_of_the_whole_table() -> None:
    with pytest.raises(ConfigError, match=r"--no-mmap-bin-file is not a flag of this program \(nearest: --no-mmap-bin-files\)"):
        parse_command(f"{REQUIRED} --no-mmap-bin-file".split())


def test_no_flag_of_the_table_is_a_setting() -> None:
    spellings = {option for action in build_parser()._actions for option in action.option_strings}
    assert sorted(spellings & {row.flag for row in ROWS}) == []


def test_no_flag_stands_twice_in_the_table() -> None:
    flags = [row.flag for row in ROWS]
    assert sorted({flag for flag in flags if flags.count(flag) > 1}) == []


def test_every_reason_fits_a_line() -> None:
    assert [row.why for row in ROWS if not 0 < len(row.why) <= 130 or row.why.endswith(".")] == []


def test_a_flag_of_its_own_wins_over_its_family() -> None:
    row, family = find("--fp8-margin"), find("--fp8-something-new")
    assert row is not None
    assert family is not None
    assert (row.outcome, row.words) == ("accepted", 1)
    assert (family.outcome, family.words) == ("refused", MANY)


def test_settings_that_megatron_does_not_have_are_not_called_megatrons() -> None:
    ours = {item.flag for item in settings() if is_ours(item)}
    assert "--domino-row-slices" in ours
    assert "--num-layers" not in ours


def test_older_spellings_set_what_they_always_set() -> None:
    run = parse_command(f"{REQUIRED} --load x --override-lr-scheduler --wandb-name job".split()).run
    assert (run.checkpoint.override_opt_param_scheduler, run.logging.wandb_exp_name) == (True, "job")
    assert parse_command(f"{REQUIRED} --use-checkpoint-lr-scheduler".split()).run.checkpoint.use_checkpoint_opt_param_scheduler


def test_another_format_of_checkpoints_is_told_in_one_line_that_names_the_converter() -> None:
    (line,) = parse_command(f"{REQUIRED} --ckpt-format torch".split()).ignored
    assert line == ("--ckpt-format torch: checkpoints are written in the torch_dist layout; domino-lm-convert writes others")
