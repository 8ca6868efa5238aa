"""The README's and the docs' commands do what they say, in their order, on a corpus of a few documents."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from statistics import mean

import pytest

from domino_lm.watch.metrics_file import read_lines
from tests.documents import ROOT, attempt, commands_for, copy_of_tree, fences, here

SHORT = "--train-iters 3 --lr-warmup-iters 1 --eval-iters 1 --log-interval 1 --num-workers 0"


NO_TEST_SPLIT = (
    "warning: data/my_text_document: the test split has 0 of 49 documents and no token; use more data, or change --split so that test gets "
    "some, or give it the weight 0. Without it there is no test loss."
)
"""What is said of 50 documents, one of them empty, of which the usual split leaves none to test on."""


def run(folder: Path, command: str, **variables: str) -> str:
    """What a line prints in ``folder``, which holds links to what it names."""
    done = attempt(folder, command, **variables)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    printed = (done.stdout + done.stderr).replace(NO_TEST_SPLIT, "")
    assert not re.search(r"warning|Traceback", printed, re.I), printed
    return done.stdout


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder as a reader of the README has it: the repository's tools, a text, a tokenizer."""
    for name in ("tools", "domino_lm", "examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "tokenizer.model").symlink_to(ROOT / "examples/data/sp4096.model")
    lines = (ROOT / "examples/data/corpus.jsonl").read_text().splitlines()[:50]
    (tmp_path / "my.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.long
def test_the_commands_for_ones_own_text_lead_from_text_to_curves(desk: Path) -> None:
    activate, preprocess, train, alone, verify, curves, timeline = commands_for(
        "test_the_commands_for_ones_own_text_lead_from_text_to_curves"
    )
    (desk / ".venv").symlink_to(sys.prefix)
    run(desk, f"{activate}\n{preprocess}")
    out = run(desk, f"{train} {SHORT} --metrics-file runs/my/metrics.jsonl --timeline runs/demo/timeline")
    assert "training ended: finished at iteration 3" in out
    assert "resumed from checkpoints/my at iteration 3" in run(desk, f"{train} {SHORT}")
    assert "training ended: finished at iteration 2" in run(desk, f"{alone} --train-iters 2 --eval-iters 1")
    assert "all is normal" in run(desk, f"{verify} --verify-steps 1")
    assert "curves.png" in run(desk, curves)
    assert "timeline.png" in run(desk, timeline)


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
    (desk / "data").mkdir()
    for name in ("data/my_text_document.bin", "data/my_text_document.idx"):
        (desk / name).touch()
    (desk / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate([*BYTES, "<|endoftext|>"])}))
    (desk / "merges.txt").write_text("#version: 0.2\n")
    return {"PATH": f"{desk / 'bin'}:{os.environ['PATH']}"}


BYTES = [chr(code if 33 <= code <= 126 or 161 <= code <= 172 or code >= 174 else 256 + code) for code in range(256)]
"""GPT-2's way to write each byte as a printable character, up to the order of those that are not."""

FOR_CLUSTERS = commands_for("test_a_command_for_a_cluster_is_sound_as_it_is_typed")


@pytest.mark.parametrize("command", FOR_CLUSTERS, ids=[command.split()[-1] for command in FOR_CLUSTERS])
def test_a_command_for_a_cluster_is_sound_as_it_is_typed(command: str, desk: Path) -> None:
    out = run(desk, command, **as_dry_runs(desk))
    assert "dry run: nothing was started" in out
    assert "missing   " not in out


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt3", "llama"])
def test_the_command_for_two_cpu_processes_trains_on_the_demos_tokens(family: str, desk: Path) -> None:
    commands = commands_for("test_the_command_for_two_cpu_processes_trains_on_the_demos_tokens")
    (command,) = (command for command in commands if f"examples/{family}/" in command)
    assert len(commands) == 2
    (desk / "runs/demo").mkdir(parents=True)
    (desk / ".venv").symlink_to(sys.prefix)
    tokenizer = "--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model"
    run(desk, f"python tools/preprocess_data.py --input my.jsonl --output-prefix runs/demo/corpus --append-eod {tokenizer}")
    out = run(desk, command, EXTRA_ARGS=SHORT)
    assert "training ended: finished at iteration 3" in out


@pytest.mark.long
def test_the_page_on_training_runs_as_it_is_typed(tmp_path: Path) -> None:
    """Two models, 300 steps each, stopped and started again: no warning, and the second half goes on from the first."""
    for name in ("tools", "domino_lm", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs/figures").mkdir(parents=True)
    (block,) = (text for text in fences("docs/training.md") if "for family" in text)
    lines = commands_for("test_the_page_on_training_runs_as_it_is_typed")
    assert [" ".join(line.split()) for line in block.replace("\\\n", " ").splitlines()] == lines
    run(tmp_path, f"set -eu\n{block}")
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
    (command,) = commands_for("test_make_demo_runs_without_a_warning")
    run(copy_of_tree(tmp_path / "tree"), here(command))
    assert (tmp_path / "tree/runs/demo/timeline.png").exists()


def test_the_memory_command_answers_for_all_its_ranks(desk: Path) -> None:
    (command,) = commands_for("test_the_memory_command_answers_for_all_its_ranks")
    assert "64 rank(s) = 8 tensor-parallel x 8 data-parallel" in run(desk, command)
