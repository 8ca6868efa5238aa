"""Tokenizers on SentencePiece models, with a memory of words that makes encoding several times faster.

If no piece of a BPE model reaches over a space, words are encoded independently of each other, so the ids of a word
seen before can be looked up. Whether a model is of this kind is read from the model itself; others are encoded text by
text.
"""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from domino_lm.data.tokenizers.tokenizer import LONGEST_WORD, NOWHERE, Ids, Lengths, encode_pieces, flatten, sha256_of

SPACE = "\u2581"  # SentencePiece's visible space
BETWEEN_SPACES = re.compile(f"{SPACE}*[^{SPACE}]+|{SPACE}+")
WORD_BORDER = re.compile(f"(?<=[^ {SPACE}])(?=[ {SPACE}])")
MAX_WORDS = 1 << 19
MAX_REMEMBERED_IDS = 1 << 23
BPE = 2


class SentencePieceTokenizer:
    """A SentencePiece model as it stands: no BOS or EOS is added, and ``<s>`` in a text is ordinary characters."""

    uses_threads = False

    def __init__(self, tokenizer_model: str) -> None:
        from sentencepiece import SentencePieceProcessor

        self._path = tokenizer_model
        self._model: Any = SentencePieceProcessor(model_file=tokenizer_model)
        self.vocab_size: int = self._model.vocab_size()
        ids: list[int] = [self._model.eos_id(), self._model.pad_id()]
        self.eod, self.pad = (found if found >= 0 else None for found in ids)
        self._words = WordMemory(self._model) if _words_are_independent(tokenizer_model, self._model) else None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        if self._words is not None:
            return self._words.encode_batch(texts)
        return encode_pieces(lambda pieces: flatten(self._model.encode(pieces, num_threads=1)), texts, NOWHERE)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode([int(i) for i in ids])
        return text

    def identity(self) -> dict[str, str]:
        return {"type": type(self).__name__, "tokenizer_model": sha256_of(self._path)}


class LegacySentencePieceTokenizer:
    """A SentencePiece model with special tokens of its own behind the vocabulary, as Megatron's legacy mode has them.

    A text is cut at its special tokens, leftmost first, and the parts are encoded apart; between two special tokens a
    leading piece that is a space alone is dropped. It knows no end of document.
    """

    uses_threads = False

    def __init__(self, tokenizer_model: str, special_tokens: Sequence[str]) -> None:
        self._plain = SentencePieceTokenizer(tokenizer_model)
        self._path, model = tokenizer_model, self._plain._model
        self._special: dict[str, int] = {}
        self.vocab_size: int = self._plain.vocab_size
        for token in special_tokens:
            known = model.piece_to_id(token)
            if known != model.unk_id():
                self._special[token] = known
            elif token not in self._special:
                self._special[token] = self.vocab_size
                self.vocab_size += 1
        self._names = {i: token for token, i in self._special.items()}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._space: int = model.piece_to_id(SPACE)
        self.eod: int | None = None
        self.pad: int | None = None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text).tolist()
        return ids

    def _encode(self, text: str) -> Ids:
        parts = self._cut.split(text) if self._cut is not None else [text]
        found: list[Ids] = []
        for i, part in enumerate(parts):
            if i % 2:
                found.append(np.array([self._special[part]], np.int32))
                continue
            long = len(part) > LONGEST_WORD
            encoded = self._plain.encode_batch([part])[0] if long else np.array(self._plain.encode(part), np.int32)
            between = 0 < i < len(parts) - 1
            found.append(encoded[1:] if between and encoded[:1].tolist() == [self._space] else encoded)
        return np.concatenate(found)

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        encoded = [self._encode(text) for text in texts]
        ids = np.concatenate(encoded) if len(encoded) > 1 else encoded[0] if encoded else np.empty(0, np.int32)
        return ids, np.fromiter(map(len, encoded), np.int64, len(encoded))

    def decode(self, ids: Sequence[int]) -> str:
        parts = []
        for special, group in itertools.groupby(map(int, ids), key=self._names.get):
            run = list(group)
            parts += [special] * len(run) if special is not None else [self._plain.decode(run)]
        return " ".join(parts).strip()

    def identity(self) -> dict[str, str]:
        return {"type": type(self).__name__, "tokenizer_model": sha256_of(self._path), "special_tokens": " ".join(self._special)}


class WordMemory:
    """Encodes text as the model does, word by word; a word is spaces and what stands between them and the next space.

    Words are numbered as they come; the ids of word i are ``_flat[_starts[i] : _starts[i + 1]]``.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._space: int = model.piece_to_id(SPACE)
        self._numbers = _Numbers()
        self._flat: Ids = np.empty(0, np.int32)
        self._starts: Lengths = np.zeros(1, np.int64)

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Ids of all texts back to back, and how many belong to each text."""
        return encode_pieces(self._encode_words, texts, WORD_BORDER, _spelled)

    def _encode_words(self, texts: list[str]) -> tuple[Ids, Lengths]:
        """The same for texts whose spaces are spelled as the model spells them."""
        words = list(map(BETWEEN_SPACES.findall, texts))
        if len(self._numbers) > MAX_WORDS or len(self._flat) > MAX_REMEMBERED_IDS:
            self._numbers, self._flat, self._starts = _Numbers(), np.empty(0, np.int32), np.zeros(1, np.int64)
        in_text = np.fromiter(map(len, words), np.int64, len(words))
        numbers = np.fromiter(map(self._numbers.__getitem__, itertools.chain.from_iterable(words)), np.int64, int(in_text.sum()))
        self._learn(self._numbers.take_new())
        starts, counts = self._starts[numbers], self._starts[numbers + 1] - self._starts[numbers]
        ends = np.cumsum(counts)
        begins_in_text = np.concatenate(([0], ends))[np.concatenate(([0], np.cumsum(in_text)))]
        ids = self._flat[np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1] if len(ends) else 0)]
        return ids, np.diff(begins_in_text)

    def _learn(self, new: list[str]) -> None:
        """Encode words that have numbers, but no ids yet."""
        if not new:
            return
        # The model puts a space before every text itself; the first one of the word stands for it.
        encoded = self._model.encode([word[1:] for word in new], num_threads=1)
        ids, lengths = flatten([[self._space] if word == SPACE else found for word, found in zip(new, encoded, strict=True)])
        self._starts = np.concatenate((self._starts, self._starts[-1] + np.cumsum(lengths)))
        self._flat = np.concatenate((self._flat, ids))


def _spelled(piece: str, begin: int) -> str:
    """A piece of a text with spaces spelled as the model does, which puts one before each text, and part of a word, that is not empty."""
    spelled = piece.replace(" ", SPACE)
    return SPACE + spelled if spelled and (begin == 0 or not spelled.startswith(SPACE)) else spelled


class _Numbers(dict[str, int]):
    """Numbers of words, from 0 in the order in which they were first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._new: list[str] = []

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        self._new.append(word)
        return number

    def take_new(self) -> list[str]:
        """The words that were new since the last call."""
        new, self._new = self._new, []
        return new


def _words_are_independent(path: str, model: Any) -> bool:
    """Whether the text between spaces is encoded the same whatever stands around it.

    So it is in BPE models that change no character, keep all spaces, put one before a text, spell unknown characters in
    bytes, and have no piece with a space behind another character.
    """
    # The classes that sentencepiece brings for its messages ask for a protobuf as new as itself.
    model_fields = _fields(Path(path).read_bytes())
    trainer, normalizer = _fields(model_fields.get(2, b"")), _fields(model_fields.get(3, b""))
    plain_text = not normalizer.get(2) and normalizer.get(4, 1) == 0 and normalizer.get(3, 1) == 1 and normalizer.get(5, 1) == 1
    if trainer.get(3, 1) != BPE or not trainer.get(35, 0) or trainer.get(24, 0) or not plain_text:
        return False
    if model.piece_to_id(SPACE) == model.unk_id():
        return False
    pieces = map(model.id_to_piece, range(model.vocab_size()))
    return not any(SPACE in piece.lstrip(SPACE) for piece in pieces)


def _fields(message: bytes) -> dict[int, Any]:
    """Last value of each field of a protocol-buffers message, by the field's number: integers, or bytes."""
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.unknown_fields import UnknownFieldSet

    return {field.field_number: field.data for field in UnknownFieldSet(Empty.FromString(message))}
