"""The training, validation and test sets of a run, from whatever form the data is named in."""

import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from domino_lm.config.data import DataConfig
from domino_lm.config.foreign_text import ForeignTextError, parse_json
from domino_lm.data.blended import Blend, BlendedDataset, first_few, normalised, parse_blend, source_sizes, source_targets
from domino_lm.data.gpt_dataset import (
    SPLITS,
    EmptySplitError,
    GPTDataset,
    GPTDatasetConfig,
    SplitName,
    TokenSource,
    count_split,
    split_ranges,
)
from domino_lm.data.indexed import IndexedDataset
from domino_lm.data.indices import DatasetError
from domino_lm.data.mock import MockTokens

Dataset = GPTDataset | BlendedDataset
Path = str | os.PathLike[str]
MOCK_SPLIT = "1,1,1"
DEFAULT_SPLIT = "969,30,1"


@dataclass(frozen=True, kw_only=True)
class DataSources:
    """What the splits are read from: one blend that ``split`` cuts, a blend for each split, or mock tokens if neither is given."""

    blend: Blend | None = None
    split: str = DEFAULT_SPLIT
    per_split: dict[SplitName, Blend] = field(default_factory=dict)
    surplus: float = 0.005
    """Extra samples that each source of a weighted blend is built with, as a fraction of its share."""

    multiple_validation_sets: bool = False
    """Keep the sources of the validation split apart instead of blending them."""

    @property
    def mock(self) -> bool:
        return self.blend is None and not self.per_split

    def __str__(self) -> str:
        if self.mock:
            return "mock tokens"
        if self.blend is not None:
            return f"{self.blend} (split {self.split})"
        return ", ".join(f"{name}: {blend}" for name, blend in self.per_split.items())


@dataclass(frozen=True)
class Splits:
    """Data sets of a run; None, or an empty list, for a split that has nothing."""

    train: Dataset | None
    valid: list[Dataset]
    test: Dataset | None

    def named(self) -> list[tuple[str, Dataset]]:
        """Every data set with the name of its split."""
        valid = [("valid" if len(self.valid) == 1 else f"valid {i}", dataset) for i, dataset in enumerate(self.valid)]
        found = [("train", self.train), *valid, ("test", self.test)]
        return [(name, dataset) for name, dataset in found if dataset is not None]


def sources_of(settings: DataConfig) -> DataSources:
    """The sources that the flags name. Raises DatasetError if they name nothing, or the same thing twice."""
    apart = {name: words for name in SPLITS if (words := getattr(settings, f"{name}_data_path"))}
    ways = {
        "--data-path": settings.data_path,
        "--data-args-path": settings.data_args_path,
        "/".join(f"--{name}-data-path" for name in apart) or "--train-data-path": apart,
        "--per-split-data-args-path": settings.per_split_data_args_path,
        "--mock-data": settings.mock_data,
    }
    given = [flag for flag, value in ways.items() if value]
    if len(given) != 1:
        fault = f"{' and '.join(given)} all say where the data is" if given else "no flag says where the data is"
        raise DatasetError(f"{fault}; give one of {', '.join(ways)}.")
    per_split: dict[SplitName, Blend] = {name: parse_blend(words, f"--{name}-data-path") for name, words in apart.items()}
    if settings.per_split_data_args_path:
        per_split = read_per_split(settings.per_split_data_args_path)
    if per_split and settings.split is not None:
        raise DatasetError(
            f"--split {settings.split} cuts the data of --data-path, but {given[0]} names each split's own; leave --split out."
        )
    named: Sequence[str] | None = settings.data_path
    named = [named] if isinstance(named, str) else named or (read_words(settings.data_args_path) if settings.data_args_path else None)
    return DataSources(
        blend=parse_blend(named, given[0]) if named is not None else None,
        split=settings.split or DEFAULT_SPLIT,
        per_split=per_split,
        surplus=settings.mid_level_dataset_surplus,
        multiple_validation_sets=settings.multiple_validation_sets,
    )


def read_words(path: Path) -> list[str]:
    """The words of a file that stand for those behind ``--data-path``. Raises DatasetError."""
    return _read(path, "--data-args-path").split()


def read_per_split(path: Path) -> dict[SplitName, Blend]:
    """Blends from a JSON object with the keys train, valid and test; each a list of words or one string. Raises DatasetError."""
    try:
        content = parse_json(_read(path, "--per-split-data-args-path"))
    except json.JSONDecodeError as error:
        raise DatasetError(f"--per-split-data-args-path {path}, line {error.lineno}: not valid JSON ({error.msg}).") from error
    except ForeignTextError as error:
        raise DatasetError(f"--per-split-data-args-path {path}: {error}.") from error
    if not isinstance(content, dict) or not set(content) <= set(SPLITS):
        raise DatasetError(f"--per-split-data-args-path {path} must hold an object with the keys train, valid and test.")
    found: dict[SplitName, Blend] = {}
    for name in SPLITS:
        words = content.get(name)
        words = words.split() if isinstance(words, str) else words
        if not isinstance(words, list | None) or not all(isinstance(word, str) for word in words or []):
            raise DatasetError(f"--per-split-data-args-path {path}: {name!r} must be a list of words or one string.")
        if words:
            found[name] = parse_blend(words, f"{name!r} in {path}")
    return found


def build_splits(sources: DataSources, sizes: Sequence[int | None], config: GPTDatasetConfig, cache_path: Path | None = None) -> Splits:
    """Data sets of the three splits; ``sizes`` are the samples asked of each (None: one epoch).

    A split is left out when its weight or path is missing, or when it has no sequence and is asked for 0 samples.
    Raises DatasetError or IndexedDatasetError if the data cannot give what is asked.
    """
    builder = _Builder(sources, config, cache_path)
    found = {name: builder.build(name, size) for name, size in zip(SPLITS, sizes, strict=True)}
    for name, datasets in found.items():
        tiny = [source.indexed.prefix for dataset in datasets for source in dataset.sources if source.shorter_than_a_sample]
        if tiny:
            warnings.warn(
                f"{first_few(tiny)}: the {name} split has less than one sample of tokens; every sample repeats some of them.", stacklevel=2
            )
    return Splits(next(iter(found["train"]), None), list(found["valid"]), next(iter(found["test"]), None))


class _Builder:
    """Opens every source once and builds the data sets of splits from it."""

    def __init__(self, sources: DataSources, config: GPTDatasetConfig, cache_path: Path | None) -> None:
        self._sources, self._config, self._cache_path = sources, config, cache_path
        self._opened: dict[str, TokenSource] = {}

    def build(self, name: SplitName, size: int | None) -> Sequence[Dataset]:
        """One data set, none, or with multiple validation sets several.

        Validation or test data that ``--split`` leaves nothing of are left out with a warning, and so is each source of a blend, unless they are
        to be read in full.
        """
        try:
            return self._build(name, size)
        except EmptySplitError as error:
            if not self._may_be_empty(name, size):
                raise
            warnings.warn(f"{error} Without it there is no {name} loss.", stacklevel=2)
            return []

    def _may_be_empty(self, name: SplitName, size: int | None) -> bool:
        """Whether nobody asked for just this split, so that it may be left out."""
        return name != "train" and not (name == "valid" and size is None) and not self._sources.per_split

    def _build(self, name: SplitName, size: int | None) -> Sequence[Dataset]:
        sources = self._sources
        blend = sources.per_split.get(name) if sources.blend is None else sources.blend
        if sources.mock:
            return self._cut(self._mock(), name, size)
        if blend is None:
            return []
        if len(blend.prefixes) == 1 and blend.weights is None:
            return self._cut(self._open(blend.prefixes[0]), name, size)
        if size != 0 and self._may_be_empty(name, size):
            blend = self._without_empty(blend, name, size)
        if name == "valid" and sources.multiple_validation_sets:
            return [found for prefix in blend.prefixes for found in self._cut(self._open(prefix), name, size)]
        return self._blended(blend, name, size)

    def _blended(self, blend: Blend, name: SplitName, size: int | None) -> list[BlendedDataset]:
        if size == 0 or self._sequences(name, 1) is None:
            return []
        if blend.weights is None:
            datasets = self._require(blend, name, [None] * len(blend.prefixes))
            total = sum(map(len, datasets))
            size = None if size is None else min(size, total)
            return [BlendedDataset(datasets, [len(d) / total for d in datasets], size, cache_path=self._cache_path)]
        if size is None:
            raise DatasetError(
                f"the {name} data {blend} is read in full, so weights have no meaning; leave them out, or ask for a number of samples "
                "(without --full-validation)."
            )
        weights = normalised(blend.weights)
        datasets = self._require(blend, name, source_sizes(weights, size, self._sources.surplus))
        return [BlendedDataset(datasets, weights, size, sum(source_targets(weights, size)), self._cache_path)]

    def _without_empty(self, blend: Blend, name: SplitName, size: int | None) -> Blend:
        """The blend without sources that have nothing for ``name``, which a warning names. Raises EmptySplitError if none has."""
        apart = self._sources.multiple_validation_sets and name == "valid"
        once = blend.weights is None and not apart
        faults = {prefix: self._emptiness(prefix, name, None if once else size) for prefix in blend.prefixes}
        empty = [prefix for prefix, fault in faults.items() if fault is not None]
        if not empty:
            return blend
        if len(empty) == len(faults):
            raise EmptySplitError(
                f"the {name} split has nothing of any of {len(empty)} sources ({first_few(empty)}); use more data, or change --split so that "
                f"{name} gets some, or give it the weight 0."
            )
        counted = "the sets that are left are numbered anew" if apart else "the others share its samples"
        warnings.warn(
            f"the {name} split has no whole sample, or no token, of {len(empty)} of {len(faults)} sources: {first_few(empty)}. The {name} loss is "
            f"measured without them; {counted}. Use more data, or change --split, to have them in.",
            stacklevel=2,
        )
        kept = [i for i, prefix in enumerate(blend.prefixes) if faults[prefix] is None]
        weights = None if blend.weights is None else tuple(blend.weights[i] for i in kept)
        return Blend(tuple(blend.prefixes[i] for i in kept), weights)

    def _emptiness(self, prefix: str, name: SplitName, size: int | None) -> EmptySplitError | None:
        """Why a source cannot give ``name`` a single sample; None if it can, or if nothing is read of it."""
        tokens = self._open(prefix)
        sequences = self._sequences(name, len(tokens))
        try:
            if sequences is not None:
                count_split(tokens, sequences, name, size, self._config)
        except EmptySplitError as error:
            return error
        return None

    def _require(self, blend: Blend, name: SplitName, sizes: Sequence[int | None]) -> list[GPTDataset]:
        pairs = zip(blend.prefixes, sizes, strict=True)
        return [dataset for prefix, size in pairs for dataset in self._cut(self._open(prefix), name, size, required=True)]

    def _cut(self, tokens: TokenSource, name: SplitName, size: int | None, required: bool = False) -> list[GPTDataset]:
        """The part of one source that ``name`` reads, if it reads any."""
        sequences = self._sequences(name, len(tokens))
        if sequences is None or (len(sequences) == 0 and size == 0 and not required):
            return []
        return [GPTDataset(tokens, sequences, name, size, self._config, self._cache_path)]

    def _sequences(self, name: SplitName, count: int) -> range | None:
        """Which of a source's ``count`` sequences ``name`` reads; None if its weight is 0."""
        if self._sources.per_split:
            return range(count)
        split = MOCK_SPLIT if self._sources.mock else self._sources.split
        return dict(zip(SPLITS, split_ranges(split, count), strict=True))[name]

    def _open(self, prefix: str) -> TokenSource:
        if prefix not in self._opened:
            indexed = IndexedDataset(prefix)
            if indexed.sequence_modes is not None:
                raise DatasetError(f"{prefix}: multimodal sequences cannot be trained on here; give a data set of text.")
            if len(indexed) == 0:
                raise DatasetError(f"{prefix}: the data set has no tokens; preprocess documents with text.")
            self._opened[prefix] = indexed
        return self._opened[prefix]

    def _mock(self) -> TokenSource:
        vocab_size, eod = self._config.vocab_size, self._config.eod
        if vocab_size is None:
            raise DatasetError("--mock-data makes up tokens of a vocabulary: give --vocab-size, or --tokenizer-type with its files.")
        return self._opened.setdefault("mock", MockTokens(vocab_size, vocab_size - 1 if eod is None else eod))


def _read(path: Path, flag: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise DatasetError(f"{flag} {path} cannot be read: {reason}.") from error
