"""Which kernels a run gets, and how other libraries are called, by stand-ins that check their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from domino_lm.config.kernels import KernelConfig
from domino_lm.config.settings import ConfigError
from domino_lm.model.kernels import apex, backends, pointwise
from domino_lm.model.kernels.apex import ApexNorms, ApexWgradLinear
from domino_lm.model.kernels.backends import accumulates_rightly, choose_kernels, multiplies_rightly, normalises_rightly, shows_not_finite
from domino_lm.model.kernels.fp8 import Fp8Format, Fp8Linear, Quantised, quantise
from domino_lm.model.kernels.transformer_engine import TransformerEngineQuantiser
from domino_lm.model.linear import Linear, MixedAddmmLinear
from domino_lm.model.parameter import Parameter

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16, FP32 = torch.bfloat16, torch.float32


def wgrad_extension(calls: list[tuple[Any, ...]]) -> Any:
    """Apex's extension: operands [tokens, width] in 16 or 32 bits, the sum into fp32 or 16-bit memory."""

    def accumulate(kind: torch.dtype) -> Any:
        def run(x: Tensor, dy: Tensor, grad: Tensor) -> None:
            assert x.dim() == dy.dim() == 2
            assert grad.dtype == kind
            assert grad.shape == (dy.shape[1], x.shape[1])
            calls.append((x.shape, dy.shape, grad.dtype))
            grad.add_(dy.to(kind).t() @ x.to(kind))

        return run

    return SimpleNamespace(wgrad_gemm_accum_fp32=accumulate(FP32), wgrad_gemm_accum_fp16=accumulate(BF16))


def test_apex_adds_weight_gradients_to_the_memory_that_there_is() -> None:
    calls: list[tuple[Any, ...]] = []
    linear = ApexWgradLinear(wgrad_extension(calls))
    weight = Parameter(torch.zeros(6, 4, dtype=BF16))
    dy, x = torch.ones(5, 2, 6, dtype=BF16), torch.ones(5, 2, 4, dtype=BF16)
    for memory in (FP32, BF16):
        weight.main_grad = torch.ones(6, 4, dtype=memory)
        linear.accumulate_wgrad(weight, dy, x)
        assert torch.equal(weight.main_grad, torch.full((6, 4), 11, dtype=memory))
    assert calls == [((10, 4), (10, 6), FP32), ((10, 4), (10, 6), BF16)]


def test_the_other_gemms_stay_pytorchs_beside_apex() -> None:
    linear, weight, x = ApexWgradLinear(wgrad_extension([])), Parameter(torch.randn(6, 4)), torch.randn(3, 2, 4)
    assert torch.equal(linear.forward(x, weight), Linear().forward(x, weight))


def fused_norms(calls: list[Any]) -> Any:
    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, shape: torch.Size, eps: float) -> Tensor:
        calls.append(("layer", shape, eps))
        return pointwise.normalise(x, weight, bias, eps)

    def rms_norm(x: Tensor, weight: Tensor, shape: torch.Size, eps: float) -> Tensor:
        calls.append(("rms", shape, eps))
        return pointwise.normalise(x, weight, None, eps)

    return SimpleNamespace(fused_layer_norm_affine=layer_norm, fused_rms_norm_affine=rms_norm)


def persistent_norms(calls: list[Any], widths: set[int]) -> Any:
    def apply(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        if x.shape[-1] not in widths:
            raise RuntimeError("FWD: Unsupported hidden_size or types")
        calls.append(("persistent", eps))
        return pointwise.normalise(x, weight, bias, eps)

    return SimpleNamespace(FastLayerNormFN=SimpleNamespace(apply=apply))


def test_apex_norms_take_their_own_arguments() -> None:
    calls: list[Any] = []
    x, weight = torch.randn(2, 2, 8), torch.ones(8)
    fused, persistent = ApexNorms(fused_norms(calls), None), ApexNorms(fused_norms(calls), persistent_norms(calls, {8}))
    for norm in (fused, persistent):
        norm(x, weight, weight, 1e-5)
        norm(x, weight, None, 1e-6)
    assert calls == [("layer", (8,), 1e-5), ("rms", (8,), 1e-6), ("persistent", 1e-5), ("rms", (8,), 1e-6)]


def test_float64_is_normalised_by_pytorch() -> None:
    calls: list[Any] = []
    x, weight = torch.randn(2, 2, 8, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    assert torch.equal(ApexNorms(fused_norms(calls), None)(x, weight, None, 1e-5), pointwise.normalise(x, weight, None, 1e-5))
    assert calls == []


def test_a_kernel_that_fails_or_is_wrong_is_found_out() -> None:
    wrong = SimpleNamespace(wgrad_gemm_accum_fp32=lambda x, dy, grad: grad.zero_(), wgrad_gemm_accum_fp16=None)
    assert accumulates_rightly(ApexWgradLinear(wgrad_extension([])), CPU, BF16)
    assert accumulates_rightly(Linear(), CPU, BF16)
    assert not accumulates_rightly(ApexWgradLinear(wrong), CPU, BF16)  # type: ignore[arg-type]
    assert not accumulates_rightly(MixedAddmmLinear(), CPU, BF16)  # PyTorch has it on GPUs alone
    assert normalises_rightly(ApexNorms(fused_norms([]), persistent_norms([], {32})), CPU, FP32, 32)
    assert not normalises_rightly(ApexNorms(fused_norms([]), persistent_norms([], {32})), CPU, FP32, 48)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a GPU, whose kernels are tried on the CPU; the dictionary holds the modules that are installed."""
    modules: dict[str, Any] = {}
    monkeypatch.setattr(apex, "find", modules.get)
    real_wgrad, real_norm = accumulates_rightly, normalises_rightly
    real_probe = shows_not_finite
    monkeypatch.setattr(backends, "multiplies_rightly", lambda linear, device, dtype: True)
    monkeypatch.setattr(backends, "shows_not_finite", lambda quantiser, fmt, device, dtype: real_probe(quantiser, fmt, CPU, dtype))
    monkeypatch.setattr(backends, "accumulates_rightly", lambda linear, device, dtype: real_wgrad(linear, CPU, dtype))
    monkeypatch.setattr(backends, "normalises_rightly", lambda norm, device, dtype, size: real_norm(norm, CPU, dtype, size))
    return modules


def test_what_is_installed_is_used_on_a_gpu(on_a_gpu: dict[str, Any]) -> None:
    on_a_gpu["fused_weight_gradient_mlp_cuda"] = wgrad_extension([])
    on_a_gpu["apex.normalization.fused_layer_norm"], on_a_gpu["fused_layer_norm_cuda"] = fused_norms([]), object()
    on_a_gpu["apex.contrib.layer_norm.layer_norm"] = persistent_norms([], {64})
    kernels = choose_kernels(KernelConfig(), CUDA, BF16, 64)
    assert isinstance(kernels.linear, ApexWgradLinear)
    assert kernels.head_linear is kernels.linear
    assert kernels.description == "weight gradients accumulated by Apex's GEMM; norms by Apex (persistent)"
    assert "norms by Apex (fused)" in choose_kernels(KernelConfig(), CUDA, BF16, 48).description
    assert "norms by Apex (fused)" in choose_kernels(KernelConfig(persist_layer_norm=False), CUDA, BF16, 64).description


def test_nothing_of_apex_is_used_where_a_flag_or_the_device_or_the_dtype_forbids_it(on_a_gpu: dict[str, Any]) -> None:
    on_a_gpu["fused_weight_gradient_mlp_cuda"] = wgrad_extension([])
    without = KernelConfig(gradient_accumulation_fusion=False)
    for settings, device, dtype in ((without, CUDA, BF16), (KernelConfig(), CPU, FP32), (KernelConfig(), CUDA, torch.float64)):
        assert type(choose_kernels(settings, device, dtype, 64).linear) is Linear


def test_without_apex_everything_is_pytorchs(on_a_gpu: dict[str, Any]) -> None:
    assert choose_kernels(KernelConfig(), CUDA, BF16, 64).description == "weight gradients by PyTorch; norms by PyTorch"


def test_fp8_wraps_the_layers_and_not_the_head() -> None:
    kernels = choose_kernels(KernelConfig(fp8_format="hybrid"), CPU, FP32, 64)
    assert isinstance(kernels.linear, Fp8Linear)
    assert type(kernels.head_linear) is Linear
    assert kernels.description.endswith("GEMMs in fp8 (hybrid), quantised by PyTorch")


def test_an_8_bit_kernel_that_fails_or_is_wrong_is_found_out() -> None:
    hybrid = Fp8Format.of("hybrid", CPU)

    def scaled_twice(matrix: Tensor, dtype: torch.dtype, transposed: bool) -> Quantised:
        found = quantise(matrix, dtype, transposed)
        return found._replace(inverse_scale=2 * found.inverse_scale)

    def absent(matrix: Tensor, dtype: torch.dtype, transposed: bool) -> Quantised:
        raise AttributeError("'Float8Tensor' object has no attribute '_transpose'")

    for dtype in (FP32, BF16):
        assert multiplies_rightly(Fp8Linear(hybrid, Linear()), CPU, dtype)
    assert not multiplies_rightly(Fp8Linear(hybrid, Linear(), scaled_twice), CPU, FP32)
    assert not multiplies_rightly(Fp8Linear(hybrid, Linear(), absent), CPU, FP32)


def hiding(bad: str, order: str) -> Any:
    """A quantiser that saturates one kind of element that is not finite, in one order of the matrix."""

    def saturating(matrix: Tensor, dtype: torch.dtype, transposed: bool) -> Quantised:
        hidden = {"inf": torch.isposinf, "-inf": torch.isneginf, "nan": torch.isnan}[bad](matrix)
        found = quantise(matrix, dtype, transposed)
        kept = quantise(matrix.masked_fill(hidden, 448), dtype, transposed)
        return kept if order == "both" else found._replace(columns=kept.columns, inverse_scale=kept.inverse_scale)

    return saturating


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_quantiser_that_hides_what_is_not_finite_is_found_out(dtype: torch.dtype) -> None:
    for name in ("hybrid", "e4m3"):
        assert shows_not_finite(quantise, Fp8Format.of(name, CPU), CPU, dtype)
        for bad in ("inf", "-inf", "nan"):
            assert not shows_not_finite(hiding(bad, "both"), Fp8Format.of(name, CPU), CPU, dtype)
    assert not shows_not_finite(hiding("inf", "columns"), Fp8Format.of("e4m3", CPU), CPU, dtype)


def test_transformer_engine_is_passed_over_if_it_hides_infinity(on_a_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backends, "import_module", lambda name: SimpleNamespace(__version__="2.9"))
    settings = KernelConfig(fp8_format="hybrid")
    for quantiser, named in ((quantise, "Transformer Engine 2.9"), (hiding("inf", "both"), "PyTorch")):
        monkeypatch.setattr(backends, "find_quantiser", lambda device, found=quantiser: found)
        assert choose_kernels(settings, CUDA, BF16, 64).description.endswith(f"quantised by {named}")


@pytest.fixture
def without_tf32() -> Iterator[None]:
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("on_a_gpu", "without_tf32")
@pytest.mark.parametrize("asked", [False, True])
def test_tf32_is_a_setting_of_gpus(asked: bool) -> None:
    assert "TF32" not in choose_kernels(KernelConfig(tf32=asked), CPU, FP32, 64).description
    assert torch.backends.cuda.matmul.allow_tf32 is False
    assert ("GEMMs of fp32 in TF32" in choose_kernels(KernelConfig(tf32=asked), CUDA, FP32, 64).description) == asked
    assert torch.backends.cuda.matmul.allow_tf32 is asked


def test_fp8_without_8_bit_gemms_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("not for this device")))
    with pytest.raises(ConfigError, match="multiplies no 8-bit matrices on this device; leave it out"):
        choose_kernels(KernelConfig(fp8_format="hybrid"), CPU, FP32, 64)


def test_fp8_refuses_float64() -> None:
    with pytest.raises(ConfigError, match="--fp8-format hybrid needs a model in bf16, fp16 or fp32, not float64"):
        choose_kernels(KernelConfig(fp8_format="hybrid"), CPU, torch.float64, 64)


def test_fp8_refuses_a_gpu_without_8_bit_units(on_a_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"needs a GPU of compute capability 8\.9 or newer, not 8\.0"):
        choose_kernels(KernelConfig(fp8_format="e4m3"), CUDA, BF16, 64)


def test_rocm_has_its_own_8_bit_types_and_no_nvidia_capability(on_a_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: pytest.fail("asked for a CUDA capability"))
    linear = choose_kernels(KernelConfig(fp8_format="hybrid"), CUDA, BF16, 64).linear
    assert isinstance(linear, Fp8Linear)
    assert (linear.format.forward, linear.format.gradient) == (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class EngineQuantiser:
    """Transformer Engine's quantiser by its arguments and by what its tensor holds."""

    made: list[tuple[Any, ...]]

    def __init__(self, kind: Any, device: torch.device, *, rowwise: bool, columnwise: bool) -> None:
        self.made.append((kind, device, rowwise, columnwise))
        self._dtype, self._columnwise = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[kind], columnwise

    def __call__(self, matrix: Tensor) -> Any:
        assert matrix.is_contiguous()
        rows, columns, scale = quantise(matrix, self._dtype, self._columnwise)
        transpose = None if columns is None else columns.view(torch.uint8)
        return SimpleNamespace(_data=rows.view(torch.uint8), _transpose=transpose, _scale_inv=scale.view(1))


@pytest.mark.parametrize("transposed", [False, True])
def test_transformer_engine_quantises_as_we_do(transposed: bool) -> None:
    EngineQuantiser.made = []
    engine = TransformerEngineQuantiser(EngineQuantiser, SimpleNamespace(kFloat8E4M3="E4M3", kFloat8E5M2="E5M2"), CUDA)
    matrix = torch.randn(32, 16, generator=torch.Generator().manual_seed(2))
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fn):
        for found, expected in zip(engine(matrix, dtype, transposed), quantise(matrix, dtype, transposed), strict=True):
            assert (found is None and expected is None) or torch.equal(found.float(), expected.float())
    assert EngineQuantiser.made == [("E4M3", CUDA, True, transposed), ("E5M2", CUDA, True, transposed)]


def test_an_unknown_compiler_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="--compile-backend nvfuser is not known to this PyTorch; use one of"):
        choose_kernels(KernelConfig(compile=True, compile_backend="nvfuser"), CPU, FP32, 64)


def test_a_missing_compiler_is_told_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Any, **settings: Any) -> Any:
        def fail(*args: Any) -> None:
            raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found in g++")

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(ConfigError, match=r"--compile: .* inductor does not work here \(InvalidCxx.*\)\. It needs a C\+\+ compiler"):
        choose_kernels(KernelConfig(compile=True), CPU, FP32, 64)


def test_every_pointwise_kernel_is_compiled_in_one_graph_without_dynamic_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Any]] = []

    def compile_(function: Any, **settings: Any) -> Any:
        seen.append((function.__name__, settings))
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    choose_kernels(KernelConfig(compile=True, compile_backend="aot_eager"), CPU, FP32, 64)
    assert [name for name, _ in seen] == ["probe", "normalise", "join", "gelu", "swiglu", "rotate"]
    assert all(settings == {"fullgraph": True, "dynamic": False, "backend": "aot_eager"} for _, settings in seen)
