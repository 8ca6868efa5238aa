"""Missing files and folders that cannot be written are refused before torch is loaded, all at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from domino_lm.config.arguments import parse_arguments
from domino_lm.config.settings import ConfigError
from domino_lm.launch.file_checks import check_files
from domino_lm.pretrain import main

BASE = "--preset debug-gpt --lr 1e-3 --micro-batch-size 2 --train-iters 10 --vocab-size 100"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds the pair ``tokens``, and a file where a folder is wanted."""
    for name in ("tokens.bin", "tokens.idx", "file", "half.bin"):
        (tmp_path / name).touch()
    (tmp_path / "broken.json").write_text("{")
    return tmp_path


def faults(folder: Path, flags: str) -> str:
    with pytest.raises(ConfigError) as raised:
        check_files(parse_arguments(f"{BASE} {flags.replace('@', f'{folder}/')}".split()))
    return str(raised.value).replace(f"{folder}/", "@").replace(str(folder), "@")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("--data-path @none", ["@none.bin and @none.idx", "are not there", "domino-lm-preprocess"]),
        ("--data-path @half", ["@half.idx", "is not there"]),
        ("--data-path @tokens.bin", ["without its extension: @tokens"]),
        ("--data-path 1 @tokens 2 @other", ["the data @other"]),
        ("--train-data-path @tokens --valid-data-path @other", ["the data @other"]),
        ("--data-path @tokens --tokenizer-type Llama2Tokenizer --tokenizer-model @no", ["--tokenizer-model @no", "Llama2Tokenizer"]),
        ("--data-path @tokens --tokenizer-type GPT2BPETokenizer --vocab-file @no --merge-file @file", ["--vocab-file @no"]),
        ("--data-path @tokens --save @file/checkpoints", ["--save @file/checkpoints", "@file is a file"]),
        ("--data-path @tokens --data-cache-path @file", ["--data-cache-path @file", "is a file"]),
        ("--data-path @tokens --schedule auto --domino-calibration dgx-h1000", ["--domino-calibration dgx-h1000", "dgx-h100"]),
        ("--data-path @tokens --schedule auto --domino-calibration @broken.json", ["broken.json"]),
        ("--data-path @tokens --schedule auto --domino-calibration @no/new.json", ["@no/new.json", "make it first"]),
    ],
)
def test_what_is_not_there_is_named_with_its_flag_and_the_way_out(flags: str, names: list[str], folder: Path) -> None:
    message = faults(folder, flags)
    assert [name for name in names if name not in message] == [], message


def test_every_missing_file_is_listed_at_once(folder: Path) -> None:
    assert faults(folder, "--data-path @none --save @file/a").startswith("2 settings cannot work:")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(folder: Path) -> None:
    (folder / "locked").mkdir(mode=0o500)
    assert "no permission" in faults(folder, "--data-path @tokens --save @locked/new")


def test_folders_that_can_be_made_and_files_that_are_there_pass(folder: Path) -> None:
    flags = f"--data-path {folder}/tokens --save {folder}/a/b --schedule auto --domino-calibration {folder}/new.json"
    check_files(parse_arguments(f"{BASE} {flags}".split()))
    assert not (folder / "a").exists()


def test_a_refusal_comes_before_torch_is_loaded(folder: Path) -> None:
    flags = f"{BASE} --data-path {folder}/none".split()
    code = f"import sys; from domino_lm.pretrain import main; code = main({flags!r}); sys.exit(9 if 'torch' in sys.modules else code)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1)


def test_a_vocabulary_smaller_than_its_tokenizer_is_refused_before_torch_is_loaded(folder: Path) -> None:
    named = f"--data-path {folder}/tokens --tokenizer-type Llama2Tokenizer --tokenizer-model examples/data/sp4096.model"
    flags = f"{BASE} {named}".split()
    code = f"import sys; from domino_lm.pretrain import main; code = main({flags!r}); sys.exit(9 if 'torch' in sys.modules else code)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False, capture_output=True, text=True)
    assert "--vocab-size 100 is smaller than the 4096 ids of --tokenizer-type Llama2Tokenizer" in done.stderr
    assert done.returncode == 2


def test_one_process_of_a_node_speaks_for_all(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    waits: list[float] = []
    monkeypatch.setattr("domino_lm.pretrain.time.sleep", waits.append)
    monkeypatch.setenv("WORLD_SIZE", "4")
    told = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank % 2))  # two nodes of two
        assert main(f"{BASE} --data-path {folder}/none".split()) == 2
        told.append(capsys.readouterr().err)
    assert waits[0] < waits[2] < min(waits[1], waits[3]) - 3  # the first to speak is gone then, and torchrun ends the others of its node
    assert told[2].startswith("error: rank 2: the data")


def test_a_dry_run_tells_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{BASE} --data-path {folder}/none --dry-run".split()) == 0
    assert f"missing   the data {folder}/none needs" in capsys.readouterr().out
