"""The training loop: steps, evaluations, checkpoints, and how a run ends."""

from __future__ import annotations

import math
import os
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from domino_lm.checkpoint.background import BackgroundSaves
from domino_lm.checkpoint.folder import iteration_folder
from domino_lm.checkpoint.same_model import refuse_other_model
from domino_lm.checkpoint.save_load import load_checkpoint
from domino_lm.checkpoint.source import softmax_rows_of
from domino_lm.config.batch_plan import BatchPlan, data_parallel_size
from domino_lm.config.precision import NAMES
from domino_lm.config.schema import flat_values
from domino_lm.config.settings import ConfigError, RunConfig
from domino_lm.data.continued import DataRecord
from domino_lm.data.epochs import EpochCount
from domino_lm.model.batch import MicroBatch
from domino_lm.model.parameter import dtype_of
from domino_lm.model.parameter_groups import layer_matrices
from domino_lm.model.stack import Stack
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.parallel.progress import Cell, Progress, Stage
from domino_lm.schedule.executor import StepResult
from domino_lm.schedule.graphs import build_executor
from domino_lm.schedule.prepare import prepare_plan
from domino_lm.schedule.recorder import AnyRecorder, Recorder, WaitClock
from domino_lm.schedule.render import MissingMatplotlibError, draw
from domino_lm.schedule.timeline import Timeline
from domino_lm.training.apex_adam import find_adamw
from domino_lm.training.garbage import GarbageCollection
from domino_lm.training.loss_scale import LossScale
from domino_lm.training.lr_schedule import LearningRateSchedule
from domino_lm.training.nan_dump import NanDump, PastStep
from domino_lm.training.optimizer import Optimizer, Rates
from domino_lm.training.planned_muon import PlannedMuon
from domino_lm.training.run_data import MicroBatches, RunData, evaluation_batches
from domino_lm.training.saving import SaveError, Saves, TrainingError
from domino_lm.training.step_checks import StepChecks
from domino_lm.training.stop import STOP_NAMES, Asked, RunSignals, Standing
from domino_lm.training.straggler import Straggler
from domino_lm.watch.hang_timeout import FIRST_STEPS
from domino_lm.watch.metrics import StepReport, validation_line
from domino_lm.watch.slow_step import Standstill
from domino_lm.watch.watch import Watch


@dataclass(frozen=True)
class FitResult:
    """How a run ended."""

    iteration: int
    reason: str
    """finished, skip-train, SIGINT, SIGHUP, SIGTERM, exit-interval, exit-samples or exit-duration-in-mins."""

    first_loss: float | None
    """Of the first step here that was not skipped, before it changed a weight; None if there is none."""

    last_loss: float | None

    tokens_per_s: float
    """Over all ranks, without evaluations, saving and the first step; 0 if there was no second step."""

    data_ms_per_step: float = 0.0
    """Time that rank 0 waited for data in a step, the first one left out."""

    steps: int = 0
    """Made here, skipped ones among them."""

    def __str__(self) -> str:
        if self.reason == "skip-train":
            return f"nothing was trained, as --skip-train says: the weights of iteration {self.iteration} were evaluated"
        if self.steps and self.first_loss is None:
            return f"training ended: {self.reason} at iteration {self.iteration}; all {self.steps} of its steps were skipped"
        if self.first_loss is None or self.last_loss is None:
            return f"nothing was trained: the run had ended before, at iteration {self.iteration}; a larger --train-iters or --train-samples goes on"
        return (
            f"training ended: {self.reason} at iteration {self.iteration}, first loss {self.first_loss:.4f}, last {self.last_loss:.4f}, "
            f"{self.tokens_per_s:,.0f} tokens/s, {self.data_ms_per_step:.1f} ms of a step waiting for data"
        )


class Trainer:
    """Runs the steps of one run. Built once; every rank of the mesh holds one and calls the same methods.

    ``console`` prints a line (rank 0 alone does). ``run_id`` names the run in its checkpoints. ``may_save`` is called on rank 0 before anything in ``--save`` changes, and raises
    TakenError if the folder is no longer this run's. ``progress`` takes what this rank does.
    """

    def __init__(
        self,
        run: RunConfig,
        mesh: ParallelMesh,
        stack: Stack,
        data: RunData,
        *,
        console: Callable[[str], None] = print,
        tokenizer_identity: dict[str, str] | None = None,
        run_id: str = "",
        may_save: Callable[[], None] | None = None,
        background: BackgroundSaves | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.run, self.mesh, self.stack, self.data = run, mesh, stack, data
        self.console = console if mesh.world.rank == 0 else lambda line: None
        self.tokenizer_identity = tokenizer_identity
        self.progress = progress or Progress()
        self._straggler = Straggler(mesh.world) if run.logging.log_straggler else None
        self.batch_plan = BatchPlan.of(run, mesh.world.size)
        self.batch_size = self.batch_plan.full
        self.loss_scale = LossScale.of(run.precision, mesh.device)
        narrow = dtype_of(run.precision.gradient_dtype) if run.precision.gradient_bytes < 4 else None
        matrices = layer_matrices(stack.parts) if run.optimizer.optimizer == "muon" else {}
        self.plan, gradients = prepare_plan(
            stack, mesh, run.schedule, run.training.micro_batch_size, run.model.seq_length, narrow, tuple(matrices)
        )
        moments = (run.precision.exp_avg_dtype, run.precision.exp_avg_sq_dtype)
        self.optimizer = Optimizer(
            stack.parameters(),
            run.optimizer,
            mesh.tp,
            moment_dtypes=None if moments == ("fp32", "fp32") else (dtype_of(NAMES[moments[0]]), dtype_of(NAMES[moments[1]])),
            loss_scale=self.loss_scale,
            gradients=gradients,
            world=mesh.world,
            kernel=find_adamw(run.kernels, mesh.device),
            embeddings_decay=run.model.embedding_init_method_std is None,
            matrix_parts=matrices,
        )
        self._learning_rates = torch.zeros(2, dtype=torch.float32, device=mesh.device)  # where a captured step reads them
        self.executor = build_executor(
            run.kernels,
            mesh,
            self.plan,
            stack,
            gradients,
            self._update,
            seed=run.training.seed,
            per_token_loss=run.training.calculate_per_token_loss,
            loss_scale=None if self.loss_scale is None else self.loss_scale.value,
            progress=self.progress.cells,
            matrices=PlannedMuon(self.optimizer, self._bad_loss, self._rates) if matrices else None,
        )
        self.lr_schedule = LearningRateSchedule.of(run.optimizer, self.batch_plan)
        self.iteration = 0
        self.consumed_samples = 0
        self._checks = StepChecks(run.training, self.loss_scale)
        folder = run.logging.dump_on_nan
        self._nan_dump = None if folder is None else NanDump(folder, run, self.executor, self.optimizer)
        run_id = run_id or uuid.uuid4().hex  # rank 0's counts
        self.saves = Saves(run.checkpoint, stack, self.optimizer, mesh, run_id, lambda line: self.console(line), background, may_save)
        self._data_record: DataRecord | None = None
        self._evaluated: dict[str, int] = {}

    def fit(self) -> FitResult:
        """Train to the end of the run, or until an exit is asked for; the last state is saved, once.

        Raises TrainingError when too many steps in a row are not finite, SaveError when the last state cannot be saved.
        """
        begin, began_s = self.iteration, time.monotonic()
        watch = Watch(
            self.run, self.console, self.mesh.world, self.mesh.device, self.batch_plan.iterations, self.iteration, self.consumed_samples
        )
        self.console, console = watch.print, self.console
        several = self.mesh.world.rank == 0 and self.mesh.world.size > 1
        standstill = Standstill(self.console if several else None, 60.0 * self.run.parallel.distributed_timeout_minutes)
        garbage = GarbageCollection(self.run.training.manual_gc, self.run.training.manual_gc_interval)
        reason = "finished"
        try:
            with RunSignals(lambda: self._standing(begin), speaks=self.mesh.world.rank == 0) as signals, standstill, garbage:
                batches = None if self._at_end() or self.run.training.skip_train else self.training_batches()
                epochs = EpochCount(self.data.train, self.consumed_samples)
                while batches is not None and not self._at_end():
                    if self.iteration + 1 in self.run.training.iterations_to_skip:
                        self._leave_out(batches)
                        continue
                    asked = signals.take(self._out_of_time(began_s))
                    recorder = self._recorder(begin, watch)
                    with standstill.step(self.iteration + 1):
                        report, agreed = self.step(batches, asked, recorder)
                    if recorder is not None and self._is_timeline_step(begin):
                        self._write_timeline(recorder, watch)
                    begun = epochs.advance(self.consumed_samples)
                    watch.step(report, epochs.epochs)
                    self.saves.poll(self.iteration)
                    if self.iteration % self.run.logging.log_interval == 0:
                        self._say_straggler()
                        self._warn(self.saves.failure)
                    if begun is not None:
                        self.console(f"data repeats from iteration {self.iteration} on: {begun}")
                    garbage.step(self.iteration)
                    reason = self._reason_to_stop(agreed) or reason
                    if agreed.stop_signal:
                        break
                    if self._due(self.run.training.eval_interval):
                        garbage.collect()
                        self._evaluate_split("valid", watch)
                    if reason != "finished":
                        break
                    if self._due(self.run.checkpoint.save_interval) or agreed.save:
                        garbage.collect()
                        self.save()
                if not self.run.training.skip_train:
                    self.save(must=True)
                if reason in STOP_NAMES and self.run.checkpoint.save is None:
                    raise SaveError(f"{reason} ended the run at iteration {self.iteration}, and without --save nothing of it is kept.")
                if reason not in STOP_NAMES and (fault := self._checks.skipped.fault_of_run()) is not None:
                    raise TrainingError(fault)
                if reason == "finished":
                    for split in ("valid", "test"):
                        self._evaluate_split(split, watch, at_end=True)
                self._end_saves()
        finally:
            self.saves.close()
            self._warn()
            watch.close()
            self.console = console
        reason = "skip-train" if self.run.training.skip_train else reason
        rate = watch.rate
        tokens_per_s = rate.sequences_per_s * self.run.model.seq_length
        return FitResult(self.iteration, reason, rate.first_loss, rate.last_loss, tokens_per_s, rate.data_s_per_step * 1e3, rate.steps)

    def step(self, batches: MicroBatches, asked: Asked | None = None, recorder: AnyRecorder | None = None) -> tuple[StepReport, Asked]:
        """One optimizer step over a global batch; gives too what any rank has ``asked``. ``recorder`` collects its timeline."""
        begin, waited = time.perf_counter(), batches.blocked_s
        self.progress.enter(Stage.DATA, self.iteration + 1)
        size = self.batch_plan.at(self.consumed_samples)
        micro_batches = self._take(batches, size)
        waited = batches.blocked_s - waited
        self._learning_rates[0].fill_(self.lr_schedule.value())
        if self.lr_schedule.decoupled is not None:
            self._learning_rates[1].fill_(self.lr_schedule.decoupled_value())
        self.progress.enter(Stage.STEP)
        measured = recorder or (WaitClock() if self._straggler is not None and self.mesh.device.type == "cpu" else None)
        made = self.executor.run_step(micro_batches, self.iteration, measured)
        if self._straggler is not None:
            self._straggler.step(time.perf_counter() - begin, measured)
        self.progress.enter(Stage.EDGE)
        loss_sum, tokens, masked, agreed, loss_scale, grad_norm, skipped, *logged = self._read_edge(made, asked or Asked())
        self.iteration += 1
        self.consumed_samples += size
        if not skipped:
            self.lr_schedule.advance(size)
        report = StepReport(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            batch_size=size,
            loss_sum=loss_sum,
            tokens=int(tokens),
            learning_rate=self.lr_schedule.value(),
            grad_norm=grad_norm,
            skipped=bool(skipped),
            loss_scale=loss_scale,
            seconds=time.perf_counter() - begin,
            data_seconds=waited,
            exposed_s=self._exposed_s(recorder),
            masked_micro_batches=int(masked),
            **self._named(logged),
        )
        self.progress.step_done(report.seconds)
        self.progress.enter(Stage.OUTPUT)
        self._limit_collectives()
        fault = self._checks.fault(report, self.saves.saved_at)
        if self._nan_dump is not None and self._checks.skipped.in_a_row:
            past = PastStep(self.iteration - 1, micro_batches, self._checks.skipped.scale_used)
            if said := self._nan_dump.write(past, report, batches.numbers):
                self.console(said)
        if fault is not None:
            raise TrainingError(fault)
        return report, agreed

    def _limit_collectives(self) -> None:
        """Give collectives the time that --distributed-timeout-seconds-after-init allows, once the first steps are done."""
        seconds = self.run.parallel.distributed_timeout_seconds_after_init
        if seconds is not None and self.progress.cells[Cell.STEPS_DONE] == FIRST_STEPS:
            self.mesh.set_timeout(timedelta(seconds=seconds))

    def _take(self, batches: MicroBatches, size: int) -> list[MicroBatch]:
        """This rank's micro-batches of a global batch of ``size``."""
        return batches.take(size // (self.run.training.micro_batch_size * data_parallel_size(self.run, self.mesh.world.size)))

    def _leave_out(self, batches: MicroBatches) -> None:
        """Read an iteration's data and make no step of it."""
        size = self.batch_plan.at(self.consumed_samples)
        self._take(batches, size)
        self.iteration += 1
        self.consumed_samples += size
        self.console(f"left out iteration {self.iteration} and its {size} samples, as --iterations-to-skip says")

    @torch.no_grad()
    def evaluate(self, dataset: Any) -> float:
        """Mean loss in nats per token, without dropout, over the first ``--eval-iters`` global batches, the same ones each time, or over all.

        NaN if all of their tokens are masked.
        """
        self.executor.complete_gathers()
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)  # sum of losses, tokens
        self.progress.enter(Stage.EVALUATE, self.iteration)
        for micro_batch in evaluation_batches(dataset, self.run, self.mesh):
            self.progress.move()
            losses = self.stack.forward(micro_batch)  # [s, b]
            total += torch.stack([(losses * micro_batch.loss_mask).sum(), micro_batch.loss_mask.sum()])
        loss_sum, tokens = self.mesh.dp.all_reduce(total).tolist()
        if not tokens:
            self.console("warning: all tokens of this evaluation are masked, so that it has no loss")
        return float(loss_sum / tokens) if tokens else math.nan

    def save(self, must: bool = False) -> None:
        """Write a checkpoint if ``--save`` is given, unless this iteration has one from this run; see `Saves.save`."""
        if self.run.checkpoint.save is None or self.saves.has(self.iteration):
            return
        self.progress.enter(Stage.SAVE, self.iteration)
        self._data_record = self.data.position(self.consumed_samples, self.run.data, self._data_record)
        state = {
            "consumed_samples": self.consumed_samples,
            "data": None if self._data_record is None else self._data_record.state_dict(),
            "learning_rate": self.lr_schedule.state_dict(),
            "loss_scaler": None if self.loss_scale is None else self.loss_scale.state_dict(),
            "model": asdict(self.run.model),
            "tokenizer": self.tokenizer_identity,
            "settings": flat_values(self.run),
        }
        self.executor.complete_gathers()
        self.saves.save(self.iteration, state, must)

    def _end_saves(self) -> None:
        """Return when the last state is saved; if its save began as one that may fail, and failed, it is saved again."""
        self.saves.wait(self.iteration)
        if not self.run.training.skip_train:
            self.save(must=True)
            self.saves.wait(self.iteration)

    def load(self) -> None:
        """Resume from ``--load`` if it holds a checkpoint.

        Raises ConfigError if the checkpoint is of another model or learning-rate schedule, or if
        ``--exit-on-missing-checkpoint`` finds none.
        """
        checkpoint = self.run.checkpoint
        if checkpoint.load is None:
            return
        optimizer = None if checkpoint.no_load_optim or checkpoint.finetune else self.optimizer
        self.executor.complete_gathers()
        state = load_checkpoint(checkpoint.load, self.stack, optimizer, self.mesh, checkpoint.ckpt_step, checkpoint.verify_integrity)
        if state is None:
            if checkpoint.exit_on_missing_checkpoint:
                raise ConfigError(
                    f"--load {checkpoint.load} holds no checkpoint, and --exit-on-missing-checkpoint forbids to start without."
                )
            self.console(f"no checkpoint in {checkpoint.load}: starting from scratch")
            return
        found = int(state["iteration"])
        path = iteration_folder(checkpoint.load, found)
        self.saves.whole = self.saves.loaded = path if path.is_dir() else Path(checkpoint.load)
        unsaid = [name for name in ("model", "consumed_samples") if state.get(name) is None]
        if unsaid:
            raise ConfigError(f"--load {checkpoint.load} holds no checkpoint of training: its state does not say {' and '.join(unsaid)}.")
        self._refuse_other_model(state, checkpoint.load)
        rows, true_rows = softmax_rows_of(self.stack), self.run.model.vocab_size
        if rows is not None and true_rows is not None and rows > true_rows:
            self.console(
                f"{rows} vocabulary rows take part in the softmax, as in the checkpoint: {rows - true_rows} more than there are tokens"
            )
        if optimizer is None:
            self.optimizer.read_parameters()
            self.console(
                f"loaded the weights alone of iteration {found} from {checkpoint.load}: optimizer, schedule and iteration start anew"
            )
            return
        if not state.get("learning_rate"):
            raise ConfigError(f"--load {checkpoint.load} holds no learning-rate schedule; load the weights alone with --no-load-optim.")
        side = self.lr_schedule.load_state_dict(
            state["learning_rate"],
            override=checkpoint.override_opt_param_scheduler or self.run.training.skip_train,  # which makes no step of it
            use_checkpoint=checkpoint.use_checkpoint_opt_param_scheduler,
        )
        self.console(side)
        if self.loss_scale is not None and state.get("loss_scaler"):
            self.loss_scale.load_state_dict(state["loss_scaler"])
            self._checks.skipped.begin()
        self.iteration, self.consumed_samples = found, int(state["consumed_samples"])
        self._go_on_with_data(state.get("data"))
        self.saves.saved_at = found if checkpoint.save == checkpoint.load else None
        self.console(f"resumed from {checkpoint.load} at iteration {found}, {self.consumed_samples} samples consumed")

    def _update(self, loss_sum: torch.Tensor) -> list[torch.Tensor]:
        """What the plan's STEP op does: gradient norm, whether the step was skipped, and what else is logged."""
        logging, optimizer = self.run.logging, self.optimizer
        zeros = [optimizer.zero_gradients()] if logging.log_num_zeros_in_grad else []
        begun = bool(self.plan.slicing.orthogonalized)  # by the plan's own ops
        info = optimizer.finish(self._rates()) if begun else optimizer.step(self._rates(), self._bad_loss(loss_sum))
        norm = [self.optimizer.parameter_norm()] if logging.log_params_norm else []
        return [info.grad_norm, info.found_inf, *zeros, *norm]

    def _bad_loss(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """Above 0 if the loss is not finite on any replica, which keeps the weights as they are."""
        return self.mesh.dp.all_reduce(torch.logical_not(torch.isfinite(loss_sum)).to(torch.float32))

    def _rates(self) -> Rates:
        """The step's learning rates, in device memory if the update is captured and must not hold their numbers."""
        schedule, captured = self.lr_schedule, self.run.kernels.cuda_graph
        rates = (self._learning_rates[0], self._learning_rates[1]) if captured else (schedule.value(), schedule.decoupled_value())
        return Rates(rates[0], None if schedule.decoupled is None else rates[1], schedule.weight_decay_value())

    def _named(self, logged: list[float]) -> dict[str, Any]:
        """The numbers that `_update` logs, by the names of the report's fields."""
        logging, values = self.run.logging, iter(logged)
        zeros = {"num_zeros": int(next(values))} if logging.log_num_zeros_in_grad else {}
        return zeros | ({"params_norm": next(values)} if logging.log_params_norm else {})

    def _read_edge(self, made: StepResult, asked: Asked) -> tuple[Any, ...]:
        """The one host read of a step: loss sum, tokens, masked micro-batches, what any rank asks for, loss scale, what `_update` found."""
        counted = self.mesh.tp.rank == 0  # the ranks of a TP group hold the same loss
        sums = [value.double() * counted for value in (made.loss_sum, made.tokens, made.masked)]
        mine = torch.stack([*sums, *(made.loss_sum.new_full((), flag).double() for flag in asked)])
        total = self.mesh.world.all_reduce(mine)
        scale = total.new_ones(()) if self.loss_scale is None else self.loss_scale.value
        values: list[float] = torch.cat([total, torch.stack([value.double() for value in (scale, *made.found)])]).tolist()
        summed, asks, found = values[: len(sums)], values[len(sums) : len(mine)], values[len(mine) :]
        return *summed, Asked(*(count > 0 for count in asks)), *found

    def _go_on_with_data(self, position: dict[str, Any] | None) -> None:
        """Continue reading where the checkpoint stopped, in each source apart if its mixture is another."""
        if position is None:  # of Megatron's, or read in passes of its own
            return
        end = self.batch_plan.end(self.iteration, self.consumed_samples)[1]
        self.data, said = self.data.resume_from(position, self.consumed_samples, end, self.run.data)
        if said is not None:
            self.console(said)

    def _refuse_other_model(self, state: dict[str, Any], folder: str) -> None:
        refuse_other_model(asdict(self.run.model), state["model"], folder)
        if self.tokenizer_identity and state.get("tokenizer") and state["tokenizer"] != self.tokenizer_identity:
            self.console("warning: the checkpoint was trained with another tokenizer; its token ids mean other text")

    def _at_end(self) -> bool:
        return self.batch_plan.ended(self.iteration, self.consumed_samples)

    def _out_of_time(self, began_s: float) -> bool:
        """Whether the minutes of ``--exit-duration-in-mins`` are over on rank 0."""
        minutes = self.run.training.exit_duration_in_mins
        return minutes is not None and self.mesh.world.rank == 0 and time.monotonic() - began_s > minutes * 60

    def _reason_to_stop(self, agreed: Asked) -> str:
        """Why the run ends after this step, the same on every rank; empty if it goes on."""
        training = self.run.training
        reasons = {
            agreed.stop_signal: bool(agreed.stop_signal),
            "exit-duration-in-mins": agreed.time_over,
            "exit-interval": self._due(training.exit_interval),
            "exit-samples": training.exit_samples is not None and self.consumed_samples >= training.exit_samples,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def _warn(self, *others: str) -> None:
        """Say what the log line does not of the steps since the last one, and what else there is."""
        for warning in filter(None, [*others, *self._checks.warnings()]):
            self.console(f"warning: {warning}")

    def _standing(self, begin: int) -> Standing:
        """What would be left if the run, which began after iteration ``begin``, ended now."""
        kept_at = self.saves.saved_at if self.saves.saved_at is not None else begin
        return Standing(self.iteration, kept_at, self.saves.whole, self.run.checkpoint.save is not None)

    def _due(self, interval: int | None) -> bool:
        return bool(interval) and self.iteration % interval == 0  # type: ignore[operator]

    def training_batches(self) -> MicroBatches:
        """What this rank has yet to read of the training split."""
        return MicroBatches(self.data.train, self.consumed_samples, self.run.training.micro_batch_size, self.mesh, self.run.data)

    def _is_timeline_step(self, begin: int) -> bool:
        """Whether the step that was just made is the one that ``--timeline`` asks for."""
        return self.run.logging.timeline is not None and self.iteration - begin == self.run.logging.timeline_iteration

    def _say_straggler(self) -> None:
        """Name the slowest rank of the interval that has ended, if that is asked for."""
        line = "" if self._straggler is None else self._straggler.line()
        if line:
            self.console(line)

    def _recorder(self, begin: int, watch: Watch) -> AnyRecorder | None:
        """One for the step that ``--timeline`` asks for, and on rank 0 for steps whose waits are logged.

        The first is on every rank: a recorded step is not replayed from graphs, and NCCL needs all ranks to do alike. On GPUs
        ``--log-straggler`` has one step of each interval recorded on every rank.
        """
        if self._straggler is not None and self.mesh.device.type == "cuda" and (self.iteration + 1) % self.run.logging.log_interval == 0:
            return Recorder.on(self.mesh.device)
        wanted = self.run.logging.timeline is not None and self.iteration + 1 - begin == self.run.logging.timeline_iteration
        return Recorder.on(self.mesh.device) if wanted or watch.wants_exposed(self.iteration + 1) else None

    def _exposed_s(self, recorder: AnyRecorder | None) -> float | None:
        """Time that compute stood waiting for a link."""
        if recorder is None:
            return None
        return sum(Timeline.of(recorder.spans).exposed_s(phase) for phase in "FBS")

    def _write_timeline(self, recorder: AnyRecorder, watch: Watch) -> None:
        """Chrome trace and picture; what cannot be written is a warning, since training does not need it."""
        assert self.run.logging.timeline is not None
        self.executor.complete_gathers()
        if self.mesh.world.rank != 0:
            return
        stem = self.run.logging.timeline.removesuffix(".json").removesuffix(".png")
        layout = f"TP {self.mesh.tp.size} x DP {self.mesh.dp.size}"
        timeline = Timeline.of(recorder.spans, f"step {self.iteration}, rank 0", {"layout": layout, "device": self.mesh.device.type})
        try:
            os.makedirs(os.path.dirname(stem) or ".", exist_ok=True)
            timeline.write_trace(f"{stem}.json")
            draw(timeline, f"{stem}.png")
            watch.timeline(f"{stem}.png", self.iteration)
            self.console(f"wrote the timeline of step {self.iteration} to {stem}.json and {stem}.png")
        except (OSError, MissingMatplotlibError) as error:
            warnings.warn(f"--timeline {self.run.logging.timeline}: {error}", stacklevel=2)

    def _evaluate_split(self, split: str, watch: Watch, at_end: bool = False) -> None:
        datasets = self.data.evaluated(split)
        for number, dataset in enumerate(datasets):
            suffix = f"-{number}" if len(datasets) > 1 else ""
            if self._evaluated.get(split + suffix) == self.iteration:
                continue
            self._evaluated[split + suffix] = self.iteration
            loss = self.evaluate(dataset)
            watch.validation(self.iteration, self.consumed_samples, loss, split, suffix)
            name = {"valid": "validation", "test": "test"}[split] + suffix if at_end or suffix else None
            self.console(validation_line(self.iteration, loss, name))
