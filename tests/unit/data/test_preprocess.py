"""Preprocessing: one clear line for each fault, no file left behind, the same bytes for any number of workers."""

import contextlib
import gzip
import io
import itertools
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from domino_lm.config.data import TokenizerConfig
from domino_lm.data.indexed import IndexedDataset, IndexedDatasetError, IndexedDatasetWriter
from domino_lm.data.preprocess.inputs import Block, PreprocessError, read_blocks
from domino_lm.data.preprocess.preprocess import PreprocessConfig, Progress, Summary, preprocess
from domino_lm.data.tokenizers.build import build_tokenizer

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools" / "preprocess_data.py"
TOKENIZER = TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(ROOT / "examples/data/sp4096.model"))
GOOD = b'{"text": "one good line"}\n'


def run(tmp_path: Path, data: bytes, name: str = "input.jsonl", **settings: Any) -> Summary:
    (tmp_path / name).write_bytes(data)
    config = {"input": str(tmp_path / name), "output_prefix": str(tmp_path / "out"), "tokenizer": TOKENIZER, "workers": 1, **settings}
    return preprocess(PreprocessConfig(**config))


def outputs(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out"))


def tool(*flags: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *map(str, flags)], capture_output=True, text=True, timeout=60, **options)


def flags(source: Path, prefix: Path) -> list[str | Path]:
    assert TOKENIZER.tokenizer_model is not None
    tokenizer = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", TOKENIZER.tokenizer_model]
    return ["--input", source, "--output-prefix", prefix, *tokenizer]


@pytest.mark.parametrize(
    ("line", "byte", "message"),
    [
        pytest.param(b'{"text": "a"', 12, "not valid JSON", id="malformed"),
        pytest.param('{"ä": 1, text}'.encode(), 10, "not valid JSON", id="malformed behind a wide character"),
        pytest.param(b'{"text": "a"} {"text": "b"}', 14, "not valid JSON", id="two objects"),
        pytest.param(b'["text"]', 0, "holds a list, not an object", id="list"),
        pytest.param(b'[{"text": "a"},', 15, "not valid JSON", id="a file that is one array"),
        pytest.param(b"null", 0, "holds null, not an object", id="null line"),
        pytest.param(b'{"txt": "a"}', 0, r"no key 'text' \(keys here: 'txt'\)", id="key missing"),
        pytest.param(b'{"text": null}', 0, "'text' is null, not a string", id="null"),
        pytest.param(b'{"text": 7}', 0, "'text' is a number, not a string", id="number"),
        pytest.param(b'{"text": ["a", {}]}', 0, "'text' is an object in a list, not a string", id="list of no strings"),
        pytest.param(b'{"text": "a\xa3\xffb"}', 11, r"not UTF-8 \(bytes a3 ff", id="not UTF-8"),
        pytest.param(b'{"text": "ab\\ud800"}', 0, r"half of a surrogate pair \(\\ud800, character 3\)", id="lone surrogate"),
        pytest.param(b'{"text": "ab\\udc00\\ud800"}', 0, "half of a surrogate pair", id="swapped surrogates"),
        pytest.param(b"[" * 100_000, 0, "not readable as JSON", id="nested too deep"),
    ],
)
@pytest.mark.parametrize("before", [0, 2])
def test_a_bad_line_is_named_with_file_line_and_byte(tmp_path: Path, line: bytes, byte: int, message: str, before: int) -> None:
    place = f"input.jsonl, line {before + 1}, byte {before * len(GOOD) + byte}: "
    with pytest.raises(PreprocessError, match=f"{place}.*{message}.*; "):
        run(tmp_path, GOOD * before + line + b"\n" + GOOD)
    assert outputs(tmp_path) == []


def test_a_byte_order_mark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PreprocessError, match="line 1, byte 0: the file begins with a byte order mark"):
        run(tmp_path, b"\xef\xbb\xbf" + GOOD)


@pytest.mark.parametrize(
    ("data", "ending"),
    [(gzip.compress(GOOD), "gz"), (b"\x28\xb5\x2f\xfd\0", "zst"), (b"PAR1\0", "parquet")],
    ids=["gzip", "zstd", "parquet"],
)
def test_packed_files_under_another_name_are_told_what_they_are(tmp_path: Path, data: bytes, ending: str) -> None:
    with pytest.raises(PreprocessError, match=rf"line 1, byte 0: these are the first bytes of a \.{ending} file; give it a name"):
        run(tmp_path, data)


def test_a_fault_that_a_worker_finds_is_named_alike(tmp_path: Path) -> None:
    with pytest.raises(PreprocessError, match=r"input\.jsonl, line 30001, byte 780000: not valid JSON"):
        run(tmp_path, GOOD * 30_000 + b"x\n", workers=2)
    assert outputs(tmp_path) == []


@pytest.mark.parametrize("data", [b"", b"\n\n", b'{"text": ""}\n', b'{"text": []}\n{"text": [""]}\n'])
def test_input_without_any_token_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(PreprocessError, match=r"no document|are empty"):
        run(tmp_path, data)
    assert outputs(tmp_path) == []


@pytest.mark.parametrize("data", [b"", GOOD + b"x\n"], ids=["no document", "a bad line"])
def test_a_run_that_fails_leaves_no_folder_that_it_made(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "mine").mkdir()
    for prefix in ("new/inner/out", "mine/out"):
        with pytest.raises(PreprocessError):
            run(tmp_path, data, output_prefix=str(tmp_path / prefix))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["input.jsonl", "mine"]


def test_an_empty_first_document_is_counted(tmp_path: Path) -> None:
    summary = run(tmp_path, b'{"text":""}\n' + GOOD)
    assert (summary.documents, summary.empty, IndexedDataset(tmp_path / "out_text_document").document_indices.tolist()) == (
        2,
        {"text": 1},
        [0, 0, 1],
    )


def test_blank_lines_are_skipped_with_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run(tmp_path, GOOD + b"\n" + GOOD + b" \t\r\n" + GOOD)
    warning = f"warning: {tmp_path}/input.jsonl, line 2: blank line skipped; further ones are only counted.\n"
    assert (summary.documents, summary.blank_lines, capsys.readouterr().err) == (3, 2, warning)


@pytest.mark.parametrize("data", [GOOD + GOOD[:-1], GOOD.replace(b"\n", b"\r\n") * 2], ids=["no newline at the end", "CRLF"])
def test_line_ends_do_not_matter(tmp_path: Path, data: bytes) -> None:
    run(tmp_path, GOOD * 2, output_prefix=str(tmp_path / "expected"))
    run(tmp_path, data)
    assert (tmp_path / "out_text_document.bin").read_bytes() == (tmp_path / "expected_text_document.bin").read_bytes()


def test_a_pair_of_surrogates_is_one_character(tmp_path: Path) -> None:
    run(tmp_path, b'{"text": "\\ud83d\\ude00"}\n')
    tokenizer = build_tokenizer(TOKENIZER)
    assert IndexedDataset(tmp_path / "out_text_document").get(0).tolist() == tokenizer.encode("\U0001f600")


def test_end_of_document_joins_the_last_sequence(tmp_path: Path) -> None:
    run(tmp_path, b'{"text": ["one", "", "two", ""]}\n{"text": ""}\n', append_eod=True)
    dataset, tokenizer = IndexedDataset(tmp_path / "out_text_document"), build_tokenizer(TOKENIZER)
    assert [dataset.get(i).tolist() for i in range(len(dataset))] == [tokenizer.encode("one"), [*tokenizer.encode("two"), 2]]


def test_every_key_gets_a_whole_pair(tmp_path: Path) -> None:
    run(tmp_path, b'{"text": "a", "title": "b c"}\n' * 3, json_keys=("text", "title"))
    assert [IndexedDataset(tmp_path / f"out_{key}_document").num_documents for key in ("text", "title")] == [3, 3]


def test_gzip_input_gives_the_same_bytes(tmp_path: Path) -> None:
    run(tmp_path, GOOD * 5, output_prefix=str(tmp_path / "expected"))
    run(tmp_path, gzip.compress(GOOD * 5), "input.jsonl.gz")
    assert (tmp_path / "out_text_document.bin").read_bytes() == (tmp_path / "expected_text_document.bin").read_bytes()


@pytest.mark.parametrize("data", [gzip.compress(GOOD * 5)[:-9], GOOD], ids=["truncated", "not gzip"])
def test_damaged_gzip_input_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(PreprocessError, match="the gzip file is damaged"):
        run(tmp_path, data, "input.jsonl.gz")


@pytest.mark.parametrize("size_bytes", [1, 10, 26, 27, 1000])
def test_blocks_are_whole_lines_and_know_their_place(tmp_path: Path, size_bytes: int) -> None:
    data = GOOD * 3 + b"\n" + b"x" * 100 + b"\n" + GOOD[:-1]
    path = str(tmp_path / "file")
    Path(path).write_bytes(data)
    blocks = list(read_blocks([path], ["text"], size_bytes))
    assert b"".join(block.data for block in blocks) == data
    for block in blocks:
        begin = block.offset_bytes
        assert (block.path, block.data, block.first_line) == (path, data[begin:][: len(block.data)], 1 + data[:begin].count(b"\n"))
        assert block.offset_bytes == 0 or data[block.offset_bytes - 1 : block.offset_bytes] == b"\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "--workers 0"),
        ({"partitions": 0}, "--partitions 0"),
        ({"log_interval": 0}, "--log-interval 0"),
        ({"json_keys": ("text", "text")}, "--json-keys text text"),
        ({"input": "/no/such.jsonl"}, "--input /no/such.jsonl: no such file"),
        ({"input": "/tmp"}, "--input /tmp is a folder"),
        ({"output_prefix": "/proc/none/out"}, "/proc/none/out_text_document: the folder for it cannot be made"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_flag(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises((PreprocessError, IndexedDatasetError), match=message):
        run(tmp_path, GOOD, **settings)


def test_the_input_is_never_overwritten(tmp_path: Path) -> None:
    with pytest.raises(PreprocessError, match="would overwrite --input"):
        run(tmp_path, GOOD, "out_text_document.bin")
    assert (tmp_path / "out_text_document.bin").read_bytes() == GOOD


def test_a_failed_run_keeps_the_output_of_an_earlier_one(tmp_path: Path) -> None:
    run(tmp_path, GOOD)
    before = (tmp_path / "out_text_document.bin").read_bytes()
    with pytest.raises(PreprocessError):
        run(tmp_path, GOOD * 2 + b"{\n")
    assert (tmp_path / "out_text_document.bin").read_bytes() == before
    assert outputs(tmp_path) == ["out_text_document.bin", "out_text_document.idx"]


@pytest.mark.parametrize("partitions", [1, 2])
def test_output_does_not_depend_on_the_number_of_workers(tmp_path: Path, partitions: int) -> None:
    lines = b"".join(json.dumps({"text": f"line {i} " * (i % 50)}).encode() + b"\n" for i in range(4000))
    for workers in (1, 3):
        run(tmp_path, lines, workers=workers, partitions=partitions, append_eod=True, output_prefix=str(tmp_path / f"out{workers}"))
    for extension in ("bin", "idx"):
        assert len({(tmp_path / f"out{workers}_text_document.{extension}").read_bytes() for workers in (1, 3)}) == 1


def test_partitions_that_keep_the_order_write_what_one_partition_writes(tmp_path: Path) -> None:
    lines = as_lines(*(f"document {i}" for i in range(20)))
    run(tmp_path, lines, output_prefix=str(tmp_path / "expected"))
    run(tmp_path, lines, partitions=3, keep_sequential_samples=True)
    for extension in ("bin", "idx"):
        assert (tmp_path / f"out_text_document.{extension}").read_bytes() == (tmp_path / f"expected_text_document.{extension}").read_bytes()


def test_a_full_disk_ends_the_tool_with_a_reason_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "input.jsonl").write_bytes(GOOD * 30_000)
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))  # noqa: E731
    result = tool(*flags(tmp_path / "input.jsonl", tmp_path / "out"), "--workers", "1", "--log-interval", "100000", preexec_fn=limit)
    assert (result.returncode, result.stderr.count("\n"), "File too large; free space" in result.stderr) == (1, 1, True)
    assert outputs(tmp_path) == []


def test_the_tool_prints_one_line_for_a_fault_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "input.jsonl").write_bytes(b"{\n")
    result = tool(*flags(tmp_path / "input.jsonl", tmp_path / "out"))
    assert (result.returncode, result.stderr.count("\n"), result.stderr.startswith("error: ")) == (1, 1, True)


def test_the_tool_exits_with_2_for_a_missing_flag() -> None:
    result = tool("--input", "x")
    assert (result.returncode, "--output-prefix" in result.stderr) == (2, True)


def test_the_tool_reports_progress_and_a_summary(tmp_path: Path) -> None:
    (tmp_path / "input.jsonl").write_bytes(GOOD * 30_000)
    result = tool(*flags(tmp_path / "input.jsonl", tmp_path / "out"), "--workers", "1", "--log-interval", "10000")
    assert (len(result.stderr.splitlines()), "30000 documents in " in result.stdout) == (3, True)
    line = r"Processed 1\d{4} documents \([\d.]+ docs/s, [\d.]+ MB/s, [\d.]+ M tokens, \d+ s left\)\."
    assert re.fullmatch(line, result.stderr.splitlines()[0])


def test_a_terminal_gets_a_bar_with_documents_tokens_speed_and_time_left() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with Progress(1, 1000, stream) as progress:
        progress.update(Summary(documents=5, read_bytes=500, tokens={"text": 2_000_000}))
    assert "50%" in stream.getvalue()
    assert re.search(r"\[00:00<.*B/s, 5 documents, 2\.0 M tokens\]", stream.getvalue())


def test_the_tool_runs_without_torch() -> None:
    program = (
        f"import sys, runpy\nsys.argv, sys.path[0] = ['x', '--help'], {str(TOOL.parent)!r}\ntry: runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
        "except SystemExit: assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True).returncode == 0


def start_endless(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    """The tool with two workers, reading from a pipe that never ends."""
    os.mkfifo(tmp_path / "input.jsonl")
    command = [sys.executable, str(TOOL), *map(str, flags(tmp_path / "input.jsonl", tmp_path / "out")), "--workers", "2", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


def feed(tmp_path: Path, process: subprocess.Popen[str]) -> tuple[int, list[int]]:
    """Opens the pipe and writes until the workers are there. Returns the open pipe and the workers."""
    pipe = os.open(tmp_path / "input.jsonl", os.O_WRONLY)
    deadline = time.monotonic() + 60
    while len(workers_of(process.pid)) < 2:
        os.write(pipe, GOOD * 2000)
        assert time.monotonic() < deadline, "no workers"
    os.write(pipe, GOOD * 2000)
    return pipe, workers_of(process.pid)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_a_killed_worker_ends_the_run_with_a_reason(tmp_path: Path) -> None:
    process = start_endless(tmp_path)
    pipe, workers = feed(tmp_path, process)
    os.kill(workers[0], signal.SIGKILL)
    os.close(pipe)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "a worker process died" in err
    assert outputs(tmp_path) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["terminated", "killed"])
def test_workers_end_with_a_parent_that_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    process = start_endless(tmp_path)
    pipe, workers = feed(tmp_path, process)
    process.send_signal(number)
    process.wait(timeout=60)
    os.close(pipe)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "orphaned workers"
        time.sleep(0.05)
    if number == signal.SIGTERM:
        assert outputs(tmp_path) == []


def documents(prefix: Path) -> list[list[int]]:
    """Tokens of each document."""
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices
    return [[int(t) for i in range(a, b) for t in dataset.get(i)] for a, b in itertools.pairwise(bounds)]


def ids(*texts: str) -> list[list[int]]:
    tokenizer = build_tokenizer(TOKENIZER)
    return [tokenizer.encode(text) for text in texts]


def as_lines(*texts: str) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def compressed(name: str, data: bytes) -> bytes:
    if name == "gz":
        return gzip.compress(data)
    zstandard = pytest.importorskip("zstandard")
    half = len(data) // 2
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:]))


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_input_gives_the_same_documents(tmp_path: Path, kind: str) -> None:
    run(tmp_path, compressed(kind, as_lines("a", "b c", "d" * 5000) * 50), f"input.jsonl.{kind}")
    assert documents(tmp_path / "out_text_document") == ids("a", "b c", "d" * 5000) * 50


@pytest.mark.parametrize("cut", [-1, 10])
def test_damaged_zstd_input_is_refused(tmp_path: Path, cut: int) -> None:
    with pytest.raises(PreprocessError, match="the zstd file is damaged"):
        run(tmp_path, compressed("zst", as_lines("some text") * 50)[:cut], "input.jsonl.zst")
    assert outputs(tmp_path) == []


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["a", "", "b c"], "other": [1, 2, 3], "list": [["x"], ["y", "z"], []]})
    parquet.write_table(table, tmp_path / "input.parquet")
    run(tmp_path, (tmp_path / "input.parquet").read_bytes(), "input.parquet", json_keys=("text", "list"))
    assert documents(tmp_path / "out_text_document") == [*ids("a"), [], *ids("b c")]
    assert documents(tmp_path / "out_list_document") == [ids("x")[0], ids("y")[0] + ids("z")[0], []]


def test_bytes_in_parquet_are_text_where_they_are_utf8(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a \u00e4".encode(), b"x\xa3"]}), tmp_path / "in.parquet")
    data = (tmp_path / "in.parquet").read_bytes()
    with pytest.raises(PreprocessError, match=r"input.parquet, row 2: the value of 'text' holds half of a surrogate pair"):
        run(tmp_path, data, "input.parquet")
    run(tmp_path, data, "input.parquet", on_error="replace")
    assert documents(tmp_path / "out_text_document") == ids("a \u00e4", "x\ufffd")


@pytest.mark.parametrize("values", [[1, 2], [1.5], [{"a": "b"}], [True]])
def test_a_column_of_something_else_than_text_is_refused(tmp_path: Path, values: list[Any]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": values}), tmp_path / "in.parquet")
    with pytest.raises(PreprocessError, match=r"input.parquet: the column 'text' holds .*, not text"):
        run(tmp_path, (tmp_path / "in.parquet").read_bytes(), "input.parquet")


def test_long_rows_of_parquet_are_read_few_at_a_time(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [f"{i} " + "x" * (300_000 if i % 3 else 10) for i in range(20)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "in.parquet", compression="zstd", use_dictionary=False)
    blocks = list(read_blocks([str(tmp_path / "in.parquet")], ["text"]))
    assert max(block.data.count(b"\n") for block in blocks) <= 2
    assert [block.first_line for block in blocks] == list(
        itertools.accumulate((block.data.count(b"\n") for block in blocks[:-1]), initial=1)
    )
    assert [json.loads(line)["text"] for block in blocks for line in block.data.splitlines()] == texts


def test_a_fault_in_parquet_is_named_by_its_row(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "in.parquet")
    data = (tmp_path / "in.parquet").read_bytes()
    with pytest.raises(PreprocessError, match=r"input.parquet, row 2: the value of 'text' is null"):
        run(tmp_path, data, "input.parquet")
    with pytest.raises(PreprocessError, match=r"no column 'title' \(columns here: 'text'\)"):
        run(tmp_path, data, "input.parquet", json_keys=("title",))
    with pytest.raises(PreprocessError, match="the parquet file cannot be read"):
        run(tmp_path, data[:-20], "input.parquet")


@pytest.mark.parametrize(
    ("package", "name", "settings"),
    [("zstandard", "input.jsonl.zst", {}), ("pyarrow", "input.parquet", {}), ("punkt", "input.jsonl", {"split_sentences": True})],
)
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str, settings: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PreprocessError, match=r"needs the package .*pip install"):
        run(tmp_path, GOOD, name, **settings)
    assert outputs(tmp_path) == []


def test_patterns_find_files_in_order_and_leave_hidden_ones_out(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(as_lines("b"))
    (tmp_path / "._x.jsonl").write_bytes(b"\xa3\xff")
    run(tmp_path, as_lines("a"), "a.jsonl", input=str(tmp_path / "*.jsonl"))
    assert documents(tmp_path / "out_text_document") == ids("a", "b")


@pytest.mark.parametrize(
    "given", [("nothing*.jsonl",), ("input.jsonl", "input.jsonl"), ("input.jsonl", "./input.jsonl"), ("input.jsonl", "absent.jsonl")]
)
def test_input_that_names_nothing_or_something_twice_is_refused(tmp_path: Path, given: tuple[str, ...]) -> None:
    with pytest.raises(PreprocessError, match="--input"):
        run(tmp_path, GOOD, input=tuple(str(tmp_path / name) for name in given))


def test_lines_are_counted_in_each_file(tmp_path: Path) -> None:
    (tmp_path / "second.jsonl").write_bytes(GOOD + b"{\n")
    with pytest.raises(PreprocessError, match=r"second.jsonl, line 2, byte 27: not valid JSON"):
        run(tmp_path, GOOD * 3, input=(str(tmp_path / "input.jsonl"), str(tmp_path / "second.jsonl")))


@pytest.mark.parametrize("change", ["grows", "is replaced", "is touched", "vanishes"])
def test_input_that_changes_while_it_is_read_is_noticed(tmp_path: Path, change: str) -> None:
    path = tmp_path / "input.jsonl"
    path.write_bytes(GOOD * 100)
    blocks = read_blocks([str(path)], ["text"], size_bytes=1000)
    next(blocks)
    if change == "grows":
        path.write_bytes(GOOD * 101)
    elif change == "is replaced":
        (tmp_path / "new").write_bytes(GOOD * 100)
        os.replace(tmp_path / "new", path)
    elif change == "is touched":
        os.utime(path, (1, 1))
    else:
        path.unlink()
    with pytest.raises(PreprocessError, match=r"input\.jsonl: the file changed while it was read"):
        list(blocks)


def test_partitions_of_an_earlier_input_are_never_used_again(tmp_path: Path) -> None:
    for text in ("old text", "new"):
        run(tmp_path, as_lines(*[text] * 5), partitions=2)
    assert documents(tmp_path / "out_text_document") == ids(*["new"] * 5)
    assert outputs(tmp_path) == ["out_text_document.bin", "out_text_document.idx"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_a_killed_run_is_started_again_from_a_clean_place(tmp_path: Path) -> None:
    process = start_endless(tmp_path, "--partitions", "2")
    pipe, _ = feed(tmp_path, process)
    process.kill()
    process.wait(timeout=60)
    os.close(pipe)
    assert any(".tmp-" in name for name in outputs(tmp_path))
    (tmp_path / "input.jsonl").unlink()
    run(tmp_path, as_lines("new"))
    assert (documents(tmp_path / "out_text_document"), outputs(tmp_path)) == (
        ids("new"),
        ["out_text_document.bin", "out_text_document.idx"],
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
def test_a_second_run_to_the_same_output_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    process = start_endless(tmp_path)
    pipe, _ = feed(tmp_path, process)
    (tmp_path / "second.jsonl").write_bytes(GOOD)
    second = tool(*flags(tmp_path / "second.jsonl", tmp_path / "out"))
    assert (second.returncode, "is being written by another process" in second.stderr) == (1, True)
    os.close(pipe)
    assert process.wait(timeout=60) == 0
    assert IndexedDataset(tmp_path / "out_text_document").num_documents > 1


def test_runs_to_one_output_that_start_together_never_mix(tmp_path: Path) -> None:
    commands = []
    for name in "abc":
        (tmp_path / name).write_bytes(as_lines(*[f"text of {name} "] * 20_000))
        command = map(str, flags(tmp_path / name, tmp_path / "out"))
        commands.append([sys.executable, str(TOOL), *command, "--workers", "1", "--log-interval", "100000"])
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for command in commands]
    ends = [(process.communicate(timeout=60)[1], process.returncode) for process in running]
    assert all(code == 0 or "is being written by another process" in error for error, code in ends)
    whole = [ids(f"text of {name} ") * 20_000 for name, (_, code) in zip("abc", ends, strict=True) if code == 0]
    assert not whole or documents(tmp_path / "out_text_document") in whole  # two may refuse each other
    assert outputs(tmp_path) == (["out_text_document.bin", "out_text_document.idx"] if whole else [])


def test_a_pair_that_fails_at_the_end_takes_those_of_other_keys_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = IndexedDatasetWriter.prepare

    def full(writer: IndexedDatasetWriter) -> None:
        if "out_text" in writer.prefix:
            raise OSError(28, "No space left on device")
        real(writer)

    monkeypatch.setattr(IndexedDatasetWriter, "prepare", full)
    with pytest.raises(PreprocessError, match="No space left on device; free space"):
        run(tmp_path, b'{"text": "a", "title": "b"}\n', json_keys=("text", "title"))
    assert outputs(tmp_path) == []


def test_the_tool_ends_quietly_however_long_its_end_takes(tmp_path: Path) -> None:
    """Its timer must not outlive it: the end of the interpreter hands the signal to the system, which kills."""
    (tmp_path / "input.jsonl").write_bytes(GOOD)
    slow = tmp_path / "sitecustomize.py"
    slow.write_text(
        "import sys, time\nclass Slow:\n    def __del__(self, sleep=time.sleep):\n        sleep(0.8)\nsys.slow_to_end = Slow()\n"
    )
    result = tool(*flags(tmp_path / "input.jsonl", tmp_path / "out"), env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 0


def test_blocks_of_long_lines_are_encoded_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from domino_lm.data.preprocess import pool

    at_once: list[int] = []

    class Pool:
        def __init__(self, *_: object) -> None:
            self.waiting: list[Block] = []

        def submit(self, block: Block) -> None:
            self.waiting.append(block)
            at_once.append(sum(len(each.data) for each in self.waiting))

        def next_result(self) -> Any:
            return self.waiting.pop(0)

        def close(self) -> None: ...

    monkeypatch.setattr(pool, "_Processes", Pool)
    monkeypatch.setattr(pool, "BYTES_IN_FLIGHT", 100)
    sizes = [30, 30, 30, 30, 500, 40, 40]
    blocks = [Block("x", b"x" * size, 1, 0, 0) for size in sizes]
    encoder: Any = SimpleNamespace(tokenizer=SimpleNamespace(uses_threads=False))
    assert list(pool.encode_blocks(blocks, 4, encoder, None, lambda _: encoder)) == blocks
    assert at_once == [30, 60, 90, 90, 500, 40, 80]


def test_want_of_memory_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("domino_lm.data.preprocess.documents.parse_line", fail)
    with pytest.raises(PreprocessError, match=r"input\.jsonl: out of memory after 0 documents; .*fewer workers"):
        run(tmp_path, GOOD)
    assert outputs(tmp_path) == []


def test_standard_input_is_read(tmp_path: Path) -> None:
    result = tool(*flags(Path("-"), tmp_path / "out"), input=as_lines("a", "b").decode())
    assert (result.returncode, documents(tmp_path / "out_text_document")) == (0, ids("a", "b"))


def test_a_closed_standard_input_is_refused(tmp_path: Path) -> None:
    command = shlex.join([sys.executable, str(TOOL), *map(str, flags(Path("-"), tmp_path / "out"))])
    result = subprocess.run(f"{command} <&-", shell=True, capture_output=True, text=True)
    assert (result.returncode, result.stderr.startswith("error: --input -: standard input is closed")) == (1, True)


BAD_LINES = as_lines("a") + b"{\n" + b'{"text": null}\n' + as_lines("b") + b'{"text": "\xff"}\n'


def test_bad_lines_are_skipped_counted_and_named_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run(tmp_path, BAD_LINES, on_error="skip")
    assert (summary.documents, summary.skipped, documents(tmp_path / "out_text_document")) == (2, 3, ids("a", "b"))
    assert [line.split(",")[1] for line in capsys.readouterr().err.splitlines()] == [" line 2", " line 3", " line 5"]


def test_a_line_that_lacks_one_key_is_skipped_for_all(tmp_path: Path) -> None:
    run(tmp_path, b'{"text": "a", "title": "x"}\n{"text": "b"}\n', json_keys=("text", "title"), on_error="skip")
    assert (documents(tmp_path / "out_text_document"), documents(tmp_path / "out_title_document")) == (ids("a"), ids("x"))


def test_the_tool_exits_with_3_when_lines_were_skipped(tmp_path: Path) -> None:
    (tmp_path / "input.jsonl").write_bytes(BAD_LINES)
    result = tool(*flags(tmp_path / "input.jsonl", tmp_path / "out"), "--on-error", "skip", "--json")
    summary = json.loads(result.stdout)
    assert (result.returncode, summary["documents"], summary["skipped"], summary["outputs"]) == (
        3,
        2,
        3,
        {"text": f"{tmp_path}/out_text_document"},
    )


def test_characters_that_are_none_are_replaced_when_asked_for(tmp_path: Path) -> None:
    summary = run(tmp_path, b'{"text": "a\xa3b"}\n{"text": "c"}\n{"text": "a\\ud800b"}\n', on_error="replace")
    assert documents(tmp_path / "out_text_document") == ids("a\ufffdb", "c", "a\ufffdb")
    assert summary.replaced == 2


def test_other_faults_stop_a_run_that_replaces_characters(tmp_path: Path) -> None:
    with pytest.raises(PreprocessError, match="not valid JSON"):
        run(tmp_path, BAD_LINES, on_error="replace")


NULL = TokenizerConfig(tokenizer_type="NullTokenizer")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("1000 65000", "id 1000 is outside the vocabulary"),
        ("1 70000", "id 70000 is outside the vocabulary"),
        ("-5", "id -5 is outside"),
        ("1  2", "word 2 is '', not a number"),
    ],
)
def test_text_that_the_tokenizer_refuses_is_named_by_its_line(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(PreprocessError, match=rf"input.jsonl, line 2, byte 14: .*\({fault}"):
        run(tmp_path, as_lines("1", text, "2"), tokenizer=NULL, vocab_size=100)


def test_text_that_the_tokenizer_refuses_can_be_skipped(tmp_path: Path) -> None:
    summary = run(tmp_path, as_lines("1", "70000", "2 3"), tokenizer=NULL, vocab_size=100, on_error="skip")
    assert (summary.skipped, documents(tmp_path / "out_text_document")) == (1, [[1], [2, 3]])


def test_sentences_become_sequences(tmp_path: Path) -> None:
    pytest.importorskip("punkt")
    run(tmp_path, as_lines("Dr. Smith went home.\nHe was tired."), split_sentences=True, append_eod=True)
    dataset = IndexedDataset(tmp_path / "out_text_sentence")
    expected = ids("Dr. Smith went home.", "He was tired.")
    assert [dataset.get(i).tolist() for i in range(len(dataset))] == [expected[0], [*expected[1], 2]]


def test_newlines_between_sentences_are_kept_when_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("punkt")
    run(tmp_path, as_lines("One.\n Two."), split_sentences=True, keep_newlines=True)
    assert [IndexedDataset(tmp_path / "out_text_sentence").get(i).tolist() for i in range(2)] == ids("One.\n ", "Two.")


def test_an_unknown_language_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    pytest.importorskip("punkt")
    with pytest.raises(PreprocessError, match=r"--lang klingon is unknown; choose one of .*english"):
        run(tmp_path, GOOD, split_sentences=True, lang="klingon")


@pytest.mark.parametrize("partitions", [3, 7])
def test_partitions_deal_documents_out_in_turn(tmp_path: Path, partitions: int) -> None:
    texts = [f"document {i}" if i % 4 else "" for i in range(20)]
    run(tmp_path, as_lines(*texts), partitions=partitions)
    assert documents(tmp_path / "out_text_document") == ids(*(text for p in range(partitions) for text in texts[p::partitions]))


def test_a_failed_run_leaves_no_partition(tmp_path: Path) -> None:
    with pytest.raises(PreprocessError):
        run(tmp_path, GOOD * 5 + b"{\n", partitions=2)
    assert outputs(tmp_path) == []


def test_threads_write_what_one_worker_writes(tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    folder = ROOT / "tests/golden/data/tokenizers/gpt2-bpe"
    gpt2 = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt"))
    lines = as_lines(*(f"line {i} <|endoftext|> " * (i % 50) for i in range(4000)))
    for workers in (1, 3):
        run(tmp_path, lines, workers=workers, tokenizer=gpt2, append_eod=True, output_prefix=str(tmp_path / f"out{workers}"))
    for extension in ("bin", "idx"):
        assert len({(tmp_path / f"out{workers}_text_document.{extension}").read_bytes() for workers in (1, 3)}) == 1


MEMORY = """
import sys
from domino_lm.data.preprocess.preprocess import PreprocessConfig, preprocess
from domino_lm.config.data import TokenizerConfig
vocab, merges = (f"tests/golden/data/tokenizers/gpt2-bpe/{name}" for name in ("vocab.json", "merges.txt"))
tokenizer = TokenizerConfig(tokenizer_type="GPT2BPETokenizer", vocab_file=vocab, merge_file=merges)
preprocess(PreprocessConfig(input=sys.argv[1], output_prefix=sys.argv[1], tokenizer=tokenizer, workers=1))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def peak_mb(path: Path) -> float:
    """Largest memory of a process that encodes the file."""
    result = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, cwd=ROOT, check=True)
    return int(result.stdout) / 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "kind", [pytest.param("jsonl", marks=pytest.mark.long), "jsonl.gz", pytest.param("parquet", marks=pytest.mark.long)]
)
def test_memory_does_not_grow_with_the_size_of_the_input(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("gigatoken")
    texts = [f"line {i} of some text " * 40 for i in range(5000)]  # 4.6 MB
    for name, times in (("small", 3), ("large", 15)):
        path = tmp_path / f"{name}.{kind}"
        if kind == "parquet":
            pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.table({"text": texts * times}), path, use_dictionary=False)
        else:
            data = as_lines(*texts) * times
            path.write_bytes(gzip.compress(data, 1) if kind == "jsonl.gz" else data)
    assert peak_mb(tmp_path / f"large.{kind}") - peak_mb(tmp_path / f"small.{kind}") < 14  # the input is 55 MB larger


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_long_line_takes_a_few_times_its_size(tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    (tmp_path / "small").write_bytes(GOOD * 10_000)
    (tmp_path / "line").write_bytes(as_lines("some words of a text that does not end " * 500_000))
    assert peak_mb(tmp_path / "line") - peak_mb(tmp_path / "small") < 7 * 20


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_documents_of_one_token_take_less_than_40_bytes_each(tmp_path: Path) -> None:
    (tmp_path / "input.jsonl").write_bytes(b'{"text":"5"}\n' * 600_000)
    program = (
        "import sys\n"
        "from domino_lm.data.preprocess.preprocess import PreprocessConfig, preprocess\n"
        "from domino_lm.config.data import TokenizerConfig\n"
        "null = TokenizerConfig(tokenizer_type='NullTokenizer')\n"
        "config = lambda name: PreprocessConfig(input=name, output_prefix=sys.argv[2], tokenizer=null, vocab_size=10, workers=1)\n"
        "open(sys.argv[1] + '.small', 'wb').write(open(sys.argv[1], 'rb').read(13 * 100_000))\n"
        "peak = lambda: int(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1]) * 1024\n"
        "preprocess(config(sys.argv[1] + '.small')); before = peak()\n"
        "preprocess(config(sys.argv[1])); print(peak() - before)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "input.jsonl"), str(tmp_path / "out")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert int(result.stdout) < 40 * 500_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize("delay_s", [0.3, 0.6, 0.9])
def test_a_signal_at_any_moment_of_the_start_ends_the_run(tmp_path: Path, delay_s: float) -> None:
    process = start_endless(tmp_path)
    pipe = os.open(tmp_path / "input.jsonl", os.O_WRONLY)
    os.set_blocking(pipe, False)
    deadline = time.monotonic() + delay_s
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            os.write(pipe, GOOD * 150)  # few enough bytes to be written whole or not at all
        time.sleep(0.001)
    process.terminate()
    process.wait(timeout=60)
    os.close(pipe)
    assert (process.returncode in (128 + signal.SIGTERM, -signal.SIGTERM), outputs(tmp_path)) == (True, [])
