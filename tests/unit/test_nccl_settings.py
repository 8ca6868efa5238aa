"""What the program tells NCCL and CUDA before they start, and how inputs reach a GPU, by stand-ins."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from domino_lm.config.kernels import KernelConfig
from domino_lm.config.settings import ConfigError, ParallelConfig
from domino_lm.model.batch import to_device
from domino_lm.parallel.mesh import ParallelMesh, _nccl_options
from domino_lm.parallel.nccl_variables import set_nccl_variables

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def options(is_high_priority_stream: bool) -> Any:
        return SimpleNamespace(priority=is_high_priority_stream, config=SimpleNamespace(min_ctas=None, max_ctas=None))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)


@pytest.mark.usefixtures("nccl")
def test_named_groups_run_at_high_priority() -> None:
    settings = KernelConfig(high_priority_stream_groups=("tp",))
    assert _nccl_options(settings, "tp").priority is True
    assert _nccl_options(settings, "dp") is None


@pytest.mark.usefixtures("nccl")
def test_a_limit_of_thread_blocks_holds_for_every_group() -> None:
    for group in ("tp", "dp"):
        found = _nccl_options(KernelConfig(nccl_max_ctas=4), group)
        assert (found.priority, found.config.min_ctas, found.config.max_ctas) == (False, 1, 4)


def test_without_settings_nccl_has_its_own() -> None:
    assert _nccl_options(KernelConfig(), "tp") is None
    assert _nccl_options(None, "tp") is None


@pytest.mark.parametrize(("queues", "expected"), [(None, "1"), (8, "8")])
def test_hardware_queues_are_set_before_a_device_is_chosen(monkeypatch: pytest.MonkeyPatch, queues: int | None, expected: str) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    seen = []

    def default_device() -> torch.device:
        seen.append(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
        return CPU

    monkeypatch.setattr("domino_lm.parallel.mesh.default_device", default_device)
    ParallelMesh.create(ParallelConfig(), kernels=KernelConfig(cuda_device_max_connections=queues))
    assert seen == [expected]


EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"}


@pytest.mark.parametrize(
    ("version", "given", "expected"),
    [("2.6.0+cu124", None, "1"), ("2.7.1", None, "1"), ("2.7.1", "0", "0"), ("2.8.0", None, None), ("2.13.0a0+git1", None, None)],
)
def test_an_older_pytorch_is_told_not_to_hold_memory_back(version: str, given: str | None, expected: str | None) -> None:
    environment = {} if given is None else {"TORCH_NCCL_AVOID_RECORD_STREAMS": given}
    set_nccl_variables(environment, KernelConfig(), version)
    assert environment.get("TORCH_NCCL_AVOID_RECORD_STREAMS") == expected


@pytest.mark.parametrize(
    ("variables", "graphs", "expected"),
    [
        (EXPANDABLE, True, "0"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments: True"}, True, "0"),
        (EXPANDABLE | {"NCCL_GRAPH_REGISTER": "0"}, True, "0"),
        (EXPANDABLE, False, None),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True,expandable_segments:False"}, True, None),
        ({}, True, None),
    ],
)
def test_graphs_with_memory_that_moves_register_no_buffers(variables: dict[str, str], graphs: bool, expected: str | None) -> None:
    environment = dict(variables)
    set_nccl_variables(environment, KernelConfig(cuda_graph=graphs), "2.13.0")
    assert environment.get("NCCL_GRAPH_REGISTER") == expected


def test_graphs_with_memory_that_moves_and_registered_buffers_are_refused() -> None:
    environment = EXPANDABLE | {"NCCL_GRAPH_REGISTER": "1"}
    with pytest.raises(ConfigError, match=r"--cuda-graph with PYTORCH_CUDA_ALLOC_CONF=.* needs NCCL_GRAPH_REGISTER=0, .* but it is 1"):
        set_nccl_variables(environment, KernelConfig(cuda_graph=True), "2.13.0")


class HostTensor:
    """A tensor of the host that notes how it is copied."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def pin_memory(self) -> HostTensor:
        self.log.append("pinned")
        return self

    def to(self, device: torch.device, non_blocking: bool) -> HostTensor:
        self.log.append((device, non_blocking))
        return self


@pytest.mark.parametrize(("device", "expected"), [(CUDA, ["pinned", (CUDA, True)]), (CPU, [(CPU, True)])], ids=str)
def test_inputs_reach_a_gpu_from_pinned_memory_without_waiting(device: torch.device, expected: list[Any]) -> None:
    log: list[Any] = []
    to_device(HostTensor(log), device)  # type: ignore[arg-type]
    assert log == expected
