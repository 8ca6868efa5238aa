"""What a command line can ask of data, learning rate, length and logs, each in a real run on two tensor-parallel processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from domino_lm import pretrain
from domino_lm.config.settings import ConfigError
from domino_lm.watch.metrics_file import read_lines
from tests.distributed.training_runs import REPOSITORY, TINY, program, write_tokens

Run = Callable[[str], str]
PLAIN = TINY.split(" --lr-warmup-iters", maxsplit=1)[0] + " --micro-batch-size 2 --global-batch-size 8 --log-interval 1"
"""The model and the batch alone; a case adds its data, its length and its learning rate."""

DATA = {
    "weighted blend, kept indices": "--data-path 3 @a/tokens 1 @b/tokens --split 80,20,0 --data-cache-path @cache",
    "blend by size, threads": "--data-path @a/tokens @b/tokens --split 80,20,0 --num-workers 4",
    "no threads": "--data-path @a/tokens --split 80,20,0 --num-workers 0",
    "paths of each split": "--train-data-path @a/tokens --valid-data-path @b/tokens --test-data-path @b/tokens",
    "words from a file": "--data-args-path @words --split 80,20,0",
    "paths of each split from a file": "--per-split-data-args-path @splits.json",
    "mock": "--mock-data",
    "cyclic": "--data-path @a/tokens --split 80,20,0 --dataloader-type cyclic",
    "several validation sets": "--train-data-path @a/tokens --valid-data-path 1 @a/tokens 1 @b/tokens --multiple-validation-sets",
    "full validation": "--data-path @a/tokens --split 80,20,0 --full-validation",
    "documents apart": "--data-path @a/tokens --split 80,20,0 --reset-position-ids --reset-attention-mask --eod-mask-loss "
    "--tokenizer-type NullTokenizer --vocab-size 97",
}
LENGTHS = {
    "constant": "--train-iters 4 --lr-decay-style constant",
    "linear": "--train-iters 4 --lr-decay-style linear --lr-warmup-iters 1 --min-lr 1e-3",
    "inverse square root": "--train-iters 4 --lr-decay-style inverse-square-root --lr-warmup-iters 1",
    "WSD": "--train-iters 4 --lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-wsd-decay-style minus_sqrt",
    "WSD in samples": "--train-samples 32 --lr-decay-style WSD --lr-wsd-decay-samples 16 --lr-warmup-samples 8",
    "cosine in samples, ramp-up": "--train-samples 40 --lr-decay-samples 40 --rampup-batch-size 2 2 16",
    "exit by samples": "--train-iters 9 --exit-samples 32",
    "exit by time": "--train-iters 9000 --exit-duration-in-mins 0.02",
    "manual collection": "--train-iters 4 --manual-gc --manual-gc-interval 2",
}


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_tokens(tmp_path / name)
    (tmp_path / "words").write_text(f"1 {tmp_path}/a/tokens 2 {tmp_path}/b/tokens\n")
    (tmp_path / "splits.json").write_text(json.dumps({"train": [f"{tmp_path}/a/tokens"], "valid": [f"{tmp_path}/b/tokens"]}))
    return tmp_path


@pytest.fixture
def train(desk: Path) -> Run:
    def run(flags: str) -> str:
        """Output of a run on two processes that succeeds without a warning; ``@`` is the folder."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        words = f"{PLAIN} --tensor-model-parallel-size 2 --metrics-file @metrics.jsonl {flags}".replace("@", f"{desk}/").split()
        done = subprocess.run(
            [sys.executable, *launcher, "-m", "domino_lm.pretrain", *words],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
            timeout=300,
            check=False,
        )
        told = done.stdout + done.stderr
        assert done.returncode == 0, told
        assert not re.search("warning|Traceback", told, re.I), told
        return done.stdout

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", DATA.values(), ids=DATA)
def test_each_way_to_name_data_trains_and_evaluates(flags: str, train: Run, desk: Path) -> None:
    out = train(f"--train-iters 4 --eval-interval 2 --eval-iters 1 {flags}")
    assert "training ended: finished at iteration 4" in out
    evaluated = [line["split"] for line in read_lines(desk / "metrics.jsonl") if line.get("split", "").startswith("valid")]
    assert len(evaluated) == (4 if "multiple" in flags else 2)
    assert (desk / "cache").exists() == ("cache" in flags)


@pytest.mark.exhaustive
@pytest.mark.parametrize("flags", LENGTHS.values(), ids=LENGTHS)
def test_each_length_and_learning_rate_runs_to_its_end(flags: str, train: Run, desk: Path) -> None:
    out = train(f"--data-path @a/tokens --split 100,0,0 {flags}")
    assert re.search(r"training ended: (finished|exit-samples|exit-duration-in-mins) at iteration", out)
    lines = read_lines(desk / "metrics.jsonl")
    assert all(line["learning_rate"] >= 0 and line["lm_loss"] > 0 for line in lines)
    if "rampup" in flags:
        assert [line["batch_size"] for line in lines] == [2, 2, 2, 4, 4, 6, 8, 8]


@pytest.mark.exhaustive
def test_a_saved_configuration_goes_on_where_its_run_stopped(train: Run, desk: Path) -> None:
    train("--data-path @a/tokens --split 80,20,0 --train-iters 4 --exit-interval 2 --save @saved --load @saved")
    out = train("--config @saved/config.toml --exit-interval 100")
    assert "at iteration 2, 16 samples consumed" in out
    assert "training ended: finished at iteration 4" in out
    steps = [line for line in read_lines(desk / "metrics.jsonl") if "lm_loss" in line]
    assert [(line["iteration"], line["resumed"]) for line in steps] == [(1, False), (2, False), (3, True), (4, False)]


@pytest.mark.exhaustive
def test_finetuning_starts_anew_from_the_weights(train: Run) -> None:
    train("--data-path @a/tokens --split 80,20,0 --train-iters 2 --save @saved")
    out = train("--data-path @b/tokens --split 80,20,0 --train-iters 2 --load @saved --finetune")
    assert "loaded the weights alone of iteration 2" in out
    assert "training ended: finished at iteration 2" in out


@pytest.mark.exhaustive
def test_two_json_keys_and_a_tokenizer_json_become_two_data_sets(train: Run, desk: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: number for number, word in enumerate(["<|endoftext|>", *(f"w{i}" for i in range(90))])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(desk / "tokenizer.json"))
    (desk / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    random = numpy.random.default_rng(0)
    lines = [{key: " ".join(f"w{i}" for i in random.integers(0, 90, 40)) for key in ("text", "title")} for _ in range(40)]
    (desk / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {desk}/tokenizer.json"
    command = f"tools/preprocess_data.py --input {desk}/in.jsonl --output-prefix {desk}/out --json-keys text title --append-eod {flags}"
    subprocess.run([sys.executable, *command.split()], cwd=REPOSITORY, check=True, capture_output=True)
    named = "--data-path @out_text_document @out_title_document --split 80,20,0"
    out = train(f"{named} --train-iters 2 --eval-iters 1 {flags.replace(f'{desk}/', '@')}")
    assert "training ended: finished at iteration 2" in out


@pytest.mark.slow
@pytest.mark.long
def test_logs_that_cannot_be_written_are_a_warning_each_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flags = f"--tensorboard-dir {tmp_path}/file --metrics-file {tmp_path}/file/m.jsonl --timeline {tmp_path}/file/t --train-iters 3"
    with program(write_tokens(tmp_path), flags) as started:
        out, error = started.communicate(timeout=300)
    assert started.returncode == 0, error
    assert "training ended: finished at iteration 3" in out
    assert [error.count(flag) for flag in ("warning: --tensorboard-dir", "warning: --metrics-file", "warning: --timeline")] == [1, 1, 1]
    assert "Traceback" not in error


@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_is_said_before_the_ranks_have_met_is_said_by_one(
    rank: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def parse(*_: object, **__: object) -> None:
        warnings.warn("an older checkpoint is taken", stacklevel=1)
        raise ConfigError("wrong")

    monkeypatch.setattr(pretrain, "parse_command", parse)
    waits: list[float] = []
    monkeypatch.setattr("domino_lm.pretrain.time.sleep", waits.append)
    monkeypatch.setenv("RANK", rank)
    with warnings.catch_warnings():
        assert pretrain.main([]) == pretrain.EXIT_WRONG_SETTINGS
    said = capsys.readouterr().err
    assert said == ("warning: an older checkpoint is taken\nerror: wrong\n" if rank == "0" else "error: rank 1: wrong\n")
    assert sum(waits) >= (0 if rank == "0" else 1)  # in which torchrun ends rank 1, since rank 0 is gone
