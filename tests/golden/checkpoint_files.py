"""Unpacks ``model/ckpt/checkpoints.tar.xz``: checkpoints that Megatron itself wrote after 20 steps of the recorded runs."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

from domino_lm.config.settings import ModelConfig
from tests.golden.model_files import GOLDEN_MODELS

ARCHIVE = Path(__file__).parent / "model" / "ckpt" / "checkpoints.tar.xz"
KINDS = {
    "gpt_legacy_tp1": "megatron-legacy",
    "gpt_legacy_tp2": "megatron-legacy",
    "gpt_torch_dist_tp2": "megatron-torch_dist",
    "gpt_torch_dist_core0161_tp2": "megatron-torch_dist",
    "llama_legacy_tp1": "megatron-legacy",
    "llama_legacy_tp2": "megatron-legacy",
    "llama_torch_dist_tp2": "megatron-torch_dist",
}
WITH_OPTIMIZER = ["gpt_legacy_tp1", "gpt_legacy_tp2", "gpt_torch_dist_tp2", "llama_legacy_tp1"]
WITHOUT_OPTIMIZER = [name for name in KINDS if name not in WITH_OPTIMIZER]


def unpack(folder: Path) -> Path:
    """Put all checkpoints into ``folder``, each in a folder of its own name."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def family(name: str) -> str:
    """The kind of model that a checkpoint holds: gpt or llama."""
    return name.split("_")[0]


def model_of(name: str) -> ModelConfig:
    """The model that a checkpoint holds; all 128 vocabulary rows count, as in the recorded runs."""
    return GOLDEN_MODELS[family(name)]


Checkpoint = Callable[[str], str]
