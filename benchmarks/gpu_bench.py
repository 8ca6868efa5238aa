"""Where a GPU check measures, at what size, and the lines that it prints."""

from __future__ import annotations

import gc
from dataclasses import dataclass

import torch

from benchmarks.emulated_link import Link, StreamLink, ThreadLink
from benchmarks.gpu_slice import Case
from domino_lm.config.settings import ModelConfig
from domino_lm.simulate.hardware import HARDWARE, Device, Hardware
from domino_lm.simulate.predict import named_model

REHEARSAL = "rehearsal on CPU, not a GPU result"
KNOWN = {"H200": "dgx-h200", "H100": "dgx-h100", "A100": "dgx-a100", "B200": "dgx-b200", "MI300": "mi300x"}
"""Machines whose datasheets are known, by what stands in a GPU's name."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    section: str
    what: str
    found: str
    verdict: str = ""
    """ok, FAULT, skipped, or nothing where there is no right or wrong."""


@dataclass
class Bench:
    """Where and at what size things are measured."""

    device: torch.device
    rehearse: bool
    hardware: Hardware

    @property
    def narrow(self) -> torch.dtype:
        """What speed is measured in."""
        return torch.float32 if self.rehearse else torch.bfloat16

    def model(self, name: str, seq_length: int = 2048) -> ModelConfig:
        """A 1 to 2 billion parameter slice of a named model, some of its layers; a tiny one in a rehearsal."""
        if self.rehearse:
            tiny = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 8, "ffn_hidden_size": 128}
            return named_model(name, **tiny, seq_length=seq_length // 64, vocab_size=128)
        return named_model(name, num_layers=4, seq_length=seq_length)

    def case(self, name: str, seq_length: int, tensor_parallel: int, micro_batch_size: int) -> Case:
        """A slice of a named model."""
        return Case(
            model=self.model(name, seq_length),
            tensor_parallel=tensor_parallel,
            micro_batch_size=micro_batch_size,
            dtype=self.narrow,
            device=self.device,
            hardware=self.hardware,
        )

    def link(self, priority: int = 0) -> Link:
        """What collectives travel on."""
        return ThreadLink() if self.device.type == "cpu" else StreamLink(self.device, priority)

    @property
    def rounds(self) -> int:
        """Of a measurement."""
        return 2 if self.rehearse else 8


def known_hardware(device: torch.device) -> Hardware:
    """The datasheet of this GPU, or DGX-H100's where there is none."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    found = HARDWARE[next((machine for part, machine in KNOWN.items() if part in name), "dgx-h100")]
    assert isinstance(found.device, Device)
    return found


def release(device: torch.device) -> None:
    """Give memory back that the last measurement left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
