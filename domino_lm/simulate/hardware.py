"""How long a device takes for each kind of work, and the machines known by name; `machines.toml` holds their numbers and sources."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from math import ceil, log
from pathlib import Path
from typing import Any, NamedTuple

from domino_lm.config.foreign_text import parse_json
from domino_lm.config.settings import ConfigError
from domino_lm.simulate.links import Fabric, Link, MeasuredFabric

# Output tiles of GEMM kernels, and how fast each runs against the largest: smaller ones load operands more often.
# The ratios are assumed; they follow the operand traffic of a tile, (m + n) / (m n), if it exceeds what shared memory delivers.
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.75), (64, 64, 0.55))
MAX_K_SPLITS = 16
SPLIT_K_EFFICIENCY = 0.9
"""Assumed: partial sums of a GEMM split along k are added in a second pass."""


class Gemm(NamedTuple):
    """``[m, k] x [k, n]``."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """A multiplication and an addition per term."""
        return 2.0 * self.m * self.n * self.k


class CoreAttention(NamedTuple):
    """Fused attention: ``flops`` of the products that are not masked; ``length`` keys that a query sees at most."""

    flops: float
    length: int
    backward: bool


class Pass(NamedTuple):
    """Kernels bound by memory bandwidth; ``name`` is the key of a measured rate, ``launches`` the number of kernels."""

    name: str
    size_bytes: float
    launches: int = 1


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, by its datasheet."""

    peak_flops: float
    """Dense, in the training dtype."""

    gemm_efficiency: float
    """Share of the peak that the largest GEMMs reach."""

    units: int
    """Streaming multiprocessors or compute units: output tiles run in waves of so many."""

    memory_bytes_per_s: float
    memory_efficiency: float
    memory_bytes: float
    kernel_s: float
    """Device time of the smallest kernel: ramp-up, tail, the gap to the next."""

    launch_s: float
    """Host time to enqueue one kernel; the device waits if it outruns the host."""

    attention_efficiency: float
    """Share of the peak that fused attention tends to at long sequences, forward."""

    attention_half_length: float
    """Keys at which it reaches half of that."""

    def gemm_s(self, gemm: Gemm, element_bytes: int) -> float:
        """Tile by tile in waves over the units, for the tile that is fastest; at least the time to move the operands."""
        moved = element_bytes * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
        unit_flops = self.peak_flops * self.gemm_efficiency / self.units
        math_s = min(self._tiled_s(gemm, tile_m, tile_n, unit_flops * speed) for tile_m, tile_n, speed in TILES)
        return self.kernel_s + max(math_s, moved / (self.memory_bytes_per_s * self.memory_efficiency))

    def _tiled_s(self, gemm: Gemm, tile_m: int, tile_n: int, unit_flops: float) -> float:
        tiles = min(ceil(gemm.m / tile_m) * ceil(gemm.n / tile_n), ceil(gemm.m / tile_n) * ceil(gemm.n / tile_m))
        tile_s = 2.0 * tile_m * tile_n * gemm.k / unit_flops
        whole = ceil(tiles / self.units) * tile_s
        splits = min(MAX_K_SPLITS, self.units // tiles, gemm.k // 512) if tiles < self.units else 1
        return min(whole, tile_s / splits / SPLIT_K_EFFICIENCY) if splits > 1 else whole

    def attention_s(self, work: CoreAttention) -> float:
        """Backward runs at 0.86 of forward's rate (63 against 73 % of A100's peak: FlashAttention-2, arXiv 2307.08691)."""
        reached = self.attention_efficiency * work.length / (work.length + self.attention_half_length)
        return self.kernel_s + work.flops / (self.peak_flops * reached * (0.86 if work.backward else 1.0))

    def pass_s(self, work: Pass) -> float:
        """Bytes over the memory's rate."""
        return work.launches * self.kernel_s + work.size_bytes / (self.memory_bytes_per_s * self.memory_efficiency)


@dataclass(frozen=True, kw_only=True)
class MeasuredDevice:
    """One device as calibration saw it; kernels run on the thread that issues them."""

    gemm_rates: tuple[tuple[float, float], ...]
    """GEMMs by FLOPs: FLOPs, FLOPs per second."""

    pass_rates: Mapping[str, float]
    """Bytes per second by the name of the pass; ``default`` stands for names that are missing."""

    attention_flops_per_s: tuple[float, float]
    """Fused attention forward and backward."""

    op_s: float
    """Host time of one op of the plan beside its kernels."""

    memory_bytes: float
    peak_flops: float
    """Of the best GEMM that was measured."""

    launch_s: float = 0.0

    def gemm_s(self, gemm: Gemm, element_bytes: int) -> float:
        """By the rate of GEMMs of its size, linear in the logarithm of the FLOPs."""
        rates = self.gemm_rates
        size = min(max(gemm.flops, rates[0][0]), rates[-1][0])
        high = next(i for i, (flops, _) in enumerate(rates) if flops >= size)
        if high == 0:
            return gemm.flops / rates[0][1]
        (low_flops, low_rate), (high_flops, high_rate) = rates[high - 1], rates[high]
        share = log(size / low_flops) / log(high_flops / low_flops)
        return gemm.flops / (low_rate + share * (high_rate - low_rate))

    def attention_s(self, work: CoreAttention) -> float:
        """By the measured rate."""
        return work.flops / self.attention_flops_per_s[work.backward]

    def pass_s(self, work: Pass) -> float:
        """By the rate that was measured under the pass's name."""
        return work.size_bytes / self.pass_rates.get(work.name, self.pass_rates["default"])


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A machine that a plan can be simulated on."""

    name: str
    device: Device | MeasuredDevice
    fabric: Fabric | MeasuredFabric
    element_bytes: int = 2
    """Of an activation: 2 for bf16, 4 for fp32."""

    fused: bool = True
    """Bias, dropout and residual add are one kernel each way (Megatron's kernels, torch.compile); False: eager PyTorch."""

    cpu: bool = False
    """Kernels are those of PyTorch on CPUs."""

    notes: Mapping[str, str] = field(default_factory=dict)
    """Where the numbers come from, for what was measured."""

    @property
    def host_blocks(self) -> bool:
        """Whether ops run on the host itself, so that none is issued before the one before it has ended."""
        return isinstance(self.device, MeasuredDevice)

    @property
    def composes_kernels(self) -> bool:
        """Whether RMSNorm and grouped heads are put together from smaller kernels, which keep their results: PyTorch on CPUs does."""
        return not self.fused and (self.host_blocks or self.cpu)

    @property
    def op_s(self) -> float:
        """Host time of one op that is part of the compute lane."""
        return self.device.op_s if isinstance(self.device, MeasuredDevice) else 0.0

    def without_contention(self) -> Hardware:
        """The same machine, its collectives taking no compute."""
        if isinstance(self.fabric, Fabric):
            return replace(self, fabric=replace(self.fabric, compute_share=0.0))
        points = tuple((size, seconds, 0.0) for size, seconds, _ in self.fabric.points)
        return replace(self, fabric=replace(self.fabric, points=points))

    def to_json(self) -> str:
        """Text that `from_json` reads back."""
        kinds = {"device": type(self.device).__name__, "fabric": type(self.fabric).__name__}
        return json.dumps({**asdict(self), "kinds": kinds}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """The machine that `to_json` wrote. Raises ConfigError if the text is something else."""
        classes = {kind.__name__: kind for kind in (Device, MeasuredDevice, Fabric, MeasuredFabric)}
        try:
            values: dict[str, Any] = parse_json(text)
            kinds = values.pop("kinds")
            for name in ("device", "fabric"):
                values[name] = classes[kinds[name]](**{key: _frozen(value) for key, value in values[name].items()})
            return cls(**values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"not a calibration file ({type(error).__name__}: {error}).") from error

    def write_json(self, path: Path | str) -> None:
        """Keep a calibration; `read_hardware` reads it back."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")


def read_hardware(path: Path | str) -> Hardware:
    """A machine from its JSON file, as `Hardware.write_json` writes it. Raises ConfigError if the file is something else."""
    try:
        return Hardware.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--hardware {path}: cannot be read: {error.strerror}; known names are {', '.join(HARDWARE)}.") from error
    except ValueError as error:  # ConfigError, and bytes that are no text
        raise ConfigError(f"--hardware {path}: {error}") from error


def find_hardware(name: str) -> Hardware:
    """The machine of that name, or of that JSON file. Raises ConfigError."""
    if name in HARDWARE:
        return HARDWARE[name]
    if name.endswith(".json"):
        return read_hardware(name)
    raise ConfigError(f"--hardware {name} is neither known nor a .json calibration; known are {', '.join(HARDWARE)}.")


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict) and set(value) == {"bytes_per_s", "efficiency", "latency_s"}:
        return Link(**value)
    return value


def _machine(name: str, gpu: str, collective_units: int, **numbers: Any) -> Hardware:
    """A machine from its table; ``collective_units`` are those that a collective takes from compute."""
    defaults = _TABLES["fabric"]
    fabric: dict[str, Any] = {kind: Link(**defaults[kind] | numbers.pop(kind)) for kind in ("local", "network")}
    fabric |= {key: numbers.pop(key) for key in ("node_size", "switch_bytes_per_s") if key in numbers}
    share = collective_units / numbers["units"]
    return Hardware(
        name=name,
        device=Device(**_TABLES["gpu"], **numbers, peak_flops=_TABLES["peaks"][gpu]["peak_flops"]),
        fabric=Fabric(**fabric, overhead_s=defaults["overhead_s"], compute_share=share),
    )


def peak_flops_of(gpu: str, element_bytes: int) -> float | None:
    """Dense FLOP/s of a GPU by the name that its driver gives, in fp32 or in 16 bits; None if it is not known."""
    known = max((name for name in _TABLES["peaks"] if name in gpu), key=len, default=None)  # GB200 holds B200
    return None if known is None else _TABLES["peaks"][known]["peak_flops" if element_bytes < 4 else "fp32_flops"]


_TABLES: dict[str, Any] = tomllib.loads(files("domino_lm.simulate").joinpath("machines.toml").read_text(encoding="utf-8"))
HARDWARE: dict[str, Hardware] = {name: _machine(name, **numbers) for name, numbers in _TABLES["machines"].items()}
