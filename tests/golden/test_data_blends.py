"""Blends, per-split data and mock data give Megatron's order and samples, and `--data-path` is read as Megatron reads it."""

import hashlib
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from domino_lm.data.blended import Blend, BlendedDataset, blend_order, parse_blend, source_sizes
from domino_lm.data.gpt_dataset import GPTDatasetConfig
from domino_lm.data.indices import DatasetError
from domino_lm.data.splits import Dataset, DataSources, Splits, build_splits
from tests.golden.token_files import GOLDEN, TokenFiles

UNIT = json.loads((GOLDEN / "blending_cases.json").read_text())
PATH_CASES = json.loads((GOLDEN / "parse_cases.json").read_text())["blend_from_list"]
CASES = sorted(path.stem for path in (GOLDEN / "blend").glob("*.json") if not path.stem.endswith("_error"))
MOCKS = sorted(path.stem for path in (GOLDEN / "mock").glob("*.json"))
Case = tuple[dict[str, Any], dict[str, np.ndarray], Splits]


@pytest.mark.parametrize("case", UNIT["blending"], ids=lambda case: f"{case['size']} of {case['weights']}")
def test_order_of_a_blend_equals_megatrons(case: dict[str, Any]) -> None:
    sources, numbers = blend_order(case["weights"], case["size"])
    assert (sources.tolist(), numbers.tolist()) == (case["dataset_index"], case["dataset_sample_index"])


@pytest.mark.parametrize("case", UNIT["exhaustive"], ids=lambda case: str(case["sizes"]))
def test_order_of_all_samples_equals_megatrons(case: dict[str, Any]) -> None:
    sizes = case["sizes"]
    sources, numbers = blend_order([size / sum(sizes) for size in sizes], sum(sizes), sizes)
    assert (sources.tolist(), numbers.tolist()) == (case["dataset_index"], case["dataset_sample_index"])


@pytest.mark.parametrize("case", UNIT["size_margin"], ids=str)
def test_sources_are_built_with_megatrons_sizes(case: dict[str, Any]) -> None:
    sizes = [source_sizes(case["weights"], target, case["surplus"]) for target in case["targets"]]
    assert list(map(list, zip(*sizes, strict=True))) == case["sizes"]


@pytest.mark.parametrize("case", [case for case in PATH_CASES if case.get("list")], ids=lambda case: " ".join(case["list"]))
def test_data_paths_are_read_as_megatron_reads_them(case: dict[str, Any]) -> None:
    prefixes, weights = case["blend"]
    if weights is not None and not all(weight > 0 and not math.isnan(weight) for weight in weights):
        with pytest.raises(DatasetError, match=r"the weight (nan|-1|0) must be above 0"):
            parse_blend(case["list"])
    else:
        assert parse_blend(case["list"]) == Blend(tuple(prefixes), None if weights is None else tuple(weights))


@pytest.fixture(scope="module")
def token_files(tmp_path_factory: pytest.TempPathFactory) -> TokenFiles:
    return TokenFiles(tmp_path_factory.mktemp("token_files"))


def blend(given: list[Any] | None, token_files: TokenFiles) -> Blend | None:
    if given is None:
        return None
    prefixes = [str(token_files.prefix(path.removeprefix("bin/").removesuffix("_text_document"))) for path in given[0]]
    return Blend(tuple(prefixes), None if given[1] is None else tuple(given[1]))


def build(meta: dict[str, Any], token_files: TokenFiles) -> Splits:
    settings, names = meta["config"], ("train", "valid", "test")
    per_split = {
        name: found for name, given in zip(names, meta["blend_per_split"] or (), strict=False) if (found := blend(given, token_files))
    }
    sources = DataSources(
        blend=blend(meta["blend"], token_files),
        split=meta["split"] or "1",
        per_split=per_split,  # type: ignore[arg-type]
        surplus=settings["mid_level_dataset_surplus"],
        multiple_validation_sets=settings.get("multiple_validation_sets", False),
    )
    config = GPTDatasetConfig(sequence_length=settings["sequence_length"], seed=settings["random_seed"], eod=50256, vocab_size=50257)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build_splits(sources, meta["sizes"], config)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, token_files: TokenFiles) -> Case:
    meta = json.loads((GOLDEN / "blend" / f"{request.param}.json").read_text())
    with np.load(GOLDEN / "blend" / f"{request.param}.npz") as arrays:
        return meta, dict(arrays), build(meta, token_files)


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_splits_have_megatrons_kinds_and_lengths(case: Case) -> None:
    meta, _, splits = case
    found = dict(splits.named())
    expected: dict[str, Any] = {}
    for name, split in meta["splits"].items():
        expected |= {f"{name} {i}": part for i, part in enumerate(split)} if isinstance(split, list) else {name: split} if split else {}
    assert {name: len(dataset) for name, dataset in found.items()} == {name: split["len"] for name, split in expected.items()}
    for name, split in expected.items():
        assert type(found[name]).__name__ == split.get("kind", "GPTDataset")


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_blends_have_megatrons_order(case: Case) -> None:
    _, arrays, splits = case
    for name, dataset in splits.named():
        if isinstance(dataset, BlendedDataset):
            for index in ("dataset_index", "dataset_sample_index"):
                assert getattr(dataset, index).dtype == arrays[f"{name}_{index}"].dtype
                np.testing.assert_array_equal(getattr(dataset, index), arrays[f"{name}_{index}"])
            assert [share.samples for share in dataset.shares()] == np.bincount(arrays[f"{name}_dataset_index"][: dataset.size]).tolist()


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_sources_of_blends_have_megatrons_indices(case: Case) -> None:
    meta, _, splits = case
    for name, dataset in splits.named():
        recorded = meta["splits"][name.split()[0]]
        sources, expected = [dataset], [recorded]
        if isinstance(dataset, BlendedDataset):
            sources, expected = list(dataset.datasets), recorded["datasets"]
        elif isinstance(recorded, list):
            expected = [recorded[int(name.split()[1])]]
        assert_indices(sources, expected)


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_samples_of_blends_equal_megatrons(case: Case) -> None:
    _, arrays, splits = case
    for name, dataset in splits.named():
        assert_samples(dataset, name, arrays)


def assert_indices(sources: list[Any], expected: list[dict[str, Any]]) -> None:
    for source, meta in zip(sources, expected, strict=True):
        assert (source.num_samples, len(source)) == (meta["num_samples_requested"], meta["len"])
        for index in ("document_index", "sample_index", "shuffle_index"):
            array = getattr(source, index)
            assert [array.dtype.name, list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()] == meta[index]


def assert_samples(dataset: Dataset, name: str, arrays: dict[str, np.ndarray]) -> None:
    stored = {key.partition(".")[2]: value for key, value in arrays.items() if key.startswith(f"{name}_samples.")}
    for i in range(len(stored.get("tokens", ()))):
        sample: dict[str, Any] = dict(dataset[i])
        if isinstance(dataset, BlendedDataset):
            sample["dataset_id"] = dataset.locate(i)[0]
        for key, values in stored.items():
            np.testing.assert_array_equal(sample[key], values[i], f"{name} {i} {key}")
    last = {key.partition(".")[2]: value for key, value in arrays.items() if key.startswith(f"{name}_last_sample.")}
    for key in set(last) - {"idx", "dataset_id"}:
        np.testing.assert_array_equal(dataset[len(dataset) - 1][key], last[key])


def test_weights_without_a_number_of_samples_are_refused_as_in_megatron(token_files: TokenFiles) -> None:
    meta = json.loads((GOLDEN / "blend/09_weights_sizeNone_error.json").read_text())
    with pytest.raises(DatasetError, match="weights have no meaning"):
        build(meta, token_files)


@pytest.fixture(scope="module")
def mock(request: pytest.FixtureRequest) -> Case:
    meta = json.loads((GOLDEN / "mock" / f"{request.param}.json").read_text())
    eod = int(meta["config"]["tokenizer"].split()[-1])
    config = GPTDatasetConfig(
        sequence_length=meta["config"]["sequence_length"], seed=meta["config"]["random_seed"], eod=eod, vocab_size=eod + 1
    )
    with np.load(GOLDEN / "mock" / f"{request.param}.npz") as arrays:
        return meta, dict(arrays), build_splits(DataSources(), meta["sizes"], config)


@pytest.mark.parametrize("mock", MOCKS, indirect=True)
def test_mock_data_has_megatrons_indices(mock: Case) -> None:
    meta, _, splits = mock
    for name, dataset in splits.named():
        assert_indices([dataset], [meta["splits"][name]])


@pytest.mark.parametrize("mock", MOCKS, indirect=True)
def test_mock_samples_equal_megatrons(mock: Case) -> None:
    _, arrays, splits = mock
    for name, dataset in splits.named():
        assert_samples(dataset, name, arrays)


def test_words_of_a_file_stand_for_those_of_the_command_line(tmp_path: Path) -> None:
    from domino_lm.data.splits import read_per_split, read_words

    (tmp_path / "words").write_text("0.3 a\n0.7 b\n")
    (tmp_path / "splits.json").write_text('{"train": ["1", "a", "3", "b"], "valid": "c d", "test": null}')
    assert read_words(tmp_path / "words") == ["0.3", "a", "0.7", "b"]
    assert read_per_split(tmp_path / "splits.json") == {"train": Blend(("a", "b"), (1.0, 3.0)), "valid": Blend(("c", "d"))}
