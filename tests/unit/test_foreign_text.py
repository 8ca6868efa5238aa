"""Text from outside is parsed within limits: what is beyond them is one error of one line, in every file that is read."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from domino_lm.checkpoint.convert.hugging_face import read_hugging_face
from domino_lm.checkpoint.manifest import MANIFEST_FILE, Manifest
from domino_lm.config.data import TokenizerConfig
from domino_lm.config.foreign_text import LARGEST, MOST_NESTED, ForeignTextError, int_of_flag, parse_json, parse_toml, whole_number
from domino_lm.config.settings import refuse
from domino_lm.config.toml_file import read_config
from domino_lm.data.splits import read_per_split
from domino_lm.data.tokenizers.build import build_tokenizer
from domino_lm.schedule.timeline import read_trace
from domino_lm.simulate.hardware import read_hardware
from domino_lm.watch.metrics_file import read_lines

PACKAGE = Path(__file__).parents[2] / "domino_lm"
DEEP, DEEPER = MOST_NESTED + 1, 50_000
HOSTILE = {
    "deep": "[" * DEEP + "]" * DEEP,
    "deeper": "[" * DEEPER + "]" * DEEPER,
    "deep objects": '{"a":' * DEEP + "1" + "}" * DEEP,
    "long number": "[" + "7" * 400 + "]",
    "longer number": "[-" + "7" * 9000 + "]",
    "just too large": f"[{LARGEST + 1}]",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_json_beyond_a_limit_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ForeignTextError, match=r"nested deeper than 64 levels|whole number is larger than") as error:
        parse_json(text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 100


def test_json_within_the_limits_is_what_it_is() -> None:
    nested = "[" * MOST_NESTED + "]" * MOST_NESTED
    assert json.dumps(parse_json(nested)) == nested
    assert parse_json(f'{{"a": [{LARGEST}, {-LARGEST}, 1e30, true, "{"[" * 200}"]}}')["a"][:4] == [LARGEST, -LARGEST, 1e30, True]
    assert parse_json("[" + "7" * 400 + "]", whole_numbers=False) == [int("7" * 400)]
    with pytest.raises(json.JSONDecodeError):
        parse_json("[1,")


@pytest.mark.parametrize(
    "text",
    [
        f"a = {HOSTILE['deep']}",
        f"a = {HOSTILE['deeper']}",
        "a = " + "{b = " * DEEP + "1" + "}" * DEEP,
        ".".join("a" * DEEP) + " = 1",
        ".".join("a" * 100_000) + " = 1",
        "[" + ' . "x y" . b' * DEEP + "]",
        f"a = {'7' * 400}",
        f"a = {'7' * 9000}",
        f"a = 0x{'f' * 400}",
    ],
    ids=["array", "deep array", "tables", "key", "long key", "quoted keys", "number", "long number", "hexadecimal number"],
)
def test_toml_beyond_a_limit_is_refused_at_once(text: str) -> None:
    began = time.process_time()
    with pytest.raises(ForeignTextError, match=r"nested deeper|whole number is larger|more than 64 parts"):
        parse_toml(text)
    assert time.process_time() - began < 2


def test_toml_within_the_limits_is_what_it_is() -> None:
    dots = "../" * 100 + "a" + ".b" * 100
    assert parse_toml(f"a.b.c = 1\n[d]\ne = '{dots}'\nf = \"{dots}\"") == {"a": {"b": {"c": 1}}, "d": {"e": dots, "f": dots}}
    with pytest.raises(ForeignTextError, match="line 1"):
        parse_toml("a b = 1")


@pytest.mark.parametrize("text", ["9" * 20, "-" + "9" * 400, "9" * 5000, "9" * 10_000_000], ids=len)
def test_a_number_that_is_too_large_is_refused_in_few_words(text: str) -> None:
    with pytest.raises(ForeignTextError, match="largest whole number") as error:
        whole_number(text)
    assert len(str(error.value)) < 100


@pytest.mark.parametrize(("text", "value"), [("12", 12), (" -3 ", -3), ("1_000", 1000), (str(LARGEST), LARGEST), ("+0007", 7)])
def test_a_number_is_what_it_is(text: str, value: int) -> None:
    assert whole_number(text) == int_of_flag(text) == value


@pytest.mark.parametrize("text", ["", "x", "1.5", "1e3", "__1", "\u0661"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="invalid int value"):
        int_of_flag(text)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


READERS: dict[str, Callable[[Path, str], object]] = {
    "calibration": lambda folder, text: read_hardware(write(folder / "machine.json", text)),
    "trace": lambda folder, text: read_trace(write(folder / "trace.json", text)),
    "manifest": lambda folder, text: (write(folder / MANIFEST_FILE, text), Manifest.read(folder)),
    "splits": lambda folder, text: read_per_split(write(folder / "splits.json", text)),
    "Hugging Face configuration": lambda folder, text: (write(folder / "config.json", text), read_hugging_face(folder)),
    "settings": lambda folder, text: refuse(read_config(write(folder / "x.toml", f"num_layers = {text.replace(':', '=')}")).faults),
    "tokenizer.json": lambda folder, text: build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(write(folder / "tokenizer.json", text))), None
    ),
    "tiktoken": lambda folder, text: build_tokenizer(
        TokenizerConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(write(folder / "ranks.json", text))), None
    ),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_every_reader_names_the_file_and_the_limit_in_one_line(tmp_path: Path, reader: Callable[[Path, str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r"nested deeper than|whole number is larger than") as error:
        reader(tmp_path, text)
    assert str(tmp_path) in str(error.value)
    assert len(str(error.value).strip().splitlines()) == 1
    assert len(str(error.value)) < 400


def test_lines_of_metrics_beyond_a_limit_are_left_out(tmp_path: Path) -> None:
    lines = "\n".join(['{"iteration": 1}', *HOSTILE.values(), '{"iteration": 2}'])
    assert [line["iteration"] for line in read_lines(write(tmp_path / "metrics.jsonl", lines))] == [1, 2]


def test_nothing_but_the_one_module_parses_json_and_toml_of_others() -> None:
    """The package's own tables are its own, and processes of one job trust each other."""
    own = {"config/foreign_text.py", "config/megatron_flags.py", "simulate/hardware.py", "parallel/agreement.py", "checkpoint/writing.py"}
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert {name for name, text in texts.items() if re.search(r"\b(json|tomllib)\.loads?\b", text)} <= own
