"""The fields of `settings` as values: name, type, default and help of each, from which flags and TOML files are made."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from domino_lm.config import settings as config
from domino_lm.config.settings import RunConfig

NO_DEFAULT = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of one of RunConfig's parts, as the command line sees it."""

    part: str
    name: str
    kind: type
    choices: tuple[str, ...] | None
    default: Any
    help: str
    many: bool = False
    """Takes several values."""

    @property
    def flag(self) -> str:
        """Spelling on the command line."""
        return "--" + self.name.replace("_", "-")


def settings() -> list[Setting]:
    """Every setting in the order of `config`; names are unique over all parts."""
    found = []
    for part, part_class in parts().items():
        docstrings = field_docstrings(part_class)
        hints = get_type_hints(part_class)
        for item in dataclasses.fields(part_class):
            kind, choices, many = _kind(hints[item.name])
            found.append(Setting(part, item.name, kind, choices, item.default, docstrings[item.name], many))
    return found


@cache
def field_docstrings(part_class: type) -> dict[str, str]:
    """Docstring that follows each field in the class's source."""
    (class_node,) = ast.parse(textwrap.dedent(inspect.getsource(part_class))).body
    assert isinstance(class_node, ast.ClassDef)
    found = {}
    for node, following in zip(class_node.body, class_node.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            found[node.target.id] = inspect.cleandoc(ast.literal_eval(following.value))
    return found


def parts() -> dict[str, Any]:
    """Each of RunConfig's parts by its name: the class that holds its settings."""
    return {item.name: get_type_hints(RunConfig, vars(config))[item.name] for item in dataclasses.fields(RunConfig)}


def _kind(hint: Any) -> tuple[type, tuple[str, ...] | None, bool]:
    """Type of one value, its choices, and whether there may be several."""
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (member for member in get_args(hint) if member is not NoneType)
    if get_origin(hint) is Literal:
        return str, get_args(hint), False
    if get_origin(hint) is tuple:
        return get_args(hint)[0], None, True
    return hint, None, False
