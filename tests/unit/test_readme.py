"""What the documents tell a reader to type and to open exists, and their commands are accepted."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from domino_lm.arguments import parse_command, settings
from domino_lm.checks import check_run
from domino_lm.config_file import PRESET
from domino_lm.megatron_flags import flag_names

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/gpu.md",
    "docs/parallelism.md",
    "docs/training.md",
    "docs/troubleshooting.md",
    "examples/gpt3/README.md",
    "examples/llama/README.md",
]
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]
WRITTEN += [ROOT / "benchmarks/README.md", ROOT / "domino_lm/schedule/README.md"]
LAUNCHERS = {
    "--standalone",
    "--nproc-per-node",
    "--max-restarts",
    "--rdzv-backend",
    "--help",
    "--dry-run",
    "--config",
    "--preset",
    "--nodes",
    "--export",
    "--names",
    "--output",
    "--input",
    "--output-prefix",
    "--append-eod",
    "--workers",
}


def fences(document: str) -> list[str]:
    """Code blocks that hold commands."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / document).read_text(), re.S | re.M)
    return [content for language, content in fenced if language in ("", "bash")]


def blocks(document: str) -> list[str]:
    """Commands of the code blocks, one a line, without their comments."""
    return [line.split("#")[0].strip() for line in "\n".join(fences(document)).replace("\\\n", " ").splitlines()]


def commands(program: str) -> list[tuple[str, str]]:
    """Every command of every document that runs ``program``, and what follows it."""
    return [(document, line.split(program, 1)[1]) for document in DOCUMENTS for line in blocks(document) if program in line]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_exists(document: str) -> None:
    named = {word for line in blocks(document) for word in re.findall(r"^make ([\w-]+)", line)}
    assert named
    assert named <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:domino_lm|tools|tests|examples|docs|benchmarks|\.ci)/[\w./-]+|[A-Z]+(?:\.md)?)`", text)
    linked = [str(Path(document).parent / name) for name in re.findall(r"!\[.*?\]\((.*?)\)", text)]
    assert [name for name in [*named, *linked] if "." in name and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_program_that_is_typed_exists(document: str) -> None:
    typed = [word for line in blocks(document) for word in re.findall(r"(?:tools|examples)/[\w./]+\.(?:py|sh)", line)]
    assert [word for word in typed if not (ROOT / word).exists()] == []


@pytest.mark.parametrize(("document", "flags"), commands("-m domino_lm.pretrain"))
def test_a_training_command_is_accepted(document: str, flags: str) -> None:
    world_size = 64 if "llama2-13b" in flags else 8 if "use-mcore-models" in flags else 2
    check_run(parse_command(shlex.split(flags)).run, world_size)


def test_megatrons_command_moves_over_by_its_program_alone() -> None:
    ((_, before),) = commands("pretrain_gpt.py")
    assert before in [flags for _, flags in commands("-m domino_lm.pretrain")]
    assert len(parse_command(shlex.split(before)).ignored) == 2


def test_the_verify_command_takes_training_flags() -> None:
    ((_, flags),) = commands("tools/verify.py")
    check_run(parse_command(shlex.split(flags)).run, 2)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_flag_that_is_named_is_known(document: str) -> None:
    programs = [ROOT / "tools" / "preprocess_data.py", ROOT / "tools" / "preflight.py", ROOT / "benchmarks" / "gpu_check.py"]
    known = "".join(path.read_text() for path in [Path(__file__).parent / "cli_surface.txt", *programs])
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", (ROOT / document).read_text())) - LAUNCHERS - set(flag_names())
    assert [flag for flag in sorted(named) if flag not in known] == []


HOW_COMMANDS_ARE_TESTED = {
    r"^make (test|check)": "CI runs them",
    r"^make (test-all|format|bench)|^make setup": "the target exists; what it installs or measures needs a network, or hours",
    r"^make demo": "test_documents, long",
    r"^make gpu-check": "needs a GPU; test_gpu_check rehearses it",
    r"tools/preflight\.py": "test_preflight",
    r"pretrain_gpt\.py": "Megatron's own program: the same flags are run with ours",
    r"^torchrun --nproc-per-node 8 -m domino_lm|examples/\w+/\w+_[\d.]+m?b\.sh": "test_documents, as a dry run",
    r"^WORLD_SIZE=64 python -m domino_lm\.pretrain --dry-run": "test_documents",
    r"--input my\.jsonl|--nproc-per-node 2 |plot_(run|timeline)\.py runs": "test_documents, on a short corpus",
    r"^NPROC=2 .*debug\.sh": "test_documents, two steps",
    r"runs/real|^(export|for|done|FLAGS|EXTRA_ARGS)": "test_documents, long",
    r"^python benchmarks/head_to_head\.py": "test_benchmarks takes the flags; the run needs root, and hours",
    r"data\.py .*runs/data": "data/test_page",
    r"\.\.\. the flags of your script|^python tools/convert_checkpoint\.py|\[--target-tensor": "a pattern to be filled in",
    r"^(part |baseline|2 rows|2 columns|2 x 2|op \d|link|\d+ +m0|-->)": "a drawing",
}
"""Each command in a document, by a pattern, and what runs it."""


@pytest.mark.parametrize("document", sorted(str(path.relative_to(ROOT)) for path in WRITTEN))
def test_it_is_known_what_runs_each_command(document: str) -> None:
    typed = [line for line in blocks(document) if line]
    assert [line for line in typed if not any(re.search(pattern, line) for pattern in HOW_COMMANDS_ARE_TESTED)] == []


def test_toml_blocks_name_settings_in_their_parts() -> None:
    parts = {item.name: item.part for item in settings()}
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/training.md").read_text(), re.S)
    tables = tomllib.loads(text)
    assert isinstance(tables.pop(PRESET), str)
    assert all(parts[name] == part for part, values in tables.items() for name in values)


def test_ci_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "make check" in script
    assert "make test" in script
