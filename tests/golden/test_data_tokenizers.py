"""Tokenizers give the ids and the text that Megatron's wrappers give."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from domino_lm.config.data import TokenizerConfig
from domino_lm.data.tokenizers.build import build_tokenizer
from domino_lm.data.tokenizers.tokenizer import Tokenizer, TokenizerError

GOLDEN = Path(__file__).parent / "data" / "tokenizers"
EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
SETTINGS = {
    "gpt2_bpe": TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer", vocab_file=str(GOLDEN / "gpt2-bpe/vocab.json"), merge_file=str(GOLDEN / "gpt2-bpe/merges.txt")
    ),
    "sp4096_llama2": TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(EXAMPLES / "sp4096.model")),
    "mistral_v1_llama2": TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(GOLDEN / "mistral-v1/tokenizer.model")),
}
STRINGS = [case["text"] for case in json.loads((GOLDEN / "expected_gpt2_bpe.json").read_text())["cases"]]


@pytest.fixture(scope="module")
def hugging_face_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 as the tokenizers library saves it, with the special tokens named as transformers does."""
    folder = tmp_path_factory.mktemp("hf-gpt2")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(SETTINGS["gpt2_bpe"].vocab_file, SETTINGS["gpt2_bpe"].merge_file))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<|endoftext|>")])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>", "eos_token": {"content": "<|endoftext|>"}}')
    return folder


@pytest.fixture(
    scope="module", params=[*SETTINGS, "hf_gpt2", "hf_gpt2 without gigatoken", "gpt2_bpe without gigatoken", "sp4096_legacy_special"]
)
def golden(request: pytest.FixtureRequest, hugging_face_folder: Path) -> Iterator[tuple[Tokenizer, dict[str, Any]]]:
    name, _, without = request.param.partition(" ")
    expected = json.loads((GOLDEN / f"expected_{name}.json").read_text())
    with pytest.MonkeyPatch.context() as patch:
        if without:
            patch.setenv("DOMINO_LM_GIGATOKEN", "0")
        if name == "hf_gpt2":
            yield (
                build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(hugging_face_folder))),
                expected,
            )
        elif name == "sp4096_legacy_special":
            yield legacy(), expected | {"eod": None}  # Megatron raises AttributeError when it is asked
        else:
            yield build_tokenizer(SETTINGS[name]), expected


def legacy() -> Tokenizer:
    model, special = SETTINGS["sp4096_llama2"].tokenizer_model, ("<CLS>", "<SEP>", "<EOD>", "<MASK>")
    return build_tokenizer(
        TokenizerConfig(
            tokenizer_type="SentencePieceTokenizer",
            tokenizer_model=model,
            tokenizer_sentencepiece_legacy=True,
            tokenizer_special_tokens=special,
        )
    )


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


def test_legacy_special_tokens_are_cut_out_as_megatron_does() -> None:
    cases = json.loads((GOLDEN / "expected_sp4096_legacy_special.json").read_text())["extra_cases"]
    assert [legacy().encode(case["text"]) for case in cases] == [case["ids"] for case in cases]


def test_special_tokens_without_the_legacy_mode_are_refused() -> None:
    with pytest.raises(TokenizerError, match="--tokenizer-sentencepiece-legacy"):
        build_tokenizer(
            TokenizerConfig(
                tokenizer_type="SentencePieceTokenizer",
                tokenizer_model=SETTINGS["sp4096_llama2"].tokenizer_model,
                tokenizer_special_tokens=("<CLS>",),
            )
        )


NULL = json.loads((GOLDEN / "expected_null.json").read_text())


def null(**given: Any) -> Tokenizer:
    return build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", **given), vocab_size=1000)


@pytest.mark.parametrize("case", NULL["cases"], ids=lambda case: repr(case["text"]))
def test_null_tokenizer_reads_numbers_as_megatron_does(case: dict[str, Any]) -> None:
    if "error" in case:
        with pytest.raises(TokenizerError, match="not a number"):
            null().encode(case["text"])
    else:
        assert null().encode(case["text"]) == case["ids"]


def test_null_tokenizer_has_megatrons_special_ids() -> None:
    assert (null().vocab_size, null().eod, null().pad) == (NULL["vocab_size"], NULL["eod"], NULL["pad"])
    given, expected = null(null_tokenizer_eod_id=5, null_tokenizer_pad_id=7), NULL["with_eod5_pad7"]
    assert (given.vocab_size, given.eod, given.pad) == (expected["vocab_size"], expected["eod"], expected["pad"])


def test_null_tokenizer_of_older_versions_has_its_end_of_document_behind_the_vocabulary() -> None:
    old = null(null_tokenizer_extra_eod=True)
    assert (old.vocab_size, old.eod) == (1001, 1000)


def template(folder: Path, target: Path) -> Path:
    """The same tokenizer with a template that puts a token before each text."""
    content = json.loads((folder / "tokenizer.json").read_text())
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [50256], "tokens": ["<|endoftext|>"]}}
    content["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    (target / "tokenizer.json").write_text(json.dumps(content))
    return target


@pytest.mark.parametrize(("without", "ids"), [(False, [50256, 64]), (True, [64])])
def test_a_template_of_hugging_face_applies_unless_special_tokens_are_off(
    hugging_face_folder: Path, tmp_path: Path, without: bool, ids: list[int]
) -> None:
    model = str(template(hugging_face_folder, tmp_path))
    tokenizer = build_tokenizer(
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model, tokenizer_hf_no_include_special_tokens=without)
    )
    assert (tokenizer.encode("a"), tokenizer.encode_batch(["a"])[0].tolist()) == (ids, ids)


def corpus() -> list[str]:
    return [json.loads(line)["text"] for line in (EXAMPLES / "corpus.jsonl").read_text().split("\n")[:-1]]


def random_texts(count: int) -> list[str]:
    """Strings of characters that split words in odd places, from many scripts, and of the special token's parts."""
    rng = np.random.default_rng(5)
    alphabet = list(" \t\n\r.,'-_0123456789abcXYZ<|>\u00a0\u2028\u2581\u0301\u4f60\u597d\u0441\u043b\u0627\u05d0\U0001f600\u200d\ufeff\x00")
    alphabet += ["'s", "'ll", "  ", "<|endoftext|>", "<s>", "the ", " of", "ing"]
    weights = rng.dirichlet(np.ones(len(alphabet)), count)
    return ["".join(rng.choice(alphabet, rng.integers(0, 30), p=weights[i])) for i in range(count)]


@pytest.mark.parametrize("kind", [*SETTINGS, "hf_gpt2"])
def test_fast_batches_give_the_ids_of_the_slow_way(kind: str, hugging_face_folder: Path) -> None:
    given = (
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(hugging_face_folder))
        if kind == "hf_gpt2"
        else SETTINGS[kind]
    )
    tokenizer: Any = build_tokenizer(given)
    if "gpt2" in kind:
        pytest.importorskip("gigatoken")
        assert tokenizer._fast is not None, "gigatoken is installed but not used"
    else:
        assert tokenizer._words is not None, "words of this model are independent, but not remembered"
    texts = corpus() + STRINGS + random_texts(4000)
    ids, lengths = tokenizer.encode_batch(texts)
    slow = [tokenizer.encode(text) for text in texts]
    np.testing.assert_array_equal(lengths, list(map(len, slow)))
    np.testing.assert_array_equal(ids, [token for each in slow for token in each])


@pytest.mark.parametrize("gigatoken", ["0", "1"])
@pytest.mark.parametrize("kind", [*SETTINGS, "hf_gpt2"])
def test_long_texts_are_encoded_in_pieces_to_the_same_ids(
    kind: str, gigatoken: str, hugging_face_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOMINO_LM_GIGATOKEN", gigatoken)
    monkeypatch.setattr("domino_lm.data.tokenizers.tokenizer.PIECE_CHARACTERS", 40)
    given = SETTINGS.get(kind) or TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(hugging_face_folder))
    tokenizer = build_tokenizer(given)
    texts = ["", *corpus()[:40], *STRINGS, *random_texts(200)]
    ids, lengths = tokenizer.encode_batch(texts)
    whole = [tokenizer.encode(text) for text in texts]
    np.testing.assert_array_equal(lengths, list(map(len, whole)))
    np.testing.assert_array_equal(ids, [token for each in whole for token in each])


@pytest.mark.parametrize(
    ("token", "cut"), [({"content": "<x>"}, True), ({"content": "<x y>"}, False), ({"content": "<x>", "rstrip": True}, False)]
)
def test_texts_are_cut_only_where_no_token_reaches_over(
    token: dict[str, Any], cut: bool, hugging_face_folder: Path, tmp_path: Path
) -> None:
    description = json.loads((hugging_face_folder / "tokenizer.json").read_text())
    description["added_tokens"].append({**description["added_tokens"][0], "id": 50257, **token})
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    tokenizer: Any = build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path)))
    assert (tokenizer._border.search("a b") is not None) == cut


def test_without_gigatoken_the_tokenizers_library_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gigatoken.gigatoken_rs", None)
    tokenizer: Any = build_tokenizer(SETTINGS["gpt2_bpe"])
    assert (tokenizer._fast, tokenizer.encode_batch(["a b"])[0].tolist()) == (None, tokenizer.encode("a b"))


def test_the_fast_encoder_is_made_anew_before_its_memory_grows_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gigatoken")
    monkeypatch.setattr("domino_lm.data.tokenizers.fast_bpe.RENEW_AFTER_BYTES", 100)
    tokenizer: Any = build_tokenizer(SETTINGS["gpt2_bpe"])
    first = tokenizer._fast._encoder
    ids = [tokenizer.encode_batch(["some words here " * 5])[0].tolist() for _ in range(3)]
    assert tokenizer._fast._encoder is not first
    assert ids[0] == ids[1] == ids[2]
