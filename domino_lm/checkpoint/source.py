"""An opened checkpoint of any kind, checked against a run's model and ready to fill it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from domino_lm.checkpoint.blocks import OPTIMIZER_PREFIX, Block, blocks_of, blocks_of_range, plan_reads, read_blocks
from domino_lm.checkpoint.folder import incomplete, kind_of
from domino_lm.checkpoint.index import CheckpointError, DamagedError, read_metadata
from domino_lm.checkpoint.manifest import StoredFiles
from domino_lm.checkpoint.megatron_distributed import MASTER_PREFIX, read_common
from domino_lm.checkpoint.megatron_legacy import LegacyCheckpoint, Role, moments_in
from domino_lm.checkpoint.megatron_state import arithmetic_of, optimizer_steps, read_state
from domino_lm.checkpoint.record import read_native_record
from domino_lm.model.head import Head
from domino_lm.model.parameter import Parameter
from domino_lm.model.parameter_groups import MOMENTS, Moment
from domino_lm.parallel.collectives import Communicator

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"


class HasParameters(Protocol):
    """A model, as far as a checkpoint knows it."""

    def parameters(self) -> Sequence[Parameter]:
        """Every storage once, in the same order on every rank."""


class HasMoments(Protocol):
    """An optimizer, as far as a checkpoint knows it."""

    pieces: list[Any]
    """What this rank updates of each parameter."""

    kept: list[dict[Moment, Tensor]]
    """What it keeps of each piece."""

    step_count: int

    @property
    def moments(self) -> Mapping[Moment, list[Tensor]]:
        """All that it keeps, by name."""

    def write_parameters(self) -> None:
        """Have the parameters follow their master weights."""


class Source(NamedTuple):
    """What `open_checkpoint` returns: everything is known to fit, no value has changed."""

    record: dict[str, Any]
    """``iteration``, ``vocab_size``, ``softmax_rows``, ``optimizer_steps`` and ``state``, as native checkpoints keep them."""

    fill: Callable[[], None]
    """Reads weights and, if they are wanted, moments into this rank's tensors. Master weights of an optimizer are filled from the
    most exact that is stored; its parameters follow with `HasMoments.write_parameters`."""

    verified: bool = False
    """Whether what it reads is compared with a manifest."""


def open_checkpoint(path: Path, stack: HasParameters, optimizer: HasMoments | None, tp: Communicator, verify: bool = True) -> Source:
    """Open the checkpoint that lies in ``path`` for the weights of ``stack`` and, if given, the moments of ``optimizer``.

    No collective. Raises DamagedError if it is incomplete, or (now, or when it fills) if what is read is not what was written,
    which ``verify`` False does not ask; CheckpointError if it is of a kind that cannot be trained from, does not fit, or
    holds values that are not finite.
    """
    fault = incomplete(path, verify)
    if fault is not None:
        raise DamagedError(f"{path.parent}: {fault}. Take another iteration")
    kind = kind_of(path)
    if kind == "hf":
        raise CheckpointError(
            f"{path}: a Hugging Face model, which training does not read directly; "
            "convert it: domino-lm-convert --load ... --save ... --to native"
        )
    if kind == "megatron-legacy":
        source = _open_legacy(path, stack, optimizer, tp)
    else:
        source = _open_distributed(StoredFiles(path, verify), kind == "native", stack, optimizer, tp)
    _refuse_too_few_rows(path, source.record["softmax_rows"], stack)

    def fill() -> None:
        source.fill()
        for held in _roles(stack.parameters(), optimizer, masters_apart=True):
            refuse_not_finite(path, f"{prefix_of(held.role)}{held.parameter.spec.name}", held.tensor)

    return source._replace(fill=fill)


def refuse_not_finite(path: Path, name: str, tensor: Tensor) -> None:
    """Raise CheckpointError, naming the tensor, if one that was read from ``path`` holds inf or nan."""
    # One pass without a mask: a sum is finite if all of its terms are, unless it overflows.
    if not torch.isfinite(tensor.detach().sum()) and not torch.isfinite(tensor).all():
        count = int(torch.isfinite(tensor).logical_not().sum())
        raise CheckpointError(f"{path}: {name} holds {count} value(s) that are inf or nan; take an earlier iteration with --ckpt-step")


def _open_distributed(files: StoredFiles, native: bool, stack: HasParameters, optimizer: HasMoments | None, tp: Communicator) -> Source:
    """Native, or Megatron's torch_dist: the same tensors, beside another record."""
    path, metadata = files.folder, read_metadata(files.folder, files.read)
    record = read_native_record(files) if native else read_megatron_record(path, metadata)
    _refuse_other_optimizer(path, moments_of(metadata), optimizer)
    stored_masters = any(key.startswith(MASTER_PREFIX) for key in metadata.state_dict_metadata)
    blocks = blocks_of_all(stack.parameters(), optimizer, tp, masters_apart=stored_masters)
    reads = plan_reads(path, metadata, blocks)
    masters = list(_master_blocks(stack.parameters(), metadata, tp))
    if not stored_masters:
        masters += [block for held in _owned_masters(optimizer) for block in held.blocks(tp)]
    master_reads = plan_reads(path, metadata, masters, complete=False)
    if native:
        refuse_other_vocabulary(path, record["vocab_size"], vocab_size_of(stack))

    def fill() -> None:
        read_blocks(files, metadata, blocks, reads)
        read_blocks(files, metadata, masters, master_reads)

    return Source(record, fill, files.verify)


def _open_legacy(path: Path, stack: HasParameters, optimizer: HasMoments | None, tp: Communicator) -> Source:
    """Megatron's legacy files, of any tensor-parallel size."""
    stored = LegacyCheckpoint.open(path)
    stored.check([parameter.spec for parameter in stack.parameters()], with_optimizer=optimizer is not None)
    _refuse_other_optimizer(path, stored.moments, optimizer)

    @torch.no_grad()
    def fill() -> None:
        for role, parameter, tensor, start in [*_roles(stack.parameters(), optimizer, masters_apart=False), *_owned_masters(optimizer)]:
            if start is None:
                stored.fill(parameter.spec, role, tensor, tp)
            else:
                whole = tensor.new_empty(parameter.shape)
                stored.fill(parameter.spec, role, whole, tp)
                tensor.view(-1).copy_(whole.view(-1)[start : start + tensor.numel()])

    return Source(record_of_megatron(stored.common, stored.vocab_rows, str(path)), fill)


class Held(NamedTuple):
    """A tensor of this rank that a checkpoint knows, with its parameter and what it is of it."""

    role: Role
    parameter: Parameter
    tensor: Tensor
    start: int | None = None
    """Its first element of the flattened parameter if no other data-parallel rank holds it; None: whole, and alike on all."""

    def blocks(self, tp: Communicator) -> Iterator[Block]:
        """Where it belongs in a checkpoint."""
        spec, prefix = self.parameter.spec, prefix_of(self.role)
        if self.start is None:
            return blocks_of(spec, self.tensor, tp, prefix=prefix)
        return blocks_of_range(spec, self.parameter.shape, self.start, self.tensor.view(-1), tp, prefix)


def _roles(parameters: Sequence[Parameter], optimizer: HasMoments | None, masters_apart: bool) -> Iterator[Held]:
    """Every tensor of this rank that a checkpoint knows.

    Master weights have a role of their own if they lie ``masters_apart``, and else stand in for their weights; those of
    a rank's own share cannot, and are left out then.
    """
    pieces = [] if optimizer is None else optimizer.pieces
    masters = {piece.parameter: piece.main for piece in pieces if piece.is_master and not piece.is_owned}
    for parameter in parameters:
        weights = parameter.detach()
        yield Held("weight", parameter, weights if masters_apart else masters.get(parameter, weights))
    if optimizer is not None:
        for number, piece in enumerate(pieces):
            start = piece.start if piece.is_owned else None
            if masters_apart and piece.is_master:
                yield Held("master", piece.parameter, piece.main, start)
            for name, moment in optimizer.kept[number].items():
                yield Held(name, piece.parameter, moment, start)


def _owned_masters(optimizer: HasMoments | None) -> list[Held]:
    """Master weights of a rank's own share. They do not stand in for its weights, so both are read."""
    pieces = [] if optimizer is None else optimizer.pieces
    return [Held("weight", piece.parameter, piece.main, piece.start) for piece in pieces if piece.is_owned and piece.is_master]


def blocks_of_all(
    parameters: Sequence[Parameter], optimizer: HasMoments | None, tp: Communicator, *, masters_apart: bool = True
) -> list[Block]:
    """Everything tensor-like that this rank holds, in the same order on every rank; see `_roles` of ``masters_apart``."""
    return [block for held in _roles(parameters, optimizer, masters_apart) for block in held.blocks(tp)]


def prefix_of(role: Role) -> str:
    """What stands before a parameter's key in the key of its weight, master weight or moment."""
    if role == "master":
        return MASTER_PREFIX
    return "" if role == "weight" else f"{OPTIMIZER_PREFIX}state.{role}."


def moments_of(metadata: Metadata) -> tuple[Moment, ...]:
    """What the optimizer of a distributed checkpoint keeps of each weight; none if it holds no optimizer."""
    kept = {name for names in MOMENTS.values() for name in names}
    return moments_in([name for name in kept if any(key.startswith(prefix_of(name)) for key in metadata.state_dict_metadata)])


def _refuse_other_optimizer(path: Path, stored: tuple[Moment, ...], optimizer: HasMoments | None) -> None:
    """Raise CheckpointError if the checkpoint's moments are those of another optimizer."""
    mine = () if optimizer is None else tuple(optimizer.moments)
    if stored and mine and stored != mine:
        names = {kept: name for name, kept in MOMENTS.items()}
        raise CheckpointError(
            f"{path}: it holds the moments of --optimizer {names[stored]}, and this run has --optimizer {names[mine]}; "
            "give that, or pass --no-load-optim to load the weights alone"
        )


def _master_blocks(parameters: Sequence[Parameter], metadata: Metadata, tp: Communicator) -> Iterator[Block]:
    """Weights that the checkpoint holds in fp32 beside its own half-precision ones, for parameters that can keep that precision."""
    for parameter in parameters:
        if MASTER_PREFIX + parameter.spec.key in metadata.state_dict_metadata and parameter.dtype.itemsize >= 4:
            yield from blocks_of(parameter.spec, parameter, tp, prefix=MASTER_PREFIX)


def word_embeddings(path: Path, metadata: Metadata) -> TensorStorageMetadata:
    """The entry of the word embedding: its size and data type. Raises CheckpointError if there is none."""
    table = metadata.state_dict_metadata.get(WORD_EMBEDDINGS)
    if not isinstance(table, TensorStorageMetadata):
        raise CheckpointError(f"{path}: it holds no {WORD_EMBEDDINGS}, so it is no language model")
    return table


def read_megatron_record(path: Path, metadata: Metadata) -> dict[str, Any]:
    """The record of a torch_dist checkpoint of Megatron's."""
    return record_of_megatron(read_common(path, metadata), word_embeddings(path, metadata).size[0], str(path))


def record_of_megatron(common: Mapping[str, Any], vocab_rows: int, where: str) -> dict[str, Any]:
    """What Megatron saved beside tensors, as a native record. All ``vocab_rows`` take part in its softmax."""
    iteration = int(common.get("iteration") or 0)
    return {
        "iteration": iteration,
        "vocab_size": None,
        "softmax_rows": vocab_rows,
        "optimizer_steps": optimizer_steps(common.get("optimizer"), iteration),
        "state": {**read_state(common), "model": arithmetic_of(common, where)},
    }


def vocab_size_of(stack: HasParameters) -> int | None:
    """The true vocabulary of a model; None if no parameter has vocabulary rows."""
    return next((p.spec.vocab_rows for p in stack.parameters() if p.spec.vocab_rows is not None), None)


def refuse_other_vocabulary(path: Path, saved: int | None, current: int | None) -> None:
    """Raise CheckpointError if a native checkpoint's true vocabulary is not the run's."""
    if saved is not None and saved != current:
        raise CheckpointError(
            f"{path}: the checkpoint was saved with a vocabulary of {saved} tokens, this run has {current}, and nothing was loaded. "
            "Give the tokenizer (or --vocab-size) that it was trained with."
        )


def softmax_rows_of(stack: HasParameters) -> int | None:
    """Vocabulary rows that take part in the softmax, padded ones included if they do; correct on tensor-parallel rank 0 alone."""
    head = getattr(stack, "head", None)
    if not isinstance(head, Head):
        return None
    return int(head.weight.spec.shape[0] if head.true_columns is None else head.true_columns)


def set_softmax_rows(stack: HasParameters, rows: int | None, tp_rank: int) -> None:
    """Let the first ``rows`` of the vocabulary take part in the softmax and no others, whatever the padding; None changes nothing."""
    head = getattr(stack, "head", None)
    if isinstance(head, Head) and rows is not None:
        head.true_columns = max(0, rows - tp_rank * head.weight.shape[0])


def _refuse_too_few_rows(path: Path, rows: int | None, stack: HasParameters) -> None:
    """Raise CheckpointError if the run's padded vocabulary would leave rows out that take part in the checkpoint's softmax."""
    found = next((p.spec.shape[0] for p in stack.parameters() if p.spec.vocab_rows is not None), None)
    if rows is not None and found is not None and found < rows:
        raise CheckpointError(
            f"{path}: {rows} vocabulary rows take part in the checkpoint's softmax, padding included, but this run keeps {found}; "
            f"give a --make-vocab-size-divisible-by (x --tensor-model-parallel-size) that pads the vocabulary to {rows} or more"
        )
