"""The inspection of data: what it shows is what training reads."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from domino_lm.data.indexed import IndexedDatasetWriter

TOOL = Path(__file__).parents[3] / "tools" / "inspect_data.py"


@pytest.fixture
def prefixes(tmp_path: Path) -> tuple[str, str]:
    """Two pairs of 10 documents: of 1 to 10 tokens, and of 20 tokens each; each ends with 0, the end of document."""
    for name, lengths in (("a", range(1, 11)), ("b", [20] * 10)):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for length in lengths:
                writer.add_document([*range(1, length), 0])
    return str(tmp_path / "a"), str(tmp_path / "b")


def tool(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *flags], capture_output=True, text=True, timeout=60)


def report(*flags: str) -> dict[str, Any]:
    result = tool(*flags, "--json", "--seq-length", "8", "--split", "1")
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "30", "--null-tokenizer-eod-id", "0")


def test_files_are_described_by_their_documents(prefixes: tuple[str, str]) -> None:
    (pair,) = report("--data-path", prefixes[0])["files"]
    assert (pair["documents"], pair["tokens"], pair["tokens_per_document"]["most"]) == (10, 55, 10)


def test_shares_and_epochs_of_a_blend_are_shown_for_each_source(prefixes: tuple[str, str]) -> None:
    (split,) = report("--data-path", "1", prefixes[0], "3", prefixes[1], "--train-samples", "40")["splits"]
    assert [(source["samples"], source["share"], round(source["epochs"], 3)) for source in split["sources"]] == [
        (10, 0.25, round(80 / 55, 3)),
        (30, 0.75, round(240 / 200, 3)),
    ]


def test_samples_are_shown_as_text_with_their_masks(prefixes: tuple[str, str]) -> None:
    flags = ("--samples", "6", "--eod-mask-loss", "--reset-position-ids", "--reset-attention-mask")
    (split,) = report("--data-path", prefixes[0], *NULL, *flags)["splits"]
    assert len(split["shown"]) == 6
    for sample in split["shown"]:
        ends = [i for i, token in enumerate(sample["tokens"]) if token == 0]
        assert (sample["ends_of_document"], sample["masked_positions"]) == (ends, ends)
        assert sample["position_restarts"] == [i + 1 for i in ends if i < 7]
        assert sample["first_visible_position"] == [max((end + 1 for end in ends if end < i), default=0) for i in range(8)]
        assert sample["text"] == " ".join(map(str, sample["tokens"]))


def test_documents_are_shown(prefixes: tuple[str, str]) -> None:
    (document,) = report("--data-path", prefixes[0], *NULL, "--document", "2")["documents"]
    assert (document["sequences"], document["text"]) == ([[1, 2, 0]], ["1 2 0"])


def test_it_can_be_read_without_json(prefixes: tuple[str, str]) -> None:
    result = tool("--data-path", *prefixes, "--seq-length", "8", "--split", "1", *NULL)
    assert result.returncode == 0
    assert f"file {prefixes[0]}" in result.stdout
    assert "samples:                30" in result.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "no flag says where the data is"),
        (("--data-path", "a", "--mock-data"), "--data-path and --mock-data all say where the data is"),
        (("--train-data-path", "a", "--split", "1"), "leave --split out"),
        (("--data-path", "/no/such"), "/no/such.bin and /no/such.idx: no such file"),
        (("--mock-data",), "give --vocab-size"),
    ],
)
def test_data_that_is_not_there_or_named_twice_is_refused(flags: tuple[str, ...], message: str) -> None:
    result = tool(*flags)
    assert (result.returncode, result.stderr.count("\n"), result.stderr.startswith("error: ")) == (1, 1, True)
    assert message in result.stderr
