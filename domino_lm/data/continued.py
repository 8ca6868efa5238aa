"""Resuming with another mixture of data, or for longer: each source continues at its own next sample.

What a checkpoint keeps of the data is, for each source, how many of its samples are consumed and in which order they come
(`DataRecord`). No rank, batch or layout occurs in it, so all of these may change between two parts of a run.
"""

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any, Self

import numpy as np

from domino_lm.data.blended import BlendedDataset, blend_order
from domino_lm.data.gpt_dataset import GPTDataset, Sample
from domino_lm.data.indices import Array, plan_epochs

Path = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """One source: which samples it has, in which order, and how many of them are consumed."""

    key: str
    """Names the samples: the files by content and name, the sequences that the split takes, the length of a sample."""

    prefix: str
    segments: tuple[tuple[int, int | None], ...]
    """Seed and samples asked for of each `GPTDataset` whose samples follow each other; every one of them is read to its end."""

    taken: int = 0
    """Samples consumed."""

    taken_before: int = 0
    """Those of them that were consumed before the present mixture began."""


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """What a checkpoint keeps of the data of training."""

    sequence_length: int
    begin: int
    """Samples of the run that were consumed when the present mixture began."""

    weights: tuple[float, ...]
    sources: tuple[SourceRecord, ...]
    retired: tuple[SourceRecord, ...] = ()
    """Sources of earlier mixtures that are not read at present; one that comes back continues where it stopped."""

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        """The inverse of `state_dict`."""

        def records(name: str) -> tuple[SourceRecord, ...]:
            return tuple(SourceRecord(**{**item, "segments": tuple(map(tuple, item["segments"]))}) for item in state[name])

        return cls(**{**state, "weights": tuple(state["weights"]), "sources": records("sources"), "retired": records("retired")})


class SourceOrder:
    """Samples of one source one after the other: those of a first data set to the end of its epochs, then those of the next."""

    def __init__(self, source: GPTDataset, record: SourceRecord, needed: int, cache_path: Path | None) -> None:
        """``needed`` samples at least: if the recorded ones end before, new epochs in a new order follow."""
        self._source, self._cache_path = source, cache_path
        self.segments = list(record.segments)
        self._parts = [self._part(*segment) for segment in self.segments]
        while (missing := needed - sum(map(len, self._parts))) > 0:
            self.segments.append((self.segments[-1][0] + 1, missing))
            self._parts.append(self._part(*self.segments[-1]))
        self._ends = list(accumulate(map(len, self._parts)))

    def __getitem__(self, i: int) -> Sample:
        part = bisect_right(self._ends, i)
        return self._parts[part][i - (self._ends[part - 1] if part else 0)]

    def _part(self, seed: int, size: int | None) -> GPTDataset:
        source = self._source
        if (seed, size) == (source.config.seed, source.num_samples):
            return source
        config = replace(source.config, seed=seed % 2**32)
        return GPTDataset(source.indexed, source.sequences, source.split, size, config, self._cache_path)


class ContinuedDataset:
    """Samples of a run from ``record.begin`` on, by their number in the whole run; those before it are gone."""

    def __init__(self, fresh: Sequence[GPTDataset], record: DataRecord, end: int, cache_path: Path | None = None) -> None:
        """``fresh`` are the sources of ``record`` in their order, ``end`` the samples of the whole run."""
        self.split, self.sources = fresh[0].split, list(fresh)
        self._begin, self._length = record.begin, end
        self._sources, numbers = blend_order(record.weights, max(0, end - record.begin))
        counts = np.bincount(self._sources, minlength=len(fresh)).tolist()
        pairs = list(zip(fresh, record.sources, counts, strict=True))
        self._orders = [SourceOrder(source, kept, kept.taken_before + count, cache_path) for source, kept, count in pairs]
        kept_sources = zip(record.sources, self._orders, strict=True)
        self._record = replace(record, sources=tuple(replace(kept, segments=tuple(order.segments)) for kept, order in kept_sources))
        self._numbers = numbers + np.array([kept.taken_before for kept in record.sources], np.int64)[self._sources]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> Sample:
        source, number = self.locate(i)
        return self._orders[source][number]

    def locate(self, i: int) -> tuple[int, int]:
        """Source of the run's sample ``i``, and its number there."""
        if not self._begin <= i < self._length:
            raise IndexError(f"{self.split} sample {i} is outside {self._begin}..{self._length - 1}")
        return int(self._sources[i - self._begin]), int(self._numbers[i - self._begin])

    def identity(self) -> dict[str, Any]:
        """Everything that the order depends on."""
        return {"format": 1, "record": self._record.state_dict(), "length": self._length}

    def record(self, consumed: int) -> DataRecord:
        """What a checkpoint keeps after ``consumed`` samples of the run."""
        sources = zip(self._record.sources, self.taken(0, consumed).tolist(), strict=True)
        return replace(self._record, sources=tuple(replace(kept, taken=count) for kept, count in sources))

    def taken(self, begin: int, end: int) -> Array:
        """How many of a run's samples ``begin`` to ``end`` each source gives, int64 [sources]; from 0 on, earlier mixtures count too."""
        picked = self._sources[max(0, begin - self._begin) : max(0, end - self._begin)]
        before = [kept.taken_before for kept in self._record.sources]
        return np.bincount(picked, minlength=len(before)) + np.array(before, np.int64) * (begin == 0)


def record_of(dataset: GPTDataset | BlendedDataset | ContinuedDataset, consumed: int, earlier: DataRecord | None = None) -> DataRecord:
    """What a checkpoint keeps of training data of which ``consumed`` samples have been read, from the first on.

    Files are named by their content, which takes time for large ones: ``earlier`` is a record of the same data.
    """
    if isinstance(dataset, ContinuedDataset):
        return dataset.record(consumed)
    sources, taken = dataset.sources, dataset.taken(0, consumed).tolist()
    weights = dataset.weights if isinstance(dataset, BlendedDataset) else [1.0]
    if earlier is not None:
        counted = zip(earlier.sources, taken, strict=True)
        return replace(earlier, sources=tuple(replace(source, taken=count) for source, count in counted))
    return DataRecord(
        sequence_length=sources[0].config.sequence_length,
        begin=0,
        weights=tuple(weights),
        sources=tuple(_fresh_record(source, count) for source, count in zip(sources, taken, strict=True)),
    )


def continue_data(
    state: dict[str, Any], fresh: GPTDataset | BlendedDataset, consumed: int, end: int, cache_path: Path | None = None
) -> tuple[GPTDataset | BlendedDataset | ContinuedDataset, str | None]:
    """The data of a run resumed after ``consumed`` samples, up to ``end``, and a line that says what changed, if anything.

    ``fresh`` is what a run that begins now would read. It is read from its sample ``consumed`` on if the checkpoint's
    run would have read the same; if the mixture is another, every source of it continues at the number of its own samples
    that are consumed, one that is new begins at its first, and one that is gone keeps its count for later.
    """
    record, mine = DataRecord.of_state(state), record_of(fresh, 0)
    if record.sequence_length != mine.sequence_length:
        return fresh, (
            f"data: samples were {record.sequence_length} tokens long and are {mine.sequence_length} now; reading goes on at sample "
            f"{consumed} of the new order, where some tokens come again"
        )
    same = record.weights == mine.weights and [item.key for item in record.sources] == [item.key for item in mine.sources]
    sources = fresh.sources
    if same and record.begin == 0 and end <= len(fresh) and all(map(_keeps_order, sources, record.sources)):
        return fresh, None
    if same:
        longer = ContinuedDataset(sources, record, end, cache_path)
        return longer, None if record.begin else "data: the run has another length than it began with; every source keeps its order"
    changed = _with_new_mixture(record, mine, consumed)
    return ContinuedDataset(sources, changed, end, cache_path), _sentence(record, changed)


def _with_new_mixture(record: DataRecord, mine: DataRecord, consumed: int) -> DataRecord:
    """``mine`` from ``consumed`` on, each source with the count that it has in ``record``."""
    left = [*record.sources, *record.retired]
    sources = []
    for item in mine.sources:
        known = next((kept for kept in left if kept.key == item.key), None)
        if known is not None:
            left.remove(known)
        sources.append(item if known is None else replace(known, prefix=item.prefix, taken_before=known.taken))
    return replace(mine, begin=consumed, sources=tuple(sources), retired=tuple(left))


def _sentence(record: DataRecord, changed: DataRecord) -> str:
    """What becomes of each source, in one line."""
    known = {kept.key for kept in (*record.sources, *record.retired)}
    parts = [
        f"{kept.prefix} at its sample {kept.taken_before}" if kept.key in known else f"{kept.prefix}, new, at its first sample"
        for kept in changed.sources
    ]
    gone = [f"{kept.prefix} rests at sample {kept.taken}" for kept in changed.retired]
    return f"data: another mixture than the checkpoint's, each source goes on by itself: {'; '.join([*parts, *gone])}"


def _keeps_order(source: GPTDataset, kept: SourceRecord) -> bool:
    """Whether the samples of ``source`` come in the recorded order."""
    (seed, size), *more = kept.segments
    config = source.config
    plan = plan_epochs(source.tokens_per_epoch, size, config.sequence_length, int(config.add_extra_token_to_sequence))
    return not more and seed == config.seed and plan == source.epochs


def _fresh_record(source: GPTDataset, taken: int) -> SourceRecord:
    prefix = source.indexed.prefix
    identity = source.identity()
    names = {key: value for key, value in identity.items() if key not in ("seed", "num_samples", "tokens")}
    tokens = {key: value for key, value in identity["tokens"].items() if key != "mtimes_ns"}
    text = json.dumps([os.path.basename(prefix), names, tokens], sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    return SourceRecord(key=key, prefix=prefix, segments=((source.config.seed, source.num_samples),), taken=taken)
