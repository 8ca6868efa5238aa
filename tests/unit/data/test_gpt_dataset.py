"""Samples: the stream they are cut from, their masks, the cache of their order, and data that cannot give any."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from domino_lm.config.data import DataConfig
from domino_lm.data.blended import Blend
from domino_lm.data.gpt_dataset import GPTDataset, GPTDatasetConfig, attention_mask, parse_split, split_ranges
from domino_lm.data.indexed import IndexedDataset, IndexedDatasetWriter
from domino_lm.data.indices import (
    DatasetError,
    build_sample_index,
    build_shuffle_index,
    count_samples,
    document_index_dtype,
    plan_epochs,
    sample_index_dtype,
    shuffle_index_dtype,
)
from domino_lm.data.loader import Batches
from domino_lm.data.samplers import SequentialSampler
from domino_lm.data.splits import DataSources, Splits, build_splits

EOD = 0


def write(prefix: Path, lengths: list[int], first_token: int = 1) -> Path:
    """One document for each length; tokens count up from ``first_token``, the last of a document is EOD."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        token = first_token
        for length in lengths:
            ids = np.arange(token, token + length)
            ids[-1:] = EOD
            writer.add_document(ids)
            token += length
    return prefix


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """20 sequences, 110 tokens."""
    return write(tmp_path / "data", [1 + i % 10 for i in range(20)])


def dataset(prefix: Path, num_samples: int | None = None, split: Any = "train", cache: Path | None = None, **config: Any) -> GPTDataset:
    indexed = IndexedDataset(prefix)
    resets = DataConfig(**{name: config.pop(name) for name in ("reset_position_ids", "reset_attention_mask") if name in config})
    settings = GPTDatasetConfig(**{"sequence_length": 8, "seed": 1, "eod": EOD, "data": resets, **config})
    return GPTDataset(indexed, range(len(indexed)), split, num_samples, settings, cache)


def build(prefix: Path, split: str = "1", sizes: Sequence[int | None] = (None, 0, 0), config: GPTDatasetConfig | None = None) -> Splits:
    return build_splits(DataSources(blend=Blend((str(prefix),)), split=split), sizes, config or GPTDatasetConfig(sequence_length=8, seed=1))


def stream(data: GPTDataset) -> np.ndarray:
    return np.concatenate([data.indexed.get(int(i)) for i in data.document_index])


@pytest.mark.parametrize("split", ["", "abc", "0,0,0", "-80,10,10", "nan,1", "inf,1", "1.2.3,1", "1e-1,2", "1,2,3,4", "80,10,10%", "²,1"])
def test_a_split_that_is_no_list_of_numbers_is_refused(split: str) -> None:
    with pytest.raises(DatasetError, match="--split"):
        parse_split(split)


def test_splits_are_contiguous_and_cover_all_sequences() -> None:
    assert split_ranges("1,1,2", 10) == (range(2), range(2, 5), range(5, 10))


def test_a_split_of_weight_0_is_none() -> None:
    assert split_ranges("9,0,1", 10)[1] is None


@pytest.mark.parametrize("size", [None, 5])
def test_a_test_split_of_which_nothing_is_left_is_left_out_with_one_warning(prefix: Path, size: int | None) -> None:
    config = GPTDatasetConfig(sequence_length=8, seed=1)
    with pytest.warns(UserWarning, match=r"the test split has 0 of 20 documents.*--split.* Without it there is no test loss") as found:
        splits = build(prefix, "969,30,1", (None, None if size is None else 0, size), config)
    assert (splits.test, len(found)) == (None, 1)


@pytest.mark.parametrize(
    ("sources", "sizes"),
    [
        ({"split": "1,969,30"}, (1, 1, 0)),  # training
        ({"split": "969,1,30"}, (1, None, 0)),  # read in full
        ({"blend": None, "per_split": ["train", "valid"]}, (1, 0, 0)),  # named by its own flag
    ],
    ids=["training", "full validation", "its own path"],
)
def test_what_is_asked_for_by_name_must_be_there(
    prefix: Path, tmp_path: Path, sources: dict[str, Any], sizes: tuple[int | None, ...]
) -> None:
    with IndexedDatasetWriter(tmp_path / "empty", np.uint16) as writer:
        writer.add_documents([], [0], [1])
    if "per_split" in sources:
        sources = sources | {"per_split": {"train": Blend((str(prefix),)), "valid": Blend((str(tmp_path / "empty"),))}}
    with pytest.raises(DatasetError, match="no token"):
        build_splits(DataSources(**{"blend": Blend((str(prefix),)), **sources}), sizes, GPTDatasetConfig(sequence_length=8, seed=1))


def test_a_split_without_sequences_is_none_when_nothing_is_asked_of_it(prefix: Path) -> None:
    splits = build(prefix, "99,1,0", (None, 0, 0))
    assert (splits.valid, splits.test) == ([], None)


def test_data_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="has no tokens"):
        build(write(tmp_path / "none", []))


def test_sequences_without_tokens_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "zero", np.uint16) as writer:
        writer.add_documents([], [0, 0], [1, 1])
    with pytest.raises(DatasetError, match="no token"):
        dataset(tmp_path / "zero", 3)


def test_numbers_that_are_no_token_ids_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.float32) as writer:
        writer.add_document(np.ones(20, np.float32))
    with pytest.raises(DatasetError, match=r"x\.bin holds float32 numbers"):
        dataset(tmp_path / "x")


def test_multimodal_data_is_refused(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.int32, multimodal=True) as writer:
        writer.add_documents(np.ones(20, np.int32), [20], [1], [1])
    with pytest.raises(DatasetError, match="multimodal"):
        build(tmp_path / "x")


def test_too_few_tokens_for_one_sample_are_refused(prefix: Path) -> None:
    with pytest.raises(DatasetError, match=r"has 110 tokens, too few for one sample of --seq-length 110 and its last label"):
        dataset(prefix, sequence_length=110)


def test_samples_that_repeat_tokens_of_a_tiny_split_are_warned_of(prefix: Path) -> None:
    with pytest.warns(UserWarning, match="less than one sample"):
        assert build(prefix, sizes=(3, 0, 0), config=GPTDatasetConfig(sequence_length=200, seed=1)).train is not None


@pytest.mark.parametrize("bad", [{"sequence_length": 0}, {"seed": -1}, {"eod": None, "data": DataConfig(eod_mask_loss=True)}])
def test_settings_that_cannot_work_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(DatasetError, match="--"):
        GPTDatasetConfig(**{"sequence_length": 8, "seed": 1, **bad})


def test_an_id_outside_the_vocabulary_is_refused_by_file(prefix: Path) -> None:
    data = dataset(prefix, vocab_size=50)
    with pytest.raises(DatasetError, match=r"data\.bin: .* token id \d+, but the vocabulary has 50"):
        list(map(data.__getitem__, range(len(data))))


@pytest.mark.parametrize("i", [-1, 13])
def test_an_index_outside_the_data_set_is_refused(prefix: Path, i: int) -> None:
    assert len(dataset(prefix)) == 13
    with pytest.raises(IndexError, match=r"train sample .* outside 0\.\.12"):
        dataset(prefix)[i]


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 1),
    sequence_length=st.integers(1, 12),
    extra=st.integers(0, 1),
    drop_last=st.booleans(),
)
def test_sample_index_cuts_the_stream_every_sequence_length_tokens(
    lengths: list[int], sequence_length: int, extra: int, drop_last: bool
) -> None:
    total = sum(lengths)
    samples = count_samples(total, sequence_length, extra, drop_last)
    index = build_sample_index(np.array(lengths), np.arange(len(lengths)), sequence_length, samples, extra)
    begins = np.cumsum([0, *lengths])
    flat = [int(begins[position] + offset) for position, offset in index]
    assert flat[:samples] == [k * sequence_length for k in range(samples)]
    assert flat[samples] == min(samples * sequence_length, total - extra)


@pytest.mark.parametrize(
    ("lengths", "extra", "last"),
    [([5, 4, 0, 0], 0, (3, 0)), ([5, 3, 0, 0], 0, (1, 3)), ([5, 4, 2], 0, (2, 2)), ([5, 4, 1], 1, (2, 0))],
    ids=["empty documents end it", "full before the empty ones", "short", "with one token more"],
)
def test_where_documents_run_out_the_last_row_names_the_last_one(lengths: list[int], extra: int, last: tuple[int, int]) -> None:
    """Megatron's walk ends there; a last sample that is full ends at its own last token."""
    samples = count_samples(sum(lengths), 4, extra, drop_last=False)
    index = build_sample_index(np.array(lengths), np.arange(len(lengths)), 4, samples, extra)
    assert tuple(index[-1]) == last


def test_a_padded_sample_that_empty_documents_end_is_read(tmp_path: Path) -> None:
    kept = {"add_extra_token_to_sequence": False, "drop_last_partial_validation_sequence": False}
    data = dataset(write(tmp_path / "data", [5, 4, 0, 0]), split="valid", sequence_length=4, **kept)
    assert sorted(sample["loss_mask"].sum() for sample in map(data.__getitem__, range(3))) == [0, 3, 3]


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), extra=st.booleans(), num_samples=st.none() | st.integers(1, 60))
def test_samples_are_slices_of_the_shuffled_stream(
    tmp_path_factory: pytest.TempPathFactory, seed: int, extra: bool, num_samples: int | None
) -> None:
    data = dataset(
        write(tmp_path_factory.mktemp("data") / "data", [3, 1, 9, 20, 2]), num_samples, seed=seed, add_extra_token_to_sequence=extra
    )
    tokens = stream(data)
    for i, k in enumerate(data.shuffle_index):
        np.testing.assert_array_equal(data[i]["tokens"], tokens[8 * k : 8 * k + 8])


def test_labels_are_the_next_tokens(prefix: Path) -> None:
    data = dataset(prefix)
    tokens, k = stream(data), int(data.shuffle_index[0])
    np.testing.assert_array_equal(data[0]["labels"], tokens[8 * k + 1 : 8 * k + 9])


def test_a_short_last_sample_is_padded_without_loss_when_the_tokenizer_has_no_pad(tmp_path: Path) -> None:
    data = dataset(write(tmp_path / "data", [21]), split="valid", drop_last_partial_validation_sequence=False)
    last = data[int(np.argmax(data.shuffle_index))]
    assert last["loss_mask"].tolist() == [1] * 4 + [0] * 4
    assert (last["tokens"][5:].tolist(), last["labels"][4:].tolist()) == ([0] * 3, [0] * 4)


def test_a_padded_sample_leaves_the_loss_of_others_alone(tmp_path: Path) -> None:
    data = dataset(write(tmp_path / "data", [21]), split="valid", drop_last_partial_validation_sequence=False)
    data[int(np.argmax(data.shuffle_index))]
    assert data[int(np.argmin(data.shuffle_index))]["loss_mask"].tolist() == [1] * 8


def test_a_pad_id_that_occurs_in_the_data_keeps_its_loss(tmp_path: Path) -> None:
    """Whatever the tokenizer calls padding: what stands in the file is text."""
    data = dataset(write(tmp_path / "data", [17], first_token=0), vocab_size=17)
    for sample in (data[0], data[1]):
        assert sample["loss_mask"].tolist() == [1] * 8
        assert sample["labels"].tolist() == [(int(sample["tokens"][0]) + k) % 16 for k in range(1, 9)]


def test_negative_ids_are_refused_without_a_vocabulary_too(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "x", np.int32) as writer:
        writer.add_document([5] * 8 + [-1])
    with pytest.raises(DatasetError, match=r"x\.bin: .* token id -1, but the vocabulary begins at 0"):
        dataset(tmp_path / "x")[0]


@pytest.mark.parametrize(("tokens", "samples"), [(33554435, 1048577), (2147483778, 67108869)])
def test_samples_of_long_splits_are_counted_exactly(tokens: int, samples: int) -> None:
    assert count_samples(tokens, 32, 1, drop_last=False) == samples


def test_counts_past_int32_get_wide_indices() -> None:
    assert (document_index_dtype(3_000_000_000), sample_index_dtype(3_000_000_000, 10), shuffle_index_dtype(5_000_000_000)) == (
        np.int64,
    ) * 3


def test_counts_within_int32_keep_megatrons_narrow_indices() -> None:
    assert (document_index_dtype(2**31), sample_index_dtype(2**31 - 1, 10), shuffle_index_dtype(3_000_000_000)) == (
        np.int32,
        np.int32,
        np.uint32,
    )


def test_epochs_of_a_large_corpus_are_planned_exactly() -> None:
    epochs = plan_epochs(3 * 10**12 + 1, 3 * 10**9, 2048, 1)
    assert (epochs.repeats, epochs.samples_before_final) == (3, (2 * (3 * 10**12 + 1) - 1) // 2048)


@pytest.mark.parametrize(("samples", "separate"), [(100, False), (179, True), (180, False), (200, False), (279, True), (280, False)])
def test_a_final_epoch_is_shuffled_apart_when_less_than_eight_tenths_of_it_are_needed(samples: int, separate: bool) -> None:
    """A hundred samples of ten tokens an epoch, and none across its end: 79 of a further epoch stand apart, 80 do not."""
    assert plan_epochs(1000, samples, 10, 0).separate_final is separate


def test_a_separate_final_epoch_stays_behind_the_others() -> None:
    epochs = plan_epochs(100, 15, 10, 0)
    index = build_shuffle_index(20, epochs, np.random.RandomState(3))
    assert (epochs.separate_final, set(index[:10]), set(index[10:])) == (True, set(range(10)), set(range(10, 20)))


def test_attention_stays_in_its_document() -> None:
    mask = attention_mask(np.array([5, EOD, 6, 7]), EOD)
    assert (~mask[0]).astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_positions_restart_behind_each_end_of_document(tmp_path: Path) -> None:
    data = dataset(write(tmp_path / "data", [3, 5, 4], first_token=10), reset_position_ids=True, seed=0)
    tokens, position_ids = data[0]["tokens"], data[0]["position_ids"]
    expected = [i - (max((j + 1 for j in range(i) if tokens[j] == EOD), default=0)) for i in range(8)]
    assert position_ids.tolist() == expected


def test_samples_carry_a_mask_only_when_attention_is_reset(prefix: Path) -> None:
    assert ["attention_mask" in dataset(prefix, reset_attention_mask=flag)[0] for flag in (False, True)] == [False, True]


def test_a_resume_inside_an_epoch_reads_what_the_uninterrupted_run_reads(prefix: Path) -> None:
    def read(consumed: int, steps: int) -> list[list[int]]:
        data = dataset(prefix, 39)
        reader = Batches(data, SequentialSampler(len(data), micro_batch_size=1, consumed_samples=consumed))
        return [next(reader)["tokens"].tolist() for _ in range(steps)]

    assert read(0, 7) + read(7, 32) == read(0, 39)


def indices(data: GPTDataset) -> list[Any]:
    return [index.tolist() for index in (data.document_index, data.sample_index, data.shuffle_index)]


def test_cached_indices_equal_built_ones(prefix: Path, tmp_path: Path) -> None:
    assert [indices(dataset(prefix, 50, cache=tmp_path / "cache")) for _ in range(2)] == [indices(dataset(prefix, 50))] * 2


def test_cached_indices_are_used(prefix: Path, tmp_path: Path) -> None:
    dataset(prefix, cache=tmp_path / "cache")
    path = next((tmp_path / "cache").glob("*shuffle_index.npy"))
    np.save(path, np.load(path)[::-1])
    assert dataset(prefix, cache=tmp_path / "cache").shuffle_index.tolist() == dataset(prefix).shuffle_index.tolist()[::-1]


def test_data_that_changed_under_its_path_gets_new_indices(prefix: Path, tmp_path: Path) -> None:
    dataset(prefix, cache=tmp_path / "cache")
    write(prefix, [10 - i % 10 for i in range(20)])
    assert indices(dataset(prefix, cache=tmp_path / "cache")) == indices(dataset(prefix))


def test_tokens_that_changed_at_equal_size_change_the_identity(prefix: Path) -> None:
    before = dataset(prefix).identity()
    os.utime(f"{prefix}.bin", ns=(1, 1))
    assert dataset(prefix).identity() != before


@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"sequence_length": 9}, {"add_extra_token_to_sequence": False}, {"drop_last_partial_validation_sequence": False}],
    ids=str,
)
def test_each_setting_that_moves_samples_changes_the_identity(prefix: Path, change: dict[str, Any]) -> None:
    assert dataset(prefix, split="valid", **change).identity() != dataset(prefix, split="valid").identity()


def test_other_sequences_and_another_number_of_samples_change_the_identity(prefix: Path) -> None:
    indexed, settings = IndexedDataset(prefix), GPTDatasetConfig(sequence_length=8, seed=1)
    cuts: list[tuple[range, int | None]] = [(range(20), 5), (range(20), 50), (range(20), None), (range(19), 5), (range(1, 20), 5)]
    identities = [str(GPTDataset(indexed, sequences, "train", samples, settings).identity()) for sequences, samples in cuts]
    assert len(set(identities)) == len(cuts)


@pytest.mark.parametrize("size_bytes", [0, 100, 140])
def test_a_damaged_cache_file_is_named_and_built_again(prefix: Path, tmp_path: Path, size_bytes: int) -> None:
    dataset(prefix, cache=tmp_path / "cache")
    path = next((tmp_path / "cache").glob("*sample_index.npy"))
    path.write_bytes(path.read_bytes()[:size_bytes])
    with pytest.warns(UserWarning, match=f"{path.name}: the cached index is damaged"):
        assert indices(dataset(prefix, cache=tmp_path / "cache")) == indices(dataset(prefix))


def test_a_repaired_cache_is_used_without_a_warning(prefix: Path, tmp_path: Path) -> None:
    dataset(prefix, cache=tmp_path / "cache")
    next((tmp_path / "cache").glob("*document_index.npy")).unlink()
    dataset(prefix, cache=tmp_path / "cache")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset(prefix, cache=tmp_path / "cache")


def test_a_cache_folder_that_cannot_be_written_is_refused_by_its_flag(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match=r"--data-cache-path .*file"):
        dataset(prefix, cache=tmp_path / "file")
