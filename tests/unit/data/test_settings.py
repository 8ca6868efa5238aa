"""Where a run finds its data: flags that name it once."""

from pathlib import Path

import pytest

from domino_lm.config.arguments import parse_arguments
from domino_lm.config.data import DataConfig
from domino_lm.config.settings import ConfigError
from domino_lm.data.blended import Blend
from domino_lm.data.splits import DataSources, sources_of
from domino_lm.launch.checks import check_run

BASE = "--preset debug-gpt --lr 1e-3 --micro-batch-size 2 --train-iters 10 --vocab-size 100"


def sources(flags: str) -> DataSources:
    return sources_of(parse_arguments(f"{BASE} {flags}".split()).data)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--data-path a", DataSources(blend=Blend(("a",)))),
        ("--data-path a b c --split 1,0,0", DataSources(blend=Blend(("a", "b", "c")), split="1,0,0")),
        ("--data-path 1 a 2 b", DataSources(blend=Blend(("a", "b"), (1.0, 2.0)))),
        (
            "--train-data-path 1 a 3 b --valid-data-path c",
            DataSources(per_split={"train": Blend(("a", "b"), (1.0, 3.0)), "valid": Blend(("c",))}),
        ),
        ("--mock-data", DataSources()),
    ],
)
def test_flags_name_the_data(flags: str, expected: DataSources) -> None:
    assert sources(flags) == expected


def test_a_file_stands_for_the_words_of_the_data_path(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("1 a 2 b")
    assert sources(f"--data-args-path {tmp_path}/words") == sources("--data-path 1 a 2 b")


def test_a_file_stands_for_the_paths_of_the_splits(tmp_path: Path) -> None:
    (tmp_path / "paths.json").write_text('{"train": ["1", "a", "2", "b"], "valid": "c"}')
    assert sources(f"--per-split-data-args-path {tmp_path}/paths.json") == sources("--train-data-path 1 a 2 b --valid-data-path c")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "no flag says where the data is"),
        ("--data-path a --mock-data", "--data-path and --mock-data all say where the data is"),
        ("--data-path a --train-data-path b", "--data-path and --train-data-path all say"),
        ("--train-data-path a --split 9,1,0", "leave --split out"),
        ("--valid-data-path a", "give --train-data-path too"),
        ("--data-path a --split 1,2,3,4", "--split '1,2,3,4' is not one to three plain numbers"),
        ("--data-path 1 a x b", "'x' stands where a weight is due"),
        ("--data-path a --no-data-sharding", "--no-data-sharding says how --dataloader-type cyclic"),
        ("--data-path a --num-workers -1", "--num-workers -1 must be 0 or more"),
        ("--data-args-path /no/such", "--data-args-path /no/such cannot be read"),
        ("--data-path a --tokenizer-type HuggingFaceTokenizer", "--tokenizer-type HuggingFaceTokenizer also needs --tokenizer-model"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_built(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_run(parse_arguments(f"{BASE} {flags}".split()), 1)
    assert message in str(raised.value)


def test_numbers_without_a_vocabulary_are_refused() -> None:
    flags = BASE.replace("--vocab-size 100", "--mock-data --tokenizer-type NullTokenizer")
    with pytest.raises(ConfigError, match="NullTokenizer also needs --vocab-size"):
        check_run(parse_arguments(flags.split()), 1)


def test_one_prefix_is_data_too() -> None:
    assert sources_of(DataConfig(data_path="a")) == DataSources(blend=Blend(("a",)))  # type: ignore[arg-type]
