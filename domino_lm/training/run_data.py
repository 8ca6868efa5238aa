"""The data sets of a run, and the micro-batches that one data-parallel rank reads from them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from domino_lm.config.batch_plan import BatchPlan, eval_batch_size, eval_micro_batch_size
from domino_lm.config.data import DataConfig
from domino_lm.config.settings import RunConfig
from domino_lm.data.blended import BlendedDataset
from domino_lm.data.continued import ContinuedDataset, DataRecord, continue_data, record_of
from domino_lm.data.gpt_dataset import GPTDatasetConfig
from domino_lm.data.indices import DatasetError
from domino_lm.data.loader import Batches
from domino_lm.data.rank_facts import file_facts, order_facts
from domino_lm.data.samplers import CyclicSampler, FullPassSampler, Sampler, SequentialSampler
from domino_lm.data.splits import Dataset, Splits, build_splits, sources_of
from domino_lm.data.tokenizers.tokenizer import Tokenizer
from domino_lm.model.batch import MicroBatch
from domino_lm.parallel.agreement import Alike
from domino_lm.parallel.mesh import ParallelMesh

SHOWN_SOURCES = 20
SAME_FILES = "copy the same .bin and .idx files to all nodes, or name files that all nodes share"


@dataclass(frozen=True)
class RunData:
    """The data sets of a run: none for a split that is empty or not needed."""

    train: Dataset | ContinuedDataset
    valid: tuple[Dataset, ...]
    test: Dataset | None
    not_evaluated: str = ""
    """Why there is nothing to evaluate on; empty if there is."""

    @classmethod
    def build(cls, run: RunConfig, tokenizer: Tokenizer | None, mesh: ParallelMesh) -> Self:
        """Open the data; training gets every sample of the whole run, an evaluation split those of one evaluation.

        ``run.model.vocab_size`` must be resolved. Raises DatasetError if the data cannot give the samples.
        """
        evaluates = run.training.eval_interval or run.training.skip_train
        evaluated = eval_batch_size(run, mesh.world.size) * run.training.eval_iters if evaluates else 0
        config = GPTDatasetConfig(
            sequence_length=run.model.seq_length,
            seed=run.training.seed,
            eod=tokenizer.eod if tokenizer else None,
            vocab_size=run.model.vocab_size,
            data=run.data,
        )
        sizes = (BatchPlan.of(run, mesh.world.size).samples, None if evaluated and run.data.full_validation else evaluated, evaluated)
        splits: Splits = build_splits(sources_of(run.data), sizes, config, run.data.data_cache_path)
        if splits.train is None:
            raise DatasetError(f"--split {run.data.split} leaves nothing to train on; its first number must be above 0.")
        _refuse_too_few(splits, sizes, run, eval_batch_size(run, mesh.world.size))
        if not evaluated:
            flag = "eval-interval" if run.training.eval_interval == 0 else "eval-iters"
            return cls(splits.train, (), None, f"--{flag} 0 turns it off")
        return cls(splits.train, tuple(splits.valid), splits.test, "" if splits.valid or splits.test else "the data has no such split")

    def evaluated(self, split: str) -> tuple[Dataset, ...]:
        """The data sets of ``split``, valid or test: none, one, or several validation sets."""
        if split == "valid":
            return self.valid
        return () if self.test is None else (self.test,)

    def alike(self) -> list[Alike]:
        """What decides the samples and their order, by kind: ranks that differ would train on different data."""
        assert not isinstance(self.train, ContinuedDataset), "ranks compare their data before it goes on with a checkpoint's"
        valid = [("validation" if len(self.valid) == 1 else f"validation {i}", dataset) for i, dataset in enumerate(self.valid)]
        named = [("training", self.train), *valid, *([("test", self.test)] if self.test is not None else [])]
        return [Alike(file_facts(dataset for _, dataset in named), SAME_FILES), Alike(order_facts(named), SAME_FILES)]

    def describe(self) -> str:
        """How many samples training has, what it takes from each source, how often, and why nothing is evaluated, if nothing is."""
        assert not isinstance(self.train, ContinuedDataset), "a run is described before it goes on with its checkpoint's data"
        off = f"\n{'':10}no evaluation: {self.not_evaluated}" if self.not_evaluated else ""
        if not isinstance(self.train, BlendedDataset):
            samples = self.train.num_samples or len(self.train)
            epochs = samples * self.train.config.sequence_length / self.train.tokens_per_epoch
            repeats = ", which repeats" if epochs > 1 else ""
            return f"{samples:,} training samples ({epochs:.3g} epochs) from {self.train.indexed.prefix}{repeats}{off}"
        shares = self.train.shares()
        repeating = sum(share.epochs > 1 for share in shares)
        total = f"{sum(share.samples for share in shares):,} training samples"
        lines = [f"{share.samples:,} ({share.epochs:.3g} epochs) from {share.prefix}" for share in shares[:SHOWN_SOURCES]]
        if rest := shares[SHOWN_SOURCES:]:
            lines.append(f"{sum(share.samples for share in rest):,} from {len(rest)} more sources")
        head = f"{total}, {repeating} of {len(shares)} sources repeat:" if repeating else f"{total}:"
        return "\n".join([head, *(f"{'':10}{line}" for line in lines)]) + off

    def position(self, consumed_samples: int, settings: DataConfig, earlier: DataRecord | None = None) -> DataRecord | None:
        """What a checkpoint keeps of the training data after so many samples; None if they come in passes of their own (cyclic).

        ``earlier`` is an older record of this run, whose file hashes are reused.
        """
        return record_of(self.train, consumed_samples, earlier) if settings.dataloader_type == "single" else None

    def resume_from(
        self, position: dict[str, Any] | None, consumed_samples: int, end: int, settings: DataConfig
    ) -> tuple[Self, str | None]:
        """The data resumed from a checkpoint's ``position`` up to sample ``end``, and a line for the log, or None."""
        if position is None or settings.dataloader_type != "single" or consumed_samples == 0 or isinstance(self.train, ContinuedDataset):
            return self, None
        train, said = continue_data(position, self.train, consumed_samples, end, settings.data_cache_path)
        return replace(self, train=train), said


def _refuse_too_few(splits: Splits, sizes: tuple[int | None, ...], run: RunConfig, batch: int) -> None:
    """Raise DatasetError if a blend without weights, which passes over its sources once, ends before the run does."""
    wanted = dict(zip(("train", "valid", "test"), sizes, strict=True))
    for name, dataset in splits.named():
        split, size = name.split()[0], wanted[name.split()[0]]
        if size is None or len(dataset) >= size or (split == "train" and run.data.dataloader_type == "cyclic"):
            continue
        length = "train-samples" if run.training.train_samples is not None else "train-iters"
        fewer = f"lower --{length if split == 'train' else f'eval-iters to {len(dataset) // batch}'}"
        raise DatasetError(
            f"the {name} data holds {len(dataset):,} samples, but {size:,} are needed, and without weights each source is read once: "
            f"{fewer}, or give each prefix a weight, with which it repeats."
        )


class MicroBatches:
    """This rank's micro-batches of the training set, from ``consumed_samples`` on, step after step."""

    def __init__(
        self,
        dataset: Dataset | ContinuedDataset,
        consumed_samples: int,
        micro_batch_size: int,
        mesh: ParallelMesh,
        settings: DataConfig | None = None,
    ) -> None:
        settings = settings or DataConfig(num_workers=0)
        self._batches = Batches(dataset, _sampler(len(dataset), consumed_samples, micro_batch_size, mesh, settings), settings.num_workers)
        self._device: torch.device = mesh.device
        self._stride = micro_batch_size * mesh.dp.size
        self._first = micro_batch_size * mesh.dp.rank
        self.numbers: list[list[int]] = []
        """Those of the last step's samples in the training set, for each micro-batch."""

    @property
    def blocked_s(self) -> float:
        """Seconds that this rank's steps have waited for data so far."""
        return self._batches.blocked_s

    def take(self, count: int) -> list[MicroBatch]:
        """The next step's ``count`` micro-batches; each knows where its first sample stands in the global batch."""
        self.numbers, taken = [], []
        for i in range(count):
            taken.append(MicroBatch.from_samples(next(self._batches), self._device, self._first + self._stride * i))
            self.numbers.append(self._batches.numbers)
        return taken


def evaluation_batches(dataset: Dataset, run: RunConfig, mesh: ParallelMesh) -> Iterator[MicroBatch]:
    """Micro-batches of one evaluation on this rank: those of ``--eval-iters`` global batches, or with --full-validation all.

    The ranks that share a model get equally many; data-parallel ranks may get one more or less of a full pass.
    """
    size = eval_micro_batch_size(run)
    sampler: Sampler
    if run.data.full_validation and dataset.split == "valid":
        sampler = FullPassSampler(len(dataset), **_dealt(mesh, size))
        count = len(sampler)
    else:
        sampler = SequentialSampler(len(dataset), **_dealt(mesh, size))
        count = run.training.eval_iters * (eval_batch_size(run, mesh.world.size) // (size * mesh.dp.size))
    batches = Batches(dataset, sampler, run.data.num_workers)
    try:
        for _ in range(count):
            yield MicroBatch.from_samples(next(batches), mesh.device)
    finally:
        batches.close()


def _sampler(samples: int, consumed_samples: int, micro_batch_size: int, mesh: ParallelMesh, settings: DataConfig) -> Sampler:
    dealt = {**_dealt(mesh, micro_batch_size), "consumed_samples": consumed_samples}
    if settings.dataloader_type == "cyclic":
        return CyclicSampler(samples, data_sharding=settings.data_sharding, **dealt)
    return SequentialSampler(samples, **dealt)


def _dealt(mesh: ParallelMesh, micro_batch_size: int) -> dict[str, Any]:
    """How samples are dealt to the data-parallel ranks."""
    return {"micro_batch_size": micro_batch_size, "data_parallel_rank": mesh.dp.rank, "data_parallel_size": mesh.dp.size}
