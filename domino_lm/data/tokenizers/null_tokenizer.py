"""Numbers instead of text, for data that is tokenized already."""

from collections.abc import Sequence

from domino_lm.data.tokenizers.tokenizer import Ids, Lengths, TokenizerError, flatten, shortened


class NullTokenizer:
    """A text is decimal ids with one space between them; nothing is looked up.

    The end of a document is the last id, ``vocab_size - 1``, unless ``eod`` says otherwise. ``extra_eod`` puts it behind
    the vocabulary instead, which then has one id more.
    """

    uses_threads = False

    def __init__(self, vocab_size: int, eod: int | None = None, pad: int | None = None, extra_eod: bool = False) -> None:
        if vocab_size < 1:
            raise TokenizerError(f"--vocab-size {vocab_size} leaves no id; use at least 1.")
        if extra_eod and eod is not None:
            raise TokenizerError(
                f"--null-tokenizer-extra-eod and --null-tokenizer-eod-id {eod} both say what ends a document; leave one out."
            )
        self.vocab_size: int = vocab_size + extra_eod
        if eod is not None and not 0 <= eod < vocab_size:
            raise TokenizerError(
                f"--null-tokenizer-eod-id {eod} is outside --vocab-size {vocab_size}; use 0 to {vocab_size - 1}, or --null-tokenizer-extra-eod."
            )
        self.eod: int | None = self.vocab_size - 1 if eod is None else eod
        self.pad: int | None = -1 if pad is None else pad

    def encode(self, text: str) -> list[int]:
        """Raises TokenizerError if the text is not ids with single spaces between them."""
        ids = []
        for number, word in enumerate(text.split(" "), start=1):
            try:
                ids.append(int(word))
            except ValueError:
                raise TokenizerError(f"word {number} is {shortened(word)!r}, not a number; write ids with one space between them") from None
        return ids

    def encode_batch(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Raises TokenizerError too for an id outside the vocabulary."""
        encoded = [self.encode(text) for text in texts]
        for ids in encoded:
            if min(ids) < 0 or max(ids) >= self.vocab_size:
                bad = next(i for i in ids if not 0 <= i < self.vocab_size)
                raise TokenizerError(f"id {shortened(str(bad))} is outside the vocabulary; ids are 0 to {self.vocab_size - 1}")
        return flatten(encoded)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, map(int, ids)))

    def identity(self) -> dict[str, str]:
        return {"type": type(self).__name__, "vocab_size": str(self.vocab_size), "eod": str(self.eod)}
