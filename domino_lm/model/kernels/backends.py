"""Chooses the kernels of a run, once, by what is installed, what the device can, and what the settings ask for.

Nothing is looked up on the machine but Python modules and what PyTorch says of the device: no compiler of CUDA or ROCm
is searched for, and the same code serves both.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor

from domino_lm.config.kernels import KernelConfig
from domino_lm.config.settings import ConfigError
from domino_lm.model.kernels import apex, pointwise
from domino_lm.model.kernels.compiled import compile_kernels
from domino_lm.model.kernels.fp8 import Fp8Format, Fp8Linear, Quantise, quantise
from domino_lm.model.kernels.kernel_set import Kernels
from domino_lm.model.kernels.transformer_engine import find_quantiser
from domino_lm.model.linear import Linear, MixedAddmmLinear
from domino_lm.model.parameter import Parameter
from domino_lm.model.stack import Stack

FP8_CAPABILITY = (8, 9)
"""First compute capability of NVIDIA's with 8-bit tensor cores (Ada)."""


def choose_kernels(settings: KernelConfig, device: torch.device, dtype: torch.dtype, hidden_size: int) -> Kernels:
    """The kernels for a model of ``dtype`` on ``device``. Raises ConfigError if a requested kernel does not run here."""
    linear, linear_name = _linear(settings, device, dtype)
    normalise, norm_name = _normalise(settings, device, dtype, hidden_size)
    kernels = Kernels(linear=linear, head_linear=linear, normalise=normalise)
    names = [f"weight gradients {linear_name}", f"norms {norm_name}"]
    if settings.tf32 and device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        names.append("GEMMs of fp32 in TF32")
    if settings.compile:
        kernels = compile_kernels(kernels, settings.compile_backend, device)
        names[1:2] = [f"norms, joins, activations and rotations by torch.compile ({settings.compile_backend})"]
    if settings.fp8_format is not None:
        fmt = Fp8Format.of(settings.fp8_format, device)
        quantiser, quantiser_name = _quantiser(settings, fmt, device, dtype)
        kernels = replace(kernels, linear=Fp8Linear(fmt, linear, quantiser))
        names.append(f"GEMMs in fp8 ({settings.fp8_format}), quantised by {quantiser_name}")
    return replace(kernels, description="; ".join(names))


def install_kernels(stack: Stack, kernels: Kernels) -> None:
    """Make every part of ``stack`` compute with ``kernels``."""
    for part in stack.parts:
        part.kernels = kernels


def _linear(settings: KernelConfig, device: torch.device, dtype: torch.dtype) -> tuple[Linear, str]:
    """The backend of weight gradients; a candidate that fails on a small example is passed over."""
    narrow = dtype in (torch.bfloat16, torch.float16)
    if not settings.gradient_accumulation_fusion or device.type != "cuda" or dtype == torch.float64:
        return Linear(), "by PyTorch"
    extension = None if settings.deterministic_mode else apex.find("fused_weight_gradient_mlp_cuda")
    if extension is not None and accumulates_rightly(apex.ApexWgradLinear(extension), device, dtype):
        return apex.ApexWgradLinear(extension), "accumulated by Apex's GEMM"
    if narrow and accumulates_rightly(MixedAddmmLinear(), device, dtype):
        return MixedAddmmLinear(), "accumulated in fp32 by PyTorch's mixed GEMM"
    return Linear(), "by PyTorch"


def accumulates_rightly(linear: Linear, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``linear`` runs here and adds a small product to fp32 memory to 16-bit rounding."""

    class Weight:
        main_grad = torch.ones(32, 48, dtype=torch.float32, device=device)

    dy = torch.linspace(-1, 1, 16 * 32, device=device).view(16, 1, 32).to(dtype)
    x = torch.linspace(-2, 1, 16 * 48, device=device).view(16, 1, 48).to(dtype)
    expected = 1 + dy.flatten(0, 1).float().t() @ x.flatten(0, 1).float()
    try:
        linear.accumulate_wgrad(Weight, dy, x)  # type: ignore[arg-type]
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
    return torch.allclose(Weight.main_grad, expected, rtol=2e-2, atol=2e-2)


Norm = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]


def _normalise(settings: KernelConfig, device: torch.device, dtype: torch.dtype, hidden_size: int) -> tuple[Norm, str]:
    """Apex's norms if they run at this width, else PyTorch's."""
    fused = None if settings.deterministic_mode else apex.find("apex.normalization.fused_layer_norm")
    if device.type != "cuda" or dtype == torch.float64 or fused is None or apex.find("fused_layer_norm_cuda") is None:
        return pointwise.normalise, "by PyTorch"
    persistent = apex.find("apex.contrib.layer_norm.layer_norm") if settings.persist_layer_norm else None
    candidates = [(persistent, "by Apex (persistent)")] if persistent is not None else []
    for module, name in [*candidates, (None, "by Apex (fused)")]:
        norm = apex.ApexNorms(fused, module)
        if normalises_rightly(norm, device, dtype, hidden_size):
            return norm, name
    return pointwise.normalise, "by PyTorch"


def normalises_rightly(norm: Norm, device: torch.device, dtype: torch.dtype, hidden_size: int) -> bool:
    """Whether ``norm`` runs here at this width and agrees with PyTorch to the dtype's rounding."""
    hidden = torch.linspace(-3, 2, 4 * hidden_size, device=device).view(4, 1, hidden_size).to(dtype)
    weight = torch.linspace(0.5, 1.5, hidden_size, device=device).to(dtype)
    try:
        return all(
            torch.allclose(norm(hidden, weight, bias, 1e-5), pointwise.normalise(hidden, weight, bias, 1e-5), rtol=2e-2, atol=2e-2)
            for bias in (weight, None)
        )
    except (RuntimeError, TypeError, NotImplementedError):
        return False


def _quantiser(settings: KernelConfig, fmt: Fp8Format, device: torch.device, dtype: torch.dtype) -> tuple[Quantise, str]:
    """Transformer Engine's, or our own, compiled if ``--compile`` is given. Raises ConfigError if no fp8 GEMM runs."""
    if dtype == torch.float64:
        raise ConfigError(f"--fp8-format {settings.fp8_format} needs a model in bf16, fp16 or fp32, not float64.")
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability(device)))
        needed = ".".join(map(str, FP8_CAPABILITY))
        raise ConfigError(
            f"--fp8-format {settings.fp8_format} needs a GPU of compute capability {needed} or newer, not {found}; leave it out."
        )
    if not hasattr(torch, "_scaled_mm"):
        raise ConfigError(f"--fp8-format {settings.fp8_format} needs a PyTorch with 8-bit GEMMs, not {torch.__version__}; leave it out.")
    candidates: list[tuple[Quantise, str]] = []
    foreign = device.type == "cuda" and torch.version.hip is None and not settings.deterministic_mode
    if foreign and (library := find_quantiser(device)) is not None:
        candidates.append((library, f"Transformer Engine {getattr(import_module('transformer_engine'), '__version__', '')}".rstrip()))
    if settings.compile:
        compiled = torch.compile(quantise, fullgraph=True, dynamic=False, backend=settings.compile_backend)
        candidates.append((compiled, "a compiled kernel"))
    for quantiser, name in [*candidates, (quantise, "PyTorch")]:
        if shows_not_finite(quantiser, fmt, device, dtype) and multiplies_rightly(Fp8Linear(fmt, Linear(), quantiser), device, dtype):
            return quantiser, name
    raise ConfigError(
        f"--fp8-format {settings.fp8_format}: PyTorch {torch.__version__} multiplies no 8-bit matrices on this device; leave it out."
    )


@torch.no_grad()
def shows_not_finite(quantiser: Quantise, fmt: Fp8Format, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether an element that is not finite stays visible in both orders of what ``quantiser`` makes; a saturated one would train on."""
    for kind in {fmt.forward, fmt.gradient}:
        for bad in (float("inf"), float("-inf"), float("nan")):
            matrix = torch.linspace(-1, 2, 32 * 16, device=device).view(32, 16).to(dtype)
            matrix[5, 3] = bad
            try:
                rows, columns, inverse_scale = quantiser(matrix, kind, True)
            except (AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError):
                return False
            for order in (rows, columns):
                if order is None or bool((order.float() * inverse_scale).isfinite().all()):
                    return False
    return True


@torch.no_grad()
def multiplies_rightly(linear: Linear, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``linear`` runs here and gives small products to 8-bit rounding, forward and backward."""
    weight = Parameter(torch.linspace(-1, 2, 48 * 64, device=device).view(48, 64).sin().to(dtype))
    x, dy = (torch.linspace(-3, 3, 32 * n, device=device).view(16, 2, n).cos().to(dtype) for n in (64, 48))
    found: list[Tensor] = []
    expected: list[Tensor] = []
    try:
        for one, results in ((linear, found), (Linear(), expected)):
            weight.main_grad = torch.zeros(48, 64, dtype=torch.float32, device=device)
            one.accumulate_wgrad(weight, dy, x)
            half = slice(16, 32)
            results += [one.forward(x, weight), one.dgrad(dy, weight), one.forward_columns(x, weight, half), weight.main_grad]
    except (AttributeError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    return all(bool((a.float() - b.float()).norm() < 0.15 * b.float().norm()) for a, b in zip(found, expected, strict=True))
