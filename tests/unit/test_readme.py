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
from domino_lm.megatron_flags import IGNORED

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/parallelism.md",
    "docs/training.md",
    "docs/troubleshooting.md",
    "examples/gpt3/README.md",
    "examples/llama/README.md",
]
LAUNCHERS = {
    "--standalone",
    "--nproc-per-node",
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


def blocks(document: str) -> list[str]:
    """Commands of the code blocks, one a line, without their comments."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / document).read_text(), re.S | re.M)
    text = "\n".join(content for language, content in fenced if not language)
    return [line.split("#")[0].strip() for line in text.replace("\\\n", " ").splitlines()]


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
    known = (Path(__file__).parent / "cli_surface.txt").read_text() + (ROOT / "tools" / "preprocess_data.py").read_text()
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", (ROOT / document).read_text())) - LAUNCHERS - set(IGNORED)
    assert [flag for flag in sorted(named) if flag not in known] == []


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
