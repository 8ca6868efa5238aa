"""Sample index, split weights and samplers equal Megatron's on direct calls."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from domino_lm.data.gpt_dataset import parse_split
from domino_lm.data.indices import DatasetError, build_sample_index, count_samples
from domino_lm.data.samplers import CyclicSampler, FullPassSampler, SequentialSampler

GOLDEN = Path(__file__).parent / "data"
SAMPLE_INDEX_CASES = json.loads((GOLDEN / "sample_index_cases.json").read_text())
SPLIT_CASES = json.loads((GOLDEN / "parse_cases.json").read_text())["split"]
SAMPLERS = json.loads((GOLDEN / "samplers.json").read_text())
SAMPLER_CASES = [case for case in SAMPLERS if case["sampler"] == "single"]
CYCLIC_CASES = [case for case in SAMPLERS if case["sampler"] == "random"]
FULL_PASS_CASES = [case for case in SAMPLERS if case["sampler"] == "full_validation"]


@pytest.mark.parametrize("case", SAMPLE_INDEX_CASES, ids=lambda case: str(case["k"]))
def test_sample_index_equals_megatrons(case: dict[str, Any]) -> None:
    lengths, documents = np.array(case["lens"], np.int32), np.array(case["doc_idx"], np.int32)
    samples = count_samples(int(lengths[documents].sum()), case["seq"], case["extra"], case["drop_last"])
    index = build_sample_index(lengths, documents, case["seq"], samples, case["extra"])
    assert index.tolist() == case["result"]


@pytest.mark.parametrize("case", SPLIT_CASES, ids=lambda case: case["split"])
def test_split_weights_equal_megatrons(case: dict[str, Any]) -> None:
    assert list(parse_split(case["split"])) == case["vector"]


def sampler(case: dict[str, Any]) -> SequentialSampler:
    names = ("micro_batch_size", "consumed_samples", "data_parallel_rank", "data_parallel_size", "drop_last")
    return SequentialSampler(case["total_samples"], **{name: case[name] for name in names if name in case})


@pytest.mark.parametrize("case", [case for case in SAMPLER_CASES if "error" not in case], ids=lambda case: str(SAMPLER_CASES.index(case)))
def test_sequential_sampler_deals_megatrons_micro_batches(case: dict[str, Any]) -> None:
    found, expected = list(sampler(case)), case["batches"]
    if case["truncated"]:
        found = found[:20] + found[-5:]
    assert found == expected


@pytest.mark.parametrize("case", [case for case in SAMPLER_CASES if "error" not in case], ids=lambda case: str(SAMPLER_CASES.index(case)))
def test_sequential_sampler_knows_how_many_micro_batches_are_left(case: dict[str, Any]) -> None:
    assert len(sampler(case)) == case["num_batches"]


@pytest.mark.parametrize("case", [case for case in SAMPLER_CASES if "error" in case], ids=lambda case: case["error"])
def test_sequential_sampler_refuses_what_megatron_refuses(case: dict[str, Any]) -> None:
    with pytest.raises(DatasetError):
        sampler(case)


def cyclic(case: dict[str, Any]) -> CyclicSampler:
    names = ("micro_batch_size", "consumed_samples", "data_parallel_rank", "data_parallel_size", "data_sharding")
    return CyclicSampler(case["total_samples"], **{name: case[name] for name in names})


def number(case: dict[str, Any]) -> str:
    return str(SAMPLERS.index(case))


@pytest.mark.parametrize("case", [case for case in CYCLIC_CASES if "error" not in case], ids=number)
def test_cyclic_sampler_permutes_as_megatron_does(case: dict[str, Any]) -> None:
    found = list(cyclic(case).epoch_batches(*divmod(case["consumed_samples"], cyclic(case).epoch_samples)))
    assert (len(found), found[:20] + found[20:][-5:] if case["truncated"] else found) == (case["num_batches"], case["batches"])


def in_step(case: dict[str, Any]) -> bool:
    """Whether Megatron's rank ends its epoch with the others; where it takes one step more, it is out of step for good."""
    return "error" not in case and case["consumed_after"] % cyclic(case).epoch_samples == 0


@pytest.mark.parametrize("case", list(filter(in_step, CYCLIC_CASES)), ids=number)
def test_cyclic_sampler_goes_on_into_megatrons_next_epoch(case: dict[str, Any]) -> None:
    sampler = cyclic(case)
    left_in_epoch = (sampler.epoch_samples - case["consumed_samples"] % sampler.epoch_samples) // sampler.samples_per_step
    expected = case["next_epoch_first_batches"]
    assert list(itertools.islice(sampler, left_in_epoch, left_in_epoch + len(expected))) == expected


@pytest.mark.parametrize("case", [case for case in CYCLIC_CASES if "error" in case], ids=number)
def test_cyclic_sampler_refuses_what_megatron_fails_on(case: dict[str, Any]) -> None:
    with pytest.raises(DatasetError):
        cyclic(case)


@pytest.mark.parametrize("case", FULL_PASS_CASES, ids=number)
def test_a_full_pass_deals_megatrons_samples(case: dict[str, Any]) -> None:
    sampler = FullPassSampler(
        case["total_samples"], data_parallel_rank=case["data_parallel_rank"], data_parallel_size=case["data_parallel_size"]
    )
    found = list(sampler)
    assert (len(sampler), len(found)) == (case["len"], case["num_batches"])
    assert (found[:20] + found[-5:] if case["truncated"] else found) == case["batches"]
