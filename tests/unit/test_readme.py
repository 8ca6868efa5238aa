"""What the documents tell a reader to type and to open exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from domino_lm.arguments import parse_arguments
from domino_lm.checks import check_run

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md"]


def blocks(document: str) -> list[str]:
    """Commands of the code blocks, one a line, without their comments."""
    text = "\n".join(re.findall(r"```\n(.*?)```", (ROOT / document).read_text(), re.S))
    return [line.split("#")[0].strip() for line in text.replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_exists(document: str) -> None:
    named = {word for line in blocks(document) for word in re.findall(r"^make (\w+)", line)}
    assert named
    assert named <= set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_is_named_exists(document: str) -> None:
    named = re.findall(r"`((?:domino_lm|tools|tests|examples|\.ci)/[\w./]+|[A-Z]+(?:\.md)?)`", (ROOT / document).read_text())
    assert [name for name in named if not (ROOT / name).exists() and "." in name] == []


def test_the_readmes_training_command_is_accepted() -> None:
    (command,) = [line for line in blocks("README.md") if "domino_lm.pretrain" in line]
    check_run(parse_arguments(shlex.split(command.split("domino_lm.pretrain")[1])), world_size=2)


def test_every_flag_that_the_readme_names_is_known() -> None:
    known = (Path(__file__).parent / "cli_surface.txt").read_text() + (ROOT / "tools" / "preprocess_data.py").read_text()
    named = set(re.findall(r"(?<!\w)--[a-z][\w-]+", (ROOT / "README.md").read_text())) - {"--standalone", "--nproc-per-node", "--help"}
    assert [flag for flag in sorted(named) if flag not in known] == []


def test_ci_runs_the_readmes_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "make check" in script
    assert "make test" in script
