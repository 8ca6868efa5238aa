"""Graphs on a CPU: what a call does is recorded op by op, and a replay does the same ops on the same memory again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Tape(TorchDispatchMode):
    """Keeps every op with its arguments and results, numbers as they were: what a real graph bakes in is baked in here."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        self.ops.append((function, args, kwargs or {}, results))
        return results

    def replay(self) -> None:
        for function, args, kwargs, results in self.ops:
            aliased = [value.alias_info for value in function._schema.returns]
            if any(alias is not None and not alias.is_write for alias in aliased):
                continue  # a view shows what its base now holds
            again = function(*args, **kwargs)
            if not function._schema.is_mutable:
                for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old is not new:
                        old.detach().copy_(new)


class RecordedGraphs:
    """Stands in for `CudaGraphs`: the call runs while it is captured, which counts as its first replay. ``log`` holds what was asked."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @contextmanager
    def warm_up(self) -> Iterator[None]:
        self.log.append("warm-up")
        yield

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        number = sum(entry.startswith("capture") for entry in self.log)
        self.log.append(f"capture {number}")
        tape = _Tape()
        with tape:
            call()
        fresh = [True]

        @torch.no_grad()
        def replay() -> None:
            self.log.append(f"replay {number}")
            if fresh:
                fresh.clear()
            else:
                tape.replay()

        return replay
