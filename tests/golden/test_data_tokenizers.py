"""Tokenizers give the ids and the text that Megatron's wrappers give."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from domino_lm.config import TokenizerConfig
from domino_lm.data.tokenizer import Tokenizer, build_tokenizer

GOLDEN = Path(__file__).parent / "data" / "tokenizers"
EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
SETTINGS = {
    "gpt2_bpe": TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer", vocab_file=str(GOLDEN / "gpt2-bpe/vocab.json"), merge_file=str(GOLDEN / "gpt2-bpe/merges.txt")
    ),
    "sp4096_llama2": TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(EXAMPLES / "sp4096.model")),
    "mistral_v1_llama2": TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(GOLDEN / "mistral-v1/tokenizer.model")),
}


@pytest.fixture(scope="module", params=SETTINGS)
def golden(request: pytest.FixtureRequest) -> tuple[Tokenizer, dict[str, Any]]:
    expected = json.loads((GOLDEN / f"expected_{request.param}.json").read_text())
    return build_tokenizer(SETTINGS[request.param]), expected


def test_ids_equal_megatrons(golden: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, expected = golden
    assert [tokenizer.encode(case["text"]) for case in expected["cases"]] == [case["ids"] for case in expected["cases"]]


def test_a_batch_gives_the_ids_of_its_texts(golden: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, expected = golden
    ids, lengths = tokenizer.encode_batch([case["text"] for case in expected["cases"]])
    assert ids.tolist() == [token for case in expected["cases"] for token in case["ids"]]
    np.testing.assert_array_equal(lengths, [len(case["ids"]) for case in expected["cases"]])


def test_text_equals_megatrons(golden: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, expected = golden
    assert [tokenizer.decode(case["ids"]) for case in expected["cases"]] == [case["detokenized"] for case in expected["cases"]]


def test_vocabulary_size_and_end_of_document_equal_megatrons(golden: tuple[Tokenizer, dict[str, Any]]) -> None:
    tokenizer, expected = golden
    assert (tokenizer.vocab_size, tokenizer.eod) == (expected["vocab_size"], expected["eod"])


@pytest.mark.parametrize("name", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer"])
def test_all_sentencepiece_names_mean_the_same_tokenizer(name: str) -> None:
    settings = TokenizerConfig(tokenizer_type=name, tokenizer_model=SETTINGS["sp4096_llama2"].tokenizer_model)
    assert build_tokenizer(settings).identity() == build_tokenizer(SETTINGS["sp4096_llama2"]).identity()


def test_end_of_text_in_a_document_is_the_end_of_document_of_gpt2() -> None:
    assert build_tokenizer(SETTINGS["gpt2_bpe"]).encode("a<|endoftext|>")[-1] == 50256
