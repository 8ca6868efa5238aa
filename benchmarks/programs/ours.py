"""Our program as a rank process: every variant is an executor on the same weights."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.case import OUR_VARIANTS, Case
from benchmarks.programs.rank import Program, serve, weight_file
from domino_lm.config.settings import ScheduleConfig
from domino_lm.model.batch import MicroBatch
from domino_lm.model.build import build_stack
from domino_lm.parallel.collectives import Communicator, Pending
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.binding import BoundOp
from domino_lm.schedule.executor import Executor
from domino_lm.schedule.passes import serialize
from domino_lm.schedule.prepare import prepare_plan
from domino_lm.schedule.recorder import Recorder
from domino_lm.schedule.timeline import Timeline
from domino_lm.simulate.auto import choose
from domino_lm.simulate.calibrate import calibrate
from domino_lm.simulate.predict import Setting


class SilentCommunicator(Communicator):
    """Starts nothing: a collective's buffer is handed back as it is, or repeated where ranks would be gathered."""

    def all_reduce_start(self, tensor: Tensor) -> Pending:
        return Pending(tensor, None)

    def all_gather_start(self, tensor: Tensor) -> Pending:
        return Pending(tensor.expand(self.size, *tensor.shape), None)

    def all_gather_tokens_start(self, tensor: Tensor) -> Pending:
        return Pending(tensor.repeat(self.size, *[1] * (tensor.dim() - 1)), None)

    def reduce_scatter_start(self, tensor: Tensor) -> Pending:
        return Pending(tensor.chunk(self.size)[self.rank].contiguous(), None)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        return tensor


@dataclass
class Prepared:
    """A variant ready to run: its executor and the gradient memory that belongs to it."""

    executor: Executor
    main_grads: list[Tensor]


class OurProgram(Program):
    """One set of weights; an executor and gradient memory for each variant, made when it first runs."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case, rank)
        self.mesh = ParallelMesh.from_world(case.tensor_parallel, torch.device("cpu"))
        self.stack = build_stack(case.model, self.mesh.tp, case.seed)
        self.parameters = self.stack.parameters()
        self.batches = [
            MicroBatch(tokens.t().contiguous(), labels.t().contiguous(), torch.ones(labels.t().shape)) for tokens, labels in self.samples()
        ]
        self.prepared: dict[str, Prepared] = {}
        self.settled: ScheduleConfig | None = None
        self._mark_phases()

    def load(self, folder: Path) -> None:
        """The weights come from here: save them for the others."""
        if self.mesh.dp.rank == 0:
            torch.save({p.spec.name: p.detach() for p in self.parameters}, weight_file(folder, self.mesh.tp.rank))

    def step(self, variant: str) -> Tensor:
        about = OUR_VARIANTS[variant]
        if about.schedule is None and not about.auto:
            return self._autograd_step()
        prepared = self.prepared.get(variant) or self._prepare(variant)
        for parameter, grad in zip(self.parameters, prepared.main_grads, strict=True):
            parameter.main_grad = grad
        made = prepared.executor.run_step(self.batches, 1)
        return made.loss_sum / made.tokens

    def gradients(self) -> dict[str, Tensor]:
        return {p.spec.name: p.main_grad for p in self.parameters}

    def calibrate(self) -> dict[str, Any]:
        """Kernels and all-reduces by themselves, as they are now: what a prediction is made from."""
        return dict(json.loads(calibrate(self.mesh.tp, self.mesh.device, "this machine").to_json()))

    def settle(self) -> dict[str, Any]:
        """Measure this machine and link, and choose the schedule that ``auto`` runs from now on, as ``--schedule auto`` would."""
        case = self.case
        hardware = calibrate(self.mesh.tp, self.mesh.device, "this machine")
        setting = Setting(
            model=case.model,
            hardware=self.mesh.world.broadcast_object(hardware),
            tensor_parallel=case.tensor_parallel,
            data_parallel=case.data_parallel,
            micro_batch_size=case.micro_batch_size,
            micro_batches=case.micro_batches,
        )
        choice = choose(setting, ScheduleConfig(schedule="auto"))
        self.settled = choice.chosen.schedule
        for name in [name for name in self.prepared if OUR_VARIANTS[name].auto]:
            del self.prepared[name]
        return {"chosen": choice.chosen.name, "candidates": str(choice), "paired": self.settled.domino_pair is not None}

    def record(self, variant: str, trace: str, about: str) -> float:
        """Write rank 0's timeline of one step as a trace; returns its makespan."""
        self.step(variant)
        recorder = Recorder()
        self.prepared[variant].executor.run_step(self.batches, 1, recorder)
        timeline = Timeline.of(recorder.spans, f"{OUR_VARIANTS[variant].label}, {about}")
        if self.rank == 0:
            timeline.write_trace(trace)
        return timeline.makespan_s

    def dispatch_s(self, variant: str, steps: int) -> float:
        """Host seconds an op when every op of the plan is an empty callable."""
        prepared = self.prepared.get(variant) or self._prepare(variant)
        executor: Any = prepared.executor
        (bound,) = executor.bound_templates(1)
        empty = [op._replace(call=_nothing(op)) for op in bound]
        values = executor.empty_slots()
        start_s = time.perf_counter()
        for _ in range(steps):
            executor.run(empty, values)
        return (time.perf_counter() - start_s) / steps / len(bound)

    def _prepare(self, variant: str) -> Prepared:
        about = OUR_VARIANTS[variant]
        schedule = self.settled if about.auto else about.schedule
        assert schedule is not None, "auto is settled before it runs"
        mesh = self.mesh
        plan, gradients = prepare_plan(self.stack, mesh, schedule, self.case.micro_batch_size, self.case.model.seq_length)
        if about.serial:
            plan = serialize(plan)
        if not about.communicates:
            tp, dp = (SilentCommunicator(group.rank, group.size, group.group) for group in (mesh.tp, mesh.dp))
            mesh = ParallelMesh(mesh.world, tp, dp, mesh.device)
        elif not about.one_way:
            mesh = replace(mesh, tp=Communicator(mesh.tp.rank, mesh.tp.size, mesh.tp.group))
        executor = Executor(plan, self.stack, mesh, gradients)
        self.prepared[variant] = Prepared(executor, [p.main_grad for p in self.parameters])
        return self.prepared[variant]

    def _autograd_step(self) -> Tensor:
        """The same model without a plan, through autograd and blocking collectives."""
        for parameter in self.parameters:
            parameter.grad = None
        total = torch.zeros(())
        for batch in self.batches:
            loss = self.stack.forward(batch).mean()
            self.clock.enter("B")
            (loss / len(self.batches)).backward()
            self.clock.enter("F")
            total += loss.detach() / len(self.batches)
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.main_grad = self.mesh.dp.all_reduce(parameter.grad).div_(self.mesh.dp.size)
        return total

    def _mark_phases(self) -> None:
        """The clock follows the chain: forward begins at the embedding and ends with the first loss of a row.

        The losses of further rows, which stand between their backward's first ops, count as backward.
        """
        embed, lose = self.stack.embedding.body, self.stack.head.loss

        def body(*arguments: Any) -> Any:
            if self.clock.phase == "B":
                self.clock.enter("F")
            return embed(*arguments)

        def loss(*arguments: Any) -> Any:
            result = lose(*arguments)
            if self.clock.phase == "F":
                self.clock.enter("B")
            return result

        vars(self.stack.embedding)["body"] = body
        vars(self.stack.head)["loss"] = loss


def _nothing(op: BoundOp) -> Any:
    made = {role: None for role, _ in op.writes}
    return lambda **_: made


if __name__ == "__main__":
    serve(OurProgram)
