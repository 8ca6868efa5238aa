"""Blends: shares that add up to what was asked for, sources that are named when they have nothing to give."""

import os
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domino_lm.data.blended import Blend, BlendedDataset, blend_order, normalised, parse_blend
from domino_lm.data.gpt_dataset import GPTDatasetConfig
from domino_lm.data.indexed import IndexedDatasetWriter
from domino_lm.data.indices import DatasetError
from domino_lm.data.splits import DataSources, build_splits, read_per_split, read_words

CONFIG = GPTDatasetConfig(sequence_length=4, seed=1)


def source(folder: Path, name: str, tokens: int) -> str:
    with IndexedDatasetWriter(folder / name, np.uint16) as writer:
        for start in range(0, tokens, 5):
            writer.add_document(np.arange(start, min(start + 5, tokens)))
    return str(folder / name)


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, str]:
    """41 tokens, so 10 samples, and 81 tokens, so 20 samples."""
    return source(tmp_path, "a", 41), source(tmp_path, "b", 81)


def blended(blend: Blend, size: int | None, **settings: Any) -> BlendedDataset:
    dataset = build_splits(DataSources(blend=blend, split="1", **settings), (size, 0, 0), CONFIG).train
    assert isinstance(dataset, BlendedDataset)
    return dataset


def step_by_step(weights: list[float], size: int, limits: list[int] | None) -> list[int]:
    """The rule itself, one choice after the other."""
    taken, order = [0] * len(weights), []
    for i in range(size):
        lags = [w * max(i, 1) - taken[d] if limits is None or taken[d] < limits[d] else -np.inf for d, w in enumerate(weights)]
        order.append(int(np.argmax(lags)))
        taken[order[-1]] += 1
    return order


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=6), st.integers(0, 5000))
def test_lanes_choose_what_single_steps_choose(weights: list[float], size: int) -> None:
    weights = normalised(weights)
    assert blend_order(weights, size)[0].tolist() == step_by_step(weights, size, None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 1500), min_size=1, max_size=6))
def test_lanes_choose_what_single_steps_choose_when_sources_run_out(sizes: list[int]) -> None:
    weights = [size / sum(sizes) for size in sizes]
    sources, numbers = blend_order(weights, sum(sizes), sizes)
    assert sources.tolist() == step_by_step(weights, sum(sizes), sizes)
    assert [numbers[sources == d].tolist() for d in range(len(sizes))] == [list(range(size)) for size in sizes]


@pytest.mark.parametrize(("weights", "samples"), [((1.0, 1.0), [15, 15]), ((10.0, 20.0), [10, 20]), (None, [10, 20])])
def test_weights_share_samples_and_no_weights_share_by_size(
    sources: tuple[str, str], weights: tuple[float, ...] | None, samples: list[int]
) -> None:
    assert [share.samples for share in blended(Blend(sources, weights), 30).shares()] == samples


def test_shares_tell_how_often_a_source_is_read(sources: tuple[str, str]) -> None:
    shares = blended(Blend(sources, (1.0, 1.0)), 40).shares()
    assert [round(share.epochs, 2) for share in shares] == [round(80 / 41, 2), round(80 / 81, 2)]


def test_a_weight_of_next_to_nothing_works(sources: tuple[str, str]) -> None:
    assert [share.samples for share in blended(Blend(sources, (1e-9, 1.0)), 100).shares()] == [1, 99]


def test_a_source_that_gives_nothing_is_warned_of(sources: tuple[str, str]) -> None:
    with pytest.warns(UserWarning, match="never sampled: 1 of 2 sources, since the weights give none of the 1 train samples to .*a"):
        blended(Blend(sources, (1e-9, 1.0)), 1)


@pytest.mark.parametrize(("count", "cached"), [(600, False), (40, True)])
def test_hundreds_of_sources_need_no_descriptor_each_and_one_warning_in_all(tmp_path: Path, count: int, cached: bool) -> None:
    first = source(tmp_path, "0", 41)
    prefixes = [first, *(str(tmp_path / f"{i}") for i in range(1, count))]
    for prefix in prefixes[1:]:
        for extension in (".bin", ".idx"):
            shutil.copy(first + extension, prefix + extension)
    sources = DataSources(blend=Blend(tuple(prefixes), (1.0,) * count), split="1")
    open_now, (soft, hard) = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 16, hard))
    try:
        for _ in range(1 + cached):  # indices are built, then read from the cache
            with pytest.warns(UserWarning, match="never sampled") as warned:
                train = build_splits(sources, (30, 0, 0), CONFIG, tmp_path / "cache" if cached else None).train
            assert [str(each.message).split(", since")[0] for each in warned] == [f"never sampled: {count - 30} of {count} sources"]
            assert train is not None
            assert train[29]["tokens"].shape == (4,)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_shares_add_up_to_the_request_when_weights_nearly_do(sources: tuple[str, str], tmp_path: Path) -> None:
    prefixes = (*sources, source(tmp_path, "c", 61))
    dataset = blended(Blend(prefixes, (0.3333333, 0.3333333, 0.3333333)), 100)
    assert sum(share.samples for share in dataset.shares()) == 100


def test_no_sample_comes_twice_before_a_source_is_read_to_its_end(sources: tuple[str, str]) -> None:
    dataset = blended(Blend(sources, (0.3333333, 0.6666666)), 29)
    places = [dataset.locate(i) for i in range(29)]
    assert len(set(places)) == 29


def test_all_samples_are_read_once_when_no_number_is_asked_for(sources: tuple[str, str]) -> None:
    dataset = blended(Blend(sources), None)
    assert sorted(dataset.locate(i) for i in range(len(dataset))) == [(0, i) for i in range(10)] + [(1, i) for i in range(20)]


def test_weights_without_a_number_of_samples_are_refused(sources: tuple[str, str]) -> None:
    with pytest.raises(DatasetError, match="is read in full, so weights have no meaning; leave them out"):
        blended(Blend(sources, (1.0, 2.0)), None)


def test_order_without_weights_is_cut_to_what_there_is(sources: tuple[str, str]) -> None:
    assert len(blended(Blend(sources), 1000)) == 30


def test_weights_size_and_sources_of_a_blend_change_its_identity(sources: tuple[str, str]) -> None:
    blends = [(sources, (1.0, 2.0), 30), (sources, (2.0, 1.0), 30), (sources, (1.0, 2.0), 20), (sources[::-1], (1.0, 2.0), 30)]
    assert len({str(blended(Blend(prefixes, weights), size).identity()) for prefixes, weights, size in blends}) == len(blends)


def test_cached_order_equals_built_order(sources: tuple[str, str], tmp_path: Path) -> None:
    spec = DataSources(blend=Blend(sources, (1.0, 2.0)), split="1")
    built = [build_splits(spec, (50, 0, 0), CONFIG, cache).train for cache in (None, tmp_path / "cache", tmp_path / "cache")]
    orders = [[d.locate(i) for i in range(len(d))] for d in built if isinstance(d, BlendedDataset)]
    assert orders[0] == orders[1] == orders[2]
    assert len(orders) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["1", "a", "b", "c"], "'b' stands where a weight is due"),
        (["0", "a", "1", "b"], "the weight 0 must be above 0"),
        (["-1", "a", "2", "b"], "the weight -1 must be above 0"),
        (["nan", "a", "2", "b"], "the weight nan must be above 0"),
        (["inf", "a", "2", "b"], "the weight inf must be above 0"),
        ([], "names no data"),
        (["a", " "], "names no data"),
    ],
)
def test_words_that_mean_nothing_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(DatasetError, match=f"--data-path .*{message}"):
        parse_blend(words)


def test_splits_named_apart_are_read_whole(sources: tuple[str, str]) -> None:
    splits = build_splits(DataSources(per_split={"train": Blend((sources[0],)), "valid": Blend((sources[1],))}), (None, None, None), CONFIG)
    assert [(name, len(dataset)) for name, dataset in splits.named()] == [("train", 10), ("valid", 20)]


def test_several_validation_sets_stay_apart(sources: tuple[str, str]) -> None:
    spec = DataSources(per_split={"train": Blend((sources[0],)), "valid": Blend(sources)}, multiple_validation_sets=True)
    assert [(name, len(dataset)) for name, dataset in build_splits(spec, (None, None, None), CONFIG).named()] == [
        ("train", 10),
        ("valid 0", 10),
        ("valid 1", 20),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "an object with the keys"),
        ('{"dev": []}', "an object with the keys"),
        ('{"train": [1]}', "'train' must be a list"),
    ],
)
def test_files_of_paths_that_hold_something_else_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "paths.json").write_text(content)
    with pytest.raises(DatasetError, match=f"--per-split-data-args-path .*{message}"):
        read_per_split(tmp_path / "paths.json")


def test_a_file_of_paths_that_is_missing_is_refused_by_its_flag(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"--data-args-path .*none cannot be read: No such file"):
        read_words(tmp_path / "none")


def test_mock_data_needs_a_vocabulary() -> None:
    with pytest.raises(DatasetError, match=r"--mock-data .* --vocab-size"):
        build_splits(DataSources(), (10, 0, 0), CONFIG)


SPARSE = DataSources(split="8,1,1")


def tiny_and_large(folder: Path) -> list[str]:
    """Two sources of a single document each, of which a split leaves nothing, before and behind two of 20."""
    return [source(folder, name, tokens) for name, tokens in (("tiny", 5), ("a", 100), ("b", 100), ("small", 5))]


@pytest.mark.parametrize("weights", [None, (2.0, 1.0, 3.0, 2.0)])
def test_sources_of_which_a_split_leaves_nothing_are_left_out_of_evaluations_with_one_line(tmp_path: Path, weights: Any) -> None:
    tiny, a, b, small = tiny_and_large(tmp_path)
    sources = replace(SPARSE, blend=Blend((tiny, a, b, small), weights))
    sizes = (8, 2, 2) if weights else (None, 2, 2)
    with pytest.warns(UserWarning, match="of 2 of 4 sources") as warned:
        splits = build_splits(sources, sizes, CONFIG)
    assert [re.findall(r"the (\w+) split .* sources: (\S+), (\S+)\. ", str(each.message)) for each in warned] == [
        [(name, tiny, small)] for name in ("valid", "test")
    ]
    (valid,) = splits.valid
    assert [part.indexed.prefix for part in valid.sources] == [a, b]
    assert isinstance(valid, BlendedDataset)
    assert valid.weights == ([0.25, 0.75] if weights else [0.5, 0.5])
    assert len(valid[0]["tokens"]) == 4
    assert splits.train is not None
    assert [part.indexed.prefix for part in splits.train.sources] == [tiny, a, b, small]


def test_a_split_that_no_source_of_a_blend_has_is_left_out_with_one_line(tmp_path: Path) -> None:
    tiny, _, _, small = tiny_and_large(tmp_path)
    with pytest.warns(UserWarning, match=r"nothing of any of 2 sources .*Without it there is no test loss") as warned:
        splits = build_splits(replace(SPARSE, split="9,0,1", blend=Blend((tiny, small), (1.0, 1.0))), (2, 2, 2), CONFIG)
    assert (len(warned), splits.valid, splits.test) == (1, [], None)


def test_of_several_validation_sets_an_empty_one_is_left_out(tmp_path: Path) -> None:
    tiny, a, b, _ = tiny_and_large(tmp_path)
    sources = replace(SPARSE, blend=Blend((a, tiny, b)), multiple_validation_sets=True)
    with pytest.warns(UserWarning, match=r"of 1 of 3 sources: .*tiny\. .*numbered anew"):
        assert [each.sources[0].indexed.prefix for each in build_splits(sources, (None, 2, 0), CONFIG).valid] == [a, b]


def test_what_is_to_be_read_in_full_or_trained_on_must_be_there_in_a_blend_too(tmp_path: Path) -> None:
    tiny, a, _, _ = tiny_and_large(tmp_path)
    with pytest.raises(DatasetError, match=r"tiny: the valid split has 0 of 1 documents"):
        build_splits(replace(SPARSE, blend=Blend((tiny, a))), (2, None, 0), CONFIG)
    with pytest.raises(DatasetError, match=r"tiny: the train split has 0 of 1 documents"):
        build_splits(replace(SPARSE, split="1,8,1", blend=Blend((tiny, a))), (None, 0, 0), CONFIG)
