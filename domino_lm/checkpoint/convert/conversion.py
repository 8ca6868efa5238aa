"""From a checkpoint of any kind to one of another, whole or not at all."""

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError

from domino_lm.checkpoint.convert.distributed import read_native, read_torch_dist, write_native, write_torch_dist
from domino_lm.checkpoint.convert.hugging_face import read_hugging_face, write_hugging_face
from domino_lm.checkpoint.convert.legacy import read_legacy, write_legacy
from domino_lm.checkpoint.convert.stored_model import StoredModel, check_tensor_parallel, with_vocabulary
from domino_lm.checkpoint.folder import TRACKER_FILE, Kind, detect_kind, find_checkpoint, incomplete, iteration_folder
from domino_lm.checkpoint.index import CheckpointError
from domino_lm.checkpoint.publish import publish
from domino_lm.checkpoint.retention import saving_in
from domino_lm.config.settings import ModelConfig
from domino_lm.model.parameter_groups import MOMENTS

RELEASE = "release"


def open_stored(load: Path, iteration: int | None = None, model: ModelConfig | None = None) -> StoredModel:
    """The checkpoint in ``load``, of whatever kind. Raises CheckpointError if there is none, or it is not complete."""
    kind = detect_kind(load)
    path = find_checkpoint(load, iteration)
    assert path is not None
    fault = incomplete(path)
    if fault is not None:
        raise CheckpointError(f"{load}: {fault}. Take another iteration")
    readers: dict[Kind, Callable[[], StoredModel]] = {
        "native": lambda: read_native(path),
        "megatron-torch_dist": lambda: read_torch_dist(path, model),
        "megatron-legacy": lambda: read_legacy(path, model),
        "hf": lambda: read_hugging_face(path),
    }
    return readers[kind]()


def convert(
    load: Path,
    save: Path,
    to: Kind,
    *,
    iteration: int | None = None,
    tensor_parallel: int = 1,
    dtype: torch.dtype | None = None,
    vocab_size: int | None = None,
    model: ModelConfig | None = None,
    optimizer: bool = True,
) -> tuple[StoredModel, Path]:
    """Convert ``iteration`` of ``load``, by default the latest, and return what was read and the folder that was written.

    A legacy checkpoint is cut for ``tensor_parallel`` ranks, and Megatron's vocabulary padded for them. ``dtype`` is that of
    the weights, by default the source's; ``vocab_size`` the true vocabulary, if the source does not know it or knows a wrong
    one; ``model`` has the settings for a checkpoint of Megatron's that holds no arguments. Without ``optimizer`` moments and
    schedule stay behind.

    The folder appears under its name once it is complete and on disk. Raises CheckpointError if anything is refused or
    fails; an older checkpoint and tracker are then as they were. Nothing that exists is overwritten.
    """
    stored = with_vocabulary(open_stored(load, iteration, model), vocab_size).with_dtype(dtype)
    if not optimizer:
        stored = stored.without_optimizer()
    if to in ("megatron-torch_dist", "megatron-legacy") and stored.optimizer_steps is not None and stored.moments == MOMENTS["muon"]:
        raise CheckpointError(
            f"{stored.path}: it holds the momentum of Muon, whose settings Megatron's format keeps in a form that is not written; "
            "give --no-optimizer to convert weights alone"
        )
    check_tensor_parallel(stored.model, tensor_parallel)
    final, tracked_as = _target(stored, save, to)
    if final.exists() and (final.is_file() or any(final.iterdir())):
        raise CheckpointError(f"{final} exists already and is not overwritten; give --save another folder, or remove it")
    unfinished = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex[:8]}")
    writers: dict[Kind, Callable[[], None]] = {
        "native": lambda: write_native(stored, unfinished),
        "megatron-torch_dist": lambda: write_torch_dist(stored, unfinished, tensor_parallel),
        "megatron-legacy": lambda: write_legacy(stored, unfinished, tensor_parallel),
        "hf": lambda: write_hugging_face(stored, unfinished),
    }
    try:
        with saving_in(final.parent):
            unfinished.mkdir(parents=True)
            writers[to]()
            publish(unfinished, final, tracked_as)
    except (OSError, SafetensorError, RuntimeError) as error:
        # torch.save buries a full disk under a failed check of its own.
        reason = error.__context__ if isinstance(error.__context__, OSError) else error
        raise CheckpointError(f"{final}: the checkpoint could not be written ({reason}); nothing was left there") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return stored, final


def _target(stored: StoredModel, save: Path, to: Kind) -> tuple[Path, str | None]:
    """The folder to write, and the tracker's text, or None if the kind has no tracker."""
    if to == "hf":
        if (save / TRACKER_FILE).exists():
            raise CheckpointError(f"{save} holds checkpoints of training; give --save a folder of its own for a Hugging Face model")
        return save, None
    if to != "native" and stored.iteration == 0:
        return save / RELEASE, RELEASE  # Megatron's name for weights that come from no run of its own
    return iteration_folder(save, stored.iteration), str(stored.iteration)
