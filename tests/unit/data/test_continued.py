"""Going on with another mixture, for longer, or both: no sample of a source comes twice in an epoch, and none is left out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from domino_lm.data.blended import Blend, BlendedDataset
from domino_lm.data.continued import ContinuedDataset, DataRecord, continue_data, record_of
from domino_lm.data.epochs import EpochCount
from domino_lm.data.gpt_dataset import GPTDataset, GPTDatasetConfig
from domino_lm.data.indexed import IndexedDatasetWriter
from domino_lm.data.splits import DataSources, build_splits

LENGTH = 4
CONFIG = GPTDatasetConfig(sequence_length=LENGTH, seed=1)
Data = GPTDataset | BlendedDataset | ContinuedDataset


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sources a, b and c of 101, 201 and 61 tokens, so 25, 50 and 15 samples; no two tokens are alike."""
    for number, (name, tokens) in enumerate({"a": 101, "b": 201, "c": 61}.items()):
        with IndexedDatasetWriter(tmp_path / name, np.uint16) as writer:
            for start in range(0, tokens, 10):
                writer.add_document(1000 * number + np.arange(start, min(start + 10, tokens)))
    return tmp_path


def data(folder: Path, names: str, weights: Sequence[float] | None, size: int, config: GPTDatasetConfig = CONFIG) -> Any:
    blend = Blend(tuple(str(folder / name) for name in names), None if weights is None else tuple(weights))
    return build_splits(DataSources(blend=blend, split="1"), (size, 0, 0), config).train


def kept(dataset: Data, consumed: int) -> dict[str, Any]:
    """What a checkpoint holds, through JSON."""
    state: dict[str, Any] = json.loads(json.dumps(record_of(dataset, consumed).state_dict()))
    return state


def first_tokens(dataset: Data, begin: int, end: int) -> list[int]:
    """The first token of each sample, by which it is known."""
    return [int(dataset[i]["tokens"][0]) for i in range(begin, end)]


def of(source: int, tokens: Sequence[int]) -> list[int]:
    return [token for token in tokens if token // 1000 == source]


def test_a_record_counts_what_each_source_has_given(folder: Path) -> None:
    dataset = data(folder, "ab", [1, 3], 60)
    record = record_of(dataset, 40)
    assert [source.taken for source in record.sources] == [10, 30]
    assert DataRecord.of_state(kept(dataset, 40)) == record


def test_an_unchanged_mixture_is_read_on_as_it_was(folder: Path) -> None:
    dataset = data(folder, "ab", [1, 3], 60)
    assert continue_data(kept(dataset, 40), dataset, 40, 60) == (dataset, None)


def test_another_mixture_reads_no_sample_twice_and_leaves_none_out(folder: Path) -> None:
    first = data(folder, "ab", [1, 1], 40)
    before = first_tokens(first, 0, 30)  # 15 of a, 15 of b
    fresh = data(folder, "abc", [1, 4, 1], 75)
    second, said = continue_data(kept(first, 30), fresh, 30, 75)
    after = first_tokens(second, 30, 75)
    assert abs(len(of(1, after)) - 30) <= 1  # two thirds of 45
    for source, samples in ((0, 25), (1, 50), (2, 15)):
        read = of(source, before) + of(source, after)
        assert len(read) == len(set(read)) <= samples
    whole = data(folder, "b", None, 50)
    assert of(1, before) + of(1, after) == first_tokens(whole, 0, 15 + len(of(1, after)))
    assert said is not None
    assert "a at its sample 15; " in said
    assert "b at its sample 15; " in said
    assert "c, new, at its first sample" in said
    assert "\n" not in said


def test_a_source_that_comes_back_goes_on_where_it_stood(folder: Path) -> None:
    first = data(folder, "ab", [1, 1], 20)
    state = kept(first, 20)
    second, said = continue_data(state, data(folder, "b", None, 30), 20, 30)
    assert "a rests at sample 10" in str(said)
    third, said = continue_data(kept(second, 30), data(folder, "ac", [1, 1], 50), 30, 50)
    assert "a at its sample 10" in str(said)
    read = of(0, first_tokens(first, 0, 20)) + of(0, first_tokens(third, 30, 50))
    assert read == first_tokens(data(folder, "a", None, 20), 0, 20)


@pytest.mark.parametrize("stop", [31, 37, 44])
def test_a_changed_run_that_is_stopped_again_goes_on_to_the_bit(folder: Path, stop: int) -> None:
    first, fresh = data(folder, "ab", [1, 1], 40), data(folder, "abc", [1, 2, 1], 60)
    second, _ = continue_data(kept(first, 30), fresh, 30, 60)
    again, said = continue_data(kept(second, stop), fresh, stop, 60)
    assert said is None
    assert first_tokens(again, stop, 60) == first_tokens(second, stop, 60)


def test_every_epoch_that_a_longer_run_adds_comes_in_an_order_of_its_own(folder: Path) -> None:
    dataset, orders = data(folder, "a", None, 25), []
    for epoch in range(4):
        orders.append(first_tokens(dataset, 25 * epoch, 25 * (epoch + 1)))
        end = 25 * (epoch + 2)
        dataset, _ = continue_data(kept(dataset, 25 * (epoch + 1)), data(folder, "a", None, end), 25 * (epoch + 1), end)
    assert all(len(set(order)) == 25 for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_longer_run_reads_whole_epochs_in_the_order_that_it_began_with(folder: Path, names: str) -> None:
    weights = None if names == "a" else [1, 2]
    first = data(folder, names, weights, 20)
    longer = data(folder, names, weights, 140)  # several epochs, so in another order from the first sample on
    second, said = continue_data(kept(first, 20), longer, 20, 140)
    assert "another length" in str(said)
    read = of(0, first_tokens(first, 0, 20) + first_tokens(second, 20, 140))
    assert len(set(read[:25])) == 25  # every sample of the first epoch once
    assert set(read[25:50]) <= set(range(101))


def test_one_set_of_files_becomes_a_blend(folder: Path) -> None:
    first = data(folder, "a", None, 20)
    second, _ = continue_data(kept(first, 12), data(folder, "ab", [1, 1], 30), 12, 30)
    assert first_tokens(first, 0, 12) + of(0, first_tokens(second, 12, 30)) == first_tokens(first, 0, 21)


def test_other_seeds_leave_a_source_in_its_order(folder: Path) -> None:
    first = data(folder, "a", None, 20)
    other = data(folder, "a", None, 20, GPTDatasetConfig(sequence_length=LENGTH, seed=9))
    second, _ = continue_data(kept(first, 12), other, 12, 20)
    assert first_tokens(second, 12, 20) == first_tokens(first, 12, 20)


def test_files_may_move_to_another_folder(folder: Path, tmp_path: Path) -> None:
    first = data(folder, "a", None, 20)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for suffix in ("bin", "idx"):
        (elsewhere / f"a.{suffix}").write_bytes((folder / f"a.{suffix}").read_bytes())
    moved = data(elsewhere, "a", None, 20)
    assert continue_data(kept(first, 12), moved, 12, 20) == (moved, None)


def test_samples_of_another_length_are_said_to_come_again(folder: Path) -> None:
    first = data(folder, "a", None, 20)
    longer = data(folder, "a", None, 10, GPTDatasetConfig(sequence_length=8, seed=1))
    dataset, said = continue_data(kept(first, 6), longer, 6, 10)
    assert dataset is longer
    assert "samples were 4 tokens long and are 8 now" in str(said)


def test_what_was_read_before_the_change_is_gone(folder: Path) -> None:
    second, _ = continue_data(kept(data(folder, "a", None, 20), 12), data(folder, "ab", [1, 1], 30), 12, 30)
    with pytest.raises(IndexError, match=r"sample 11 is outside 12\.\.29"):
        second[11]


def test_each_source_is_named_when_its_next_epoch_begins(folder: Path) -> None:
    """Of 4 samples 1 is of a, which has 101 tokens, and 3 are of b, which has 201."""
    count = EpochCount(data(folder, "ab", [1, 3], 200), 0)
    said = {consumed: begun for consumed in range(4, 201, 4) if (begun := count.advance(consumed)) is not None}
    assert said == {68: f"epoch 2 of {folder}/b", 104: f"epoch 2 of {folder}/a", 136: f"epoch 3 of {folder}/b"}
    assert count.epochs == pytest.approx(200 * LENGTH / 302)


def test_epochs_are_counted_on_through_another_mixture(folder: Path) -> None:
    continued, _ = continue_data(kept(data(folder, "ab", [1, 3], 60), 40), data(folder, "abc", [1, 1, 2], 200), 40, 200)
    assert isinstance(continued, ContinuedDataset)
    count = EpochCount(continued, 40)
    assert count.epochs == pytest.approx(40 * LENGTH / 363)
    assert count.advance(80) == f"epoch 2 of {folder}/c"  # 20 samples of it
