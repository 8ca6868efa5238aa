"""Byte-level BPE: GPT-2's two files, and the tokenizer.json of Hugging Face.

If the package ``gigatoken`` is installed it encodes batches, several times faster and to the same ids; the
``tokenizers`` library does everything else. DOMINO_LM_GIGATOKEN=0 in the environment leaves it out.
"""

import json
import multiprocessing
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from domino_lm.config.foreign_text import parse_json
from domino_lm.data.tokenizers.fast_bpe import FastEncoder
from domino_lm.data.tokenizers.tokenizer import NOWHERE, Ids, Lengths, TokenizerError, encode_pieces, flatten, sha256_of

END_OF_TEXT = "<|endoftext|>"
BETWEEN_WORDS = re.compile(r"(?<=\S)(?=[ \n]\S)")
"""By GPT-2's rule a word ends before a single space or newline, whatever stands around the two."""
NO_TEMPLATE: dict[str, Any] = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}]}


class _Backed:
    """What both tokenizers share: the library's tokenizer, made when first needed, and the fast encoder of batches."""

    uses_threads = False
    eod: int | None
    pad: int | None
    _include_special = False
    _adds_tokens = False
    """Whether each text that is encoded gets tokens of a template, which pieces of a text must not."""
    _border = NOWHERE
    """Where a long text may be cut without changing its ids."""

    def __init__(self, description: str, fast: FastEncoder | None) -> None:
        self._description = description
        self._made: Any = None
        self._fast = fast
        self.uses_threads = fast is not None

    @property
    def _backend(self) -> Any:
        """Importing and building it takes a good part of a second, which encoding batches alone need not wait for."""
        if self._made is None:
            from tokenizers import Tokenizer as Backend

            self._made = Backend.from_str(self._description)
            self._made.no_truncation()
            self._made.no_padding()
        return self._made

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=self._include_special).ids
        return ids

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        encode = self._encode_slowly if self._fast is None else self._fast.encode_batch
        return encode_pieces(encode, texts, self._border, cut_words=not self._adds_tokens)

    def _encode_slowly(self, texts: list[str]) -> tuple[Ids, Lengths]:
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=self._include_special)
        return flatten([encoding.ids for encoding in encodings])

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(map(int, ids)), skip_special_tokens=False)
        return text


class GPT2BPETokenizer(_Backed):
    """Byte-level BPE of GPT-2 from ``vocab.json`` and ``merges.txt``.

    A literal ``<|endoftext|>`` in a text becomes the end-of-document id, as in the original: a text can end its own
    document.
    """

    _border = BETWEEN_WORDS

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        self._files = {"vocab_file": vocab_file, "merge_file": merge_file}
        vocabulary = parse_json(Path(vocab_file).read_text(encoding="utf-8"))
        lines = Path(merge_file).read_text(encoding="utf-8").split("\n")
        merges = [line for line in lines if line and not line.startswith("#version")]
        if not isinstance(vocabulary, dict) or not all(len(line.split(" ")) == 2 for line in merges):
            raise TokenizerError("the first must be a JSON object of tokens and ids, the second lines of two tokens")
        self.eod: int | None = vocabulary.setdefault(END_OF_TEXT, len(vocabulary))
        self.pad: int | None = None
        self.vocab_size: int = len(vocabulary)
        description = json.dumps(_gpt2_description(vocabulary, merges))
        super().__init__(description, FastEncoder.create(description, END_OF_TEXT))
        if self._fast is None:
            self._backend  # noqa: B018  reading it finds faults in the files, now and not at the first text

    def identity(self) -> dict[str, str]:
        return {"type": type(self).__name__} | {flag: sha256_of(path) for flag, path in self._files.items()}


class HuggingFaceTokenizer(_Backed):
    """A ``tokenizer.json``, or the folder that holds it, with the special tokens that ``tokenizer_config.json`` names.

    ``include_special`` adds the tokens that the file's template puts around a text (a BOS, say), as Hugging Face's
    call does.
    """

    def __init__(self, path: str, include_special: bool = True) -> None:
        folder = Path(path) if os.path.isdir(path) else Path(path).parent
        self._file = Path(path) / "tokenizer.json" if os.path.isdir(path) else Path(path)
        if not self._file.is_file():
            raise TokenizerError(
                f"--tokenizer-model {path}: no tokenizer.json in this folder; save the tokenizer as a fast one, or name a SentencePiece "
                "model with --tokenizer-type SentencePieceTokenizer."
            )
        text = self._file.read_text(encoding="utf-8")
        description = parse_json(text)
        config_file = folder / "tokenizer_config.json"
        self._config: dict[str, Any] = (
            parse_json(config_file.read_text(encoding="utf-8"), whole_numbers=False) if config_file.is_file() else {}
        )
        if _add_tokens(description, self._config) or description.get("truncation") or description.get("padding"):
            text = json.dumps(description | {"truncation": None, "padding": None})
        self._include_special = include_special
        template = description.get("post_processor")
        adds_nothing = template is None or template.get("type") == "ByteLevel" or template.get("single") == NO_TEMPLATE["single"]
        self._adds_tokens = include_special and not adds_nothing
        if not self._adds_tokens:
            self._border = _border_of(description)
        special = [token["content"] for token in description["added_tokens"] if _splits_cleanly(token)]
        fast = None
        if special and not self._adds_tokens and _is_byte_level(description):
            fast = FastEncoder.create(text, special[0])
        super().__init__(text, fast)
        if fast is not None and not fast.agrees_with(self.encode, [token["content"] for token in description["added_tokens"]]):
            self._fast, self.uses_threads = None, False
            if multiprocessing.parent_process() is None:  # not in each worker once more
                warnings.warn(f"{self._file}: gigatoken gives other ids than the tokenizers library, which encodes alone.", stacklevel=2)
        self.vocab_size: int = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eod: int | None = self._named("eos_token")
        self.pad: int | None = self._named("pad_token")

    def identity(self) -> dict[str, str]:
        return {
            "type": type(self).__name__,
            "tokenizer.json": sha256_of(str(self._file)),
            "tokenizer_config": json.dumps(self._config, sort_keys=True),
            "special_tokens": str(self._include_special),
        }

    def _named(self, name: str) -> int | None:
        token = self._config.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if content is None:
            return None
        found: int | None = self._backend.token_to_id(content)  # which need not be the id that the file says
        return found


def _gpt2_description(vocabulary: dict[str, int], merges: list[str]) -> dict[str, Any]:
    """The two files as the content of a tokenizer.json."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    token = {"id": vocabulary[END_OF_TEXT], "content": END_OF_TEXT, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": ""}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token | flags],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model | {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary, "merges": merges},
    }


def _add_tokens(description: dict[str, Any], config: dict[str, Any]) -> bool:
    """Put the tokens that only the configuration names into the description, as transformers does on loading; says whether there are any."""
    known = {token["id"] for token in description.setdefault("added_tokens", [])}
    missing = {int(number): token for number, token in config.get("added_tokens_decoder", {}).items() if int(number) not in known}
    description["added_tokens"] += [{"id": number} | missing[number] for number in sorted(missing)]
    return bool(missing)


def _splits_cleanly(token: dict[str, Any]) -> bool:
    return bool(token.get("special")) and not any(token.get(flag) for flag in ("single_word", "lstrip", "rstrip", "normalized"))


def _is_gpt2s(splitter: dict[str, Any]) -> bool:
    """Whether text is cut into words by GPT-2's own rule, which gigatoken is tested on."""
    return splitter.get("type") == "ByteLevel" and bool(splitter.get("use_regex", True))


def _border_of(description: dict[str, Any]) -> re.Pattern[str]:
    """Where the tokenizer of a tokenizer.json starts afresh; tokens that hold or eat white space could reach over a border."""
    reach_over = any(token.get("rstrip") or re.search(r"\s", token["content"]) for token in description["added_tokens"])
    plain = _is_byte_level(description) and _is_gpt2s(description["pre_tokenizer"])
    return BETWEEN_WORDS if plain and not reach_over else NOWHERE


def _is_byte_level(description: dict[str, Any]) -> bool:
    """Byte-level BPE without anything whose result depends on where in a text a word stands."""
    model, splitter = description.get("model", {}), description.get("pre_tokenizer") or {}
    steps = splitter.get("pretokenizers", [splitter])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    return (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and description.get("normalizer") is None
        and len(byte_level) == 1
        and not byte_level[0].get("add_prefix_space")
        and all(step.get("type") in ("ByteLevel", "Split") for step in steps)
    )
