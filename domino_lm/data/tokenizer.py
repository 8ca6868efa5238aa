"""Text to token ids and back. All tokenizers read local files only.

Encoding is shaped for batches: ``encode_batch`` takes many texts and returns one flat array with the lengths, so a
faster tokenizer can be put behind the same seam.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

END_OF_TEXT = "<|endoftext|>"

Ids = npt.NDArray[np.int32]
Lengths = npt.NDArray[np.int64]


class TokenizerError(ValueError):
    """A tokenizer that cannot be built from the flags given. The message names the flag."""


class TokenizerSettings(Protocol):
    """What ``build_tokenizer`` reads; the fields carry the names of the flags."""

    @property
    def tokenizer_type(self) -> str | None: ...
    @property
    def tokenizer_model(self) -> str | None: ...
    @property
    def vocab_file(self) -> str | None: ...
    @property
    def merge_file(self) -> str | None: ...


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
        """Id that fills up short samples; None when the vocabulary has none."""

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Ids of all texts back to back, and how many belong to each text."""

    def decode(self, ids: Sequence[int]) -> str: ...

    def identity(self) -> dict[str, str]:
        """Names the tokenizer by content: its kind and the hash of each file. Equal identities give equal ids."""


class GPT2BPETokenizer:
    """Byte-level BPE of GPT-2 from ``vocab.json`` and ``merges.txt``.

    A literal ``<|endoftext|>`` in a text becomes the end-of-document id, as in the original: a text can end its own
    document.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Backend

        self._files = {"vocab_file": vocab_file, "merge_file": merge_file}
        self._backend = Backend(models.BPE.from_file(vocab_file, merge_file))
        self._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._backend.decoder = decoders.ByteLevel()
        self._backend.add_special_tokens([AddedToken(END_OF_TEXT)])
        self.vocab_size: int = self._backend.get_vocab_size()
        self.eod: int | None = self._backend.token_to_id(END_OF_TEXT)
        self.pad: int | None = None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        return _flatten([encoding.ids for encoding in self._backend.encode_batch_fast(list(texts))])

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def identity(self) -> dict[str, str]:
        return {"type": type(self).__name__} | {flag: _sha256(path) for flag, path in self._files.items()}


class SentencePieceTokenizer:
    """A SentencePiece model as it stands: no BOS or EOS is added, and ``<s>`` in a text is ordinary characters."""

    def __init__(self, tokenizer_model: str) -> None:
        from sentencepiece import SentencePieceProcessor

        self._path = tokenizer_model
        self._model: Any = SentencePieceProcessor(model_file=tokenizer_model)
        self.vocab_size: int = self._model.vocab_size()
        self.eod: int | None = _present(self._model.eos_id())
        self.pad: int | None = _present(self._model.pad_id())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        return _flatten(self._model.encode(list(texts), num_threads=1))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode([int(i) for i in ids])
        return text

    def identity(self) -> dict[str, str]:
        return {"type": type(self).__name__, "tokenizer_model": _sha256(self._path)}


def _gpt2(settings: TokenizerSettings) -> Tokenizer:
    vocab_file = _require(settings, "vocab_file", "GPT-2's vocab.json")
    merge_file = _require(settings, "merge_file", "GPT-2's merges.txt")
    return _load(lambda: GPT2BPETokenizer(vocab_file, merge_file), f"--vocab-file {vocab_file} with --merge-file {merge_file}")


def _sentencepiece(settings: TokenizerSettings) -> Tokenizer:
    path = _require(settings, "tokenizer_model", "a SentencePiece model")
    return _load(lambda: SentencePieceTokenizer(path), f"--tokenizer-model {path}")


TOKENIZER_TYPES: dict[str, Callable[[TokenizerSettings], Tokenizer]] = {
    "GPT2BPETokenizer": _gpt2,
    "Llama2Tokenizer": _sentencepiece,
    "SentencePieceTokenizer": _sentencepiece,
    "GPTSentencePieceTokenizer": _sentencepiece,
}


def build_tokenizer(settings: TokenizerSettings) -> Tokenizer:
    """The tokenizer that ``--tokenizer-type`` names. Raises TokenizerError on an unknown type or a missing or unreadable file."""
    if settings.tokenizer_type not in TOKENIZER_TYPES:
        fault = "is needed" if settings.tokenizer_type is None else f"{settings.tokenizer_type} is unknown"
        raise TokenizerError(f"--tokenizer-type {fault}; choose one of {', '.join(TOKENIZER_TYPES)}.")
    return TOKENIZER_TYPES[settings.tokenizer_type](settings)


def _require(settings: TokenizerSettings, field: str, what: str) -> str:
    path, flag = getattr(settings, field), "--" + field.replace("_", "-")
    if not path:
        raise TokenizerError(f"--tokenizer-type {settings.tokenizer_type} needs {flag} FILE ({what}).")
    if not os.path.isfile(path):
        raise TokenizerError(f"{flag} {path}: no such file; give the path of {what}.")
    return str(path)


def _load(build: Callable[[], Tokenizer], flags: str) -> Tokenizer:
    try:
        return build()
    # Both libraries raise bare Exception, OSError or RuntimeError, depending on the fault.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise TokenizerError(
            f"{flags} cannot be read as a tokenizer ({reason}); check that the file is whole and of the right kind."
        ) from error


def _present(token_id: int) -> int | None:
    return token_id if token_id >= 0 else None


def _flatten(ids: Sequence[Sequence[int]]) -> tuple[Ids, Lengths]:
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return np.fromiter(itertools.chain.from_iterable(ids), np.int32, int(lengths.sum())), lengths


def _sha256(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
