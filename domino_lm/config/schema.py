"""The fields of `settings` as values: name, type, default and help of each, from which flags and TOML files are made."""

import ast
import dataclasses
import inspect
import textwrap
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from domino_lm.config import settings as config
from domino_lm.config.bounds import Bounds
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

    bounds: Bounds | None = None
    """Numbers that are allowed."""

    @property
    def flag(self) -> str:
        """Spelling on the command line."""
        return "--" + self.name.replace("_", "-")

    def of(self, run: RunConfig) -> Any:
        """Its value in ``run``."""
        return getattr(getattr(run, self.part), self.name)


@cache
def settings() -> tuple[Setting, ...]:
    """Every setting in the order of `config`; names are unique over all parts."""
    return tuple(item for part, part_class in parts().items() for item in settings_of(part_class, part))


def settings_of(config_class: type, part: str = "") -> list[Setting]:
    """The fields of one dataclass that have a docstring, in their order."""
    docstrings, hints, found = field_docstrings(config_class), get_type_hints(config_class, include_extras=True), []
    for item in dataclasses.fields(config_class):
        if item.name in docstrings:
            kind, choices, many, bounds = _kind(hints[item.name])
            default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
            found.append(Setting(part, item.name, kind, choices, default, docstrings[item.name], many, bounds))
    return found


def flat_values(run: RunConfig) -> dict[str, Any]:
    """Every setting's value by its field name, in the order of `config`."""
    return {item.name: item.of(run) for item in settings()}


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


def _kind(hint: Any) -> tuple[type, tuple[str, ...] | None, bool, Bounds | None]:
    """Type of one value, its choices, whether there may be several, and the numbers that are allowed."""
    if get_origin(hint) in (Union, UnionType):
        *_, hint = (member for member in get_args(hint) if member is not NoneType)
    if get_origin(hint) is Literal:
        return str, get_args(hint), False, None
    if get_origin(hint) is Annotated:
        kind, bounds = get_args(hint)
        return kind, None, False, bounds
    if get_origin(hint) is tuple:
        return get_args(hint)[0], None, True, None
    return hint, None, False, None
