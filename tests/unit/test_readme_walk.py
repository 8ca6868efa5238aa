"""The walk through the README: its record is of this README, and it tells what went wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import readme_walk
from tests.documents import ROOT, typed
from tests.readme_walk import DEMO_LIMIT_S, Step, page, steps

RECORD = ROOT / "docs/readme-walk.md"
DEMO = "$ domino-lm-generate --load runs/demo/checkpoints --prompt 'Once more'\n\nOnce more unto the breach, dear friends\n"


@pytest.mark.skipif(not RECORD.exists(), reason="`make walk` has not written docs/readme-walk.md")
def test_the_record_holds_every_command_of_the_readme_and_no_failure() -> None:
    rows = re.findall(r"^\| `([^`]+)`(.*) \| (\d+|not typed) \| (\d*) \|", RECORD.read_text(), re.M)
    assert [command for command, *_ in rows] == list(dict.fromkeys(["make setup", *typed("README.md")]))
    assert [command for command, _, status, _ in rows if status not in ("0", "not typed")] == ["make gpu-check"]
    assert len([row for row in rows if row[2] == "not typed"]) == len(readme_walk.LEFT_OUT)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of a repository whose README tells how to make a word, read it, and look at a GPU."""
    origin = tmp_path / "origin"
    (origin / "docs").mkdir(parents=True)
    (origin / "README.md").write_text("```\nmake word\nsource env/bin/activate\npython --say word\nmake test\n```\nAgain `make word`.\n")
    (origin / "Makefile").write_text(
        "setup:\n\tmkdir -p env/bin && echo 'PATH=$$PWD/env/bin:$$PATH' > env/bin/activate\n"
        "\tprintf '#!/bin/sh\\necho warning: \"$$@\"; exit 3\\n' > env/bin/python && chmod +x env/bin/python\n"
        "word:\n\techo a word | tee word\n"
    )
    for words in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", "-C", str(origin), *words.split()], check=True)
    subprocess.run(["git", "clone", "-q", str(origin), str(tmp_path / "clone")], check=True)
    return tmp_path / "clone"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_walk_types_each_command_once_in_a_clone_and_records_what_came_of_it(clone: Path) -> None:
    found = list(steps(clone, everything=False))
    assert [(step.command, step.status) for step in found] == [
        ("make setup", 0),
        ("make word", 0),
        ("source env/bin/activate", 0),
        ("python --say word", 3),
        ("make test", None),
    ]
    assert [step.faults() for step in found] == [[], [], [], ["ended with 3"], []]
    text = page(found, "Here.")
    assert re.search(r"^\| `make word` \| 0 \| \d+ \| \d+ \| a word \|$", text, re.M)
    assert "| `make test` | not typed |" in text
    assert "- `python`: warning: --say word" in text


@pytest.mark.parametrize(
    ("output", "seconds", "fault"),
    [
        (DEMO, 100, None),
        (DEMO, DEMO_LIMIT_S + 1, "more than"),
        ("warning: x\n" + DEMO, 100, "a warning"),
        ("trained\n", 100, "without a generated line"),
        (DEMO.removesuffix("Once more unto the breach, dear friends\n"), 100, "without a generated line"),
    ],
    ids=["sound", "slow", "warns", "silent", "without its line"],
)
def test_a_demo_that_does_not_keep_what_the_readme_says_is_a_fault(output: str, seconds: float, fault: str | None) -> None:
    faults = Step("make demo", "", "", 0, seconds, seconds * (os.cpu_count() or 1), output).faults()
    assert faults == [] if fault is None else fault in " ".join(faults)
