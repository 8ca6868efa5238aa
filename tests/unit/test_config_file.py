"""Settings as TOML: what a run resolves to can be given back, and a wrong file is refused with every fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from domino_lm.config.arguments import parse_arguments, parse_command
from domino_lm.config.settings import ConfigError
from domino_lm.config.toml_file import config_text, save_config

REQUIRED = "--lr 1e-3 --micro-batch-size 2 --train-iters 10"


def write(folder: Path, text: str) -> str:
    (folder / "run.toml").write_text(text)
    return f"--config {folder}/run.toml"


@pytest.mark.parametrize("preset", ["gpt3-13b", "llama3-70b"])
def test_a_resolved_configuration_gives_the_same_run_again(preset: str, tmp_path: Path) -> None:
    run = parse_arguments(f"--preset {preset} {REQUIRED} --data-path 0.3 a 0.7 b --rampup-batch-size 2 2 10 --save 'x'".split())
    assert parse_arguments(write(tmp_path, config_text(run)).split()) == run


def test_flags_win_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    config = write(tmp_path, "preset = 'debug-gpt'\nnum-layers = 7\n[model]\nhidden_size = 64\n[optimizer]\nlr = 1\n")
    run = parse_arguments(f"{config} --micro-batch-size 2 --train-iters 10 --hidden-size 32".split())
    assert (run.model.num_layers, run.model.hidden_size, run.model.num_attention_heads, run.optimizer.lr) == (7, 32, 4, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[model]\nnum_layer = 3", "[model] num_layer is no setting (nearest: num_layers)"),
        ("[training]\nnum_layers = 3", "[training] num_layers belongs into [model]"),
        ("num_layers = '3'", "num_layers must be int, not '3'"),
        ("num_layers = true", "num_layers must be int, not True"),
        ("swiglu = 1", "swiglu must be bool, not 1"),
        ("normalization = 'Norm'", "must be one of LayerNorm, RMSNorm, not 'Norm'"),
        ("data_path = 'x'", "data_path must be a list of str"),
        ("num_layers = 3\n[model]\nnum_layers = 3", "num_layers is given twice"),
        ("num_layers = ", "is not TOML"),
        ("preset = 'gpt9'", "preset 'gpt9' is none of"),
    ],
)
def test_a_wrong_entry_is_named_with_its_file(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_arguments(f"{write(tmp_path, text)} {REQUIRED}".split())
    assert message in str(raised.value)
    assert "run.toml" in str(raised.value)


def test_every_fault_of_a_file_stands_in_one_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no_such is no setting.*swiglu must be bool"):
        parse_arguments(f"{write(tmp_path, 'no_such = 1' + chr(10) + 'swiglu = 1')} {REQUIRED}".split())


def test_a_setting_that_is_gone_is_read_with_a_line_that_says_so(tmp_path: Path) -> None:
    stored = write(tmp_path, "[schedule]\ndomino_wgrad_rows = 'each'")
    for given in (stored, "--domino-wgrad-rows together"):
        (line,) = parse_command(f"--preset debug-gpt {given} {REQUIRED}".split()).ignored
        assert "the setting is gone; each row has its own weight gradient" in line


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--config /nowhere.toml cannot be read"):
        parse_arguments(["--config", "/nowhere.toml"])


def test_a_saved_configuration_appears_in_its_folder_alone(tmp_path: Path) -> None:
    run = parse_arguments(f"--preset debug-gpt {REQUIRED}".split())
    path = save_config(run, str(tmp_path / "new"))
    assert [found.name for found in path.parent.iterdir()] == ["config.toml"]
    assert parse_arguments(["--config", str(path)]) == run


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--save .*file cannot be written"):
        save_config(parse_arguments(f"--preset debug-gpt {REQUIRED}".split()), str(tmp_path / "file"))
