"""Finds the family of a model: the built-in one, or a class of the user's own. Nothing here imports torch."""

import os
import sys
from importlib import import_module

from domino_lm.config.settings import ConfigError, ModelConfig
from domino_lm.model.families.transformer import Transformer
from domino_lm.model.family import Family


def family_of(model: ModelConfig) -> Family:
    """The family that ``model`` names, GPT and LLaMA by default. Raises ConfigError if it cannot be found, or is no family."""
    return Transformer(model) if model.model is None else _class_of(model.model)(model)


def _class_of(name: str) -> type[Family]:
    """The class that ``name``, module:Class, stands for; the module may lie in the working directory."""
    module, _, kind = name.partition(":")
    if not (module and kind):
        raise ConfigError(f"--model {name} does not name a class; write module:Class.")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(import_module(module), kind, None)
    except ModuleNotFoundError as error:
        wanted = "" if error.name == module else f", which {module} imports"
        raise ConfigError(
            f"--model {name}: there is no module {error.name}{wanted}; start in the folder that holds it, or put that on PYTHONPATH."
        ) from error
    if not (isinstance(found, type) and issubclass(found, Family)):
        what = f"{module} has no {kind}" if found is None else f"{kind} is no subclass of domino_lm.model.family.Family"
        raise ConfigError(f"--model {name}: {what}; docs/any-transformer.md shows one.")
    if found.__abstractmethods__:
        missing = " and ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"--model {name}: {kind} lacks {missing}; docs/any-transformer.md says what each returns.")
    return found
