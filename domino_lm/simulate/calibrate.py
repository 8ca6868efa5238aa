"""Measures this machine for the simulator: some GEMMs, passes over memory, attention, and all-reduces of some sizes.

The one module beside the executor's under ``schedule`` that needs torch. It measures kernels and a link, never a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import combinations, cycle, pairwise
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from domino_lm.parallel.collectives import Communicator
from domino_lm.simulate.costs import FLASH_BACKWARD_FLOPS
from domino_lm.simulate.hardware import Hardware, MeasuredDevice
from domino_lm.simulate.links import MeasuredFabric

GEMMS = ((64, 128, 128), (128, 256, 256), (256, 256, 512), (512, 512, 512), (512, 1024, 512), (1024, 1024, 1024))
"""Tokens, output width, input width."""

TOKENS, WIDTH = 1024, 512
BUFFERS = 8
"""Inputs and weights alternate, so that none is still in the caches, as in a row of a cut."""

ATTENTION = (2, 4, 256, 64)
"""Samples, heads, sequence, head width."""

REDUCED_BYTES = tuple(1 << power for power in (12, 16, 18, 19, 20, 21, 22, 23))
BESIDE = (128, 512, 512)
"""The GEMM that runs beside all-reduces: tokens, output width, input width."""

IN_A_ROW = 12
"""All-reduces in one sample of the compute time that they take."""

KERNELS_AN_OP = 8
"""Host time of one op beside its kernels, counted in smallest kernels: dispatch, views, the autograd graph. Assumed."""

REPEATS = 7
SHORTEST_S = 1e-3
"""Shortest sample of a repeated kernel."""


def calibrate(tp: Communicator, device: torch.device, name: str) -> Hardware:
    """A `Hardware` of this rank's device and of the link of ``tp``; every rank of ``tp`` must call. CPUs and fp32 only.

    With one rank communication takes no time. Runs for a few seconds. Rank 0's result is everyone's.
    """
    assert device.type == "cpu", "kernels that run on the host alone are measured; a GPU is described by its datasheet"
    with torch.no_grad():
        device_found = _measure_device()
        fabric = _measure_fabric(tp)
    notes = {"torch": torch.__version__, "threads": str(torch.get_num_threads()), "made by": "domino_lm.simulate.calibrate"}
    found = Hardware(name=name, device=device_found, fabric=fabric, element_bytes=4, fused=False, cpu=True, notes=notes)
    return tp.broadcast_object(found)


def _measure_device() -> MeasuredDevice:
    rates = [_gemm_rate(*shape) for shape in GEMMS]
    passes = {kind: size / _seconds(run) for kind, (size, run) in _pass_kernels().items()}
    passes["default"] = passes["join"]
    tiny = torch.ones(1)
    return MeasuredDevice(
        gemm_rates=tuple(sorted(rates)),
        pass_rates=passes,
        attention_flops_per_s=_attention_rates(),
        op_s=KERNELS_AN_OP * _seconds(lambda: tiny + tiny),
        memory_bytes=_machine_bytes(),
        peak_flops=max(rate for _, rate in rates),
    )


def _gemm_rate(tokens: int, width_out: int, width_in: int) -> tuple[float, float]:
    """FLOPs of one GEMM, and the rate over the three forms that a linear layer takes."""
    x, dy = torch.randn(tokens, width_in), torch.randn(tokens, width_out)
    weights, grads = (cycle([torch.randn(width_out, width_in) for _ in range(BUFFERS)]) for _ in range(2))
    forms: Sequence[Callable[[], object]] = (
        lambda: F.linear(x, next(weights)),
        lambda: dy @ next(weights),
        lambda: next(grads).addmm_(dy.t(), x),
    )
    flops = 2.0 * tokens * width_out * width_in
    return flops, len(forms) * flops / sum(map(_seconds, forms))


def _pass_kernels() -> dict[str, tuple[float, Callable[[], object]]]:
    """For each pass of `costs`: the bytes that it counts, and its kernels, on [TOKENS, WIDTH]."""
    a, b, c = (cycle([torch.randn(TOKENS, 1, WIDTH) for _ in range(BUFFERS)]) for _ in range(3))
    wide = cycle([torch.randn(TOKENS, 1, 2 * WIDTH) for _ in range(BUFFERS)])
    grads = cycle([torch.zeros(WIDTH, WIDTH) for _ in range(BUFFERS)])
    bias, weight, unit = torch.randn(WIDTH), torch.ones(WIDTH), float(next(a).nbytes)
    table, ids = torch.randn(WIDTH, WIDTH), torch.randint(0, WIDTH, (TOKENS,))
    cos, sin = torch.randn(TOKENS, 1, 1, 64), torch.randn(TOKENS, 1, 1, 64)

    def heads() -> Tensor:
        return next(a).view(TOKENS, 1, WIDTH // 64, 64)

    def rotate() -> Tensor:
        turned = heads()
        first, second = turned.chunk(2, -1)
        return turned * cos + torch.cat((-second, first), -1) * sin

    def softmax() -> Tensor:
        logits = next(a)
        maximum = logits.amax(-1, keepdim=True)
        return (logits - maximum).exp_().sum(-1)

    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    return {
        "join": (5 * unit, lambda: (next(a) + bias) + next(b)),
        "norm": (2 * unit, lambda: F.layer_norm(next(a), (WIDTH,), weight, bias)),
        "norm_grad": (3 * unit, lambda: _norm_gradients(next(a), weight, bias, next(b))),
        "join_grad": (4 * unit, lambda: (next(b).add_(next(c)), next(a).sum((0, 1)))),
        "gelu": (2 * unit, lambda: F.gelu(next(a))),
        "gelu_grad": (3 * unit, lambda: _grad(F.gelu, next(a), next(b))),
        "swiglu": (3 * unit, lambda: gated(next(wide))),
        "swiglu_grad": (5 * unit, lambda: _grad(gated, next(wide), next(a))),
        "rotate": (6 * unit, rotate),
        "layout": (2 * unit, lambda: heads().permute(1, 2, 0, 3).contiguous()),
        "softmax": (6 * unit, softmax),
        "lookup": (4 * unit, lambda: F.embedding(ids, table) * 2.0),
        "lookup_grad": (3 * unit, lambda: table.index_add_(0, ids, next(a)[:, 0])),
        "bias_grad": (unit, lambda: bias.add_(next(a).sum((0, 1)))),
        "accumulate": (3 * float(next(grads).nbytes), lambda: next(grads).add_(0.0)),
    }


def _norm_gradients(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
        out = F.layer_norm(leaves[0], weight.shape, leaves[1], leaves[2])
        return torch.autograd.grad(out, leaves, dy)


def _grad(function: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, dy)[0]


def _attention_rates() -> tuple[float, float]:
    """FLOPs per second of unmasked pairs, forward and backward."""
    samples, heads, length, width = ATTENTION
    query, key, value, dy = (torch.randn(samples, heads, length, width) for _ in range(4))
    flops = 4.0 * samples * heads * width * length * (length + 1) / 2

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (query, key, value)]
            torch.autograd.grad(attend(*leaves), leaves, dy)

    forward_s = _seconds(lambda: attend(query, key, value))
    return flops / forward_s, FLASH_BACKWARD_FLOPS * flops / max(_seconds(both) - forward_s, forward_s)


def _measure_fabric(tp: Communicator) -> MeasuredFabric:
    """All-reduces alone, and what they take from the core that computes."""
    if tp.size == 1:
        return MeasuredFabric(points=((1.0, 1e-9, 0.0), (2.0, 1e-9, 0.0)), ranks=2)
    buffers = {size: torch.zeros(size // 4) for size in REDUCED_BYTES}
    each_s, byte_s = _line([(size, median(_cpu_taken(tp, buffer) for _ in range(REPEATS))) for size, buffer in buffers.items()])
    points = [(float(size), _all_reduce_s(tp, buffer), each_s + size * byte_s) for size, buffer in buffers.items()]
    return MeasuredFabric(points=tuple(points), ranks=tp.size)


def _all_reduce_s(tp: Communicator, buffer: Tensor) -> float:
    """Seconds of an all-reduce of ``buffer`` that follows others without a pause."""
    tp.barrier()
    ends_s = []
    for _ in range(2 * REPEATS):  # the first half uses up what a link lets pass above its rate after a pause
        tp.all_reduce_start(buffer).wait()
        ends_s.append(time.perf_counter())
    return _low([end - start for start, end in pairwise(ends_s[REPEATS - 1 :])])


def _cpu_taken(tp: Communicator, buffer: Tensor) -> float:
    """CPU seconds that a rank spends more for each of some all-reduces of ``buffer`` in a row, while it computes.

    More than for one that it waits for: the transport's threads interrupt compute, and both come back to cold caches. CPU
    time and not elapsed time, because other programs do not lengthen it.
    """
    tokens, width_out, width_in = BESIDE
    x, weights = torch.randn(tokens, width_in), cycle([torch.randn(width_in, width_out) for _ in range(BUFFERS)])
    gemm_s, gemms = _seconds(lambda: x @ next(weights)), 0
    tp.barrier()
    start_s = time.process_time()
    for _ in range(IN_A_ROW):
        pending = tp.all_reduce_start(buffer)
        while not pending.done:
            x @ next(weights)
            gemms += 1
        pending.wait()
    return max(0.0, time.process_time() - start_s - gemms * gemm_s) / IN_A_ROW


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Where the line through ``points`` begins and how it rises, neither below 0.

    Medians over all pairs of points, which a few outliers do not move (Theil, 1950; Sen, 1968).
    """
    slope = max(0.0, median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2)))
    return max(0.0, median(y - slope * x for x, y in points)), slope


def _seconds(run: Callable[[], object]) -> float:
    """Time of one call: the better half of samples of several calls, since disturbances only add time.

    With a single thread it is CPU time, which other programs on the machine do not lengthen.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    start_s = clock()
    run()
    calls = max(1, int(SHORTEST_S / max(clock() - start_s, 1e-7)))
    samples = []
    for _ in range(REPEATS):
        start_s = clock()
        for _ in range(calls):
            run()
        samples.append((clock() - start_s) / calls)
    return _low(samples)


def _low(samples: Sequence[float]) -> float:
    """Median of the better half."""
    return median(sorted(samples)[: (len(samples) + 1) // 2])


def _machine_bytes() -> float:
    with open("/proc/meminfo", encoding="ascii") as file:
        return float(file.readline().split()[1]) * 1024
