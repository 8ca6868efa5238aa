"""Every command of the page about data runs as it stands there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.documents import ROOT, commands_for

PAGE = (ROOT / "docs/data-format.md").read_text()


def test_the_commands_of_the_page_run(tmp_path: Path) -> None:
    found = commands_for("test_the_commands_of_the_page_run")
    assert [shlex.split(command)[:2] for command in found] == [["python", "tools/preprocess_data.py"], ["python", "tools/inspect_data.py"]]
    for command in found:
        words = shlex.split(command.replace("runs/data", str(tmp_path)))
        result = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert (result.returncode, result.stderr) == (0, ""), command


def test_every_flag_that_the_page_names_exists() -> None:
    helps = [
        subprocess.run([sys.executable, *program, "--help"], cwd=ROOT, capture_output=True, text=True).stdout
        for program in (["tools/preprocess_data.py"], ["tools/merge_datasets.py"], ["tools/inspect_data.py"], ["-m", "domino_lm.pretrain"])
    ]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE))
    assert len(named) > 30
    known = "".join(text.replace("[no-]", "") + text.replace("[no-]", "no-") for text in helps)
    assert {flag for flag in named if flag not in known} == set()
