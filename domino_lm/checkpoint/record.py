"""``state.json``: what a native checkpoint holds beside tensors, checked before anything is made of it."""

import json
from collections.abc import Iterable
from typing import Any

from domino_lm.checkpoint.index import CheckpointError, DamagedError
from domino_lm.checkpoint.manifest import MANIFEST_FILE, StoredFiles, iteration_named
from domino_lm.config.foreign_text import parse_json

STATE_FILE = "state.json"
FORMAT_VERSION = 2
_MOST = 2**63

# What a value has to be: a kind by its name, a list of parts or of any number of one, a dictionary, or one of several.
# In a dictionary "name?" may be absent, and "*" stands for all other names.
_SCALAR = (None, "flag", "text", "number")
_SOURCE = {"key": "text", "prefix": "text", "segments": [["count", (None, "count")]], "taken": "count", "taken_before": "count"}
_DATA = {"sequence_length": "count", "begin": "count", "weights": ["number"], "sources": [_SOURCE], "retired": [_SOURCE]}
_STATE = {
    "consumed_samples?": "count",
    "data?": (None, _DATA),
    "learning_rate?": {
        "samples": "count",
        "style": "text",
        "wsd_style?": (None, "text"),
        "wsd_samples?": (None, "number"),
        "weight_decay_style?": "text",
        "*": "number",
    },
    "loss_scaler?": (None, {"scale": "number", "*": "number"}),
    "model?": (None, {"*": (*_SCALAR, ["number"])}),
    "tokenizer?": (None, {"*": _SCALAR}),
    "settings?": (None, {"*": "any"}),
    "*": "any",
}
_RECORD = {
    "format_version": "count",
    "manifest?": "flag",
    "iteration": "count",
    "vocab_size": (None, "count"),
    "softmax_rows?": (None, "count"),
    "optimizer_steps": "count",
    "state": _STATE,
}


def native_record(iteration: int, vocab_size: int | None, softmax_rows: int | None, optimizer_steps: int, state: Any) -> str:
    """The content of ``state.json``: what `read_native_record` reads. It says that a manifest belongs to it."""
    values = {"iteration": iteration, "vocab_size": vocab_size, "softmax_rows": softmax_rows, "optimizer_steps": optimizer_steps}
    return json.dumps({"format_version": FORMAT_VERSION, "manifest": True, **values, "state": state}, indent=1)


def read_native_record(files: StoredFiles) -> dict[str, Any]:
    """What this program saved beside tensors.

    Raises DamagedError if it is not the state of the checkpoint in whose folder, and beside whose manifest, it lies;
    CheckpointError if it is newer than this program.
    """
    path = files.folder / STATE_FILE
    try:
        record = parse_json(files.read(STATE_FILE).decode(), parse_constant=_no_number)
        if isinstance(record, dict) and isinstance(version := record.get("format_version"), int) and version > FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: written in format version {version}, this program reads up to {FORMAT_VERSION}; "
                "use the version of the program that saved it, or a newer one"
            )
        fault = _fault(record, _RECORD, "") or _misplaced(record, files)
        if fault is not None:
            raise ValueError(fault)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path}: not the state of this checkpoint, or damaged ({error}); take another checkpoint") from error
    if record["format_version"] < 2:
        _keep_tanh(record["state"].get("model") or {})
    return {"softmax_rows": None, **record}


def _misplaced(record: dict[str, Any], files: StoredFiles) -> str | None:
    """Why a record does not belong to its folder and manifest."""
    iteration = record["iteration"]
    if iteration_named(files.folder) not in (None, iteration):
        return f"it is that of iteration {iteration}"
    if files.manifest is None:
        return f"{MANIFEST_FILE} is missing" if record.get("manifest") else None
    if files.manifest.iteration != iteration:
        return f"it is of iteration {iteration}, {MANIFEST_FILE} of {files.manifest.iteration!r}"
    return None


def _fault(value: Any, form: Any, where: str) -> str | None:
    """What in ``value`` has not the ``form``; None if all has."""
    parts: Iterable[tuple[str, Any, Any]] = ()
    if isinstance(form, tuple):
        faults = [_fault(value, one, where) for one in form]
        return None if None in faults else faults[-1]
    if isinstance(form, dict) and isinstance(value, dict):
        missing = [name for name in form if name != "*" and not name.endswith("?") and name not in value]
        if missing:
            return f"{where}{missing[0]} is missing"
        parts = [(f"{where}{name}", item, form.get(name, form.get(f"{name}?", form.get("*", "unknown")))) for name, item in value.items()]
    elif isinstance(form, list) and isinstance(value, list) and len(form) in (1, len(value)):
        parts = zip([f"{where[:-1]}[{i}]" for i in range(len(value))], value, form * len(value) if len(form) == 1 else form, strict=True)
    elif isinstance(form, dict | list) or not _holds(value, form):
        return f"{where[:-1] or 'it'} is {str(value)[:40]}, {'which is unknown' if form == 'unknown' else 'which it cannot be'}"
    return next(filter(None, (_fault(item, part, f"{name}.") for name, item, part in parts)), None)


def _holds(value: Any, kind: str | None) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST
    return {
        None: value is None,
        "any": True,
        "flag": isinstance(value, bool),
        "text": isinstance(value, str),
        "number": number,
        "count": number and isinstance(value, int) and value >= 0,
        "unknown": False,
    }[kind]


def _no_number(text: str) -> None:
    raise ValueError(f"it holds {text}")


def _keep_tanh(model: dict[str, Any]) -> None:
    """Before format version 2, GELU was computed by tanh without biases too."""
    if not (model.get("add_bias_linear", True) or model.get("swiglu") or model.get("model")) and model.get("bias_gelu_fusion", True):
        model["openai_gelu"] = True
