"""Speed and memory of the data tools, beside plain libraries and megatron-core 0.16.1 in the same run, in turn.

    python benchmarks/data_speed.py                          # everything; about ten minutes on two quiet cores
    python benchmarks/data_speed.py --only preprocess --rounds 5   # this part anew; the others stay in OUTPUT

The input is the words of examples/data/corpus.jsonl, shuffled, as JSON lines. MB are 10^6 bytes of that file. "Whole
command" is the time of the process from start to end; "steady" is the difference between a file three times as long and
the short one, so that start-up drops out. Times on a busy machine tell little; the figures by CPU time (of all processes of
a command) hold there too. "memory" is the largest resident memory of a process that encodes everything itself.
Writes OUTPUT.json and OUTPUT.md.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from domino_lm.data.indexed import HEADER, MAGIC, VERSION, sequence_pointers  # noqa: E402

PEERS = ROOT / "benchmarks" / ".peers" / "data"
PROGRAMS = ROOT / "benchmarks" / "programs"
VOCABULARY = ROOT / "tests/golden/data/tokenizers/gpt2-bpe"
MODEL = ROOT / "examples/data/sp4096.model"
GPT2 = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", VOCABULARY / "vocab.json", "--merge-file", VOCABULARY / "merges.txt"]
SENTENCEPIECE = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", MODEL]
NUMBERS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", 10]
PLAIN = "2 x sentencepiece into megatron-core's builder"
WORKERS = 2
DOCUMENTS = 10_000_000
PARTS = ("preprocess", "memory", "index", "loader", "training")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=50, help="size of the short input")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/data_speed", help="where OUTPUT.json and OUTPUT.md go")
    chosen = parser.parse_args()
    install_megatron()
    json_path = chosen.output.with_suffix(".json")
    results: dict[str, Any] = json.loads(json_path.read_text()) if json_path.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        measures: dict[str, Callable[[], dict[str, Any]]] = {
            "preprocess": lambda: measure_preprocess(Path(folder), chosen.megabytes, chosen.rounds),
            "memory": lambda: measure_memory(Path(folder)),
            "index": lambda: measure_index(Path(folder), chosen.rounds),
            "loader": lambda: measure_loader(Path(folder), chosen.rounds),
            "training": lambda: measure_training(Path(folder), chosen.rounds),
        }
        for part in chosen.only:
            results[part] = {"machine": machine(), "command": " ".join(sys.argv), "rounds": chosen.rounds, "rows": measures[part]()}
    json_path.write_text(json.dumps(results, indent=1) + "\n")
    text = "\n".join(markdown(results)) + "\n"
    chosen.output.with_suffix(".md").write_text(text)
    print(text)


def install_megatron() -> None:
    """The wheel alone, without its requirements: it finds PyTorch and numpy in this environment."""
    if not (PEERS / "megatron").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(PEERS), "megatron-core==0.16.1"]
        subprocess.run(command, check=True)


def measure_preprocess(folder: Path, megabytes: int, rounds: int) -> dict[str, Any]:
    """Seconds of each command in each round, every command once a round."""
    short, long = (shuffled_words(folder / f"{size}.jsonl", size) for size in (megabytes, 3 * megabytes))
    save_tokenizer_json(folder / "tokenizer.json")
    hugging_face = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder / "tokenizer.json"]
    commands = {"GPT-2 BPE": GPT2, "HF tokenizer.json": hugging_face, "SentencePiece": SENTENCEPIECE}
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, tokenizer in commands.items():
            (seconds, cpu_s), (long_seconds, long_cpu_s) = (preprocess(path, folder / "out", tokenizer) for path in (short, long))
            keep(found, name, "whole_command_mb_per_s", megabytes / seconds)
            keep(found, name, "steady_mb_per_s", 2 * megabytes / max(long_seconds - seconds, 1e-9))
            keep(found, name, "start_up_cpu_s", max(cpu_s - (long_cpu_s - cpu_s) / 2, 0.0))
            keep(found, name, "steady_mb_per_cpu_s", 2 * megabytes / max(long_cpu_s - cpu_s, 1e-9))
        baseline = run_program("data_megatron.py", "sentencepiece", short, MODEL, folder / "peer")
        keep(found, PLAIN, "steady_mb_per_s", megabytes / baseline["seconds"])
        keep(found, PLAIN, "steady_mb_per_cpu_s", megabytes / baseline["cpu_seconds"])
    for tool in ("preprocess_data.py", "merge_datasets.py", "inspect_data.py"):
        seconds, cpu_s = timed([sys.executable, ROOT / "tools" / tool, "--help"])
        keep(found, f"{tool} --help", "seconds", seconds)
        keep(found, f"{tool} --help", "start_up_cpu_s", cpu_s)
    return found


def measure_memory(folder: Path) -> dict[str, Any]:
    """Megabytes at the peak for inputs of several sizes and kinds."""
    found: dict[str, Any] = {}
    inputs: list[tuple[str, Path, list[Any]]] = []
    for size in (50, 200):
        plain = shuffled_words(folder / f"{size}.jsonl", size)
        inputs += [(f"{path.name[len(str(size)) :]}, {size} MB, GPT-2 BPE", path, GPT2) for path in (plain, *in_other_forms(plain))]
        inputs.append((f".jsonl, {size} MB, SentencePiece", plain, SENTENCEPIECE))
    line = one_line(folder / "line.jsonl", folder / "200.jsonl", 100)
    inputs += [("one line of 100 MB, GPT-2 BPE", line, GPT2), ("one line of 100 MB, SentencePiece", line, SENTENCEPIECE)]
    for millions in (1, 3):
        path = folder / f"{millions}m.jsonl"
        path.write_bytes(b'{"text":"5"}\n' * (millions * 1_000_000))
        inputs.append((f"{millions} million documents of one token", path, NUMBERS))
    for name, path, tokenizer in inputs:
        flags = ["--input", path, "--output-prefix", folder / "out", *tokenizer, "--workers", 1, "--log-interval", 10**9]
        keep(found, name, "peak_mb", run_program("data_ours.py", "preprocess", *flags)["peak_mb"])
    return found


def in_other_forms(path: Path) -> list[Path]:
    """The same lines as .gz, .zst and .parquet."""
    import pyarrow
    import zstandard
    from pyarrow import parquet

    data = path.read_bytes()
    gz, zst, table = (path.with_name(path.name + ".gz"), path.with_name(path.name + ".zst"), path.with_suffix(".parquet"))
    gz.write_bytes(gzip.compress(data, 1))
    zst.write_bytes(zstandard.ZstdCompressor().compress(data))
    parquet.write_table(pyarrow.table({"text": [json.loads(line)["text"] for line in data.splitlines()]}), table)
    return [gz, zst, table]


def one_line(path: Path, source: Path, megabytes: int) -> Path:
    """A single document of the words of ``source``."""
    with open(source, encoding="utf-8") as lines, open(path, "w", encoding="utf-8") as file:
        size = file.write('{"text": "')
        for line in lines:
            size += file.write(line[len('{"text": "') : -len('"}\n')] + " ")
            if size >= megabytes * 1_000_000:
                break
        file.write('"}\n')
    return path


def measure_training(folder: Path, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step of a small model in which it waited for data, as training itself reports them."""
    path = shuffled_words(folder / "training.jsonl", 20)
    preprocess(path, folder / "training", SENTENCEPIECE)
    flags = "--preset debug-gpt --micro-batch-size 4 --train-iters 60 --lr 1e-3 --split 1,0,0 --eval-interval 0 --log-interval 60".split()
    flags += ["--data-path", str(folder / "training_text_document"), *map(str, SENTENCEPIECE)]
    found: dict[str, Any] = {}
    for _ in range(rounds):
        for workers in (0, 2):
            command = [sys.executable, "-m", "domino_lm.pretrain", *flags, "--num-workers", str(workers)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment).stdout
            waited = re.search(r"([\d.]+) ms of a step waiting for data", output)
            step = re.search(r"elapsed time per iteration \(ms\): ([\d.]+)", output)
            assert waited is not None, output
            assert step is not None, output
            keep(found, f"debug-gpt, --num-workers {workers}", "step_ms", float(step[1]))
            keep(found, f"debug-gpt, --num-workers {workers}", "wait_ms_per_step", float(waited[1]))
    return found


def measure_index(folder: Path, rounds: int) -> dict[str, Any]:
    """The three indices of ten million documents, for one and for three epochs."""
    many_documents(folder / "many")
    found: dict[str, Any] = {}
    for epochs in (1, 3):
        for i in range(rounds):
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                theirs = run_program("data_megatron.py", "index", folder / "many", epochs, cache)
            ours = run_program("data_ours.py", "index", folder / "many", epochs)
            assert ours.pop("sha256") == theirs.pop("sha256"), f"round {i}: the indices differ"
            for name, figures in (("ours", ours), ("megatron-core", theirs)):
                for figure, value in figures.items():
                    keep(found, f"{epochs} epochs, {name}", figure, value)
    return found


def measure_loader(folder: Path, rounds: int) -> dict[str, Any]:
    """Samples of 512 tokens a second, by the number of workers."""
    path = shuffled_words(folder / "loader.jsonl", 20)
    preprocess(path, folder / "loader", SENTENCEPIECE)
    found: dict[str, Any] = {}
    for _ in range(rounds):
        for workers in (0, 1, 2):
            for figure, value in run_program("data_ours.py", "loader", folder / "loader_text_document", workers).items():
                keep(found, f"{workers} workers", figure, value)
    return found


def shuffled_words(path: Path, megabytes: int) -> Path:
    """JSON lines of 50 to 800 words of the corpus, drawn at random, the same ones every time."""
    draw = random.Random(1)
    lines = (ROOT / "examples/data/corpus.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    words = [word for line in lines for word in json.loads(line)["text"].split(" ") if word]
    size = 0
    with open(path, "w", encoding="utf-8") as file:
        while size < megabytes * 1_000_000:
            size += file.write(json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(50, 800)))}) + "\n")
    return path


def many_documents(prefix: Path) -> None:
    """A pair of ten million documents of 1 to 999 tokens, whose tokens take no room on the disk."""
    lengths = np.random.default_rng(0).integers(1, 1000, DOCUMENTS).astype("<i4")
    with open(f"{prefix}.idx", "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, 8, DOCUMENTS, DOCUMENTS + 1))
        for array in (lengths, sequence_pointers(lengths, 2), np.arange(DOCUMENTS + 1, dtype="<i8")):
            file.write(array.tobytes())
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * int(lengths.sum(dtype=np.int64)))


def save_tokenizer_json(path: Path) -> None:
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(VOCABULARY / "vocab.json"), str(VOCABULARY / "merges.txt")))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<|endoftext|>")])
    backend.save(str(path))
    path.with_name("tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')


def preprocess(path: Path, output: Path, tokenizer: list[Any]) -> tuple[float, float]:
    """Seconds of the whole command, and of CPU."""
    flags = ["--input", path, "--output-prefix", output, *tokenizer, "--append-eod", "--workers", WORKERS, "--log-interval", 10**9]
    return timed([sys.executable, ROOT / "tools/preprocess_data.py", *flags])


def timed(command: list[Any]) -> tuple[float, float]:
    """Seconds from start to end, and seconds of CPU of the program and its children."""
    started, before = time.perf_counter(), children_cpu_s()
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started, children_cpu_s() - before


def children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_program(name: str, *arguments: Any) -> dict[str, Any]:
    """What one of the programs prints."""
    environment = os.environ | {"PYTHONPATH": str(PEERS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAMS / name), *map(str, arguments)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def keep(found: dict[str, Any], name: str, figure: str, value: float) -> None:
    found.setdefault(name, {}).setdefault(figure, []).append(value)


def machine() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    return {
        "processor": next(
            (line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.machine()
        ),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "commit": commit,
        "started": datetime.now().isoformat(timespec="seconds"),
    }


def markdown(results: dict[str, Any]) -> Iterator[str]:
    """Medians of all rounds, and their range."""
    yield "# Data tools"
    for part in PARTS:
        if part not in results:
            continue
        about, rows = results[part]["machine"], results[part]["rows"]
        yield from ("", f"## {part}", "", f"    {results[part]['command']}", "")
        yield (
            f"{about['processor']}, {about['cores']} cores, load {about['load_before']:.1f} before; on top of commit {about['commit'][:12]}; "
            f"{about['started']}; medians (least to most) of {results[part]['rounds']} rounds, all programs in turn in each."
        )
        yield ""
        yield from table(rows)
        if part == "preprocess":
            yield ""
            yield from preprocess_ratio(rows)


def table(rows: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    figures = list(dict.fromkeys(figure for row in rows.values() for figure in row))
    yield "| | " + " | ".join(figure.replace("_", " ") for figure in figures) + " |"
    yield "|---|" + "---|" * len(figures)
    for name, row in rows.items():
        yield f"| {name} | " + " | ".join(spread(row.get(figure, [])) for figure in figures) + " |"


def preprocess_ratio(rows: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    for figure, words in (("steady_mb_per_s", "in time"), ("steady_mb_per_cpu_s", "in CPU time")):
        ratios = [a / b for a, b in zip(rows["SentencePiece"][figure], rows[PLAIN][figure], strict=True)]
        yield f"SentencePiece, {WORKERS} workers, over two processes of the plain library, {words}: {spread(ratios)} within a round."


def spread(values: list[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main()
