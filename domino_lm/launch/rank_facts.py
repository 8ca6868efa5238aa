"""What every rank of a run must have alike before anything is built: settings, libraries, the program's sources. Nothing here imports torch."""

import ast
import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from domino_lm.config.per_rank import MAY_DIFFER
from domino_lm.config.schema import settings
from domino_lm.config.settings import RunConfig

SOURCE_ENDINGS = (".py", ".toml")
SHOWN_HASH = 12


def setting_facts(run: RunConfig) -> dict[str, str]:
    """The flag and value of every setting that ranks must share."""
    return {item.flag: _spelt(item.of(run)) for item in settings() if item.name not in MAY_DIFFER}


def source_facts(model: str | None = None, package: Path = Path(__file__).parents[1]) -> dict[str, str]:
    """Hash of each file of the program: those of ``package``, and of the module that ``model`` (module:Class) names."""
    paths = {f"{package.name}/{path.relative_to(package)}": path for path in sorted(package.rglob("*")) if path.suffix in SOURCE_ENDINGS}
    if model is not None:
        paths |= {f"{path.name} of --model": path for path in _sources_of(model.partition(":")[0])}
    return {f"the source {name}": file_hash(path) for name, path in paths.items()}


def sources_hash(facts: Mapping[str, str]) -> str:
    """One short hash of `source_facts`."""
    return hashlib.sha256("\n".join(f"{name} {value}" for name, value in sorted(facts.items())).encode()).hexdigest()[:SHOWN_HASH]


def file_hash(path: Path) -> str:
    """Short hash of a file's content."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:SHOWN_HASH]


def _spelt(value: object) -> str:
    """A value as a flag takes it."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "nothing"
    return {None: "not given", True: "on", False: "off"}.get(value, str(value)) if value is None or isinstance(value, bool) else str(value)


def _sources_of(module: str) -> list[Path]:
    """Files of an imported module of the user's own: of its whole package, or the file and those beside it that it imports."""
    top = sys.modules.get(module.partition(".")[0])
    file = getattr(top, "__file__", None)
    if file is None or module.startswith("domino_lm."):
        return []
    path = Path(file)
    return sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else sorted(_with_imports(path))


def _with_imports(path: Path) -> set[Path]:
    """``path``, and files in its folder that it imports directly or through others."""
    found, waiting = set[Path](), [path]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            waiting += [beside for name in _imported(current) if (beside := path.parent / f"{name}.py").is_file()]
    return found


def _imported(path: Path) -> Iterator[str]:
    """Top-level names of what a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (name.partition(".")[0] for name in names)
