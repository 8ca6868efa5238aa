"""Many predictions at once: a grid of layouts and slicings, simulated in parallel, as rows of a table and a picture."""

import csv
import multiprocessing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from domino_lm.config.settings import ConfigError, ModelConfig
from domino_lm.launch.checks import can_shard
from domino_lm.schedule.render import MissingMatplotlibError, write_png
from domino_lm.simulate.hardware import Hardware
from domino_lm.simulate.predict import Setting, obstacle, optimum, predict, sliced


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is varied; every combination that can run is a point."""

    devices: tuple[int, ...] = (8, 64, 512, 4096, 16384)
    tensor_parallel: tuple[int, ...] = (1, 2, 4, 8, 16)
    rows: tuple[int, ...] = (1, 2, 4)
    cols: tuple[int, ...] = (1, 2)
    micro_batch_size: tuple[int, ...] = (1, 2, 4, 8)
    seq_length: tuple[int, ...] = (2048, 4096)
    micro_batches: int = 4
    """Micro-batches of one step on each rank."""


class Point(NamedTuple):
    """One layout and slicing, and what it is predicted to do."""

    devices: int
    tensor_parallel: int
    data_parallel: int
    rows: int
    cols: int
    micro_batch_size: int
    seq_length: int
    step_s: float
    tokens_per_s_per_device: float
    mfu: float
    exposed_forward_s: float
    exposed_backward_s: float
    exposed_step_s: float
    fraction_of_optimum: float
    memory_bytes: float
    fits: bool


def sweep(model: ModelConfig, hardware: Hardware, grid: Grid, processes: int) -> list[Point]:
    """Every point of ``grid`` that can run, in the order of the grid. Raises ConfigError if none can."""
    tasks = list(_tasks(model, hardware, grid))
    if not tasks:
        raise ConfigError(
            f"no point of the sweep can run: {model.num_attention_heads} heads in {model.query_groups} groups, TP sizes {grid.tensor_parallel}, devices {grid.devices}; "
            "choose TP sizes that divide all three, and rows no more than the micro-batch size."
        )
    if processes == 1:
        return [_point(*task) for task in tasks]
    with multiprocessing.Pool(processes) as pool:
        return pool.starmap(_point, tasks, chunksize=8)


def _tasks(model: ModelConfig, hardware: Hardware, grid: Grid) -> Iterator[tuple[Setting, int, int]]:
    """Settings that can run, each with its rows and columns."""
    axes = (grid.devices, grid.tensor_parallel, grid.rows, grid.cols, grid.micro_batch_size, grid.seq_length)
    for devices, tp, rows, cols, micro_batch_size, seq_length in product(*axes):
        if devices % tp or not can_shard(model, tp) or (tp == 1 and rows * cols > 1):
            continue
        setting = Setting(
            model=replace(model, seq_length=seq_length, max_position_embeddings=None),
            hardware=hardware,
            tensor_parallel=tp,
            data_parallel=devices // tp,
            micro_batch_size=micro_batch_size,
            micro_batches=grid.micro_batches,
        )
        if not obstacle(setting, sliced(rows, cols)):
            yield setting, rows, cols


def _point(setting: Setting, rows: int, cols: int) -> Point:
    step = predict(setting, sliced(rows, cols))
    memory = step.memory.total
    return Point(
        setting.devices,
        setting.tensor_parallel,
        setting.data_parallel,
        rows,
        cols,
        setting.micro_batch_size,
        setting.model.seq_length,
        step.step_s,
        step.tokens_per_s_per_device,
        step.mfu,
        step.exposed_s("F"),
        step.exposed_s("B"),
        step.exposed_s("S"),
        optimum(setting).step_s / step.step_s,
        memory,
        memory <= setting.hardware.device.memory_bytes,
    )


def write_csv(points: Sequence[Point], path: Path) -> None:
    """One line a point."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Point._fields)
        writer.writerows([f"{value:.6g}" if isinstance(value, float) else value for value in point] for point in points)


def plot(points: Sequence[Point], title: str, path: Path) -> None:
    """Best throughput that fits by size of the cluster, and what slicing gains, for each TP size. Raises MissingMatplotlibError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingMatplotlibError("the sweep's picture needs matplotlib: pip install 'domino-lm[plot]'") from error
    figure = Figure(figsize=(14, 5.5), dpi=110, layout="constrained")
    throughput, gain = figure.subplots(1, 2)
    for tp in sorted({point.tensor_parallel for point in points}):
        own = [point for point in points if point.tensor_parallel == tp]
        best = {size: _best([p for p in own if p.devices == size and p.fits]) for size in sorted({point.devices for point in own})}
        fitting = {size: point for size, point in best.items() if point is not None}
        if fitting:
            throughput.plot(list(fitting), [point.tokens_per_s_per_device for point in fitting.values()], "-o", label=f"TP {tp}")
        gains = list(_gains(own))
        if tp > 1 and gains:
            sizes = sorted({tokens for tokens, _ in gains})
            gain.plot(sizes, [max(value for tokens, value in gains if tokens == size) for size in sizes], "-o", label=f"TP {tp}")
    throughput.set(xscale="log", xlabel="devices", ylabel="tokens/s/device", title="best setting that fits into memory", ylim=(0, None))
    gain.set(
        xscale="log", xlabel="tokens of a micro-batch", ylabel="best slicing / uncut", title="gain of slicing, largest over cluster sizes"
    )
    gain.axhline(1.0, color="grey", linewidth=0.8)
    for axes in (throughput, gain):
        if axes.has_data():
            axes.legend(frameon=False)
    figure.suptitle(title)
    write_png(figure, path)


def _best(points: Sequence[Point]) -> Point | None:
    return max(points, key=lambda point: point.tokens_per_s_per_device, default=None)


def _gains(points: Sequence[Point]) -> Iterator[tuple[int, float]]:
    """Tokens of the micro-batch, and how much faster the best slicing is than none, for each layout."""
    layouts: dict[tuple[int, int, int], list[Point]] = {}
    for point in points:
        layouts.setdefault((point.devices, point.micro_batch_size, point.seq_length), []).append(point)
    for (_, micro_batch_size, seq_length), own in layouts.items():
        uncut = next((point for point in own if point.rows == point.cols == 1), None)
        cut = _best([point for point in own if point.rows * point.cols > 1])
        if uncut is not None and cut is not None:
            yield micro_batch_size * seq_length, uncut.step_s / cut.step_s
