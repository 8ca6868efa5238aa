"""Public launch scripts of Megatron's and its neighbours' train here with few changes, which are counted."""

from __future__ import annotations

import re
from pathlib import Path

import numpy
import pytest

from domino_lm.config.arguments import parse_command
from domino_lm.config.settings import ConfigError
from domino_lm.data.indexed import IndexedDatasetWriter
from domino_lm.launch.checks import check_run, run_faults
from domino_lm.pretrain import main
from tests.launch_flags import CHANGES, SCRIPTS, Script

ROOT = Path(__file__).parents[2]
FILES = ROOT / "tests" / "golden" / "data" / "tokenizers"
RANKS = {"gpt175": 64, "llama3fp8": 8, "gpt345": 2, "ds_llama": 2, "llmjp": 32}


def names(script: Script) -> str:
    return script.name


@pytest.mark.parametrize("script", SCRIPTS, ids=names)
def test_a_script_is_refused_for_what_is_listed_alone(script: Script) -> None:
    """At its own sizes, on a fitting number of ranks."""
    try:
        parse_command(script.words, lambda *_: None, lambda run: run_faults(run, RANKS[script.name]))
        refused = []
    except ConfigError as error:
        lines = str(error).splitlines()
        refused = [line.removeprefix("  - ").split(":")[0] for line in (lines if len(lines) == 1 else lines[1:])]
    assert refused == list(CHANGES[script.name])


@pytest.mark.parametrize("script", SCRIPTS, ids=names)
def test_a_changed_script_is_sound_at_its_own_sizes(script: Script) -> None:
    check_run(parse_command(script.changed(), lambda *_: None).run, RANKS[script.name])


def test_the_readme_tells_the_counts() -> None:
    rows = dict(re.findall(r"^  \| .*`(\w+)\.txt` \| (\d+)", (ROOT / "README.md").read_text(), re.M))
    assert rows == {name: str(len(changes)) for name, changes in CHANGES.items()}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("launch")
    random = numpy.random.default_rng(0)
    with IndexedDatasetWriter(folder / "tokens", numpy.uint16) as writer:
        for _ in range(2000):
            writer.add_document(random.integers(0, 128, 20))
    own = {"CK": str(folder / "checkpoints"), "TB": str(folder / "events"), "CACHE": str(folder / "cache"), "DATA": str(folder / "tokens")}
    vocabulary = {f"gpt2-{name}": str(FILES / "gpt2-bpe" / name) for name in ("vocab.json", "merges.txt")}
    return {**own, **vocabulary, "PATH": str(next(FILES.rglob("*.model")))}


@pytest.mark.long
@pytest.mark.parametrize("script", SCRIPTS, ids=names)
def test_a_shrunk_script_trains(script: Script, paths: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = script.shrunk({**paths, "CK": str(tmp_path)})
    if "--wandb-project" in words:  # what it logs to is not installed here
        at = words.index("--wandb-project")
        del words[at : at + 2]
    assert main(words) == 0, capsys.readouterr().err
    assert "training ended: finished" in capsys.readouterr().out
