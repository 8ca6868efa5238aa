"""Imports run one way, without circles, and what tools need at once starts without torch."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "domino_lm"
BASE = ("config", "parallel", "data", "model")
PLANS = (*BASE, "schedule", "simulate")
RUN = (*PLANS, "watch", "launch", "checkpoint")
MAY_IMPORT = {
    "config": (),
    "parallel": ("config",),
    "data": ("config",),
    "model": ("config", "parallel", "data"),
    "checkpoint": BASE,
    "schedule": BASE,
    "simulate": (*BASE, "schedule"),
    "watch": PLANS,
    "launch": PLANS,
    "training": RUN,
    "pretrain": (*RUN, "training"),
    "tools": (*RUN, "training", "pretrain"),
}
"""Layers, and those below each that it may import beside itself."""

WITHOUT_TORCH = [
    "config.settings",
    "config.arguments",
    "config.presets",
    "data.indexed",
    "data.gpt_dataset",
    "data.tokenizers.build",
    "data.preprocess.preprocess",
    "model.families.lookup",
    "model.family",
    "model.shapes",
    "schedule.cuts",
    "schedule.ops",
    "schedule.plan",
    "schedule.passes",
    "schedule.step",
    "schedule.validate",
    "schedule.timeline",
    "schedule.render",
    "simulate.costs",
    "simulate.hardware",
    "simulate.links",
    "simulate.memory",
    "simulate.simulator",
    "simulate.predict",
    "simulate.auto",
    "tools.sweep",
]
FILES = sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports anywhere, for types alone too; ``a.b`` for ``domino_lm.a.b``."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "domino_lm":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if (PACKAGE.parent / inner.replace(".", "/")).with_suffix(".py").exists() else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names if alias.name.split(".")[0] == "domino_lm")
    return {module.removeprefix("domino_lm").removeprefix(".") for module in found}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_is_in_a_layer_and_imports_none_above_it(path: Path) -> None:
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if layer == "__init__":
        assert not imports_of(path)
        return
    assert layer in MAY_IMPORT, f"{path} is in no layer; put it where its subject is"
    assert {module.split(".")[0] for module in imports_of(path)} <= {layer, *MAY_IMPORT[layer]}


def test_the_root_holds_the_program_and_folders_of_layers() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "pretrain.py"}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders | {"pretrain"} == set(MAY_IMPORT)


def test_no_imports_run_in_a_circle() -> None:
    graph = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): imports_of(path) for path in FILES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_light_modules_start_without_torch() -> None:
    imports = "; ".join(f"import domino_lm.{module}" for module in WITHOUT_TORCH)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode == 0
