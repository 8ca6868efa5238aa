"""Steps as CUDA graphs: a micro-batch and the step's end are captured once and then replayed, so that the host issues no ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from domino_lm.config.kernels import KernelConfig
from domino_lm.config.settings import ConfigError
from domino_lm.model.batch import MicroBatch
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.parallel.random import DropoutKey
from domino_lm.schedule.binding import BoundOp
from domino_lm.schedule.executor import Executor, StepResult
from domino_lm.schedule.recorder import Observer

INPUTS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


class GraphBackend(Protocol):
    """Captures device work: `CudaGraphs`, or a stand-in of the tests."""

    def warm_up(self) -> AbstractContextManager[None]:
        """Run what stands inside on the stream that will capture."""

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        """Record the device work of ``call`` without running it; the result runs it."""


class CudaGraphs:
    """CUDA graphs of one device, captured on a stream of their own, with memory that all of them share.

    They share it safely, since they are replayed one after the other and none reads what another left in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        """Work on the stream that will capture: libraries allocate workspaces per stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        """Capture ``call``; threads of NCCL and autograd may go on meanwhile."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # memory that eager steps hold would come on top of the graph's own
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            call()
        return graph.replay


class GraphedExecutor(Executor):
    """Runs the first ``warmup_steps`` steps op by op and replays graphs of the same ops from then on.

    A graph is captured for each distinct template: a micro-batch, and the last one with the step's end. Inputs are copied
    into buffers that the graphs read; what changes by step (dropout's step, loss weights, the learning rate that ``on_step``
    reads) must be in device memory. ``on_step`` runs once, while it is captured. A step that is recorded runs op by op, and
    the next one captures again.
    """

    def __init__(self, *args: Any, warmup_steps: int, backend: GraphBackend, **settings: Any) -> None:
        super().__init__(*args, **settings)
        assert warmup_steps > 0, "a step must run before one is captured"
        self._eager_left = warmup_steps
        self._backend = backend
        self._graphs: dict[int, tuple[Callable[[], None], Sequence[Tensor]]] = {}  # and what the captured STEP op returned
        self._replaying = False
        self._static: MicroBatch | None = None
        self._static_weight: Tensor | None = None
        self._offset = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        dtype = torch.promote_types(self.stack.embedding.weight.dtype, torch.float32)
        self._losses = torch.zeros((), dtype=dtype, device=self.mesh.device)

    @torch.no_grad()
    def run_step(self, micro_batches: Sequence[MicroBatch], iteration: int, recorder: Observer | None = None) -> StepResult:
        """As `Executor.run_step`, replayed once warm."""
        self._replaying = self._eager_left <= 0 and recorder is None
        self._state.replayed_loss = self._losses if self._replaying else None
        if not self._replaying:
            self._eager_left -= 1
            self._graphs.clear()
            with self._backend.warm_up():
                return super().run_step(micro_batches, iteration, recorder)
        self._losses.zero_()
        return super().run_step(micro_batches, iteration)

    def _pass(self, template: list[BoundOp], values: list[Any], batch: MicroBatch | None, micro: int, weight: Tensor | None) -> None:
        if not self._replaying:
            super()._pass(template, values, batch, micro, weight)
            return
        self.stack.embedding.kernels.rebuild()
        self._require_nothing_crosses(values)
        assert batch is not None
        assert weight is not None
        static, static_weight = self._fill(batch, weight)
        if id(template) not in self._graphs:

            def run() -> None:
                super(GraphedExecutor, self)._pass(template, values, static, micro, static_weight)
                self._losses.copy_(self._state.loss_sum())
                self._state.row_losses.clear()

            self._graphs[id(template)] = self._backend.capture(run), self._state.found
            self._require_nothing_crosses(values)
        replay, self._state.found = self._graphs[id(template)]
        replay()

    def _fill(self, batch: MicroBatch, weight: Tensor) -> tuple[MicroBatch, Tensor]:
        """Copy a micro-batch and its loss weight into the buffers that graphs read."""
        if self._static is None or self._static_weight is None:
            own = {name: value.clone() for name in INPUTS if (value := getattr(batch, name)) is not None}
            self._static, self._static_weight = replace(batch, **own), weight.clone()
        for name in INPUTS:
            buffer, value = getattr(self._static, name), getattr(batch, name)
            same = (buffer is None) == (value is None) and (value is None or buffer.shape == value.shape)
            assert same, f"all micro-batches have the same inputs of the same shapes, {name} included"
            if value is not None:
                buffer.copy_(value)
        self._static_weight.copy_(weight)
        self._offset.fill_(batch.sample_offset)
        return self._static, self._static_weight

    def _dropout_key(self, batch: MicroBatch) -> DropoutKey:
        key = super()._dropout_key(batch)
        if self._replaying:
            key.samples = torch.arange(batch.size, device=self.mesh.device) + self._offset
        return key

    def _require_nothing_crosses(self, values: list[Any]) -> None:
        if any(value is not None for value in values):
            raise ConfigError(
                "--cuda-graph replays one micro-batch after the other, but in this plan something passes from one to the next; "
                "leave it out, or what makes them overlap (--domino-pair micro-batches, --overlap-param-gather)."
            )


def build_executor(kernels: KernelConfig, mesh: ParallelMesh, *args: Any, **settings: Any) -> Executor:
    """The executor that settings ask for, of the arguments of `Executor`. Raises ConfigError if graphs cannot be had."""
    plan, stack, *others = args
    if not kernels.cuda_graph:
        return Executor(plan, stack, mesh, *others, **settings)
    if mesh.device.type != "cuda":
        raise ConfigError(f"--cuda-graph captures work of a GPU, but this run computes on {mesh.device.type}; leave it out.")
    backend = CudaGraphs(mesh.device)
    return GraphedExecutor(plan, stack, mesh, *others, **settings, warmup_steps=kernels.cuda_graph_warmup_steps, backend=backend)
