"""Limits of the text that is read: lines that do not end, words of megabytes, numbers and nesting in lines."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from domino_lm.config.data import TokenizerConfig
from domino_lm.data.indexed import IndexedDataset
from domino_lm.data.preprocess.inputs import PreprocessError, read_blocks
from domino_lm.data.tokenizers import tokenizer as seam
from domino_lm.data.tokenizers.build import build_tokenizer
from domino_lm.data.tokenizers.null_tokenizer import NullTokenizer
from domino_lm.data.tokenizers.tokenizer import LONGEST_WORD, TokenizerError
from tests.unit.data.test_preprocess import GOOD, flags, outputs, run

ROOT = Path(__file__).parents[3]
GPT2 = ROOT / "tests/golden/data/tokenizers/gpt2-bpe"
KINDS = {
    "sentencepiece": TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(ROOT / "examples/data/sp4096.model")),
    "legacy": TokenizerConfig(
        tokenizer_type="SentencePieceTokenizer",
        tokenizer_model=str(ROOT / "examples/data/sp4096.model"),
        tokenizer_sentencepiece_legacy=True,
        tokenizer_special_tokens=("<mask>",),
    ),
    "gpt2": TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(GPT2 / "vocab.json"), merge_file=str(GPT2 / "merges.txt")),
    "tokenizer.json": TokenizerConfig(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(ROOT / "tests/unit/data/gapped_tokenizer.json")
    ),
}
ENDLESS = b'{"text": "' + b"a" * 3000
"""The beginning of a line that goes on."""


def zstd(data: bytes) -> bytes:
    return bytes(pytest.importorskip("zstandard").ZstdCompressor().compress(data))


def table(data: bytes) -> bytes:
    """One row with the text of ``data`` a hundred times, which a file holds once."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table({"text": ["short", "a" * len(data)]}), sink)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(("pack", "ending"), [(bytes, ""), (gzip.compress, ".gz"), (zstd, ".zst")], ids=["plain", "gzip", "zstd"])
def test_a_line_that_does_not_end_is_named_with_its_place_and_the_flag(tmp_path: Path, pack: Callable[[bytes], bytes], ending: str) -> None:
    (tmp_path / f"in.jsonl{ending}").write_bytes(pack(GOOD * 2 + ENDLESS))
    blocks = read_blocks([str(tmp_path / f"in.jsonl{ending}")], ["text"], 64, 2000)
    with pytest.raises(PreprocessError, match=rf"in\.jsonl{ending}, line 3, byte {2 * len(GOOD)}: longer than --max-line-gib .*; split it"):
        list(blocks)


@pytest.mark.parametrize("longer", [0, 1])
def test_the_limit_is_exact_and_counts_no_line_end(tmp_path: Path, longer: int) -> None:
    line = b'{"text": "%b"}' % (b"a" * 500)
    data = GOOD + line + b"\n" + GOOD
    limit = len(line) - longer
    if longer:
        with pytest.raises(PreprocessError, match="line 2, byte 26: longer than"):
            run(tmp_path, data, max_line_gib=limit / 2**30)
        assert outputs(tmp_path) == []
    else:
        assert run(tmp_path, data, max_line_gib=limit / 2**30).documents == 3


def test_a_row_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(PreprocessError, match=r"in\.parquet, row 2: longer than --max-line-gib"):
        run(tmp_path, table(ENDLESS), name="in.parquet", max_line_gib=2000 / 2**30)


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_that_is_none_is_refused(tmp_path: Path, limit: float) -> None:
    with pytest.raises(PreprocessError, match="--max-line-gib"):
        run(tmp_path, GOOD, max_line_gib=limit)


@pytest.mark.parametrize(
    "value", ["[" * 65 + "]" * 65, "[" * 40_000 + "]" * 40_000, "7" * 5000], ids=["nested", "deeply nested", "a number of 5000 digits"]
)
def test_a_line_beyond_a_limit_is_named(tmp_path: Path, value: str) -> None:
    with pytest.raises(PreprocessError, match=r"line 2, byte 26: not readable as JSON \((nested deeper|a whole number)"):
        run(tmp_path, GOOD + b'{"text": "a", "more": %b}\n' % value.encode())


def test_numbers_that_nobody_reads_may_be_large(tmp_path: Path) -> None:
    assert run(tmp_path, b'{"text": "a", "hash": %b, "shape": "[[[["}\n' % (b"7" * 40)).documents == 1


def test_an_id_that_is_no_number_is_shown_in_few_characters() -> None:
    for word in ("x" * 10_000, "9" * 10_000, "9" * 4000):
        with pytest.raises(TokenizerError) as error:
            NullTokenizer(10).encode_batch([word])
        assert len(str(error.value)) < 150


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_word_is_encoded_in_parts_and_all_others_as_ever(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = build_tokenizer(KINDS[kind], None)
    parts, around = ["abcdefghij", "klmnopqrst", "uvw"], ["Once upon a time ", " they lived."]
    text = "".join(parts).join(around)
    apart = [*tokenizer.encode(around[0] + parts[0])]
    for part in (parts[1], parts[2] + around[1]):
        apart += tokenizer.encode(part)
    plain = "words of usual lengths, and then some more of them " * 20
    usual = tokenizer.encode(plain)
    monkeypatch.setattr(seam, "LONGEST_WORD", 10)
    monkeypatch.setattr(seam, "PIECE_CHARACTERS", 20)
    monkeypatch.setattr("domino_lm.data.tokenizers.sentencepiece.LONGEST_WORD", 10)
    ids, lengths = tokenizer.encode_batch([text, plain, ""])
    assert ids[: lengths[0]].tolist() == apart
    assert ids[lengths[0] : lengths[0] + lengths[1]].tolist() == usual
    assert lengths.tolist() == [len(apart), len(usual), 0]


@pytest.mark.parametrize("letters", ["abcdefghij", " ", "\u4e2d"], ids=["letters", "spaces", "Chinese"])
def test_no_call_of_a_library_gets_more_of_a_word_than_the_longest(letters: str) -> None:
    given: list[int] = []

    def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        given.extend(map(len, texts))
        return np.zeros(sum(map(len, texts)), np.int32), np.array(list(map(len, texts)), np.int64)

    text = (letters * 2_000_000)[:2_000_000]
    _, lengths = seam.encode_pieces(encode, [text, "short"], seam.NOWHERE)
    assert lengths.tolist() == [len(text), 5]
    assert max(given) == LONGEST_WORD


MEASURE = """
import resource, sys, time
from domino_lm.tools.preprocess_data import main
began = time.process_time()
main()
print(time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, file=sys.stderr)
"""


def measured(tmp_path: Path, kind: str, word: str) -> tuple[float, float]:
    """CPU seconds and peak MiB of a process that encodes one document of one word."""
    (tmp_path / "word.jsonl").write_text(json.dumps({"text": word}, ensure_ascii=False) + "\n")
    names = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
    tokenizer = [word for name in names if (value := getattr(KINDS[kind], name)) for word in (f"--{name.replace('_', '-')}", value)]
    if kind == "legacy":
        tokenizer += ["--tokenizer-sentencepiece-legacy", "--tokenizer-special-tokens", "<mask>"]
    words = ["--input", str(tmp_path / "word.jsonl"), "--output-prefix", str(tmp_path / "out"), "--workers", "1", *tokenizer]
    words += ["--append-eod"] if build_tokenizer(KINDS[kind], None).eod is not None else []
    done = subprocess.run([sys.executable, "-c", MEASURE, *words], capture_output=True, text=True, check=True)
    seconds, mebibytes = map(float, done.stderr.split()[-2:])
    assert IndexedDataset(tmp_path / "out_text_document").num_tokens > len(word) // 10
    return seconds, mebibytes


@pytest.mark.long
@pytest.mark.parametrize("letters", ["abcdefghij", "\u4e2d\u6587"], ids=["ascii", "Chinese"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_word_of_10_mb_takes_linear_time_and_under_300_mb(tmp_path: Path, kind: str, letters: str) -> None:
    characters = 10_000_000 // len(letters.encode()) * len(letters)
    short, _ = measured(tmp_path, kind, letters * (characters // len(letters) // 10))
    seconds, mebibytes = measured(tmp_path, kind, letters * (characters // len(letters)))
    print(f"{kind}: {short:.2f} s for a tenth, {seconds:.2f} s, {mebibytes:.0f} MiB")
    assert mebibytes * 2**20 < 300e6
    assert seconds < 15 * short


@pytest.mark.long
def test_an_archive_of_gigabytes_that_is_one_line_is_refused_in_the_memory_of_the_limit(tmp_path: Path) -> None:
    """4 GiB of one letter, packed to 4 MiB; many short lines of the same size pass at flat memory (`test_preprocess`)."""
    with gzip.open(tmp_path / "bomb.jsonl.gz", "wb", compresslevel=1) as file:
        file.write(b'{"text": "')
        for _ in range(4096):
            file.write(b"a" * 2**20)
    tool = [sys.executable, str(ROOT / "tools/preprocess_data.py"), *map(str, flags(tmp_path / "bomb.jsonl.gz", tmp_path / "out"))]
    done = subprocess.run([*tool, "--max-line-gib", "0.125"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "line 1, byte 0: longer than --max-line-gib 0.125" in done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 600e6
