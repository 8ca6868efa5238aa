"""The command line: what it accepts, what it refuses, and that its surface does not change by accident."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from domino_lm.config.arguments import build_parser, config_from_values, parse_arguments, parse_command
from domino_lm.config.presets import PRESETS
from domino_lm.config.schema import NO_DEFAULT, field_docstrings, flat_values, settings
from domino_lm.config.settings import ConfigError, ModelConfig, RunConfig
from domino_lm.launch.checks import run_faults
from domino_lm.launch.file_checks import file_faults

SURFACE = Path(__file__).parent / "cli_surface.txt"
REQUIRED = "--preset debug-gpt --lr 1e-3 --micro-batch-size 2 --train-iters 10"


def parse(line: str) -> RunConfig:
    return parse_arguments(line.split())


def test_a_debug_preset_alone_is_a_whole_run_and_yields_to_all_that_is_said() -> None:
    run = parse("--preset debug-llama --mock-data")
    assert (run.optimizer.lr, run.training.train_iters, run.model.vocab_size) == (1e-3, 100, 1024)
    assert not list(run_faults(run, 1))
    said = parse("--preset debug-gpt --mock-data --train-samples 50 --lr 0.5 --tokenizer-type NullTokenizer --micro-batch-size 1")
    assert (said.training.train_iters, said.training.train_samples, said.model.vocab_size) == (None, 50, None)
    assert (said.optimizer.lr, said.training.micro_batch_size) == (0.5, 1)
    with pytest.raises(ConfigError, match=r"--lr.*no value given"):
        parse("--preset gpt3-125m --mock-data")


def surface() -> str:
    """One line a flag: spellings, choices, default."""
    defaults = {item.name: "required" if item.default is NO_DEFAULT else repr(item.default) for item in settings()}
    lines = []
    for action in build_parser()._actions:
        choices = f" {{{','.join(map(str, action.choices))}}}" if action.choices else ""
        lines.append(f"{' '.join(action.option_strings)}{choices} = {defaults.get(action.dest, '-')}")
    return "\n".join(lines) + "\n"


def test_the_flags_and_their_defaults_are_the_recorded_ones() -> None:
    assert surface() == SURFACE.read_text(), f"the command line changed; if that is meant, record it: python {__file__}"


def test_a_field_name_is_found_in_one_part_only() -> None:
    names = [item.name for item in settings()]
    assert len(names) == len(set(names))


def test_every_field_has_a_help_text() -> None:
    assert all(item.help.endswith((".", ")")) for item in settings())


def test_help_is_the_docstring_below_the_field() -> None:
    assert field_docstrings(ModelConfig)["num_layers"] == "Transformer layers."


def test_a_flag_wins_over_its_preset() -> None:
    assert parse(f"{REQUIRED} --num-layers 7").model.num_layers == 7
    assert parse(REQUIRED).model.num_layers == PRESETS["debug-gpt"]["num_layers"]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_names_fields_that_exist(name: str) -> None:
    config_from_values({"lr": 1e-3, "micro_batch_size": 1, "train_iters": 1, **PRESETS[name]})
    assert set(PRESETS[name]) <= {item.name for item in settings()}


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--no-bias-gelu-fusion", "bias_gelu_fusion", False),
        ("--untie-embeddings-and-output-weights", "untie_embeddings_and_output_weights", True),
        ("--layernorm-epsilon 1e-6", "norm_epsilon", 1e-6),
        ("--no-load-optim", "no_load_optim", True),
        ("--override-opt_param-scheduler", "override_opt_param_scheduler", True),
        ("--group-query-attention --num-query-groups 2", "num_query_groups", 2),
        ("--tensor-model-parallel-size=2", "tensor_model_parallel_size", 2),
    ],
)
def test_megatrons_spelling_sets_the_field(flags: str, name: str, value: object) -> None:
    assert flat_values(parse(f"{REQUIRED} {flags}"))[name] == value


def test_all_missing_flags_stand_in_one_message() -> None:
    with pytest.raises(ConfigError, match=r"--num-layers, .*--lr, --micro-batch-size: no value.* or take a model with --preset"):
        parse("")


def test_who_gave_a_preset_is_not_told_to_take_one() -> None:
    with pytest.raises(ConfigError, match=r"^--lr: no value given and none by default; add what is missing\.$"):
        parse("--preset gpt3-125m --micro-batch-size 2 --train-iters 10")


def test_unknown_flags_stand_in_one_message_with_the_nearest_known_ones() -> None:
    with pytest.raises(ConfigError) as raised:
        parse(f"{REQUIRED} --tensor-parallel-size 2 --hiden-size=4")
    assert "--tensor-parallel-size is not a flag of this program (nearest: --tensor-model-parallel-size)" in str(raised.value)
    assert "--hiden-size is not a flag of this program (nearest: --hidden-size)" in str(raised.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--lr fast", "--lr: invalid float value: 'fast'."),
        ("--normalization BatchNorm", "invalid choice: 'BatchNorm'"),
        ("--preset gpt9", "invalid choice: 'gpt9'"),
        ("--lr", "--lr: expected one argument."),
        ("stray", "stray: a value without a flag"),
        ("--num-lay 3", "--num-lay is not a flag"),
    ],
)
def test_a_wrong_value_is_named_with_its_flag(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(f"{REQUIRED} {line}")
    assert message in str(raised.value)


def test_unknown_refused_and_wrong_flags_and_missing_settings_stand_in_one_message() -> None:
    with pytest.raises(ConfigError) as raised:
        parse("--preset gpt3-125m --micro-batch-size x --normalization y --bogus 1 --zero-stage 2 --train-iters")
    lines = str(raised.value).splitlines()
    assert lines[0] == "6 settings cannot work:"
    starts = (
        "--bogus is not a flag",
        "--zero-stage 2: say",
        "--micro-batch-size: invalid",
        "--normalization: invalid",
        "--train-iters:",
        "--lr: no",
    )
    assert all(line.startswith(f"  - {start}") for line, start in zip(lines[1:], starts, strict=True))


def test_contradictions_stand_beside_unknown_and_refused_flags() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_arguments(f"{REQUIRED} --bogus 1 --zero-stage 2 --bf16 --fp16".split(), lambda run: run_faults(run, 1))
    for text in ("--bogus is not a flag", "--zero-stage 2: say", "--bf16 and --fp16 are both given"):
        assert str(raised.value).count(text) == 1


def everything_wrong(tmp_path: Path) -> str:
    """A command line with a fault of each kind."""
    (tmp_path / "run.toml").write_text("[training]\nlocal_batch_size = 2\nglobal_batch_size = 'many'\n")
    return (
        f"--config {tmp_path}/run.toml --num-layers 4 --hidden-size 128 --num-attention-heads 3 --lr fast --bogus 1 --zero-stage 2 "
        "--eval-iters -1 --bf16 --fp16 --train-iters 10 --data-path nowhere/tokens --vocab-size 100 --tensor-model-parallel-size 2 "
        "--no-position-embedding --load x --use-checkpoint-args --tokenizer-type NullTokenizer --tokenizer-special-tokens a --save-interval 3"
    )


def test_faults_of_every_kind_stand_in_one_message(tmp_path: Path) -> None:
    def damaged(*_: object) -> None:
        raise ConfigError("--use-checkpoint-args: x is damaged")

    with pytest.raises(ConfigError) as raised:
        parse_command(everything_wrong(tmp_path).split(), damaged, lambda run: run_faults(run, 2), files_of=file_faults)
    starts = (
        "--bogus is not a flag",
        "--zero-stage 2: say",
        "--lr: invalid float",
        "--config ",
        "--use-checkpoint-args: x is damaged",
        "--micro-batch-size: no value",
        "--no-position-embedding: models",
        "--eval-iters -1 must be 0 or more",
        "--hidden-size 128 does not divide into --num-attention-heads 3",
        "--tensor-model-parallel-size 2 does not divide --num-attention-heads 3",
        "--bf16 and --fp16 are both given",
        "--tokenizer-special-tokens has no meaning",
        "the data nowhere/tokens needs",
    )
    lines = [line.removeprefix("  - ") for line in str(raised.value).splitlines()[1:]]
    assert [start for start in starts if not any(line.startswith(start) for line in lines)] == [], "\n".join(lines)
    assert len(lines) == len(starts), "\n".join(lines)


def test_a_missing_setting_is_no_reason_to_find_fault_with_others() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_arguments(
            "--mock-data --vocab-size 100 --global-batch-size 8 --tensor-model-parallel-size 2".split(), lambda run: run_faults(run, 2)
        )
    lines = str(raised.value).splitlines()
    assert [line.split(":")[0].split(" says")[0] for line in lines[1:]] == [
        "  - --num-layers, --hidden-size, --num-attention-heads, --seq-length, --lr, --micro-batch-size",
        "  - --train-iters or --train-samples",
    ]


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as raised:
        parse_arguments(["--help", *words])
    assert raised.value.code == 0
    return capsys.readouterr().out


def test_help_is_one_line_of_usage_and_two_lines_per_setting(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = help_of(capsys).splitlines()
    assert lines[0].startswith("usage:")
    assert not lines[1]
    assert max(map(len, lines)) <= 100
    assert len(lines) <= 2 * len(settings()) + 60
    indented = "".join("c" if line.startswith(" " * 38) else "f" for line in lines)
    assert "ccc" not in indented, "a flag has more than two lines of text"
    assert [
        item.flag for item in settings() if not any(f"{item.flag[2:]}" in line.split("  ")[1] for line in lines if line[:3] == "  -")
    ] == []


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--lr-decay-style", "WSD (warm-up, stable, decay) holds the peak and decays over its last --lr-wsd-decay-iters. Default: linear."),
        ("layernorm_epsilon", "Added to the variance inside every norm."),
        ("no-swiglu", "Gated MLP, silu(gate) * up, in place of GELU. Default: off."),
        ("disable-bias-linear", "The same as --no-add-bias-linear."),
        ("moe-router-topk", "A flag of Megatron's. It is refused: experts are not there"),
        ("--use-mcore-models", "A flag of Megatron's. It is accepted without effect: models of Megatron's core"),
    ],
)
def test_help_on_one_flag_prints_its_whole_text(flag: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert text in " ".join(help_of(capsys, flag).split())


def test_help_on_a_flag_that_nobody_knows_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--hiden-size is not a flag of this program \(nearest: --hidden-size\)"):
        parse("--help hiden_size")


def test_flags_presets_and_checks_import_without_torch() -> None:
    code = "import sys, domino_lm.config.arguments, domino_lm.config.presets, domino_lm.launch.checks, domino_lm.training.lr_schedule; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    from megatron_page import page  # beside this script

    SURFACE.write_text(surface())
    (Path(__file__).parents[2] / "docs" / "megatron-flags.md").write_text(page())
