"""TikTokenizer: the ids that tiktoken's rule gives, written out here byte by byte."""

from __future__ import annotations

import base64
import itertools
import json
import random
from pathlib import Path

import pytest

from domino_lm.config.data import TokenizerConfig
from domino_lm.data.tokenizers.build import build_tokenizer
from domino_lm.data.tokenizers.tik import TikTokenizer
from domino_lm.data.tokenizers.tokenizer import TokenizerError

SPECIAL = 20
RANKED = [bytes([byte]) for byte in range(256)] + [
    text.encode() for text in ("ab", "bc", "abc", "aa", "aaa", " a", " ab", "lo", " hello", "wor", "ld", "é", "<s>", "  ", "cab", "abcabc")
]


def write(folder: Path, ranked: list[bytes]) -> str:
    path = folder / "vocabulary.json"
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(b).decode(), "token_str": b.decode(errors="replace")} for i, b in enumerate(ranked)
    ]
    path.write_text(json.dumps(entries))
    return str(path)


def by_rank(piece: bytes, ranked: list[bytes]) -> list[int]:
    """The pair whose union has the lowest rank is joined, the leftmost of equals, until there is none."""
    if piece in ranked:
        return [SPECIAL + ranked.index(piece)]
    parts = [bytes([byte]) for byte in piece]
    while True:
        unions = [(ranked.index(a + b), i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranked]
        if not unions:
            return [SPECIAL + ranked.index(part) for part in parts]
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@pytest.fixture
def tokenizer(tmp_path: Path) -> TikTokenizer:
    return TikTokenizer(write(tmp_path, RANKED), "v2", SPECIAL + len(RANKED), SPECIAL)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_merged_by_the_rank_of_their_union(tokenizer: TikTokenizer, seed: int) -> None:
    source = random.Random(seed)
    piece = "".join(source.choice("abc") for _ in range(source.randint(1, 30)))
    assert tokenizer.encode(piece) == by_rank(piece.encode(), RANKED)


def test_ids_of_random_vocabularies_are_those_of_the_rule(tmp_path: Path) -> None:
    for seed in range(3):
        source, ranked = random.Random(seed), [bytes([byte]) for byte in range(256)]
        while len(ranked) < 300:
            union = source.choice(ranked[97:100] + ranked[256:]) + source.choice(ranked[97:100] + ranked[256:])
            ranked += [union] * (union not in ranked and len(union) < 9)
        found = TikTokenizer(write(tmp_path, ranked), "v1", SPECIAL + len(ranked), SPECIAL)
        for _ in range(20):
            piece = "".join(source.choice("abc") for _ in range(40))
            assert found.encode(piece) == by_rank(piece.encode(), ranked)


@pytest.mark.parametrize(
    ("pattern", "text", "pieces"),
    [
        ("v2", "hello worldWide 123!!\n\n  x", ["hello", " world", "Wide", " ", "1", "2", "3", "!!\n\n", " ", " x"]),
        ("v1", "hello worldWide 123!!\n\n  x", ["hello", " worldWide", " ", "1", "2", "3", "!!\n\n", " ", " x"]),
        ("v2", "a/b\r\n\tc", ["a", "/b", "\r\n", "\tc"]),
    ],
)
def test_a_pattern_cuts_as_its_name_says(tmp_path: Path, pattern: str, text: str, pieces: list[str]) -> None:
    ranked = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in dict.fromkeys(pieces) if len(piece) > 1]
    found = TikTokenizer(write(tmp_path, ranked), pattern, SPECIAL + len(ranked), SPECIAL)
    assert found.encode(text) == [SPECIAL + ranked.index(piece.encode()) for piece in pieces]


def test_special_tokens_come_first_and_are_taken_from_the_text(tokenizer: TikTokenizer) -> None:
    assert tokenizer.encode("ab</s><SPECIAL_9>ab<s>") == [SPECIAL + 256, 2, 9, SPECIAL + 256, 1]
    assert (tokenizer.eod, tokenizer.pad, tokenizer.vocab_size) == (2, 4, SPECIAL + len(RANKED))


def test_what_was_encoded_is_decoded(tokenizer: TikTokenizer) -> None:
    text = "hello wörld  é<s>\n abc 漢字"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([SPECIAL + RANKED.index(b"<s>"), SPECIAL + 0xC3]) == "<s>\ufffd"


def test_a_batch_gives_the_ids_of_its_texts(tokenizer: TikTokenizer) -> None:
    texts = ["ab abc", "", "<unk>"]
    ids, lengths = tokenizer.encode_batch(texts)
    assert ids.tolist() == [number for text in texts for number in tokenizer.encode(text)]
    assert lengths.tolist() == [len(tokenizer.encode(text)) for text in texts]


def test_settings_build_it(tmp_path: Path) -> None:
    path = write(tmp_path, RANKED)
    settings = TokenizerConfig(tokenizer_type="TikTokenizer", tokenizer_model=path, tiktoken_pattern="v1", tiktoken_num_special_tokens=12)
    found = build_tokenizer(settings, 12 + 260)
    assert (found.vocab_size, found.encode("ab")) == (272, [12 + 256])
    assert found.identity() != TikTokenizer(path, "v2", 272, 12).identity()


@pytest.mark.parametrize(
    ("ranked", "vocab_size", "special", "named", "message"),
    [
        (RANKED, None, 20, (), "272 byte strings, and --vocab-size asks for 131052"),
        (RANKED[:200], 220, 20, (), "first 256 byte strings"),
        ([*RANKED, RANKED[-1]], 20 + len(RANKED) + 1, 20, (), "a byte string twice"),
        (RANKED, 292, 5, (), "--tiktoken-num-special-tokens 5 must be at least the 7"),
        (RANKED, 292, 20, ("<unk>", "</s>"), "leave out <s>"),
        (RANKED, 292, 20, ("<unk>", "<s>", "</s>", "<s>"), "not all different"),
    ],
)
def test_a_wrong_file_is_refused(
    tmp_path: Path, ranked: list[bytes], vocab_size: int | None, special: int, named: tuple[str, ...], message: str
) -> None:
    path = write(tmp_path, ranked)
    with pytest.raises(TokenizerError, match=message):
        TikTokenizer(path, "v2", vocab_size, special, named)


def test_another_json_is_refused_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    settings = TokenizerConfig(tokenizer_type="TikTokenizer", tokenizer_model=str(tmp_path / "other.json"))
    with pytest.raises(TokenizerError, match=r"--tokenizer-model .*other.json.*JSON list|JSON list"):
        build_tokenizer(settings, 3000)
