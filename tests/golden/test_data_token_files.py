"""Preprocessing and the data sets built on its files equal what Megatron wrote, byte for byte."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from domino_lm.config.data import DataConfig
from domino_lm.data.blended import Blend
from domino_lm.data.gpt_dataset import SPLITS, GPTDataset, GPTDatasetConfig, attention_mask
from domino_lm.data.indexed import IndexedDataset
from domino_lm.data.preprocess.preprocess import PreprocessConfig, preprocess
from domino_lm.data.splits import DataSources, build_splits
from domino_lm.tools.merge_datasets import merge
from tests.golden.token_files import GOLDEN, SP4096, TokenFiles, sha256

HASHES = json.loads((GOLDEN / "SHA256.json").read_text())
CASES = sorted(path.stem for path in (GOLDEN / "gpt").glob("*.json"))
INDICES = ("document_index", "sample_index", "shuffle_index")


@pytest.fixture(scope="module")
def token_files(tmp_path_factory: pytest.TempPathFactory) -> TokenFiles:
    return TokenFiles(tmp_path_factory.mktemp("token_files"))


@pytest.mark.parametrize("extension", ["bin", "idx"])
@pytest.mark.parametrize(
    ("stem", "key"),
    [
        ("corpus_gpt2", "text"),
        ("corpus_sp4096", "text"),
        ("corpus_gpt2_noeod", "text"),
        ("part_a", "text"),
        ("part_b", "text"),
        ("part_c", "text"),
        ("part_a_sp4096", "text"),
        ("part_b_keys", "text"),
        ("part_b_keys", "src"),
        ("sentences", "text"),
        ("null100k", "text"),
    ],
)
def test_preprocessing_writes_megatrons_bytes(token_files: TokenFiles, stem: str, key: str, extension: str) -> None:
    token_files.prefix(stem)
    path = token_files.folder / f"{stem}_{key}_document.{extension}"
    assert sha256(path) == HASHES[f"{stem}_{key}_document"][f"{extension}_sha256"]


def test_two_workers_write_megatrons_bytes_too(tmp_path: Path) -> None:
    prefix = TokenFiles(tmp_path).prefix("corpus_gpt2", workers=2)
    expected = HASHES["corpus_gpt2_text_document"]
    assert [sha256(prefix.with_suffix(f".{half}")) for half in ("bin", "idx")] == [expected["bin_sha256"], expected["idx_sha256"]]


def same_as(prefix: Path, name: str) -> bool:
    expected = HASHES[name]
    return all(sha256(Path(f"{prefix}.{half}")) == expected[f"{half}_sha256"] for half in ("bin", "idx"))


@pytest.mark.parametrize(("workers", "sequential", "name"), [(1, False, "_partitions2"), (2, False, "_partitions2"), (1, True, "")])
def test_partitions_put_documents_in_megatrons_order(
    token_files: TokenFiles, tmp_path: Path, workers: int, sequential: bool, name: str
) -> None:
    config = PreprocessConfig(
        input=str(token_files.source("part_a")),
        output_prefix=str(tmp_path / "out"),
        tokenizer=SP4096,
        append_eod=True,
        workers=workers,
        partitions=2,
        keep_sequential_samples=sequential,
    )
    preprocess(config)
    assert same_as(tmp_path / "out_text_document", f"part_a_sp4096{name}_text_document")
    assert len(list(tmp_path.iterdir())) == 2


def test_merged_files_have_megatrons_bytes(token_files: TokenFiles, tmp_path: Path) -> None:
    merge([str(token_files.prefix(name)) for name in ("part_a", "part_b", "part_c")], str(tmp_path / "merged"))
    assert same_as(tmp_path / "merged", "merged (part_a+part_b+part_c by tools/merge_datasets.py, not stored)")


def test_a_multimodal_file_of_megatron_is_read_whole() -> None:
    dataset = IndexedDataset(GOLDEN / "multimodal")
    assert ([dataset.get(i).tolist() for i in range(3)], dataset.document_indices.tolist()) == ([[1, 2], [3, 4], [5, 6, 70000]], [0, 2, 3])
    assert dataset.sequence_modes is not None
    assert dataset.sequence_modes.tolist() == [0, 1, 2]


def test_a_multimodal_file_is_written_as_megatron_writes_it(tmp_path: Path) -> None:
    merge([str(GOLDEN / "multimodal")], str(tmp_path / "merged"), multimodal=True)
    assert same_as(tmp_path / "merged", "multimodal")


def build(meta: dict[str, Any], token_files: TokenFiles) -> dict[str, GPTDataset | None]:
    settings = meta["config"]
    stem = meta["prefix"].removeprefix("bin/").removesuffix("_text_document")
    config = GPTDatasetConfig(
        sequence_length=settings["sequence_length"],
        seed=settings["random_seed"],
        eod=50256 if settings["tokenizer"] == "gpt2" else 2,
        vocab_size=50257 if settings["tokenizer"] == "gpt2" else 4096,
        data=DataConfig(**{name: settings[name] for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")}),
        drop_last_partial_validation_sequence=settings["drop_last_partial_validation_sequence"],
        add_extra_token_to_sequence=settings["add_extra_token_to_sequence"],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some test splits are shorter than one sample
        splits = build_splits(DataSources(blend=Blend((str(token_files.prefix(stem)),)), split=meta["split"]), meta["sizes"], config)
    return dict(zip(SPLITS, (splits.train, next(iter(splits.valid), None), splits.test), strict=True))


@pytest.fixture(scope="module")
def case(
    request: pytest.FixtureRequest, token_files: TokenFiles
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, GPTDataset | None]]:
    meta = json.loads((GOLDEN / "gpt" / f"{request.param}.json").read_text())
    with np.load(GOLDEN / "gpt" / f"{request.param}.npz") as arrays:
        return meta, dict(arrays), build(meta, token_files)


Case = tuple[dict[str, Any], dict[str, np.ndarray], dict[str, GPTDataset | None]]


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_splits_have_megatrons_lengths(case: Case) -> None:
    meta, _, datasets = case
    lengths = {name: None if dataset is None else len(dataset) for name, dataset in datasets.items()}
    assert lengths == {name: split and split["len"] for name, split in meta["splits"].items()}


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_indices_equal_megatrons(case: Case) -> None:
    _, arrays, datasets = case
    for name, dataset in datasets.items():
        for index in INDICES if dataset is not None else ():
            found, expected = getattr(dataset, index), arrays[f"{name}_{index}"]
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected, f"{name} {index}")


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_samples_equal_megatrons(case: Case) -> None:
    _, arrays, datasets = case
    compared = 0
    for name, dataset in datasets.items():
        if dataset is None:
            continue
        stored = {key.partition(".")[2]: value for key, value in arrays.items() if key.startswith(f"{name}_samples.")}
        for i in range(len(stored["tokens"])):
            assert_sample(dataset, i, {key: value[i] for key, value in stored.items() if i < len(value)})
            compared += 1
        for kind in ("last", "tail"):
            expected = {key.partition(".")[2]: value for key, value in arrays.items() if key.startswith(f"{name}_{kind}_sample.")}
            if expected:
                assert_sample(dataset, int(expected.pop("idx", len(dataset) - 1)), expected)
    assert compared >= 50


def assert_sample(dataset: GPTDataset, i: int, expected: dict[str, np.ndarray]) -> None:
    found = dict(dataset[i])
    if "attention_mask" in expected and "attention_mask" not in found:
        found["attention_mask"] = attention_mask(found["tokens"])
    for key, value in expected.items():
        np.testing.assert_array_equal(found[key], value, f"{dataset.split} sample {i}: {key}")
