"""The three data sets of a run, and the micro-batches that one data-parallel rank reads from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from domino_lm.checks import global_batch_size
from domino_lm.config import RunConfig
from domino_lm.data.gpt_dataset import GPTDataset, GPTDatasetConfig, build_train_valid_test
from domino_lm.data.indices import DatasetError
from domino_lm.data.loader import Batches, SequentialSampler
from domino_lm.data.tokenizer import Tokenizer
from domino_lm.model.batch import MicroBatch
from domino_lm.parallel.mesh import ParallelMesh


@dataclass(frozen=True)
class RunData:
    """Samples of a run; a split without documents, or one that nothing asks for, is None."""

    train: GPTDataset
    valid: GPTDataset | None
    test: GPTDataset | None

    @classmethod
    def build(cls, run: RunConfig, tokenizer: Tokenizer | None, mesh: ParallelMesh) -> RunData:
        """Read ``--data-path``; training gets every sample of the whole run, an evaluation split those of one evaluation.

        ``run.model.vocab_size`` must be resolved. Raises DatasetError where the data cannot give the samples.
        """
        assert run.data.data_path is not None, "checks.check_run asks for it"
        batch = global_batch_size(run, mesh.world.size)
        evaluated = batch * run.training.eval_iters if run.training.eval_interval else 0
        config = GPTDatasetConfig(
            sequence_length=run.model.seq_length,
            seed=run.training.seed,
            eod=tokenizer.eod if tokenizer else None,
            pad=tokenizer.pad if tokenizer else None,
            vocab_size=run.model.vocab_size,
            reset_position_ids=run.data.reset_position_ids,
            reset_attention_mask=run.data.reset_attention_mask,
            eod_mask_loss=run.data.eod_mask_loss,
        )
        sizes = (run.training.train_iters * batch, evaluated, evaluated)
        train, valid, test = build_train_valid_test(run.data.data_path, run.data.split, sizes, config, run.data.data_cache_path)
        if train is None:
            raise DatasetError(f"--split {run.data.split} leaves nothing to train on; its first number must be above 0.")
        return cls(train, valid if evaluated else None, test if evaluated else None)


class MicroBatches:
    """This rank's micro-batches of one data set, from ``consumed_samples`` on, step after step."""

    def __init__(self, dataset: GPTDataset, consumed_samples: int, micro_batch_size: int, mesh: ParallelMesh) -> None:
        self._batches = Batches(
            dataset,
            SequentialSampler(
                len(dataset),
                micro_batch_size=micro_batch_size,
                consumed_samples=consumed_samples,
                data_parallel_rank=mesh.dp.rank,
                data_parallel_size=mesh.dp.size,
            ),
        )
        self._device: torch.device = mesh.device
        self._stride = micro_batch_size * mesh.dp.size
        self._first = micro_batch_size * mesh.dp.rank

    def take(self, count: int) -> list[MicroBatch]:
        """The next step's ``count`` micro-batches; each knows where its first sample stands in the global batch."""
        return [MicroBatch.from_samples(next(self._batches), self._device, self._first + self._stride * i) for i in range(count)]
