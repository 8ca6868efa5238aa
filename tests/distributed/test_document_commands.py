"""The commands of the documents that set up, check, convert, predict and compare do what the text beside them says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from benchmarks.case import OURS
from benchmarks.peers import peer_python
from domino_lm.checkpoint.convert.conversion import convert, open_stored
from domino_lm.checkpoint.folder import detect_kind, find_checkpoint, iteration_folder
from domino_lm.data.indexed import IndexedDataset
from tests.distributed.training_runs import write_tokens
from tests.documents import ROOT, attempt, commands_for, copy_of_tree, here
from tests.golden.checkpoint_files import unpack
from tests.unit.test_benchmarks import needs_network

RESULTS = ROOT / "benchmarks" / "results"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes a command runs once with each that the documents have for it."""
    if "command" in metafunc.fixturenames:
        commands = commands_for(metafunc.function.__name__)
        metafunc.parametrize("command", commands, ids=[" ".join(command.split()[:4]) for command in commands])


def run(folder: Path, command: str, **variables: str) -> str:
    """What a line prints that has to succeed."""
    done = attempt(folder, command, **variables)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository that a command may change."""
    return copy_of_tree(tmp_path_factory.mktemp("copy") / "tree")


def write_pair(prefix: Path) -> None:
    """A token file of 40 short documents."""
    tokens = write_tokens(prefix.parent)
    for suffix in (".bin", ".idx"):
        tokens.with_suffix(suffix).rename(prefix.with_suffix(suffix))


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder of one's own, with the repository's programs, a checkpoint of Megatron's, tokens and a vocabulary."""
    for name in ("tools", "domino_lm"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "checkpoints").mkdir()
    shutil.move(unpack(tmp_path / "unpacked") / "llama_legacy_tp1", tmp_path / "checkpoints" / "megatron")
    (tmp_path / "data").mkdir()
    write_pair(tmp_path / "data" / "my_text_document")
    words = [chr(0x100 + i) if i < 33 else chr(i) for i in range(127)]
    (tmp_path / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate([*words, "<|endoftext|>"])}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    return tmp_path


def test_make_alone_lists_every_target(command: str) -> None:
    (targets,) = re.findall(r"^\.PHONY: (help .*)", (ROOT / "Makefile").read_text(), re.M)
    assert re.findall(r"^  make ([\w-]+) ", run(ROOT, command), re.M) == targets.split()


def test_a_program_explains_its_flags(command: str) -> None:
    assert run(ROOT, command if command.endswith("--help") else f"{command} --help").startswith("usage:")


def test_the_command_line_is_recorded_again(command: str, tree: Path) -> None:
    records = ["tests/unit/cli_surface.txt", "docs/megatron-flags.md"]
    for record in records:
        (tree / record).write_text("old")
    run(tree, command, PYTHONPATH=str(tree))
    assert [(tree / record).read_text() for record in records] == [(ROOT / record).read_text() for record in records]


def test_the_simulator_answers_for_a_model_and_a_cluster(command: str) -> None:
    assert re.search(r"^rows 2 .*\n(.*\n)*optimum ", run(ROOT, command), re.M)


def test_the_timeline_of_the_readme_is_drawn_again(command: str, tmp_path: Path) -> None:
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "docs/figures").mkdir(parents=True)
    run(tmp_path, command)
    assert (tmp_path / "docs/figures/timeline.png").stat().st_size > 10_000


def test_all_pairs_of_a_folder_become_one(command: str, tmp_path: Path) -> None:
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "runs/data").mkdir(parents=True)
    for name in ("a", "b"):
        write_pair(tmp_path / "runs/data" / name)
    run(tmp_path, command)
    assert len(IndexedDataset(tmp_path / "runs/all")) == 80


@pytest.mark.long
def test_a_checkpoint_of_megatrons_is_trained_on(command: str, desk: Path) -> None:
    out = run(desk, f"{command} --global-batch-size 8 --train-iters 22 --split 90,10,0 --log-interval 1")
    assert "resumed from checkpoints/megatron at iteration 20" in out
    assert set(re.findall(r"learning rate: (\d\S+)", out)) == {"4.000000E-04"}  # the checkpoint's least, where its decay has ended
    assert find_checkpoint(desk / "checkpoints/my") == iteration_folder(desk / "checkpoints/my", 22)


@pytest.mark.long
def test_conversions_lead_from_one_to_the_next(desk: Path) -> None:
    convert(load=desk / "checkpoints/megatron", save=desk / "checkpoints/my", to="native", vocab_size=128)
    for command in commands_for("test_conversions_lead_from_one_to_the_next"):
        run(desk, command)
        ((save, kind),) = re.findall(r"--save (\S+) --to (\S+)", command)
        assert detect_kind(desk / save) == kind
    run(desk, "python tools/convert_checkpoint.py --load checkpoints/my --save some --to native --iteration 20 --vocab-size 120")
    assert open_stored(desk / "some").model.vocab_size == 120


@pytest.mark.long
def test_make_format_mends_what_make_check_refuses(tree: Path) -> None:
    check, format_ = commands_for("test_make_format_mends_what_make_check_refuses")
    untidy = tree / "tools" / "untidy.py"
    untidy.write_text("print( f'a' )\n")
    assert "would be reformatted" in attempt(tree, here(check)).stdout
    run(tree, here(format_))
    assert untidy.read_text() == 'print("a")\n'
    run(tree, here(check))


@pytest.mark.long
def test_make_test_leaves_out_what_make_test_all_runs(tree: Path) -> None:
    marks = "\n".join(f"@pytest.mark.{mark}\ndef test_{mark}():\n    pass\n" for mark in ("slow", "exhaustive", "long"))
    (tree / "tests/unit/test_marks.py").write_text(f"import pytest\n\n{marks}")
    some, every = sorted(commands_for("test_make_test_leaves_out_what_make_test_all_runs"))
    assert "1 passed, 2 deselected" in run(tree, here(f"{some} PYTEST=tests/unit/test_marks.py"))
    assert "3 passed" in run(tree, here(f"{every} PYTEST=tests/unit/test_marks.py"))


@pytest.mark.long
def test_make_test_runs_what_is_asked_for(command: str, tree: Path) -> None:
    assert re.search(r"^\d+ passed, \d+ deselected", run(tree, here(command)), re.M)


@pytest.mark.long
def test_make_fuzz_tries_as_many_inputs_as_it_is_told(tree: Path) -> None:
    assert re.search(r"^\d+ passed", run(tree, here("make fuzz FUZZ_EXAMPLES=5")), re.M)


def test_make_clean_removes_what_runs_left_and_nothing_else(tmp_path: Path) -> None:
    tree = copy_of_tree(tmp_path / "tree")
    before = sorted(tree.rglob("*.*"))
    (tree / "runs/demo").mkdir(parents=True)
    run(tree, here("make clean"))
    assert not (tree / "runs").exists()
    assert sorted(tree.rglob("*.*")) == before


@pytest.mark.long
def test_the_check_of_a_gpu_can_be_rehearsed(command: str, tree: Path) -> None:
    assert run(tree, here(command)).endswith("rehearsal on CPU, not a GPU result\n")


OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PYTHONPATH": ""}
"""pip downloads nothing; the 0 is how its variables say no to isolation."""


def environment_at(folder: Path, held: Path) -> Path:
    """A new environment that sees the packages of this one but our own, as links in ``held``, and cannot change them."""
    held.mkdir()
    for place in {sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")}:
        for path in Path(place).iterdir():
            if "domino_lm" not in path.name and path.suffix != ".pth":
                (held / path.name).symlink_to(path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "held.pth").write_text(f"{held}\n")
    return folder


def own_packages(environment: Path) -> set[str]:
    """What was installed into an environment itself."""
    return {path.name.split("-")[0] for path in environment.glob("lib/python*/site-packages/*.dist-info")}


@pytest.mark.long
def test_setting_up_an_environment_that_exists_changes_no_version_in_it(command: str, tree: Path, tmp_path: Path) -> None:
    environment = environment_at(tmp_path / "environment", tmp_path / "held")
    run(tree, command.replace("/path/to/environment", str(environment)), **OFFLINE)
    assert own_packages(environment) == {"domino_lm"}
    assert (environment / "bin" / "domino-lm-pretrain").exists()
    assert run(tmp_path, f"{environment}/bin/python -c 'import domino_lm; print(domino_lm.__file__)'", **OFFLINE).startswith(str(tree))


@pytest.mark.long
def test_setting_up_with_another_torch_installs_that_one(command: str, tree: Path, tmp_path: Path) -> None:
    """A wheel of that name and version stands for the real one, which would have to be downloaded."""
    ((wanted, version),) = re.findall(r'"(torch==(.*))"', command)
    with zipfile.ZipFile(tmp_path / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch/__init__.py", f"__version__ = {version!r}\n")
        wheel.writestr(f"torch-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        wheel.writestr(f"torch-{version}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"torch-{version}.dist-info/RECORD", "")
    environment = environment_at(tree / ".venv", tmp_path / "held")
    run(tree, command, **OFFLINE, PIP_FIND_LINKS=str(tmp_path))
    assert own_packages(environment) == {"domino_lm", "torch"}
    assert run(tmp_path, f"{environment}/bin/python -c 'import torch; print(torch.__version__)'", **OFFLINE) == f"{version}\n"
    assert (environment / ".domino-lm-setup").read_text() == f"{wanted}\n"


@pytest.mark.long
def test_the_extra_packages_are_installed_by_their_names(command: str, tree: Path, tmp_path: Path) -> None:
    environment = environment_at(tmp_path / "environment", tmp_path / "held")
    run(tree, command, **OFFLINE, PATH=f"{environment}/bin:{os.environ['PATH']}")
    assert own_packages(environment) == {"domino_lm"}
    asked = set(re.findall(r"\w+", command.split("[")[1]))
    about = run(tmp_path, f"{environment}/bin/python -c 'import importlib.metadata as m; print(m.metadata(\"domino-lm\"))'", **OFFLINE)
    assert asked <= set(re.findall(r"^Provides-Extra: (\w+)", about, re.M))


@pytest.mark.long
def test_predicted_tables_are_the_recorded_ones(command: str, tmp_path: Path) -> None:
    """Of the published figures those at one batch, since all of them take minutes."""
    name = Path(command.split()[1]).stem
    run(ROOT, f"{command} --output {tmp_path / name}" + (" --batches 16" if name == "paper_figures" else ""))
    (table,) = (path for path in (tmp_path / name, tmp_path / f"{name}.md") if path.exists())
    found, recorded = table.read_text().splitlines(), (RESULTS / f"{name}.md").read_text().splitlines()
    assert len(found) > 50
    assert found == [line for line in recorded if line in found]


SMALL = "--hidden 256 --layers 1 --seq 64 --vocab 256 --rounds 1 --steps 1 --gbit 2"


@needs_network
@pytest.mark.long
def test_a_comparison_runs_at_a_tiny_size(command: str, tmp_path: Path) -> None:
    flags = f"{SMALL} --output {tmp_path}/small" + ("" if peer_python().exists() else f" --programs {OURS}")
    run(ROOT, f"{here(command)} BENCH='{flags}'" if command.startswith("make") else f"{command} {flags}")
    results = json.loads((tmp_path / "small.json").read_text())
    (link,) = results["links"]
    (turns,) = (each["turns"] for each in link["rounds"])
    assert {"domino_lm/serial", "domino_lm/no_comm"} < turns.keys()
    assert f"head_to_head.py {' '.join(command.split()[2:])}".strip() in results["command"]
    assert (tmp_path / "small.png").stat().st_size > 0


def test_the_comparison_is_predicted_as_recorded_within_a_tenth(command: str, tmp_path: Path) -> None:
    """The program ends with 1 where a ratio is missed by more."""
    run(ROOT, f"{command} --output {tmp_path}/predicted")
    assert (tmp_path / "predicted.md").read_text() == (RESULTS / "predicted_shaped.md").read_text()


def test_results_without_calibrations_are_refused() -> None:
    done = attempt(ROOT, "python benchmarks/predict_shaped.py --measured benchmarks/results/llama_512.json")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "head_to_head.py --calibrate" in done.stderr


@needs_network
@pytest.mark.long
def test_a_link_is_calibrated_and_predicted(tmp_path: Path) -> None:
    run(ROOT, f"python benchmarks/predict_shaped.py --gbit 2 --layers 1 --output {tmp_path}/predicted")
    rows = json.loads((tmp_path / "predicted.json").read_text())["rows"]
    assert {row["variant"] for row in rows} > {"serial", "baseline", "rows2"}
    assert all(0.0 < row["predicted"] < 1.2 for row in rows)
