"""Text to token ids and back. All tokenizers read local files only.

Encoding is shaped for batches: ``encode_batch`` takes many texts and returns one flat array with the lengths, so a
faster tokenizer can be put behind the same seam.
"""

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

PIECE_CHARACTERS = 1 << 20

Ids = npt.NDArray[np.int32]
Lengths = npt.NDArray[np.int64]


class TokenizerError(ValueError):
    """A tokenizer that cannot be built from the flags given, or a text that it cannot encode."""


class TokenizerSettings(Protocol):
    """What ``build_tokenizer`` reads; the fields carry the names of the flags. What a class lacks takes its default."""

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


def build_tokenizer(settings: TokenizerSettings, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that ``--tokenizer-type`` names; ``vocab_size`` is that of ``--vocab-size``.

    Raises TokenizerError on an unknown type or a missing or unreadable file.
    """
    kind = settings.tokenizer_type
    if kind not in TOKENIZER_TYPES:
        fault = "is needed" if kind is None else f"{kind} is unknown"
        raise TokenizerError(f"--tokenizer-type {fault}; choose one of {', '.join(TOKENIZER_TYPES)}.")
    _refuse_foreign(settings, kind)
    return TOKENIZER_TYPES[kind](settings, vocab_size)


def flatten(ids: Sequence[Sequence[int]]) -> tuple[Ids, Lengths]:
    """Ids of many texts as one array, and the length of each."""
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return np.fromiter(itertools.chain.from_iterable(ids), np.int32, int(lengths.sum())), lengths


def cut_long_texts(texts: Sequence[str], border: re.Pattern[str]) -> Iterator[tuple[int, int, str]]:
    """The texts, long ones in pieces of about PIECE_CHARACTERS that begin at a ``border``: number of the text, offset in it, piece.

    Encoding a text of many megabytes at once takes up to a hundred times its size in memory. A border must be a place
    where the tokenizer starts afresh whatever stands before and behind it.
    """
    for i, text in enumerate(texts):
        begin = 0
        while len(text) - begin > PIECE_CHARACTERS and (found := border.search(text, begin + PIECE_CHARACTERS)) is not None:
            yield i, begin, text[begin : found.start()]
            begin = found.start()
        yield i, begin, text[begin:]


def encode_pieces(
    encode: Callable[[list[str]], tuple[Ids, Lengths]],
    texts: Sequence[str],
    border: re.Pattern[str],
    spell: Callable[[str, int], str] = lambda piece, begin: piece,
) -> tuple[Ids, Lengths]:
    """What ``encode`` gives for all texts, called with a bounded number of characters at a time.

    ``spell`` puts a piece that begins at an offset of its text in the form that ``encode`` takes.
    """
    if sum(map(len, texts)) <= PIECE_CHARACTERS:
        return encode([spell(text, 0) for text in texts])
    per_text = np.zeros(len(texts), np.int64)
    ids: list[Ids] = []
    pieces: list[str] = []
    owners: list[int] = []
    size = 0
    for owner, begin, piece in cut_long_texts(texts, border):
        pieces.append(spell(piece, begin))
        owners.append(owner)
        size += len(piece)
        if size >= PIECE_CHARACTERS:
            ids.append(_encode_group(encode, pieces, owners, per_text))
            pieces, owners, size = [], [], 0
    if pieces:
        ids.append(_encode_group(encode, pieces, owners, per_text))
    return np.concatenate(ids), per_text


def _encode_group(encode: Callable[[list[str]], tuple[Ids, Lengths]], pieces: list[str], owners: list[int], per_text: Lengths) -> Ids:
    """Ids of some pieces; adds their lengths to those of their texts."""
    ids, lengths = encode(pieces)
    np.add.at(per_text, owners, lengths)
    return ids


def sha256_of(path: str) -> str:
    """Hash of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _gpt2(settings: TokenizerSettings, vocab_size: int | None) -> Tokenizer:
    from domino_lm.data.bpe import GPT2BPETokenizer

    vocab_file = _require(settings, "vocab_file", "GPT-2's vocab.json")
    merge_file = _require(settings, "merge_file", "GPT-2's merges.txt")
    return _load(lambda: GPT2BPETokenizer(vocab_file, merge_file), f"--vocab-file {vocab_file} with --merge-file {merge_file}")


def _sentencepiece(settings: TokenizerSettings, vocab_size: int | None) -> Tokenizer:
    from domino_lm.data.sentencepiece import LegacySentencePieceTokenizer, SentencePieceTokenizer

    path = _require(settings, "tokenizer_model", "a SentencePiece model")
    special_tokens = _option(settings, "tokenizer_special_tokens") or ()
    if _option(settings, "tokenizer_sentencepiece_legacy"):
        return _load(lambda: LegacySentencePieceTokenizer(path, special_tokens), f"--tokenizer-model {path}")
    if special_tokens:
        raise TokenizerError(
            "--tokenizer-special-tokens works with --tokenizer-sentencepiece-legacy alone; add it, or leave the tokens out."
        )
    return _load(lambda: SentencePieceTokenizer(path), f"--tokenizer-model {path}")


def _hugging_face(settings: TokenizerSettings, vocab_size: int | None) -> Tokenizer:
    from domino_lm.data.bpe import HuggingFaceTokenizer

    path = _require(settings, "tokenizer_model", "a tokenizer.json or its folder", folder=True)
    include = not _option(settings, "tokenizer_hf_no_include_special_tokens")
    return _load(lambda: HuggingFaceTokenizer(path, include), f"--tokenizer-model {path}")


def _null(settings: TokenizerSettings, vocab_size: int | None) -> Tokenizer:
    from domino_lm.data.null_tokenizer import NullTokenizer

    if vocab_size is None:
        raise TokenizerError("--tokenizer-type NullTokenizer reads numbers and has no vocabulary of its own: give --vocab-size.")
    return NullTokenizer(
        vocab_size,
        eod=_option(settings, "null_tokenizer_eod_id"),
        pad=_option(settings, "null_tokenizer_pad_id"),
        extra_eod=bool(_option(settings, "null_tokenizer_extra_eod")),
    )


TOKENIZER_TYPES: dict[str, Callable[[TokenizerSettings, int | None], Tokenizer]] = {
    "GPT2BPETokenizer": _gpt2,
    "Llama2Tokenizer": _sentencepiece,
    "SentencePieceTokenizer": _sentencepiece,
    "GPTSentencePieceTokenizer": _sentencepiece,
    "HuggingFaceTokenizer": _hugging_face,
    "NullTokenizer": _null,
}
OWN_OPTIONS = {
    "tokenizer_sentencepiece_legacy": _sentencepiece,
    "tokenizer_special_tokens": _sentencepiece,
    "tokenizer_hf_no_include_special_tokens": _hugging_face,
    "null_tokenizer_eod_id": _null,
    "null_tokenizer_pad_id": _null,
    "null_tokenizer_extra_eod": _null,
}
"""Settings that only one kind of tokenizer knows."""


def _refuse_foreign(settings: TokenizerSettings, kind: str) -> None:
    for name, builder in OWN_OPTIONS.items():
        if _option(settings, name) not in (None, False, ()) and TOKENIZER_TYPES[kind] is not builder:
            kinds = [known for known, its_builder in TOKENIZER_TYPES.items() if its_builder is builder]
            raise TokenizerError(
                f"--{name.replace('_', '-')} has no meaning for --tokenizer-type {kind}; it belongs to {', '.join(kinds)}."
            )


def _option(settings: TokenizerSettings, name: str) -> Any:
    return getattr(settings, name, None)


def _require(settings: TokenizerSettings, field: str, what: str, folder: bool = False) -> str:
    path, flag = getattr(settings, field), "--" + field.replace("_", "-")
    if not path:
        raise TokenizerError(f"--tokenizer-type {settings.tokenizer_type} needs {flag} FILE ({what}).")
    if not os.path.isfile(path) and not (folder and os.path.isdir(path)):
        raise TokenizerError(f"{flag} {path}: no such file; give the path of {what}.")
    return str(path)


def _load(build: Callable[[], Tokenizer], flags: str) -> Tokenizer:
    try:
        return build()
    except TokenizerError:
        raise
    # The libraries raise bare Exception, OSError or RuntimeError, depending on the fault.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise TokenizerError(
            f"{flags} cannot be read as a tokenizer ({reason}); check that the file is whole and of the right kind."
        ) from error
