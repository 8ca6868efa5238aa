"""Flags made from the dataclasses in `config`: a field `ffn_hidden_size` is `--ffn-hidden-size`, its docstring the help.

A value comes from the command line, else from `--config`, else from `--preset`, else from the field's default. Nothing
here imports torch.
"""

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from domino_lm.config.flag_parser import DEFAULT, FlagParser
from domino_lm.config.foreign_text import int_of_flag
from domino_lm.config.megatron_flags import REQUIRES, classify
from domino_lm.config.presets import BESIDE_THE_MODEL, DEBUG_RUN, PRESETS
from domino_lm.config.schema import NO_DEFAULT, Setting, flat_values, parts, settings
from domino_lm.config.settings import ConfigError, RunConfig, refuse
from domino_lm.config.stand_ins import faults_beside
from domino_lm.config.toml_file import PRESET, ConfigFile, read_config

ALIASES = {
    "norm_epsilon": ["--layernorm-epsilon"],
    "override_opt_param_scheduler": ["--override-opt_param-scheduler", "--override-lr-scheduler"],
    "use_checkpoint_opt_param_scheduler": ["--use-checkpoint-opt_param-scheduler", "--use-checkpoint-lr-scheduler"],
    "save_interval": ["--persistent-save-interval"],
    "cuda_graph": ["--enable-cuda-graph"],
    "tokenizer_special_tokens": ["--tiktoken-special-tokens"],
    "wandb_exp_name": ["--wandb-name"],
    "muon_nesterov": ["--muon-use-nesterov"],
}
CONSTANT_FLAGS: dict[str, tuple[str, object]] = {
    "--disable-bias-linear": ("add_bias_linear", False),
    "--recompute-activations": ("recompute_granularity", "selective"),
    "--use-rotary-position-embeddings": ("position_embedding_type", "rope"),
    "--muon-no-split-qkv": ("muon_split_qkv", False),
}
"""Megatron's flags without a value that set a field under another name: the field, and the value that they give it."""


GONE = {"domino_wgrad_rows": "the setting is gone; each row has its own weight gradient, right behind its collective"}
"""Settings of former releases that a stored configuration or script may still name, and what holds instead."""


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


@dataclasses.dataclass
class Flags:
    """The words of a command line, sorted."""

    values: dict[str, Any]
    """By field name; what is not given, or is given a wrong value, is absent."""

    ignored: list[str]
    """Flags of Megatron's that are accepted without effect, each with the reason."""

    faults: list[str]
    """Unknown flags, refused flags and wrong values."""

    wrong: set[str]
    """Names of the settings with wrong values."""


def build_parser() -> FlagParser:
    """Parser of every setting; what the command line does not name is absent from its result."""
    parser = FlagParser("domino-lm-pretrain", "Train a GPT or LLaMA model from scratch. Flags are spelled as Megatron spells them.")
    names = sorted(PRESETS)
    text = f"Take a named model's settings; explicit flags win over them. The names are {', '.join(names)}."
    parser.add_argument("--preset", choices=names, metavar="NAME", help=text)
    parser.add_argument("--config", metavar="FILE", help="Take settings from a TOML file; they win over --preset, and flags over both.")
    parser.add_argument("--dry-run", action="store_true", help="Say what the run consists of, memory included, and stop.")
    parser.add_argument("--print-plan", action="store_true", help="Print the plan of a step, with a remark per op, and stop.")
    parser.add_argument(
        "--plan-layer", type=int_of_flag, metavar="N", help="Print the plan of layer N (from 0) alone; implies --print-plan."
    )
    groups: dict[str, Any] = {}
    for setting in settings():
        if setting.part not in groups:
            groups[setting.part] = parser.add_argument_group(f"{setting.part}: {parts()[setting.part].__doc__.splitlines()[0].rstrip('.')}")
        add_setting(groups[setting.part], setting)
    for name in GONE:
        parser.add_argument(f"--{name.replace('_', '-')}", help=argparse.SUPPRESS)
    return parser


ModelOfCheckpoint = Callable[[str, int | None, Mapping[str, object]], "dict[str, object] | None"]
"""Settings of the model that the checkpoint in a folder holds, of an iteration or the latest; None if it holds none."""
FaultsOf = Callable[[RunConfig], Iterable[str]]
"""What keeps settings from working together, a line per fault."""


def parse_arguments(
    argv: Sequence[str], faults_of: FaultsOf | None = None, unless_said: Mapping[str, object] = MappingProxyType({})
) -> RunConfig:
    """Settings of one run from its command line; see `parse_command`."""
    return parse_command(argv, faults_of=faults_of, unless_said=unless_said).run


def parse_command(
    argv: Sequence[str],
    model_of_checkpoint: ModelOfCheckpoint | None = None,
    faults_of: FaultsOf | None = None,
    unless_said: Mapping[str, object] = MappingProxyType({}),
    files_of: FaultsOf | None = None,
) -> Command:
    """What a command line asks for; ``model_of_checkpoint`` answers if it asks for --use-checkpoint-args.

    Settings in ``unless_said`` are taken if flags, file, preset and checkpoint do not say them.

    Raises ConfigError with all faults in the one message: unknown flags, refused flags, wrong values, missing settings, and
    what ``faults_of`` finds in those settings that have a value. What ``files_of`` finds stands beside other faults, but is none.
    """
    flags = read_flags(build_parser(), argv)
    dry_run, layer = flags.values.pop("dry_run", False), flags.values.pop("plan_layer", None)
    print_plan = flags.values.pop("print_plan", False) or layer is not None
    preset, values, explicit = with_file_and_preset(flags)
    taken: dict[str, object] = {}
    try:
        taken = _from_checkpoint(values, explicit, model_of_checkpoint)
    except ConfigError as error:
        flags.faults.append(str(error))
        flags.wrong |= _required("model") - values.keys()
    debug = DEBUG_RUN if preset is not None and preset.startswith("debug-") else {}
    run = sound_run(_filled({**values, **taken}, {**debug, **unless_said}), flags, faults_of, files_of)
    gone = [f"--{name.replace('_', '-')} {values[name]}: {why}" for name, why in GONE.items() if name in values]
    return Command(run, dry_run, print_plan, layer, (*flags.ignored, *gone), tuple(f"{key} {value}" for key, value in taken.items()))


def read_flags(parser: FlagParser, argv: Sequence[str]) -> Flags:
    """The flags of a command line that ``parser`` or the table of Megatron's flags knows, and the faults of the others."""
    found, unknown = parser.parse_known_args(argv)
    ignored, refused, unknown = classify(unknown)
    faults = [*parser.unknown_faults(unknown), *(f"{text}." for text in refused), *parser.faults]
    return Flags(vars(found), ignored, faults, parser.wrong)


def _filled(values: dict[str, Any], unless_said: Mapping[str, object]) -> dict[str, Any]:
    """``values``, and of ``unless_said`` what they leave open: a length in samples says the iterations, a tokenizer the vocabulary."""
    said_by = {"train_iters": "train_samples", "vocab_size": "tokenizer_type"}
    return {name: value for name, value in unless_said.items() if values.get(said_by.get(name, name)) is None} | values


class Given(NamedTuple):
    """What a command line says, before anything else fills it up."""

    preset: str | None
    values: dict[str, Any]
    explicit: dict[str, Any]
    """Those of ``values`` that are no preset's."""


def with_file_and_preset(flags: Flags) -> Given:
    """Values of flags, the file that --config names, and the preset that either names. What is wrong with the file joins the faults of ``flags``."""
    given = dict(flags.values)
    path, preset = given.pop("config", None), given.pop(PRESET, None)
    file = read_config(path, GONE) if path is not None else ConfigFile({}, [])
    from_file = dict(file.values)
    named_there = from_file.pop(PRESET, None)
    flags.faults += file.faults
    flags.wrong |= file.wrong
    if named_there is not None and named_there not in PRESETS:
        flags.faults.append(f"--config {path}: preset {named_there!r} is none of {', '.join(sorted(PRESETS))}.")
        flags.wrong |= {PRESET}
        named_there = None
    name = preset or named_there
    values = {**({**BESIDE_THE_MODEL, **PRESETS[str(name)]} if name else {}), **from_file, **given}
    if values.get("tokenizer_type") is None and values.get("vocab_file") and values.get("merge_file"):
        values["tokenizer_type"] = "GPT2BPETokenizer"  # what Megatron's pretraining of GPT takes for granted
    return Given(name, values, {**from_file, **given})


def sound_run(values: dict[str, Any], flags: Flags, faults_of: FaultsOf | None = None, files_of: FaultsOf | None = None) -> RunConfig:
    """The run that ``values`` describe. Raises ConfigError with the faults of ``flags`` and of the settings in one message.

    If there are any, what ``files_of`` finds is said too.
    """
    known = flags.wrong | (_required("model") if PRESET in flags.wrong else set())
    at_fault = known | (_required() - values.keys())
    found = [*flags.faults, *_missing(values.keys() | known)]

    def more(run: RunConfig) -> list[str]:
        faults = [*_unmet(run, flags), *(faults_of(run) if faults_of else ())]
        return [*faults, *(files_of(run) if files_of and (found or faults) else ())]

    if at_fault:
        refuse([*found, *faults_beside(at_fault, values, config_from_values, more)])
    run = config_from_values(values)
    refuse([*found, *more(run)])
    return run


def _required(part: str | None = None) -> set[str]:
    """Names of settings, all or those of one part, that have no default."""
    return {item.name for item in settings() if item.default is NO_DEFAULT and part in (None, item.part)}


def _unmet(run: RunConfig, flags: Flags) -> Iterator[str]:
    """Flags of Megatron's that are accepted only beside a setting that ``run`` has otherwise."""
    flat = flat_values(run)
    for flag, (name, value, way_out) in REQUIRES.items():
        if any(text.startswith(f"{flag}:") for text in flags.ignored) and flat[name] != value:
            yield f"{flag}: {way_out}."


def _from_checkpoint(
    values: dict[str, object], explicit: dict[str, object], model_of_checkpoint: ModelOfCheckpoint | None
) -> dict[str, object]:
    """Settings of the model in --load if --use-checkpoint-args asks for them; a vocabulary size only if nothing else gives one.

    What is ``explicit`` beside the model's shape stays; for its shape it must say the same.
    """
    if not values.get("use_checkpoint_args"):
        return {}
    folder, step = values.get("load"), values.get("ckpt_step")
    if folder is None:
        raise ConfigError("--use-checkpoint-args takes the model from a checkpoint: give --load.")
    assert model_of_checkpoint is not None, "the program passes it"
    found = model_of_checkpoint(str(folder), step if isinstance(step, int) else None, explicit) or {}
    if values.get("tokenizer_type") is not None or values.get("vocab_size") is not None:
        found = {key: value for key, value in found.items() if key != "vocab_size"}
    return found


def _missing(given: Collection[str]) -> list[str]:
    """The fault of settings that have no default and are not ``given``, if there are any."""
    missing = [item for item in settings() if item.name in _required() - set(given)]
    way_out = ", or take a model with --preset debug-gpt" if "model" in {item.part for item in missing} else ""
    names = ", ".join(item.flag for item in missing)
    return [f"{names}: no value given and none by default; add what is missing{way_out}."] if missing else []


def config_from_values(values: dict[str, object]) -> RunConfig:
    """RunConfig of flat field names and values; what is absent takes its default. Raises ConfigError on a missing one."""
    refuse(_missing(values))
    values_of = {
        part: part_class(**{item.name: _stored(values[item.name]) for item in dataclasses.fields(part_class) if item.name in values})
        for part, part_class in parts().items()
    }
    return RunConfig(**values_of)


def _stored(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def add_setting(group: Any, setting: Setting, **changes: Any) -> None:
    """Add a setting's flags to a parser or a group of it; ``changes`` go to `add_argument`."""
    for flag, (name, value) in CONSTANT_FLAGS.items():
        if name == setting.name:
            same = f"{setting.flag} {value}" if setting.kind is not bool else f"--no{setting.flag[1:]}"
            group.add_argument(flag, dest=name, action="store_const", const=value, help=f"The same as {same}.")
    options: dict[str, Any]
    if setting.kind is bool:
        default = None if setting.default is None else "on" if setting.default else "off"
        options = {"action": "store_true" if setting.name.startswith("no_") else argparse.BooleanOptionalAction}
    else:
        default = " ".join(setting.default) or None if isinstance(setting.default, tuple) else setting.default
        default = None if default is NO_DEFAULT else default
        many_choices = setting.choices is not None and len(setting.choices) > 5
        metavar = "NAME" if many_choices else None if setting.choices else setting.kind.__name__.upper()
        options = {
            "type": int_of_flag if setting.kind is int else setting.kind,
            "choices": setting.choices,
            "metavar": metavar,
            **({"nargs": "+"} if setting.many else {}),
        }
    text = setting.help.replace("%", "%%") + ("" if default is None else f"{DEFAULT}{default}.")
    group.add_argument(setting.flag, *ALIASES.get(setting.name, []), dest=setting.name, help=text, **{**options, **changes})
