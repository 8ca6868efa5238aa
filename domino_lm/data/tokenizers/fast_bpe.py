"""The ``gigatoken`` package behind a seam: batches in, flat arrays out, with its memory kept in bounds."""

import os
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from domino_lm.data.tokenizers.tokenizer import Ids, Lengths

RENEW_AFTER_BYTES = 256 << 20
GROWTH_BYTES = 256 << 20
PROBES = (
    "",
    " ",
    "Hello  world\n\n  x",
    "don't I'LL  we've",
    "a\tb\r\nc \u00a0d",
    "\u4f60\u597d \u0395\u03bb\u03bb\u03ac\u03c2 \U0001f600\u200d\U0001f525",
    "12345 3.14 e\u0301",
    "x" * 300,
)


class FastEncoder:
    """Encodes many texts in one call of gigatoken.

    The texts are joined by a special token, which is cut out of the ids again: one call then serves any number of
    texts and gives a plain array (its own call for batches returns an array type whose import alone takes a second).
    Texts that hold the token themselves are encoded one by one. gigatoken remembers every word it meets, without limit;
    so it is rebuilt after ``RENEW_AFTER_BYTES`` of text, or earlier when the process has grown by ``GROWTH_BYTES``.
    """

    def __init__(self, make: Callable[[], Any], separator: str) -> None:
        self._make, self._separator = make, separator
        self._encoder = make()
        self._separator_id = int(self._encoder.encode(separator)[0])
        self._encoded_bytes, self._resident_bytes = 0, _resident_bytes()

    @classmethod
    def create(cls, description: str, separator: str) -> Self | None:
        """An encoder for the tokenizer.json ``description``; None without gigatoken, or for a tokenizer that it does not know."""
        if os.environ.get("DOMINO_LM_GIGATOKEN") == "0":
            return None
        try:
            from gigatoken.gigatoken_rs import load_hf_json
        except ImportError:
            return None
        try:
            return cls(lambda: load_hf_json(description), separator)
        except Exception:  # its own kinds of error, for tokenizers of another kind and damaged files alike
            return None

    def agrees_with(self, encode: Callable[[str], list[int]], added: Sequence[str]) -> bool:
        """Whether ``encode`` gives the same ids for a few texts that tokenizers are known to differ on, and for all ``added`` tokens."""
        texts = [*PROBES, *added, *(f"a{token} b {token}" for token in added)]
        ids, lengths = self.encode_batch(texts)
        expected = [encode(text) for text in texts]
        return lengths.tolist() == list(map(len, expected)) and ids.tolist() == [i for each in expected for i in each]

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Ids of all texts back to back, and how many belong to each text."""
        if not texts:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        joined = self._separator.join(texts)
        self._renew_if_large(len(joined))
        ids = self._encoder.encode(joined)
        separators = np.flatnonzero(ids == self._separator_id)
        if len(separators) != len(texts) - 1:
            return self._one_by_one(texts)
        lengths = np.diff(separators, prepend=-1, append=len(ids)) - 1
        return np.delete(ids, separators).astype(np.int32, copy=False), lengths.astype(np.int64, copy=False)

    def _one_by_one(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        parts = [self._encoder.encode(text) for text in texts]
        return np.concatenate(parts).astype(np.int32, copy=False), np.fromiter(map(len, parts), np.int64, len(parts))

    def _renew_if_large(self, added: int) -> None:
        self._encoded_bytes += added
        if self._encoded_bytes > RENEW_AFTER_BYTES or _resident_bytes() - self._resident_bytes > GROWTH_BYTES:
            del self._encoder  # two at a time would need twice the memory
            self._encoder = self._make()
            self._encoded_bytes, self._resident_bytes = 0, _resident_bytes()


def _resident_bytes() -> int:
    """Memory of this process, 0 if the system does not say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
