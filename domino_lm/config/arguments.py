"""Flags made from the dataclasses in `config`: a field `ffn_hidden_size` is `--ffn-hidden-size`, its docstring the help.

A value comes from the command line, else from `--config`, else from `--preset`, else from the field's default. Nothing
here imports torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from domino_lm.config.megatron_flags import NEEDS, flag_names, help_text, settle
from domino_lm.config.presets import BESIDE_THE_MODEL, PRESETS
from domino_lm.config.schema import NO_DEFAULT, Setting, parts, settings
from domino_lm.config.settings import ConfigError, RunConfig
from domino_lm.config.toml_file import PRESET, read_config

ALIASES = {
    "norm_epsilon": ["--layernorm-epsilon"],
    "override_opt_param_scheduler": ["--override-opt_param-scheduler"],
    "use_checkpoint_opt_param_scheduler": ["--use-checkpoint-opt_param-scheduler"],
    "save_interval": ["--persistent-save-interval"],
    "cuda_graph": ["--enable-cuda-graph"],
}
SAYS: dict[str, tuple[str, object]] = {
    "--disable-bias-linear": ("add_bias_linear", False),
    "--recompute-activations": ("recompute_granularity", "selective"),
    "--use-rotary-position-embeddings": ("position_embedding_type", "rope"),
}
"""Megatron's flags without a value that give a field one, where the field's own flag is another."""


@dataclasses.dataclass(frozen=True)
class Command:
    """A command line: the settings of its run, and what it says beside them."""

    run: RunConfig
    dry_run: bool = False
    """Say what the run consists of, and stop."""

    print_plan: bool = False
    """Print the plan of a step, and stop."""

    plan_layer: int | None = None
    """The only layer of the plan that is printed."""

    ignored: tuple[str, ...] = ()
    """Flags of Megatron's that need no setting here, each with the reason."""

    from_checkpoint: tuple[str, ...] = ()
    """Settings that --use-checkpoint-args took over, each with its value."""


def build_parser() -> argparse.ArgumentParser:
    """Parser of every setting; what the command line does not name is absent from its result."""
    parser = _Parser(
        prog="domino-lm-pretrain",
        description="Train a GPT or LLaMA model from scratch. Flags are spelled as Megatron spells them.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=_HelpFormatter,
        epilog=help_text(),
    )
    parser.add_argument("--preset", choices=sorted(PRESETS), help="Take a named model's settings; explicit flags win over them.")
    parser.add_argument("--config", metavar="FILE", help="Take settings from a TOML file; they win over --preset, and flags over both.")
    parser.add_argument("--dry-run", action="store_true", help="Say what the run consists of, memory included, and stop.")
    parser.add_argument("--print-plan", action="store_true", help="Print the plan of a step, with a remark per op, and stop.")
    parser.add_argument("--plan-layer", type=int, metavar="N", help="Print the plan of layer N (from 0) alone; implies --print-plan.")
    groups: dict[str, Any] = {}
    for setting in settings():
        if setting.part not in groups:
            title = parts()[setting.part].__doc__
            groups[setting.part] = parser.add_argument_group(setting.part, title)
        _add_setting(groups[setting.part], setting)
    return parser


ModelOfCheckpoint = Callable[[str, int | None], "dict[str, object] | None"]
"""Settings of the model that the checkpoint in a folder holds, of an iteration or the latest; None where it holds none."""


def parse_arguments(argv: Sequence[str]) -> RunConfig:
    """Settings of one run from its command line; see `parse_command`."""
    return parse_command(argv).run


def parse_command(argv: Sequence[str], model_of_checkpoint: ModelOfCheckpoint | None = None) -> Command:
    """What a command line asks for; ``model_of_checkpoint`` answers where it asks for --use-checkpoint-args.

    Raises ConfigError, with every unknown flag or every missing one in the one message. Whether the values work
    together is `checks.check_run`'s business.
    """
    parser = build_parser()
    found, unknown = parser.parse_known_args(list(argv))
    ignored, refused, unknown = settle(unknown)
    if unknown:
        raise ConfigError(_unknown_message(unknown, parser))
    if refused:
        raise ConfigError("; ".join(refused) + ".")
    flags = vars(found)
    dry_run, path, preset = flags.pop("dry_run", False), flags.pop("config", None), flags.pop(PRESET, None)
    layer = flags.pop("plan_layer", None)
    print_plan = flags.pop("print_plan", False) or layer is not None
    from_file = read_config(path, settings()) if path is not None else {}
    named_there = from_file.pop(PRESET, None)
    if named_there is not None and named_there not in PRESETS:
        raise ConfigError(f"--config {path}: preset {named_there!r} is none of {', '.join(sorted(PRESETS))}.")
    name = preset or named_there
    preset_values = {**BESIDE_THE_MODEL, **PRESETS[str(name)]} if name else {}
    values = _completed({**preset_values, **from_file, **flags})
    taken = _from_checkpoint(values, model_of_checkpoint)
    run = config_from_values({**values, **taken})
    _require_needs(ignored, flat_values(run))
    return Command(run, dry_run, print_plan, layer, tuple(ignored), tuple(f"{key} {value}" for key, value in taken.items()))


def _completed(values: dict[str, object]) -> dict[str, object]:
    """What Megatron's pretraining of GPT takes for granted: a vocabulary with merges is GPT-2's."""
    if values.get("tokenizer_type") is None and values.get("vocab_file") and values.get("merge_file"):
        return {**values, "tokenizer_type": "GPT2BPETokenizer"}
    return values


def _from_checkpoint(values: dict[str, object], model_of_checkpoint: ModelOfCheckpoint | None) -> dict[str, object]:
    """Settings of the model in --load where --use-checkpoint-args asks for them; a vocabulary size only where nothing else gives one."""
    if not values.get("use_checkpoint_args"):
        return {}
    folder, step = values.get("load"), values.get("ckpt_step")
    if folder is None:
        raise ConfigError("--use-checkpoint-args takes the model from a checkpoint: give --load.")
    assert model_of_checkpoint is not None, "the program passes it"
    found = model_of_checkpoint(str(folder), step if isinstance(step, int) else None) or {}
    if values.get("tokenizer_type") is not None or values.get("vocab_size") is not None:
        found = {key: value for key, value in found.items() if key != "vocab_size"}
    return found


def _require_needs(accepted: Sequence[str], values: dict[str, object]) -> None:
    """Raise ConfigError for flags of Megatron's that ask for nothing only beside a setting that this run does not have."""
    for flag, (name, value, way_out) in NEEDS.items():
        if any(text.startswith(f"{flag}:") for text in accepted) and values[name] != value:
            raise ConfigError(f"{flag}: {way_out}.")


def config_from_values(values: dict[str, object]) -> RunConfig:
    """RunConfig of flat field names and values; what is absent takes its default. Raises ConfigError on a missing one."""
    missing = [item for item in settings() if item.default is NO_DEFAULT and item.name not in values]
    if missing:
        way_out = ", or take a model with --preset debug-gpt" if "model" in {item.part for item in missing} else ""
        raise ConfigError(f"{', '.join(item.flag for item in missing)}: no value given and none by default; add what is missing{way_out}.")
    values_of = {
        part: part_class(**{item.name: _stored(values[item.name]) for item in dataclasses.fields(part_class) if item.name in values})
        for part, part_class in parts().items()
    }
    return RunConfig(**values_of)


def _stored(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def flat_values(run: RunConfig) -> dict[str, object]:
    """Every setting's value by its field name, in the order of `config`."""
    return {item.name: getattr(getattr(run, item.part), item.name) for item in settings()}


class _HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of what stands before and after the flags."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        hanging = f"{indent}      "
        return "\n".join(
            textwrap.fill(line, width, initial_indent=indent, subsequent_indent=hanging, break_on_hyphens=False) for line in lines
        )


class _Parser(argparse.ArgumentParser):
    """argparse, but a wrong value is a ConfigError, so that one process of many can print it."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument ") + ".")


def _add_setting(group: Any, setting: Setting) -> None:
    for flag, (name, value) in SAYS.items():
        if name == setting.name:
            same = f"{setting.flag} {value}" if setting.kind is not bool else f"--no{setting.flag[1:]}"
            group.add_argument(flag, dest=name, action="store_const", const=value, help=f"The same as {same}.")
    flags = [setting.flag, *ALIASES.get(setting.name, [])]
    text = setting.help.replace("%", "%%")
    if setting.kind is not bool:
        shown = "" if setting.default in (None, (), NO_DEFAULT) else f" Default: {setting.default}."
        metavar = None if setting.choices else setting.kind.__name__.upper()
        several: dict[str, Any] = {"nargs": "+"} if setting.many else {}
        group.add_argument(
            *flags, dest=setting.name, type=setting.kind, choices=setting.choices, metavar=metavar, help=text + shown, **several
        )
        return
    shown = f" Default: {'on' if setting.default else 'off'}." if setting.default is not None else ""
    plain = setting.name.startswith("no_")
    action = "store_true" if plain else argparse.BooleanOptionalAction
    group.add_argument(*flags, dest=setting.name, action=action, help=text + shown)


def _unknown_message(unknown: list[str], parser: argparse.ArgumentParser) -> str:
    flags = [word.split("=")[0] for word in unknown if word.startswith("-")]
    if not flags:
        return f"{' '.join(unknown)}: a value without a flag; every setting is given as --name value."
    known = [*(option for action in parser._actions for option in action.option_strings), *flag_names()]
    parts = []
    for flag in flags:
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.6)
        parts.append(f"{flag} is not a flag of this program" + (f" (nearest: {near[0]})" if near else ""))
    return "; ".join(parts) + ". --help lists all flags."
