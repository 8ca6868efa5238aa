"""One rank's slice of a model on one device, ready to be stepped and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from benchmarks.emulated_link import EmulatedCommunicator, FreeLink, Link
from domino_lm.config.kernels import KernelConfig
from domino_lm.config.settings import ModelConfig, ScheduleConfig
from domino_lm.model.batch import MicroBatch
from domino_lm.model.families.lookup import family_of
from domino_lm.model.kernels.backends import choose_kernels, install_kernels
from domino_lm.model.parameter import Parameter, ParameterFactory, ParameterSpec
from domino_lm.model.stack import Stack
from domino_lm.parallel.collectives import Communicator
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.cuts import resolve_cut
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.graphs import build_executor
from domino_lm.schedule.passes import serialize
from domino_lm.schedule.plan import Plan
from domino_lm.schedule.prepare import prepare_plan
from domino_lm.schedule.step import compute_plan
from domino_lm.simulate.costs import shapes_of
from domino_lm.simulate.hardware import Hardware
from domino_lm.simulate.links import Fabric
from domino_lm.simulate.memory import memory_of
from domino_lm.simulate.predict import Setting
from domino_lm.simulate.simulator import simulate


class DeviceFactory(ParameterFactory):
    """Draws a rank's weights on the device, whatever the others would hold: only sizes matter here."""

    def _make(self, spec: ParameterSpec, fill: Callable[[Tensor, torch.Generator | None], Tensor]) -> Parameter:  # type: ignore[override]
        shape = list(spec.shape)
        if spec.shard_dim is not None:
            shape[spec.shard_dim] //= self.tp.size
        local = torch.zeros(shape, dtype=self.dtype, device=self.device)
        fill(local, None)
        return Parameter.of(local, spec)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, the ranks that share it, and one rank's micro-batch."""

    model: ModelConfig
    tensor_parallel: int
    micro_batch_size: int
    dtype: torch.dtype
    device: torch.device
    hardware: Hardware
    """What a prediction counts on, and whose links are emulated."""

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.model.seq_length * self.micro_batch_size

    @property
    def setting(self) -> Setting:
        """The same for a prediction; the link takes nothing of the device, as the emulated one."""
        machine = replace(self.hardware.without_contention(), element_bytes=self.dtype.itemsize, fused=False)
        return Setting(model=self.model, hardware=machine, tensor_parallel=self.tensor_parallel, micro_batch_size=self.micro_batch_size)

    def communicator(self, link: Link | None = None) -> Communicator:
        """The group that this rank thinks it is in; without ``link`` its collectives take no time."""
        if self.tensor_parallel == 1:
            return Communicator.single()
        assert isinstance(self.hardware.fabric, Fabric)
        return EmulatedCommunicator(self.tensor_parallel, link or FreeLink(), self.hardware.fabric)

    def stack(self) -> Stack:
        """The rank's weights."""
        return family_of(self.model).stack(DeviceFactory(self.communicator(), 1, self.dtype, self.device))

    def batch(self) -> MicroBatch:
        """Random tokens."""
        assert self.model.vocab_size is not None
        shape = (self.model.seq_length + 1, self.micro_batch_size)
        tokens = torch.randint(0, self.model.vocab_size, shape, device=self.device)
        mask = torch.ones(self.model.seq_length, self.micro_batch_size, device=self.device)
        return MicroBatch(tokens[:-1].contiguous(), tokens[1:].contiguous(), mask)


class Slice:
    """The executor of one schedule over a stack; its steps have no optimizer."""

    def __init__(
        self,
        case: Case,
        stack: Stack,
        schedule: ScheduleConfig,
        link: Link | None = None,
        kernels: KernelConfig | None = None,
        *,
        serial: bool = False,
    ) -> None:
        self.case, self.schedule = case, schedule
        kernels, tp, alone = kernels or KernelConfig(), case.communicator(link), Communicator.single()
        for part in stack.parts:
            if hasattr(part, "tp"):
                part.tp = tp
        install_kernels(stack, choose_kernels(kernels, case.device, case.dtype, case.model.hidden_size))
        mesh = ParallelMesh(alone, tp, alone, case.device)
        plan, gradients = prepare_plan(stack, mesh, schedule, case.micro_batch_size, case.model.seq_length)
        plan = serialize(plan) if serial else plan
        self.executor: Executor = build_executor(kernels, mesh, plan, stack, gradients)
        self.batch = case.batch()
        self.iteration = 0

    def step(self) -> None:
        """One forward and backward."""
        self.executor.run_step([self.batch], self.iteration)
        self.iteration += 1


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Timing:
    """Medians over rounds."""

    step_s: float
    host_s: float
    """Until the host had issued a step: where it equals the step, the host is what limits."""


def in_turn(slices: Mapping[str, Slice], rounds: int, warmups: int = 3, deadline_s: float = float("inf")) -> dict[str, Timing]:
    """Time every slice, one step of each a round, so that what disturbs one disturbs all; ends early at the deadline."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in slices}
    for one in slices.values():
        for _ in range(warmups):
            one.step()
        synchronize(one.case.device)
    for number in range(rounds):
        if number > 1 and time.monotonic() > deadline_s:
            break
        for name, one in slices.items():
            synchronize(one.case.device)
            start_s = time.perf_counter()
            one.step()
            host_s = time.perf_counter() - start_s
            synchronize(one.case.device)
            samples[name].append((time.perf_counter() - start_s, host_s))
    return {name: Timing(*(median(column) for column in zip(*found, strict=True))) for name, found in samples.items()}


def plan_of(case: Case, schedule: ScheduleConfig) -> Plan:
    """Forward and backward of a micro-batch."""
    return compute_plan(family_of(case.model).chain, schedule, resolve_cut(schedule, case.setting.uncut))


def predicted_s(case: Case, schedule: ScheduleConfig, free: Sequence[str] = (), *, serial: bool = False) -> float:
    """Forward and backward of a micro-batch by the simulator, the step's end left out as it is in a `Slice`."""
    setting, plan = case.setting, plan_of(case, schedule)
    plan = serialize(plan) if serial else plan
    shapes = shapes_of(case.model, plan, case.tensor_parallel, setting.hardware, case.micro_batch_size)
    return simulate(plan, shapes, setting.hardware, free=free).makespan_s


def predicted_bytes(case: Case, schedule: ScheduleConfig) -> float:
    """Weights, gradients and activations at their peak."""
    setting, plan = case.setting, plan_of(case, schedule)
    shapes = shapes_of(case.model, plan, case.tensor_parallel, setting.hardware, case.micro_batch_size)
    return memory_of(plan.ops, shapes, optimizer_bytes=0).total
