"""The model of a checkpoint with its tokenizer, for tools that let it speak or judge it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from domino_lm.config.arguments import build_parser, config_from_values, read_flags, with_file_and_preset
from domino_lm.config.data import TokenizerConfig
from domino_lm.config.schema import settings
from domino_lm.config.settings import ConfigError, RunConfig, refuse
from domino_lm.data.tokenizers.build import build_tokenizer
from domino_lm.data.tokenizers.tokenizer import Tokenizer
from domino_lm.launch.checks import run_faults
from domino_lm.launch.exit_code import EXIT_FAILED_RUN, EXIT_WRONG_SETTINGS
from domino_lm.pretrain import SECONDS_FOR_RANK_0, WRONG_SETTINGS, show_warning, together, with_vocabulary
from domino_lm.tools.setting_flags import add_flags

if TYPE_CHECKING:
    from domino_lm.model.stack import Stack
    from domino_lm.parallel.mesh import ParallelMesh

TOKENIZER = tuple(TokenizerConfig.__dataclass_fields__)
HELP = {
    "load": "Folder of checkpoints, or one checkpoint: this program's, or Megatron's of either format.",
    "tensor_model_parallel_size": "Ranks that share each layer's matrices; by default all that torchrun has started.",
    "bf16": "Compute in bfloat16, whatever the checkpoint says.",
    "fp16": "Compute in float16, whatever the checkpoint says.",
}
"""What is to be said of a setting here instead of its text in training."""
SHOWN = ("load", "ckpt_step", "tensor_model_parallel_size", "distributed_backend", "bf16", "fp16", *TOKENIZER)
"""Settings of training that tools on a trained model explain in their own help."""
UNREAD: dict[str, object] = {"lr": 1.0, "micro_batch_size": 1, "train_iters": 1, "mock_data": True, "schedule": "baseline"}
"""Stand-ins for settings that every run has and that nothing here reads."""


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A model with the weights of a checkpoint, as this rank holds it."""

    run: RunConfig
    mesh: ParallelMesh
    stack: Stack
    tokenizer: Tokenizer | None
    iteration: int

    @property
    def positions(self) -> int:
        """Tokens that a sequence may have."""
        return self.run.model.seq_length

    @property
    def speaks(self) -> bool:
        """Whether this rank prints."""
        return self.mesh.world.rank == 0

    @property
    def vocab_size(self) -> int:
        """Ids that mean something."""
        size = self.run.model.vocab_size
        assert size is not None, "the vocabulary size is resolved before a model is built"
        return size if self.tokenizer is None else min(size, self.tokenizer.vocab_size)

    def text_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises ConfigError if neither flags nor the checkpoint name one."""
        if self.tokenizer is None:
            raise ConfigError(
                f"--load {self.run.checkpoint.load} does not say which tokenizer it was trained with: give --tokenizer-type with its files."
            )
        return self.tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, without the end of document that some tokenizers put behind every text."""
        tokenizer = self.text_tokenizer()
        ids = tokenizer.encode(text) if text else []
        outside = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if outside is not None:
            raise ConfigError(f"id {outside} is outside the model's vocabulary of {self.vocab_size}.")
        if len(ids) > 1 and ids[-1] == tokenizer.eod and not text.endswith(tokenizer.decode(ids[-1:])):
            return ids[:-1]
        return ids


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which model, and from where."""
    group = parser.add_argument_group(
        "model",
        "Model, tokenizer and number format are taken from the checkpoint as far as it names them. These flags replace them, and so do "
        "training's flags of a model (domino-lm-pretrain --help).",
    )
    items = {item.name: item for item in settings()}
    add_flags(group, [dataclasses.replace(items[name], default=None, help=HELP.get(name, items[name].help)) for name in SHOWN])


def read_run(own: argparse.Namespace, rest: Sequence[str], world_size: int) -> RunConfig:
    """The settings of a checkpoint's model, tokenizer and layout, from the flags of `add_model_flags` and others of training.

    Raises ConfigError with all faults, one of which is a folder that holds no checkpoint.
    """
    from domino_lm.checkpoint.index import CheckpointError
    from domino_lm.checkpoint.same_model import settings_beside_the_model, settings_to_take

    flags = read_flags(build_parser(), rest)
    of_model = {item.name for item in settings() if item.part == "model"}
    foreign = [
        f"--{name.replace('_', '-')} is a flag of training that has no meaning here; leave it out."
        for name in flags.values
        if name not in of_model
    ]
    shown = {name: value for name in SHOWN if (value := getattr(own, name, None)) not in (None, ())}
    folder, step = shown.get("load"), shown.get("ckpt_step")
    if folder is None:
        foreign.append("--load is needed: the folder of the checkpoint.")
    refuse([*flags.faults, *foreign])
    _, given, explicit = with_file_and_preset(dataclasses.replace(flags, values={**flags.values, **shown}))
    try:
        found = settings_to_take(str(folder), step, explicit)
        beside = settings_beside_the_model(str(folder), step)
    except CheckpointError as error:
        if "num_layers" not in given:
            raise ConfigError(f"--load: {error}") from error
        found, beside = {}, {}
    except ConfigError as error:  # a flag that nobody gave is at fault for nothing
        raise ConfigError(str(error).replace("--use-checkpoint-args", "--load")) from error
    if found is None:
        raise ConfigError(f"--load {folder} holds no checkpoint; give the folder that training saved to.")
    name = beside.pop("model", None)
    if name is not None and given.get("model") != name:
        raise ConfigError(f"--load {folder} holds the model {name}, and its code is imported only if you say so: add --model {name}.")
    values = _merged(found, beside, given, explicit)
    values = {"tensor_model_parallel_size": world_size, **values, **UNREAD}
    run = config_from_values(values)
    refuse(run_faults(run, world_size))
    return run


def _merged(found: dict[str, object], beside: dict[str, object], given: dict[str, Any], explicit: dict[str, Any]) -> dict[str, object]:
    """What the checkpoint says of its model and ``beside`` it, over what was ``given``, under what of that is ``explicit``."""
    if explicit.get("tokenizer_type", beside.get("tokenizer_type")) != beside.get("tokenizer_type"):
        beside = {name: value for name, value in beside.items() if name not in TOKENIZER}
    if explicit.get("bf16") is not None or explicit.get("fp16") is not None:
        beside = {name: value for name, value in beside.items() if name not in ("bf16", "fp16")}
    values = {**given, **found, **beside, **explicit}
    vocabulary = found.get("vocab_size")
    if values.get("null_tokenizer_extra_eod") and "vocab_size" not in explicit and isinstance(vocabulary, int):
        values["vocab_size"] = vocabulary - 1  # the checkpoint counts the id that this tokenizer adds
    learned = values.get("position_embedding_type", "learned_absolute") == "learned_absolute" and not values.get("model")
    rows = values.get("max_position_embeddings")
    if learned and rows and "seq_length" not in explicit:
        values["seq_length"] = rows  # training may have used fewer positions than there are
    return values


def open_model(run: RunConfig, mesh: ParallelMesh) -> TrainedModel:
    """Build the model and fill it. Raises ConfigError, TokenizerError or CheckpointError, the same on every rank."""
    from domino_lm.checkpoint.same_model import refuse_other_model
    from domino_lm.checkpoint.save_load import load_checkpoint
    from domino_lm.checkpoint.source import set_softmax_rows
    from domino_lm.model.build import build_stack
    from domino_lm.model.parameter import dtype_of

    folder = run.checkpoint.load
    assert folder is not None, "read_run has asked for it"
    tokenizer = together(mesh.world, lambda: build_tokenizer(run.tokenizer, run.model.vocab_size) if run.tokenizer.tokenizer_type else None)
    run = with_vocabulary(run, tokenizer)
    stack = build_stack(run.model, mesh.tp, 0, dtype_of(run.precision.params_dtype), mesh.device)
    state = load_checkpoint(folder, stack, None, mesh, run.checkpoint.ckpt_step)
    if state is None:
        raise ConfigError(f"--load {folder} holds no checkpoint; give the folder that training saved to.")
    set_softmax_rows(stack, run.model.vocab_size, mesh.tp.rank)  # padding that took part in training has no meaning
    here = dataclasses.asdict(run.model) | {"seq_length": state["model"].get("seq_length", run.model.seq_length)}
    refuse_other_model(here, state["model"], folder)
    identity = None if tokenizer is None else tokenizer.identity()
    if identity and state.get("tokenizer") and state["tokenizer"] != identity:
        warnings.warn("the checkpoint was trained with another tokenizer; its token ids mean other text", stacklevel=2)
    return TrainedModel(run, mesh, stack, tokenizer, int(state["iteration"]))


Use = Callable[[TrainedModel], int]
"""What a tool does with the model; returns the exit code."""


def use_model(read: Callable[[int], tuple[RunConfig, Use]]) -> int:
    """Let ``read`` say which model and what for, of the number of ranks, open it on all of them and use it; rank 0 prints errors, once."""
    warnings.showwarning = show_warning
    try:
        run, use = read(int(os.environ.get("WORLD_SIZE", "1")))
    except WRONG_SETTINGS as error:
        return _fail(error, EXIT_WRONG_SETTINGS)
    import torch

    from domino_lm.checkpoint.index import CheckpointError
    from domino_lm.model.decoding import NotFiniteError
    from domino_lm.parallel.mesh import ParallelMesh

    try:
        with ParallelMesh.create(run.parallel) as mesh:
            return use(open_model(run, mesh))
    except WRONG_SETTINGS as error:
        return _fail(error, EXIT_WRONG_SETTINGS)
    except NotFiniteError as error:
        cause = "its weights hold such numbers, or overflow in this format; try another iteration (--ckpt-step)"
        return _fail(f"--load {run.checkpoint.load}: {error}: {cause}.", EXIT_FAILED_RUN)
    except (CheckpointError, torch.distributed.DistError) as error:
        return _fail(error, EXIT_FAILED_RUN)
    except BrokenPipeError:  # whoever read the text has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _fail(error: object, code: int) -> int:
    """Print what all ranks have found, once; returns the exit code."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_FOR_RANK_0)
    return code
