"""Sample index, split weights and the sequential sampler equal Megatron's on direct calls."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from domino_lm.data.gpt_dataset import parse_split
from domino_lm.data.indices import build_sample_index, count_samples
from domino_lm.data.loader import LoaderError, SequentialSampler

GOLDEN = Path(__file__).parent / "data"
SAMPLE_INDEX_CASES = json.loads((GOLDEN / "sample_index_cases.json").read_text())
SPLIT_CASES = json.loads((GOLDEN / "parse_cases.json").read_text())["split"]
SAMPLER_CASES = [case for case in json.loads((GOLDEN / "samplers.json").read_text()) if case["sampler"] == "single"]


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
    with pytest.raises(LoaderError):
        sampler(case)
