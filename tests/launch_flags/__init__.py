"""The flags of five public launch scripts, and what has to change in them beside paths and sizes."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent

CHANGES: dict[str, dict[str, str]] = {
    "gpt175": {"--pipeline-model-parallel-size 16": ""},
    "llama3fp8": {},
    "gpt345": {"--checkpoint-activations": "--recompute-granularity full --recompute-method uniform"},
    "ds_llama": {},
    "llmjp": {"--pipeline-model-parallel-size 4": "", "--use-mpi": ""},
}
"""What is refused of each, and what stands in its place."""

SIZES = {
    "--num-layers": "2",
    "--hidden-size": "64",
    "--ffn-hidden-size": "128",
    "--num-attention-heads": "4",
    "--kv-channels": "16",
    "--seq-length": "32",
    "--max-position-embeddings": "32",
    "--micro-batch-size": "1",
    "--global-batch-size": "4",
    "--train-iters": "3",
    "--train-samples": "12",
    "--lr-decay-iters": "3",
    "--lr-decay-samples": "11",
    "--lr-warmup-samples": "2",
    "--lr-warmup-iters": "1",
    "--eval-iters": "1",
    "--vocab-size": "128",
    "--tensor-model-parallel-size": "1",
}
"""Sizes for one process on a CPU, whatever the script says."""
SIZES_OF = {"gpt175": {"--rampup-batch-size": "2 2 8"}, "llmjp": {"--num-query-groups": "4"}, "llama3fp8": {"--num-query-groups": "2"}}


@dataclass(frozen=True)
class Script:
    """One script's flags."""

    name: str

    @property
    def words(self) -> list[str]:
        """As it passes them."""
        return shlex.split((FOLDER / f"{self.name}.txt").read_text())

    def changed(self) -> list[str]:
        """With what is refused replaced."""
        text = " " + shlex.join(self.words) + " "
        for before, after in CHANGES[self.name].items():
            assert f" {before} " in text, before
            text = text.replace(f" {before} ", f" {after} ")
        return shlex.split(text)

    def shrunk(self, paths: dict[str, str]) -> list[str]:
        """The changed flags with the sizes of a toy, and ``paths`` in place of placeholders and of the files that it names."""
        sizes = {**SIZES, **SIZES_OF.get(self.name, {})}
        words: list[str] = []
        for word in self.changed():
            flag = next((known for known in reversed(words) if known.startswith("--")), "")
            if flag in sizes and not word.startswith("--"):
                continue
            words.append(paths.get(word, word))
            words += sizes.get(word, "").split()
        return words


SCRIPTS = [Script(name) for name in CHANGES]
