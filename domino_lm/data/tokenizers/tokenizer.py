"""Text to token ids and back. All tokenizers read local files only.

Encoding is shaped for batches: ``encode_batch`` takes many texts and returns one flat array with the lengths, so a
faster tokenizer can be put behind the same seam.
"""

import hashlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

PIECE_CHARACTERS = 1 << 18
LONGEST_WORD = 1 << 17
"""Characters without white space between them, or of white space alone; merging more at once takes gigabytes."""
NOWHERE = re.compile("(?!)")
"""The border of tokenizers that may not be cut between words."""
_WORD = re.compile(r"\S++|\s++")

Ids = npt.NDArray[np.int32]
Lengths = npt.NDArray[np.int64]
Item = TypeVar("Item")


class TokenizerError(ValueError):
    """A tokenizer that cannot be built from the flags given, or a text that it cannot encode."""


class Tokenizer(Protocol):
    """Turns text into token ids. Nothing is put before or after a text: an end-of-document token is the caller's."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, before any padding."""

    @property
    def eod(self) -> int | None:
        """Id that ends a document; None when the vocabulary has none."""

    @property
    def pad(self) -> int | None:
        """Id that the vocabulary calls padding, None when there is none; short samples are filled up without an id."""

    @property
    def uses_threads(self) -> bool:
        """Whether several of its kind encode at the same time in threads of one process (they free the interpreter's lock)."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Ids of all texts back to back, and how many belong to each text."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def identity(self) -> dict[str, str]:
        """Names the tokenizer by content: its kind and the hash of each file. Equal identities give equal ids."""


def flatten(ids: Sequence[Sequence[int]]) -> tuple[Ids, Lengths]:
    """Ids of many texts as one array, and the length of each."""
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return np.fromiter(itertools.chain.from_iterable(ids), np.int32, int(lengths.sum())), lengths


def _cut_long_texts(texts: Sequence[str], border: re.Pattern[str], cut_words: bool) -> Iterator[tuple[int, int, str]]:
    """The texts, long ones in pieces of about PIECE_CHARACTERS that begin at a ``border``: number of the text, offset in it, piece.

    Encoding a text of many megabytes at once takes up to a hundred times its size in memory. A border must be a place
    where the tokenizer starts afresh whatever stands before and behind it. With ``cut_words`` a piece also ends inside a word that is too long.
    """
    for i, text in enumerate(texts):
        begin = 0
        for end in [*(_ends_in_words(text) if cut_words and len(text) > LONGEST_WORD else ()), len(text)]:
            while end - begin > PIECE_CHARACTERS and (found := border.search(text, begin + PIECE_CHARACTERS, end)) is not None:
                yield i, begin, text[begin : found.start()]
                begin = found.start()
            yield i, begin, text[begin:end]
            begin = end


def _ends_in_words(text: str) -> Iterator[int]:
    """Where words, and stretches of white space, are cut that are longer than LONGEST_WORD."""
    for word in _WORD.finditer(text):
        yield from range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD)


def in_groups(items: Iterable[Item], size_of: Callable[[Item], int], size: int) -> Iterator[list[Item]]:
    """Consecutive ``items`` in lists that end with the item by which their sizes reach ``size``."""
    group: list[Item] = []
    total = 0
    for item in items:
        group.append(item)
        total += size_of(item)
        if total >= size:
            yield group
            group, total = [], 0
    if group:
        yield group


def encode_pieces(
    encode: Callable[[list[str]], tuple[Ids, Lengths]],
    texts: Sequence[str],
    border: re.Pattern[str],
    spell: Callable[[str, int], str] = lambda piece, begin: piece,
    cut_words: bool = True,
) -> tuple[Ids, Lengths]:
    """What ``encode`` gives for all texts, called with a bounded number of characters at a time.

    ``spell`` puts a piece that begins at an offset of its text in the form that ``encode`` takes. With ``cut_words`` words longer than
    LONGEST_WORD are encoded in parts: in time linear in their length, and a few tokens at the cuts are others.
    """
    if sum(map(len, texts)) <= PIECE_CHARACTERS:
        return encode([spell(text, 0) for text in texts])
    per_text = np.zeros(len(texts), np.int64)
    ids: list[Ids] = []
    for group in in_groups(_cut_long_texts(texts, border, cut_words), lambda cut: len(cut[2]), PIECE_CHARACTERS):
        found, lengths = encode([spell(piece, begin) for _, begin, piece in group])
        np.add.at(per_text, [owner for owner, _, _ in group], lengths)
        ids.append(found)
    return np.concatenate(ids), per_text


def shortened(text: str, shown: int = 40) -> str:
    """A text as a message shows it: the beginning of a long one."""
    return text if len(text) <= shown else f"{text[:shown]}..."


def sha256_of(path: str) -> str:
    """Hash of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
