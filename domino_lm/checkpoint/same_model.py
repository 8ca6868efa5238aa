"""What a resumed run takes from its checkpoint, and whether the checkpoint's model is the one of the run that loads it."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from domino_lm.checkpoint.folder import kind_of, locate
from domino_lm.checkpoint.index import CheckpointError, read_metadata
from domino_lm.checkpoint.manifest import StoredFiles
from domino_lm.checkpoint.megatron_distributed import read_common
from domino_lm.checkpoint.megatron_legacy import LegacyCheckpoint
from domino_lm.checkpoint.megatron_state import read_model
from domino_lm.checkpoint.record import read_native_record
from domino_lm.checkpoint.torch_files import values_of
from domino_lm.config.data import TokenizerConfig
from domino_lm.config.settings import ConfigError, ModelConfig, RunConfig
from domino_lm.model.families.transformer import RESOLVED, without_redundant_settings

LEFT_OPEN_TO_RESUME = {
    "attention_dropout",
    "hidden_dropout",
    "embedding_init_method_std",
    "init_method_std",
    "init_method_xavier_uniform",
    "make_vocab_size_divisible_by",
    "mask_padded_vocab",  # the checkpoint knows which rows take part
    "seq_length",
}
"""Settings of a model that may change between a checkpoint and the run that resumes it."""


def refuse_other_model(mine: dict[str, Any], theirs: dict[str, Any], folder: str) -> None:
    """Raise ConfigError if the settings of two models differ in what their weights or their function depend on."""
    here, there = _canonical(mine), _canonical(theirs)
    differing = [name for name in here if name not in LEFT_OPEN_TO_RESUME and name in there and here[name] != there[name]]
    if differing:
        words = ", ".join(f"--{name.replace('_', '-')} {_value(theirs, name)} there, {_value(mine, name)} here" for name in differing)
        raise ConfigError(f"--load {folder} holds another model: {words}. Give the flags that it was trained with.")


def _canonical(model: dict[str, Any]) -> dict[str, Any]:
    """A model's settings in one spelling; some of them alone, or those of another version, stay as they are."""
    try:
        return asdict(without_redundant_settings(ModelConfig(**model)))
    except TypeError:
        return model


def _value(model: dict[str, Any], name: str) -> object:
    """A setting's value, or what it resolves to if it is left to others."""
    try:
        return getattr(ModelConfig(**model), RESOLVED.get(name, name))
    except TypeError:
        return model[name]


def with_gelu_of_checkpoint(run: RunConfig) -> tuple[RunConfig, str]:
    """``run`` with GELU by tanh, and a line that says so, if it resumes a checkpoint of before format version 2, which has no biases."""
    folder = run.checkpoint.load
    with suppress(CheckpointError):  # what is wrong with it is said when it is loaded
        found = settings_of_model(folder, run.checkpoint.ckpt_step) if folder is not None else None
        if found and found.get("openai_gelu") and run.model.gelu_approximation == "none":
            model = replace(run.model, openai_gelu=True)
            return replace(
                run, model=model
            ), f"the checkpoint in {folder} was trained with GELU by tanh; it goes on so, as with --openai-gelu"
    return run, ""


def settings_to_take(folder: str, iteration: int | None, explicit: Mapping[str, object]) -> dict[str, object] | None:
    """Settings of the model in ``folder`` that a run takes over; None if there is no checkpoint.

    The run's ``explicit`` settings stay if a resume leaves them open; the sequence, at most as long as the position table.
    Raises ConfigError if others differ from the checkpoint's, CheckpointError as `settings_of_model` does.
    """
    found = settings_of_model(folder, iteration)
    if found is None:
        return None
    theirs = ModelConfig(**found)  # type: ignore[arg-type]
    if theirs.position_embedding_type == "learned_absolute":
        found["max_position_embeddings"] = theirs.position_rows
    shape = {name: explicit[name] for name in found if name in explicit and name not in LEFT_OPEN_TO_RESUME | {"vocab_size"}}
    if without_redundant_settings(replace(theirs, **shape)) != without_redundant_settings(theirs):  # type: ignore[arg-type]
        others = {name: _value(found, name) for name in shape if _value({**found, **shape}, name) != _value(found, name)}
        words = ", ".join(f"--{name.replace('_', '-')} {shape[name]}, not {value}" for name, value in others.items())
        raise ConfigError(
            f"--use-checkpoint-args: the model in {folder} has another shape than asked for ({words}); leave these flags out."
        )
    return {name: value for name, value in found.items() if not (name in explicit and name in LEFT_OPEN_TO_RESUME)}


def settings_of_model(folder: Path | str, iteration: int | None = None) -> dict[str, object] | None:
    """Settings of the model that the checkpoint in ``folder`` holds, by field name; None if there is no checkpoint.

    Those of padding and of initial weights are left out: they are the run's business. So is ``model``: no checkpoint has code imported. Raises CheckpointError if the
    checkpoint does not say what its model is.
    """
    found = locate(folder, iteration)  # who loads it says which one it is
    if found is None:
        return None
    path = found.path
    kind = kind_of(path)
    if kind == "native":
        stored = read_native_record(StoredFiles(path))["state"].get("model")
        if not isinstance(stored, dict):
            raise CheckpointError(f"{path}: it does not say the model's settings; give the model's flags")
    elif kind == "megatron-legacy":
        stored = asdict(read_model(LegacyCheckpoint.open(path).common, str(path)))
    elif kind == "megatron-torch_dist":
        stored = asdict(read_model(read_common(path, read_metadata(path)), str(path)))
    else:
        raise CheckpointError(f"{path}: not a checkpoint to train from; convert it with domino-lm-convert --to native")
    own = {
        "make_vocab_size_divisible_by",
        "mask_padded_vocab",
        "embedding_init_method_std",
        "init_method_std",
        "init_method_xavier_uniform",
        "model",
    }
    known = ModelConfig.__dataclass_fields__.keys() - own
    return {name: value for name, value in stored.items() if name in known}


def settings_beside_the_model(folder: Path | str, iteration: int | None = None) -> dict[str, object]:
    """Tokenizer, number format and ``model`` of the run that saved the checkpoint in ``folder``; what it does not say is absent.

    ``model`` is for comparison: whoever wants the code that it names imported has to say so.
    """
    found = locate(folder, iteration)
    if found is None or kind_of(found.path) == "hf":
        return {}
    path, kind = found.path, kind_of(found.path)
    if kind == "native":
        state = read_native_record(StoredFiles(path))["state"]
        stored = {**(state.get("settings") or {}), "model": (state.get("model") or {}).get("model")}
    else:
        common = LegacyCheckpoint.open(path).common if kind == "megatron-legacy" else read_common(path, read_metadata(path))
        stored = values_of(common.get("args"))
        kinds = get_args(get_args(get_type_hints(TokenizerConfig)["tokenizer_type"])[0])
        if stored.get("tokenizer_type") not in kinds:
            stored = {name: value for name, value in stored.items() if name in ("bf16", "fp16")}
    names = [*TokenizerConfig.__dataclass_fields__, "bf16", "fp16", "model"]
    return {name: stored[name] for name in names if stored.get(name) not in (None, False)}
