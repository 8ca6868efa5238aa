"""The tokenizer that a run's settings name."""

import os
from collections.abc import Callable, Iterator

from domino_lm.config.data import TokenizerConfig
from domino_lm.data.tokenizers.tokenizer import Tokenizer, TokenizerError


def build_tokenizer(settings: TokenizerConfig, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer that ``--tokenizer-type`` names; ``vocab_size`` is that of ``--vocab-size``.

    Raises TokenizerError on an unknown type or a missing or unreadable file.
    """
    kind = settings.tokenizer_type
    if kind not in TOKENIZER_TYPES:
        fault = "is needed" if kind is None else f"{kind} is unknown"
        raise TokenizerError(f"--tokenizer-type {fault}; choose one of {', '.join(TOKENIZER_TYPES)}.")
    foreign = next(foreign_options(settings, kind), None)
    if foreign is not None:
        raise TokenizerError(foreign)
    return TOKENIZER_TYPES[kind](settings, vocab_size)


def _gpt2(settings: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
    from domino_lm.data.tokenizers.bpe import GPT2BPETokenizer

    vocab_file = _require(settings, "vocab_file", "GPT-2's vocab.json")
    merge_file = _require(settings, "merge_file", "GPT-2's merges.txt")
    return _load(lambda: GPT2BPETokenizer(vocab_file, merge_file), f"--vocab-file {vocab_file} with --merge-file {merge_file}")


def _sentencepiece(settings: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
    from domino_lm.data.tokenizers.sentencepiece import LegacySentencePieceTokenizer, SentencePieceTokenizer

    path = _require(settings, "tokenizer_model", "a SentencePiece model")
    if settings.tokenizer_sentencepiece_legacy:
        return _load(lambda: LegacySentencePieceTokenizer(path, settings.tokenizer_special_tokens), f"--tokenizer-model {path}")
    return _load(lambda: SentencePieceTokenizer(path), f"--tokenizer-model {path}")


def _hugging_face(settings: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
    from domino_lm.data.tokenizers.bpe import HuggingFaceTokenizer

    path = _require(settings, "tokenizer_model", "a tokenizer.json or its folder", folder=True)
    include = not settings.tokenizer_hf_no_include_special_tokens
    return _load(lambda: HuggingFaceTokenizer(path, include), f"--tokenizer-model {path}")


def _tik(settings: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
    from domino_lm.data.tokenizers.tik import TikTokenizer

    path = _require(settings, "tokenizer_model", "a JSON list of byte strings by rank")
    pattern, special = settings.tiktoken_pattern or "v2", settings.tokenizer_special_tokens
    number = settings.tiktoken_num_special_tokens
    return _load(lambda: TikTokenizer(path, pattern, vocab_size, number, special), f"--tokenizer-model {path}")


def _null(settings: TokenizerConfig, vocab_size: int | None) -> Tokenizer:
    from domino_lm.data.tokenizers.null_tokenizer import NullTokenizer

    if vocab_size is None:
        raise TokenizerError("--tokenizer-type NullTokenizer reads numbers and has no vocabulary of its own: give --vocab-size.")
    eod, pad, extra = settings.null_tokenizer_eod_id, settings.null_tokenizer_pad_id, settings.null_tokenizer_extra_eod
    return NullTokenizer(vocab_size, eod=eod, pad=pad, extra_eod=extra)


TOKENIZER_TYPES: dict[str, Callable[[TokenizerConfig, int | None], Tokenizer]] = {
    "GPT2BPETokenizer": _gpt2,
    "Llama2Tokenizer": _sentencepiece,
    "SentencePieceTokenizer": _sentencepiece,
    "GPTSentencePieceTokenizer": _sentencepiece,
    "HuggingFaceTokenizer": _hugging_face,
    "TikTokenizer": _tik,
    "NullTokenizer": _null,
}
OWN_OPTIONS = {
    "tokenizer_sentencepiece_legacy": (_sentencepiece,),
    "tokenizer_special_tokens": (_sentencepiece, _tik),
    "tokenizer_hf_no_include_special_tokens": (_hugging_face,),
    "null_tokenizer_eod_id": (_null,),
    "null_tokenizer_pad_id": (_null,),
    "null_tokenizer_extra_eod": (_null,),
}
"""Settings that only some kinds of tokenizers know."""


def foreign_options(settings: TokenizerConfig, kind: str) -> Iterator[str]:
    """The fault of each setting that a tokenizer of this kind does not know."""
    own = TOKENIZER_TYPES[kind]
    for name, builders in OWN_OPTIONS.items():
        if getattr(settings, name) not in (None, False, ()) and own not in builders:
            kinds = [known for known, builder in TOKENIZER_TYPES.items() if builder in builders]
            yield f"--{name.replace('_', '-')} has no meaning for --tokenizer-type {kind}; it belongs to {', '.join(kinds)}."
    if own is _sentencepiece and settings.tokenizer_special_tokens and not settings.tokenizer_sentencepiece_legacy:
        yield "--tokenizer-special-tokens works with --tokenizer-sentencepiece-legacy alone; add it, or leave the tokens out."


def _require(settings: TokenizerConfig, field: str, what: str, folder: bool = False) -> str:
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
