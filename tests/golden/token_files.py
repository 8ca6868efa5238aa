"""The token files that Megatron's tool wrote, made again by ours: tests of data sets and blends read them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from domino_lm.config.data import TokenizerConfig
from domino_lm.data.preprocess.preprocess import PreprocessConfig, preprocess

GOLDEN = Path(__file__).parent / "data"
EXAMPLES = Path(__file__).parents[2] / "examples" / "data"
PARTS = {"part_a": {0}, "part_b": {1, 2}, "part_c": {3, 4, 5}}
GPT2 = TokenizerConfig(
    tokenizer_type="GPT2BPETokenizer",
    vocab_file=str(GOLDEN / "tokenizers/gpt2-bpe/vocab.json"),
    merge_file=str(GOLDEN / "tokenizers/gpt2-bpe/merges.txt"),
)
SP4096 = TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(EXAMPLES / "sp4096.model"))

NULL = TokenizerConfig(tokenizer_type="NullTokenizer")


@dataclass
class TokenFiles:
    """Makes each pair of token files once, when a test first asks for it."""

    folder: Path
    made: set[str] = field(default_factory=set)

    def prefix(self, stem: str, workers: int = 1) -> Path:
        """Prefix of the pair that Megatron's tool wrote under the output prefix ``stem``."""
        if stem not in self.made:
            keys: tuple[str, ...] = ("text",)
            source, tokenizer = stem, GPT2
            if stem.endswith("_sp4096") or stem in ("part_b_keys", "sentences"):
                source, tokenizer = stem.removesuffix("_sp4096").removesuffix("_keys"), SP4096
            if stem == "part_b_keys":
                keys = ("text", "src")
            if stem == "null100k":
                tokenizer = NULL
            source = source.removesuffix("_gpt2").removesuffix("_gpt2_noeod")
            output = str(self.folder / stem)
            preprocess(
                PreprocessConfig(
                    input=str(self.source(source)),
                    output_prefix=output,
                    tokenizer=tokenizer,
                    json_keys=keys,
                    append_eod="noeod" not in stem,
                    workers=workers,
                    vocab_size=100_000 if stem == "null100k" else None,
                )
            )
            self.made.add(stem)
        return self.folder / f"{stem}_text_document"

    def source(self, name: str) -> Path:
        """The input that Megatron's tool read."""
        if name == "corpus":
            return EXAMPLES / "corpus.jsonl"
        if name == "sentences":
            return GOLDEN / "sentences.jsonl"
        if name == "null100k":
            return GOLDEN / "null_ids.jsonl"
        path = self.folder / f"{name}.jsonl"
        lines = (EXAMPLES / "corpus.jsonl").read_bytes().split(b"\n")[:-1]
        path.write_bytes(b"".join(line + b"\n" for i, line in enumerate(lines) if i % 10 in PARTS[name]))
        return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
