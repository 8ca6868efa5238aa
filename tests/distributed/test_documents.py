"""The README's and the docs' commands do what they say, in their order, on a corpus of a few documents."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from domino_lm.training.metrics_file import read_lines
from tests.unit.test_readme import DOCUMENTS, ROOT, blocks, commands, fences

SHORT = "--train-iters 3 --lr-warmup-iters 1 --eval-iters 1 --split 90,10,0 --log-interval 1 --num-workers 0"


def run(folder: Path, words: list[str], **variables: str) -> str:
    """One command in ``folder``, which holds links to what it names."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
    assert not re.search(r"warning|Traceback", done.stderr, re.I), done.stderr
    return done.stdout


def python(folder: Path, program: str, flags: str, ranks: int = 1, **variables: str) -> str:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return run(folder, [sys.executable, *launcher, *program.split(), *shlex.split(flags)], **variables)


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder as a reader of the README has it: the repository's tools, a text, a tokenizer."""
    for name in ("tools", "domino_lm", "examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "tokenizer.model").symlink_to(ROOT / "examples/data/sp4096.model")
    (tmp_path / "data").mkdir()
    lines = (ROOT / "examples/data/corpus.jsonl").read_text().splitlines()[:60]
    (tmp_path / "my.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.slow
def test_the_commands_for_ones_own_text_lead_from_text_to_curves(desk: Path) -> None:
    preprocess = next(flags for document, flags in commands("tools/preprocess_data.py") if document == "README.md")
    train = next(flags for document, flags in commands("-m domino_lm.pretrain") if document == "README.md")
    (verify,) = (flags for _, flags in commands("tools/verify.py"))
    plot = next(flags for _, flags in commands("tools/plot_run.py") if "--names" not in flags)
    python(desk, "tools/preprocess_data.py", preprocess)
    out = python(
        desk, "-m domino_lm.pretrain", f"{train} {SHORT} --metrics-file runs/my/metrics.jsonl --timeline runs/demo/timeline", ranks=2
    )
    assert "training ended: finished at iteration 3" in out
    again = python(desk, "-m domino_lm.pretrain", f"{train} {SHORT}", ranks=2)
    assert "resumed from checkpoints/my at iteration 3" in again
    assert "all is normal" in python(desk, "tools/verify.py", f"{verify} --split 90,10,0 --verify-steps 1", ranks=2)
    assert "curves.png" in python(desk, "tools/plot_run.py", plot)
    (timeline,) = (flags for document, flags in commands("tools/plot_timeline.py") if document == "docs/training.md")
    assert "timeline.png" in python(desk, "tools/plot_timeline.py", timeline)


STAND_INS = {
    # Of a command that needs many GPUs everything is run but the training itself.
    "python": """
for word in "$@"; do
    case $last in --nproc-per-node) ranks=$word ;; --nnodes) nodes=$word ;; esac
    last=$word
done
case " $* " in *" domino_lm.pretrain "*) ;; *preflight.py*) exit 0 ;; *) exec {python} "$@" ;; esac  # no other node is there to look at
export WORLD_SIZE=${{WORLD_SIZE:-$((${{ranks:-1}} * ${{nodes:-1}}))}}
while [ "$1" != domino_lm.pretrain ]; do shift; done
shift
exec {python} -m domino_lm.pretrain "$@" --dry-run
""",
    "torchrun": 'exec python -m torch.distributed.run "$@"',
    "sbatch": """
while [ "${{1#--}}" != "$1" ]; do
    case $1 in
        --nodes) export SLURM_JOB_NUM_NODES=$2 SLURM_JOB_NODELIST=nodes ;;
        --export) IFS=, read -ra words <<< "$2"; export "${{words[@]:1}}" ;;
    esac
    shift 2
done
exec bash "$@"
""",
    "scontrol": "echo node-0",
    "srun": """
while [ "${{1#--}}" != "$1" ]; do shift; done
SLURM_NODEID=0 exec "$@"
""",
}


def as_dry_runs(desk: Path) -> dict[str, str]:
    """The environment of a cluster that dry-runs what it is given; each of its files that a command names is there."""
    (desk / "bin").mkdir()
    for name, text in STAND_INS.items():
        (desk / "bin" / name).write_text("#!/usr/bin/env bash\n" + text.format(python=sys.executable).lstrip() + "\n")
        (desk / "bin" / name).chmod(0o755)
    for name in ("data/my_text_document.bin", "data/my_text_document.idx"):
        (desk / name).touch()
    (desk / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate([*BYTES, "<|endoftext|>"])}))
    (desk / "merges.txt").write_text("#version: 0.2\n")
    return {"PATH": f"{desk / 'bin'}:{os.environ['PATH']}"}


BYTES = [chr(code if 33 <= code <= 126 or 161 <= code <= 172 or code >= 174 else 256 + code) for code in range(256)]
"""GPT-2's way to write each byte as a printable character, up to the order of those that are not."""

FOR_CLUSTERS = [
    (document, command)
    for document in DOCUMENTS
    for command in blocks(document)
    if re.search(r"examples/\w+/\w+_[\d.]+m?b\.sh|nproc-per-node 8 -m domino_lm", command)
]


@pytest.mark.parametrize(("document", "command"), FOR_CLUSTERS, ids=[f"{d}-{i}" for i, (d, _) in enumerate(FOR_CLUSTERS)])
def test_a_command_for_a_cluster_is_sound_as_it_is_typed(document: str, command: str, desk: Path) -> None:
    out = run(desk, ["bash", "-c", command], **as_dry_runs(desk))
    assert "dry run: nothing was started" in out
    assert "missing   " not in out


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("gpt3", marks=pytest.mark.exhaustive), "llama"])
def test_the_command_for_two_cpu_processes_trains_on_the_demos_tokens(family: str, desk: Path) -> None:
    (command,) = (line for line in blocks(f"examples/{family}/README.md") if line.startswith("NPROC=2"))
    (desk / "runs/demo").mkdir(parents=True)
    (desk / ".venv").symlink_to(sys.prefix)
    tokenizer = "--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model"
    python(desk, "tools/preprocess_data.py", f"--input my.jsonl --output-prefix runs/demo/corpus --append-eod {tokenizer}")
    out = run(desk, ["bash", "-c", command], EXTRA_ARGS=SHORT)
    assert "training ended: finished at iteration 3" in out


@pytest.mark.long
def test_the_page_on_training_runs_as_it_is_typed(tmp_path: Path) -> None:
    """Two models, 300 steps each, stopped and started again: no warning, and the second half goes on from the first."""
    for name in ("tools", "domino_lm", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs/figures").mkdir(parents=True)
    (block,) = (text for text in fences("docs/training.md") if "for family" in text)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euxc", block],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"warning|Traceback", done.stdout + done.stderr, re.I)
    assert (tmp_path / "docs/figures/debug_runs.png").stat().st_size > 10_000
    for family, told in (("gpt3", "5.04"), ("llama", "4.65")):
        lines = read_lines(tmp_path / f"runs/real/{family}/metrics.jsonl")
        steps = [line for line in lines if "lm_loss" in line]
        assert [line["iteration"] for line in steps] == list(range(1, 301))
        assert [line["iteration"] for line in steps if line["resumed"]] == [151]
        around = [line["lm_loss"] for line in steps]
        assert abs(mean(around[150:160]) - mean(around[140:150])) < 0.3
        found = [line["validation_loss"] for line in lines if "validation_loss" in line]
        assert found == sorted(found, reverse=True)
        assert found[-1] == pytest.approx(float(told), abs=0.05)
        assert told in (ROOT / "docs/training.md").read_text()


@pytest.mark.long
def test_make_demo_runs_without_a_warning(tmp_path: Path) -> None:
    for name in ("tools", "domino_lm", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name)
    done = subprocess.run([sys.executable, "tools/demo.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search(r"warning|Traceback", done.stdout + done.stderr, re.I)
    assert (tmp_path / "runs/demo/timeline.png").exists()


def test_the_memory_command_answers_for_all_its_ranks(desk: Path) -> None:
    (flags,) = (flags for _, flags in commands("-m domino_lm.pretrain") if "--dry-run" in flags)
    assert "64 rank(s) = 8 tensor-parallel x 8 data-parallel" in python(desk, "-m domino_lm.pretrain", flags, WORLD_SIZE="64")
