"""Every tool is a command of the installed package, which needs nothing of the checkout."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from domino_lm.tools import completion
from tests.documents import ROOT, copy_of_tree

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
COMMANDS: dict[str, str] = PROJECT["project"]["scripts"]
WITHOUT_SCRIPT = {"pretrain": "domino_lm.pretrain", "completion": "for the installed commands alone"}


def test_every_command_has_a_program_and_every_script_a_command() -> None:
    for target in COMMANDS.values():
        module, name = target.split(":")
        assert callable(getattr(importlib.import_module(module), name))
    modules = {target.split(":")[0].rpartition(".")[2] for target in COMMANDS.values()}
    scripts = {path.stem for path in (ROOT / "tools").glob("*.py")} - {"launcher"}
    assert scripts == modules - WITHOUT_SCRIPT.keys()


def test_the_demos_files_travel_with_the_package() -> None:
    (place,) = (each for each in PROJECT["tool"]["setuptools"]["package-data"]["domino_lm"] if each.startswith("tools/"))
    found = {path.name for path in (ROOT / "domino_lm").glob(place)}
    assert found == {"corpus.jsonl", "sp4096.model"}
    assert all((ROOT / "domino_lm/tools/demo_data" / name).read_bytes() == (ROOT / "examples/data" / name).read_bytes() for name in found)


def test_messages_and_help_name_commands_that_an_installed_package_has() -> None:
    sources = [path for path in (ROOT / "domino_lm").rglob("*") if path.suffix in (".py", ".toml")]
    named = {name for path in sources for name in re.findall(r"domino-lm-[a-z-]*[a-z]", path.read_text())}
    assert named <= COMMANDS.keys()
    assert [str(path) for path in sources if re.search(r"\btools/\w+\.py", path.read_text())] == []


@pytest.mark.parametrize("shell", list(completion.FOLDERS))
def test_a_shell_completes_flags_values_and_files(shell: str) -> None:
    pytest.importorskip("shtab")
    parser = completion.build_parser()
    parser.prog = "domino-lm-pretrain"
    text = completion.completion(parser, shell)
    assert all(word in text for word in ("domino-lm-pretrain", "normalization", "RMSNorm"))
    if shell == "bash":
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
        asked = (
            f'{text}\nCOMP_WORDS=(domino-lm-pretrain --normalization R); COMP_CWORD=2; _shtab_domino_lm_pretrain; echo "${{COMPREPLY[@]}}"'
        )
        assert subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=False).stdout.split() == ["RMSNorm"]


def clean(**variables: str) -> dict[str, str]:
    """An environment that knows nothing of the checkout."""
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, "OMP_NUM_THREADS": "1", **variables}


def run(folder: Path, *words: str | Path, ok: tuple[int, ...] = (0,), **variables: str) -> str:
    done = subprocess.run([*map(str, words)], cwd=folder, env=clean(**variables), capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode in ok, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment that holds the wheel, made from the sdist, beside the pinned packages."""
    folder = tmp_path_factory.mktemp("package")
    tree = copy_of_tree(folder / "tree")
    run(tree, sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})")
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(folder, *pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", with_pip=False)
    python = folder / "env/bin/python"
    own = Path(run(folder, python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (own / "pinned.pth").write_text(sysconfig.get_path("purelib") + "\n")  # after its own packages; no .pth in there is read
    run(folder, *pip, "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    for path in (tree, folder / "unpacked"):
        shutil.rmtree(path)
    return folder / "env/bin"


@pytest.mark.long
def test_the_installed_commands_need_nothing_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    assert str(installed.parent) in run(tmp_path, installed / "python", "-c", "import domino_lm; print(domino_lm.__file__)")
    for command in COMMANDS:
        assert run(tmp_path, installed / command, "--help").startswith("usage:"), command
    out = run(tmp_path, installed / "domino-lm-completion", "bash", "--output-dir", tmp_path / "completions")
    assert f"wrote completion of {len(COMMANDS)} commands" in out
    assert {path.name for path in (tmp_path / "completions").iterdir()} == COMMANDS.keys()


@pytest.mark.long
def test_the_demo_runs_where_it_is_started_and_ends_with_a_line_of_the_model(installed: Path, tmp_path: Path) -> None:
    out = run(tmp_path, installed / "domino-lm-demo", "--train-iters", "40", ok=(0, 1))
    assert "training ended: finished at iteration 40" in out
    heading, line = out.rstrip("\n").split("\n\n")[-3::2]
    assert heading == "== 4. What it says"
    assert line.startswith("To be, or")
    assert len(line) > len("To be, or")
    assert (tmp_path / "runs/demo/checkpoints/latest_checkpointed_iteration.txt").read_text() == "40"
    assert str(ROOT) not in out
