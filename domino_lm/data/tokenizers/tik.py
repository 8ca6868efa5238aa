"""Megatron's TikTokenizer: a JSON list of byte strings in the order of their ranks, encoded as the library tiktoken does.

The ids are tiktoken's; the work is done by the library ``tokenizers``, whose merges follow from the ranks.
"""

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from domino_lm.config.foreign_text import parse_json
from domino_lm.data.tokenizers.tokenizer import NOWHERE, Ids, Lengths, TokenizerError, encode_pieces, flatten, sha256_of

DEFAULT_VOCAB_SIZE = 2**17
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
SPACES = r"\s+(?!\S)|\s+"
PATTERNS = {
    "v1": rf"{BEFORE_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|{SPACES}",
    "v2": rf"{BEFORE_WORD}[{UPPER}]*[{LOWER}]+|{BEFORE_WORD}[{UPPER}]+[{LOWER}]*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{SPACES}",
}
"""What a text is cut by before its pieces are merged, by the names of --tiktoken-pattern."""


class TikTokenizer:
    """Byte-level BPE by ranks. The first ``num_special`` ids are special tokens, which a text can contain by name.

    Those are ``special_tokens`` and then ``<SPECIAL_7>``, ``<SPECIAL_8>``, ...; ``</s>`` ends a document. ``vocab_size``
    counts them, and takes as many of the file's byte strings as there is room for.
    """

    uses_threads = False

    def __init__(
        self, path: str, pattern: str = "v2", vocab_size: int | None = None, num_special: int = 1000, special_tokens: Sequence[str] = ()
    ) -> None:
        self.vocab_size: int = vocab_size or DEFAULT_VOCAB_SIZE
        self._identity = {"pattern": pattern, "vocab_size": str(self.vocab_size)}
        self._path = path
        named = list(special_tokens or SPECIAL_TOKENS)
        _check_special(named, num_special, self.vocab_size)
        special = named + [f"<SPECIAL_{number}>" for number in range(len(named), num_special)]
        if len(set(special)) < len(special):
            raise TokenizerError("--tokenizer-special-tokens are not all different; give each of them once")
        self._identity["special_tokens"] = " ".join([*named, str(num_special)])
        ranked = _read_ranked(path, self.vocab_size - num_special)
        self._bytes = [token.encode() for token in special] + ranked
        self.eod: int | None = special.index("</s>")
        self.pad: int | None = special.index("<pad>") if "<pad>" in special else None
        self._backend = Backend.from_str(json.dumps(_description(special, ranked, PATTERNS[pattern])))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        return encode_pieces(self._encode_whole, texts, NOWHERE)

    def _encode_whole(self, texts: list[str]) -> tuple[Ids, Lengths]:
        return flatten([encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)])

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self._bytes[int(number)] for number in ids).decode("utf-8", errors="replace")

    def identity(self) -> dict[str, str]:
        return {"type": "TikTokenizer", **self._identity, "tokenizer_model": sha256_of(self._path)}


def _check_special(named: Sequence[str], num_special: int, vocab_size: int) -> None:
    missing = [token for token in SPECIAL_TOKENS[:3] if token not in named]
    if missing:
        raise TokenizerError(f"--tokenizer-special-tokens leave out {', '.join(missing)}, which a TikTokenizer cannot do without")
    if not len(named) <= num_special < vocab_size:
        raise TokenizerError(
            f"--tiktoken-num-special-tokens {num_special} must be at least the {len(named)} that have names, and below the "
            f"--vocab-size of {vocab_size}"
        )


def _read_ranked(path: str, count: int) -> list[bytes]:
    """The file's first ``count`` byte strings. Raises TokenizerError if it has fewer, or is of another form."""
    entries = parse_json(Path(path).read_text(encoding="utf-8"))
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and {"rank", "token_bytes"} <= entry.keys() for entry in entries):
        raise TokenizerError("it must be a JSON list of objects with rank and token_bytes")
    if len(entries) < count:
        raise TokenizerError(f"it holds {len(entries)} byte strings, and --vocab-size asks for {count} beside the special tokens")
    ranked = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries[:count]]
    if [entry["rank"] for entry in entries[:count]] != list(range(count)):
        raise TokenizerError("its ranks do not run from 0 on in the order of the list")
    if count < 256 or any(ranked[number] != bytes([number]) for number in range(256)):
        raise TokenizerError("its first 256 byte strings are not the single bytes in their order")
    if len(set(ranked)) < count:
        raise TokenizerError("it holds a byte string twice")
    return ranked


def _description(special: Sequence[str], ranked: Sequence[bytes], pattern: str) -> dict[str, Any]:
    """A tokenizer.json. A byte string that spells a special token is left out: its text is always taken for the token."""
    spelled = _spelled_bytes()
    words = ["".join(spelled[byte] for byte in token) for token in ranked]
    vocabulary = {word: len(special) + rank for rank, word in enumerate(words)} | {token: id_ for id_, token in enumerate(special)}
    added = [
        {"id": id_, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for id_, token in enumerate(special)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # a piece that is a token is that token, whatever its merges are
            "vocab": vocabulary,
            "merges": list(_merges(words, set(special))),
        },
    }


def _merges(words: Sequence[str], special: set[str]) -> Iterator[tuple[str, str]]:
    """Every pair that makes a token, by the rank of the token: tiktoken merges the pair whose result has the lowest."""
    ranks: Mapping[str, int] = {word: rank for rank, word in enumerate(words) if word not in special}
    for word in ranks:
        pairs = [(word[:cut], word[cut:]) for cut in range(1, len(word))]
        yield from sorted(
            (pair for pair in pairs if pair[0] in ranks and pair[1] in ranks), key=lambda pair: (ranks[pair[0]], ranks[pair[1]])
        )


def _spelled_bytes() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself if it shows, else one from 256 on."""
    shows = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = iter(range(256, 512))
    return [chr(byte if byte in shows else next(others)) for byte in range(256)]
