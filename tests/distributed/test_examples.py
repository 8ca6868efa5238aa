"""The example scripts run unchanged on two CPU processes, by environment variables alone; all of them are sound at full size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.training_runs import VOCABULARY, write_tokens

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path for family in ("gpt3", "llama") for path in (EXAMPLES / family).glob("*.sh"))
NAMES = [str(path.relative_to(EXAMPLES)) for path in SCRIPTS]
SMALL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16 --make-vocab-size-divisible-by 8 "
    "--micro-batch-size 2 --global-batch-size 4 --split 80,10,10 --eval-iters 1 --log-interval 1 --lr 1e-3 --min-lr 1e-4"
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def small(script: Path) -> str:
    """Flags that make a script's model and run small enough for this machine."""
    text = script.read_text()
    length = (
        "--train-samples 8 --lr-decay-samples 8 --lr-warmup-samples 2"
        if "--train-samples" in text
        else "--train-iters 2 --lr-warmup-iters 1"
    )
    groups = "--num-query-groups 2" if re.search(r"debug-llama|llama3|70b", text) else ""
    return f"{SMALL} {length} {groups}"


def environment(tokens: Path, folder: Path, **variables: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "NPROC": "2",
        "TP": "2",
        "DATA_PATH": str(tokens),
        "TOKENIZER": f"--vocab-size {VOCABULARY}",
        "CHECKPOINTS": str(folder / "checkpoints"),
        "LOGS": str(folder / "logs"),
        **variables,
    }


def run(script: Path, variables: dict[str, str]) -> str:
    done = subprocess.run([str(script)], env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def assert_trained(out: str, folder: Path) -> None:
    assert "training ended: finished at iteration 2" in out
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (folder / "logs" / "metrics.jsonl").stat().st_size > 0
    assert "Warning" not in out
    assert "warning" not in out


@pytest.mark.long
@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.name == "debug.sh"], ids=lambda path: path.parent.name)
def test_a_debug_script_runs_on_two_processes(script: Path, tokens: Path, tmp_path: Path) -> None:
    assert_trained(run(script, environment(tokens, tmp_path, EXTRA_ARGS=small(script))), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.name != "debug.sh"], ids=lambda path: path.name)
def test_a_large_script_runs_on_two_processes(script: Path, tokens: Path, tmp_path: Path) -> None:
    assert_trained(run(script, environment(tokens, tmp_path, EXTRA_ARGS=small(script))), tmp_path)


DRY_RUN = """#!/usr/bin/env bash
while [ "$1" != domino_lm.pretrain ]; do shift; done
shift
exec {python} -m domino_lm.pretrain "$@" --dry-run
"""


@pytest.mark.parametrize("script", SCRIPTS, ids=NAMES)
def test_a_script_is_sound_at_its_full_size_and_fits_the_devices_that_its_first_line_names(
    script: Path, tokens: Path, tmp_path: Path
) -> None:
    ((ranks, gib),) = re.findall(r"\bon (\d+) (?:GPUs?|processes) of (\d+) GiB\b", script.read_text().splitlines()[1])
    stand_in = tmp_path / "python"
    stand_in.write_text(DRY_RUN.format(python=sys.executable))
    stand_in.chmod(0o755)
    vocabulary = 128256 if "llama3" in script.name else 32000 if script.parent.name == "llama" else 50257
    debug = script.name == "debug.sh"
    backend = "gloo" if debug else "nccl"
    variables = environment(tokens, tmp_path, PYTHON=str(stand_in), WORLD_SIZE=ranks)
    variables |= {"TOKENIZER": f"--vocab-size {vocabulary}", "EXTRA_ARGS": f"--distributed-backend {backend}"}
    del variables["TP"]
    out = run(script, variables)
    assert "dry run: nothing was started" in out
    ignored = [line for line in out.splitlines() if line.startswith("ignored")]
    assert all("--use-distributed-optimizer True: a single replica" in line for line in ignored)
    (estimate,) = re.findall(r"^memory +([\d.,]+ [MG]iB) per rank", out, re.M)
    (told,) = re.findall(rf"^\| `{script.name}` .*\| ([\d.]+ [MG]iB) \|", (script.parent / "README.md").read_text(), re.M)
    assert size_bytes(told) == pytest.approx(size_bytes(estimate), rel=0.05)
    assert size_bytes(estimate) < MOST_OF_A_DEVICE * size_bytes(f"{gib} GiB")
    assert debug or ("bfloat16 on cuda" in out and ("distributed optimizer: " in out or ignored))
    assert "warning" not in out


MOST_OF_A_DEVICE = 0.9
"""What a rank may take by estimate; the allocator and the libraries need the rest."""


def size_bytes(text: str) -> float:
    number, unit = text.replace(",", "").split()
    return float(number) * {"MiB": 2**20, "GiB": 2**30}[unit]


FAKE_SLURM = {
    "scontrol": "#!/usr/bin/env bash\necho localhost\n",
    "srun": '#!/usr/bin/env bash\nshift  # --cpu-bind\nfor node in 0 1; do SLURM_NODEID=$node "$@" & done\nwait -n\nfirst=$?\nwait -n\nexit $((first + $?))\n',
}


@pytest.mark.long
def test_a_slurm_job_runs_one_launcher_a_node(tokens: Path, tmp_path: Path) -> None:
    for name, text in FAKE_SLURM.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = EXAMPLES / "llama" / "debug.sh"
    variables = environment(tokens, tmp_path, EXTRA_ARGS=small(script), NPROC="1", SLURM_JOB_NODELIST="nodes", SLURM_JOB_NUM_NODES="2")
    variables |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_PORT": str(29000 + os.getpid() % 900)}
    done = subprocess.run(
        [str(EXAMPLES / "slurm.sh"), str(script)], env=variables, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rank(s) = 2 tensor-parallel x 1 data-parallel" in done.stdout
    assert_trained(done.stdout, tmp_path)


def test_a_script_without_data_says_what_it_needs() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "DATA_PATH"}
    done = subprocess.run([str(EXAMPLES / "gpt3" / "debug.sh")], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "DATA_PATH: is the prefix" in done.stderr


@pytest.mark.parametrize("family", ["gpt3", "llama"])
def test_each_script_stands_in_its_readme(family: str) -> None:
    text = (EXAMPLES / family / "README.md").read_text()
    assert [path.name for path in (EXAMPLES / family).glob("*.sh") if f"`{path.name}`" not in text] == []
