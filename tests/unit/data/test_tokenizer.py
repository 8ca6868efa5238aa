"""Tokenizers: wrong files are refused by the name of their flag, before anything else happens."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

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


@pytest.mark.filterwarnings("ignore:.*gigatoken")
@pytest.mark.parametrize("fast", ["0", "1"])
@pytest.mark.parametrize("ids", [(400, 401), (400, 500), (401, 400), (408, 409)], ids=["plain", "gap", "permuted", "shifted"])
def test_ids_are_those_of_the_tokenizers_library_whatever_ids_the_file_says(
    ids: tuple[int, int], fast: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOMINO_LM_GIGATOKEN", fast)
    description = json.loads((Path(__file__).parent / "gapped_tokenizer.json").read_text())
    for token, number in zip(description["added_tokens"], ids, strict=True):
        token["id"] = number
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "pad_token": "<|fim|>"}')
    found = build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    library = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = ["x <|fim|> y <|endoftext|>", "<|endoftext|>", "plain words", "a<|fim|><|fim|>b"]
    expected = [library.encode(text).ids for text in texts]
    assert found.encode_batch(texts)[0].tolist() == [number for ids in expected for number in ids]
    assert [found.encode(text) for text in texts] == expected
    assert (found.eod, found.pad) == (library.token_to_id("<|endoftext|>"), library.token_to_id("<|fim|>"))
    assert found.vocab_size > max([number for ids in expected for number in ids])


def test_leaving_the_fast_path_is_said_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("gigatoken")
    (tmp_path / "tokenizer.json").write_text((Path(__file__).parent / "gapped_tokenizer.json").read_text())
    with pytest.warns(UserWarning, match="gigatoken gives other ids than the tokenizers library, which encodes alone"):
        build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
