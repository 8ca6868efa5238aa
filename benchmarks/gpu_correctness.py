"""Whether every schedule and kernel is right on a device, by plain autograd on the same one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_bench import Bench, Row
from benchmarks.gpu_slice import Case, Slice
from domino_lm.config.kernels import KernelConfig
from domino_lm.config.settings import ConfigError, ModelConfig
from domino_lm.simulate.predict import SCHEDULES, named_model

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-4, torch.bfloat16: 1e-1}
"""Largest relative difference of any gradient; compared with the same dtype's autograd."""

REHEARSED = ("rows 2", "2 x 2", "sequence rows 2", "rows 2, recompute full")


def gradients(one: Slice, stack: Any) -> list[Tensor]:
    """What a step accumulates."""
    one.step()
    return [parameter.main_grad.clone() for parameter in stack.parameters()]


def autograd_gradients(one: Slice, stack: Any) -> list[Tensor]:
    """The same by `Stack.forward` and plain autograd."""
    batch = one.batch
    with torch.enable_grad():
        loss = (stack.forward(batch) * batch.loss_mask).sum() / batch.loss_mask.sum()
        return list(torch.autograd.grad(loss, stack.parameters()))


def worst(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest relative difference of any tensor; NaN counts as infinite."""
    each = [((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item() for a, b in zip(found, expected, strict=True)]
    return max(value if value == value else float("inf") for value in each)


def correctness(bench: Bench, deadline_s: float) -> Iterator[Row]:
    """Gradients of every schedule and kernel against plain autograd on the same device, on one rank."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for family in ("gpt3-13b", "llama2-13b"):
        shape: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4, "num_layers": 2, "vocab_size": 500, "seq_length": 64}
        model = named_model(family, **shape, ffn_hidden_size=256, init_method_std=0.1)
        if bench.rehearse:
            model = replace(model, num_layers=1, seq_length=16)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            case = Case(model=model, tensor_parallel=1, micro_batch_size=4, dtype=dtype, device=bench.device, hardware=bench.hardware)
            stack = case.stack()
            expected: list[Tensor] | None = None
            differences: dict[str, float] = {}
            for name, schedule in SCHEDULES.items():
                if schedule.domino_pair == "micro-batches" or (bench.rehearse and name not in REHEARSED):
                    continue  # a slice has one micro-batch
                one = Slice(case, stack, schedule)
                if expected is None:
                    batch, expected = one.batch, autograd_gradients(one, stack)
                one.batch = batch
                differences[name] = worst(gradients(one, stack), [grad.to(torch.promote_types(dtype, torch.float32)) for grad in expected])
            name, value = max(differences.items(), key=lambda item: item[1])
            what = f"{family} {str(dtype).removeprefix('torch.')}, {len(differences)} schedules against autograd"
            yield Row("correctness", what, f"{value:.1e} at most ({name})", "ok" if value < TOLERANCE[dtype] else "FAULT")
        yield from kernel_correctness(bench, model, deadline_s)


def kernel_correctness(bench: Bench, model: ModelConfig, deadline_s: float) -> Iterator[Row]:
    """Compiled, captured and 8-bit kernels against eager ones."""
    case = Case(model=model, tensor_parallel=1, micro_batch_size=4, dtype=bench.narrow, device=bench.device, hardware=bench.hardware)
    stack = case.stack()
    plain = Slice(case, stack, SCHEDULES["2 x 2"])
    expected = gradients(plain, stack)
    family = "llama" if model.swiglu else "gpt3"
    backend = "aot_eager" if bench.rehearse else "inductor"
    kinds = {
        "compiled": (KernelConfig(compile=True, compile_backend=backend), 2e-2),
        "CUDA graph": (KernelConfig(cuda_graph=True, cuda_graph_warmup_steps=1), 1e-3),
        "fp8 hybrid": (KernelConfig(fp8_format="hybrid"), 0.5),
        "fp8 e4m3": (KernelConfig(fp8_format="e4m3"), 0.5),
    }
    for name, (kernels, tolerance) in kinds.items():
        if time.monotonic() > deadline_s:
            yield Row("correctness", f"{family} {name}", "out of time", "skipped")
            continue
        try:
            one = Slice(case, stack, SCHEDULES["2 x 2"], kernels=kernels)
            one.batch = plain.batch
            for _ in range(3):  # captures in its second step
                found = gradients(one, stack)
            value = worst(found, expected)
            yield Row("correctness", f"{family} {name} against eager", f"{value:.1e} at most", "ok" if value < tolerance else "FAULT")
        except ConfigError as error:
            yield Row("correctness", f"{family} {name}", str(error).split(";")[0], "skipped")
