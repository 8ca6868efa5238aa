"""What the documents tell a reader to type and to open exists, and their commands are accepted."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from domino_lm.config.arguments import parse_command
from domino_lm.config.megatron_flags import megatron_flags
from domino_lm.config.schema import settings
from domino_lm.config.toml_file import PRESET
from domino_lm.launch.checks import check_run
from tests.documents import DOCUMENTS, ROOT, RUN_BY, blocks, commands, run_by, typed

LAUNCHERS = {
    "--standalone",
    "--nproc-per-node",
    "--max-restarts",
    "--rdzv-backend",
    "--nodes",
    "--export",
    "--help",
    "--signal",
    "--rdzv-conf",
    "--shutdown-timeout",
}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_every_make_target_exists(document: str) -> None:
    named = {word for line in blocks(document) for word in re.findall(r"^make ([\w-]+)", line)}
    assert named
    assert named <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_test_that_is_named_exists(document: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", (ROOT / document).read_text())
    places = [
        (folder / file, name)
        for file, name in named
        for folder in (ROOT / "tests", ROOT / "tests" / "unit" / "data")
        if (folder / file).exists()
    ]
    assert len(places) >= len(named)
    assert [f"{file}::{name}" for file, name in places if f"def {name}(" not in file.read_text()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_is_named_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    named = re.findall(r"`((?:domino_lm|tools|tests|examples|docs|benchmarks|\.ci)/[\w./-]+|[A-Z]+(?:\.md)?)`", text)
    linked = [str(Path(document).parent / name) for name in re.findall(r"!\[.*?\]\((.*?)\)", text)]
    assert [name for name in [*named, *linked] if "." in name and not (ROOT / name).exists()] == []


def test_six_files_lead_from_the_command_line_to_the_matrix_product() -> None:
    """Each is there, and imports the next or gets it from one that does."""
    sentence = re.search(r"to the matrix product, six files:(.*?)all under", (ROOT / "README.md").read_text(), re.S)
    assert sentence is not None
    files = re.findall(r"`([\w/]+\.py)`", sentence[1])
    assert len(files) == 6
    texts = [(ROOT / "domino_lm" / name).read_text() for name in files]
    for position, name in enumerate(files[1:], 1):
        module = "domino_lm." + name.removesuffix(".py").replace("/", ".")
        assert any(f"from {module} import" in text for text in texts[:position]), name


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_program_that_is_typed_exists(document: str) -> None:
    programs = [word for line in typed(document) for word in re.findall(r"(?:tools|examples|benchmarks|tests)/[\w./]+\.(?:py|sh)", line)]
    assert [word for word in programs if not (ROOT / word).exists()] == []


WHOLE = [each for each in commands("-m domino_lm.pretrain") if "--use-checkpoint-args" not in each[1]]


@pytest.mark.parametrize(("document", "flags"), WHOLE)
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


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if document != "docs/data-format.md"])  # data/test_page does
def test_every_flag_that_is_named_is_known(document: str) -> None:
    programs = [
        path
        for folder in ("tools", "benchmarks", "domino_lm", "tests/chaos")
        for path in (ROOT / folder).rglob("*.py")
        if ".peers" not in str(path)
    ]
    known = "".join(path.read_text() for path in [Path(__file__).parent / "cli_surface.txt", *programs])
    megatrons = {entry.flag.removesuffix("*") for entry in megatron_flags()}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", (ROOT / document).read_text())) - LAUNCHERS - megatrons
    assert [flag for flag in sorted(named) if flag not in known] == []


@pytest.mark.parametrize("document", [document for document in DOCUMENTS if typed(document)])
def test_a_test_runs_each_command(document: str) -> None:
    assert [command for command in typed(document) if run_by(command) is None] == []


def test_each_test_that_runs_commands_is_there_and_has_some_to_run() -> None:
    places = [test.split("::") for test in RUN_BY.values()]
    assert [f"{file}::{name}" for file, name in places if f"def {name}(" not in (ROOT / "tests" / file).read_text()] == []
    assert set(RUN_BY.values()) == {run_by(command) for document in DOCUMENTS for command in typed(document)}


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
