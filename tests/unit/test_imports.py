"""Imports run one way, and what tools need at once starts without torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "domino_lm"
LAYERS = ["config", "parallel", "model", "schedule", "training", "convert"]
WITHOUT_TORCH = [
    "config",
    "arguments",
    "presets",
    "data.indexed",
    "data.gpt_dataset",
    "data.tokenizer",
    "data.preprocess",
    "schedule.ops",
    "schedule.plan",
    "schedule.passes",
    "schedule.compose",
    "schedule.validate",
    "schedule.costs",
    "schedule.hardware",
    "schedule.links",
    "schedule.memory",
    "schedule.simulator",
    "schedule.predict",
    "schedule.sweep",
    "schedule.auto",
    "schedule.timeline",
    "schedule.render",
]


def imported_layers(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
    return {module.split(".")[1] for module in modules if module.startswith("domino_lm.")}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_imports_a_layer_above_its_own(path: Path) -> None:
    layer = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if layer in LAYERS:
        above = set(LAYERS[LAYERS.index(layer) + 1 :])
        assert not imported_layers(path) & above


def test_light_modules_start_without_torch() -> None:
    imports = "; ".join(f"import domino_lm.{module}" for module in WITHOUT_TORCH)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode == 0
