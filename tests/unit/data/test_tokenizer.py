"""Tokenizers: wrong files are refused by the name of their flag, before anything else happens."""

from pathlib import Path

import pytest

from domino_lm.config.data import TokenizerConfig
from domino_lm.data.tokenizers.build import build_tokenizer
from domino_lm.data.tokenizers.tokenizer import TokenizerError

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "examples/data/sp4096.model")
VOCAB = str(ROOT / "tests/golden/data/tokenizers/gpt2-bpe/vocab.json")
MERGES = str(ROOT / "tests/golden/data/tokenizers/gpt2-bpe/merges.txt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "--tokenizer-type is needed; choose one of GPT2BPETokenizer"),
        ({"tokenizer_type": "Nope"}, "--tokenizer-type Nope is unknown; choose one of GPT2BPETokenizer"),
        ({"tokenizer_type": "Llama2Tokenizer"}, "needs --tokenizer-model FILE"),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": "/no/such.model"}, "--tokenizer-model /no/such.model: no such file"),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": VOCAB}, "--tokenizer-model .* cannot be read as a tokenizer"),
        ({"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(ROOT)}, "--tokenizer-model .*: no such file"),
        ({"tokenizer_type": "NullTokenizer"}, "give --vocab-size"),
        ({"tokenizer_type": "GPT2BPETokenizer", "merge_file": MERGES}, "needs --vocab-file FILE"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": VOCAB}, "needs --merge-file FILE"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": VOCAB, "merge_file": "/no/merges"}, "--merge-file /no/merges: no such file"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": MERGES, "merge_file": VOCAB}, "--vocab-file .* cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_its_flag(settings: dict[str, str], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(TokenizerConfig(**settings))


def test_an_end_of_document_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(TokenizerError, match="--null-tokenizer-eod-id 100 is outside --vocab-size 100; use 0 to 99"):
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", null_tokenizer_eod_id=100), 100)


def test_identity_follows_the_content_not_the_path(tmp_path: Path) -> None:
    copy = tmp_path / "copy.model"
    copy.write_bytes(Path(MODEL).read_bytes())
    identities = [
        build_tokenizer(TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(p))).identity() for p in (MODEL, copy)
    ]
    assert identities[0] == identities[1]


def test_an_empty_batch_has_no_ids() -> None:
    ids, lengths = build_tokenizer(TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=MODEL)).encode_batch([])
    assert (len(ids), len(lengths)) == (0, 0)
