"""Lets programs that were written for CUDA run on CPUs: the few calls that they make are answered here.

Nothing of a peer is changed or replaced: only names in ``torch`` and ``torch.cuda`` are, in the peer's own process,
before it is imported. What a GPU would do asynchronously is done at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")
FACTORIES = "arange empty empty_like eye full full_like linspace ones ones_like rand randint randn tensor zeros zeros_like".split()


class HostStream:
    """A stream whose work has always ended."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> HostEvent:
        return HostEvent()


class HostEvent:
    """An event that has always happened."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def answer_on_cpu() -> None:
    """Install the answers; call before importing a peer."""
    cuda: Any = torch.cuda
    stream = HostStream()
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1
    cuda.set_device = _nothing
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.Stream, cuda.Event = HostStream, HostEvent
    cuda.stream = _unchanged_stream
    cuda.synchronize = cuda.empty_cache = _nothing
    cuda.manual_seed = cuda.manual_seed_all = torch.default_generator.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    anywhere: Any = torch
    anywhere.compile = _uncompiled  # the compiler catalogues torch's functions and refuses one that it meets twice
    tensor: Any = Tensor
    tensor.cuda = lambda self, *arguments, **named: self
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


class CommunicationSwitch:
    """Stands before ``torch.distributed.all_reduce``: ``mode`` is "on", "blocking" or "off"."""

    def __init__(self) -> None:
        self.mode = "on"
        self._all_reduce: Callable[..., Any] = dist.all_reduce
        dist.all_reduce = self._switched

    def _switched(self, tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        if self.mode == "on":
            return self._all_reduce(tensor, *arguments, **named)
        wants_handle = named.pop("async_op", False)
        if self.mode == "blocking":
            self._all_reduce(tensor, *arguments, **named)
        return Done() if wants_handle else None


class Done:
    """The handle of a collective that has ended."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _nothing(*arguments: Any, **named: Any) -> None:
    """Where a device would be told something."""


def _uncompiled(function: Any = None, **named: Any) -> Any:
    """Nothing that these comparisons use is compiled; peers only decorate with it."""
    return function if function is not None else _uncompiled


@contextlib.contextmanager
def _unchanged_stream(stream: Any) -> Iterator[None]:
    yield


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def make(*arguments: Any, **named: Any) -> Tensor:
        device = named.get("device")
        if device is not None and not isinstance(device, torch.device) and str(device).startswith("cuda"):
            named["device"] = CPU
        return factory(*arguments, **named)

    return make
