"""The training loop: steps, evaluations, checkpoints, and how a run ends."""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import torch

from domino_lm.arguments import flat_values
from domino_lm.checks import data_parallel_size, global_batch_size
from domino_lm.config import ConfigError, ModelConfig, RunConfig
from domino_lm.model.stack import Stack
from domino_lm.parallel.mesh import ParallelMesh
from domino_lm.schedule.executor import Executor, Recorder, StepLoss
from domino_lm.schedule.plan import cut
from domino_lm.schedule.prepare import prepare_plan
from domino_lm.schedule.render import MissingMatplotlibError, draw
from domino_lm.schedule.timeline import Timeline
from domino_lm.training.checkpoint import load_checkpoint, save_checkpoint
from domino_lm.training.checkpoint_source import softmax_rows_of
from domino_lm.training.lr_schedule import LearningRateSchedule, LearningRateShape
from domino_lm.training.metrics import LogInterval, RunRate, StepReport, TensorBoardLog, validation_line
from domino_lm.training.optimizer import Optimizer, StepInfo
from domino_lm.training.run_data import MicroBatches, RunData, evaluation_batches
from domino_lm.training.stop import StopSignal

LEFT_OPEN_TO_RESUME = {
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "make_vocab_size_divisible_by",
    "mask_padded_vocab",  # the checkpoint knows which rows take part
    "seq_length",
}
"""Settings of a model that may change between a checkpoint and the run that resumes it."""


class TrainingError(RuntimeError):
    """A run that cannot go on; the message says why, and what is saved."""


@dataclass(frozen=True)
class FitResult:
    """How a run ended."""

    iteration: int
    reason: str
    """finished, exit-interval or SIGTERM."""

    first_loss: float
    """Of the first step that ran here, before it changed a weight; nan where none ran."""

    tokens_per_s: float
    """Over all ranks, without evaluations, saving and the first step; 0 where there was no second step."""

    def __str__(self) -> str:
        return f"training ended: {self.reason} at iteration {self.iteration}, first loss {self.first_loss:.4f}, {self.tokens_per_s:,.0f} tokens/s"


class Trainer:
    """Runs the steps of one run. Built once; every rank of the mesh holds one and calls the same methods.

    ``console`` prints a line (rank 0 alone does); ``log`` is TensorBoard's, on the one rank that has it.
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
    ) -> None:
        self.run, self.mesh, self.stack, self.data = run, mesh, stack, data
        self.console = console if mesh.world.rank == 0 else lambda line: None
        self.tokenizer_identity = tokenizer_identity
        self.batch_size = global_batch_size(run, mesh.world.size)
        self.num_micro_batches = self.batch_size // (run.training.micro_batch_size * data_parallel_size(run, mesh.world.size))
        self.optimizer = Optimizer(stack.parameters(), run.optimizer, mesh.tp)
        self.plan, gradients = prepare_plan(stack, mesh, run.schedule, run.training.micro_batch_size, run.model.seq_length)
        self.executor = Executor(
            self.plan,
            stack,
            mesh,
            gradients,
            self._update,
            seed=run.training.seed,
            per_token_loss=run.training.calculate_per_token_loss,
        )
        self.schedule = LearningRateSchedule(LearningRateShape.from_config(run.optimizer, run.training.train_iters, self.batch_size))
        self.iteration = 0
        self.consumed_samples = 0
        self._update_info: StepInfo | None = None
        self._bad_steps = 0
        self._saved_at: int | None = None
        self._evaluated: dict[str, tuple[int, float]] = {}

    def fit(self) -> FitResult:
        """Train up to ``--train-iters``, or until an exit is asked for; the last state is saved, once.

        Raises TrainingError when too many steps in a row are not finite.
        """
        log, interval, reports = self._open_log(), LogInterval(), RunRate()
        begin, reason = self.iteration, "finished"
        with StopSignal() as signal:
            batches = self.training_batches() if begin < self.run.training.train_iters else None
            while batches is not None and self.iteration < self.run.training.train_iters:
                recorder = self._recorder(begin)
                report, stop_asked = self.step(batches, signal.asked, recorder)
                if recorder is not None:
                    self._write_timeline(recorder)
                reports.add(report)
                self._report(report, interval, log)
                if stop_asked:
                    reason = "SIGTERM"
                    break
                if self._due(self.run.training.eval_interval):
                    self._evaluate_split("valid", log)
                if self._due(self.run.training.exit_interval):
                    reason = "exit-interval"
                    break
                if self._due(self.run.checkpoint.save_interval):
                    self.save()
            self.save()
            if reason == "finished":
                self._evaluate_at_end(log)
        if log is not None:
            log.close()
        tokens_per_step = self.batch_size * self.run.model.seq_length
        return FitResult(self.iteration, reason, reports.first_loss, reports.steps_per_s * tokens_per_step)

    def step(self, batches: MicroBatches, stop_here: bool = False, recorder: Recorder | None = None) -> tuple[StepReport, bool]:
        """One optimizer step over a global batch; says too whether any rank has ``stop_here``. ``recorder`` collects its timeline."""
        begin = time.perf_counter()
        micro_batches = batches.take(self.num_micro_batches)
        loss = self.executor.run_step(micro_batches, self.iteration, recorder)
        loss_sum, tokens, stops, grad_norm, skipped = self._read_edge(loss, stop_here)
        self.iteration += 1
        self.consumed_samples += self.batch_size
        if not skipped:
            self.schedule.advance(self.batch_size)
        report = StepReport(
            iteration=self.iteration,
            consumed_samples=self.consumed_samples,
            batch_size=self.batch_size,
            loss_sum=loss_sum,
            tokens=int(tokens),
            learning_rate=self.schedule.value(),
            grad_norm=grad_norm,
            skipped=bool(skipped),
            seconds=time.perf_counter() - begin,
        )
        self._refuse_endless_skipping(report)
        return report, stops > 0

    @torch.no_grad()
    def evaluate(self, dataset: Any) -> float:
        """Mean loss in nats per token, without dropout, over the first ``--eval-iters`` global batches, the same ones each time, or over all."""
        total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)  # sum of losses, tokens
        for micro_batch in evaluation_batches(dataset, self.run, self.mesh, self.num_micro_batches):
            losses = self.stack.forward(micro_batch)  # [s, b]
            total += torch.stack([(losses * micro_batch.loss_mask).sum(), micro_batch.loss_mask.sum()])
        loss_sum, tokens = self.mesh.dp.all_reduce(total).tolist()
        return float(loss_sum / max(tokens, 1))

    def save(self) -> None:
        """Write a checkpoint where ``--save`` is given, unless this iteration has one from this run."""
        folder = self.run.checkpoint.save
        if folder is None or self._saved_at == self.iteration:
            return
        state = {
            "consumed_samples": self.consumed_samples,
            "learning_rate": self.schedule.state_dict(),
            "model": asdict(self.run.model),
            "tokenizer": self.tokenizer_identity,
            "settings": flat_values(self.run),
        }
        self.console(f"saving checkpoint at iteration {self.iteration:7d} to {folder}")
        save_checkpoint(folder, self.iteration, self.stack, self.optimizer, state, self.mesh)
        self.console(f"  successfully saved checkpoint from iteration {self.iteration:7d} to {folder}")
        self._saved_at = self.iteration

    def load(self) -> None:
        """Resume from ``--load`` where it holds a checkpoint.

        Raises ConfigError where the checkpoint is of another model or learning-rate schedule, or where
        ``--exit-on-missing-checkpoint`` finds none.
        """
        checkpoint = self.run.checkpoint
        if checkpoint.load is None:
            return
        optimizer = None if checkpoint.no_load_optim else self.optimizer
        state = load_checkpoint(checkpoint.load, self.stack, optimizer, self.mesh)
        if state is None:
            if checkpoint.exit_on_missing_checkpoint:
                raise ConfigError(
                    f"--load {checkpoint.load} holds no checkpoint, and --exit-on-missing-checkpoint forbids to start without."
                )
            self.console(f"no checkpoint in {checkpoint.load}: starting from scratch")
            return
        found = int(state["iteration"])
        self._refuse_other_model(state, checkpoint.load)
        rows, true_rows = softmax_rows_of(self.stack), self.run.model.vocab_size
        if rows is not None and true_rows is not None and rows > true_rows:
            self.console(
                f"{rows} vocabulary rows take part in the softmax, as in the checkpoint: {rows - true_rows} more than there are tokens"
            )
        if optimizer is None:
            self.console(
                f"loaded the weights alone of iteration {found} from {checkpoint.load}: optimizer, schedule and iteration start anew"
            )
            return
        if "learning_rate" not in state:
            raise ConfigError(f"--load {checkpoint.load} holds no learning-rate schedule; load the weights alone with --no-load-optim.")
        for difference in self.schedule.load_state_dict(state["learning_rate"], checkpoint.override_opt_param_scheduler):
            self.console(f"learning-rate schedule of this run: {difference}")
        self.iteration, self.consumed_samples = found, int(state["consumed_samples"])
        self._saved_at = found if checkpoint.save == checkpoint.load else None
        self.console(f"resumed from {checkpoint.load} at iteration {found}, {self.consumed_samples} samples consumed")

    def _update(self) -> None:
        """What the plan's STEP op does."""
        self._update_info = self.optimizer.step(self.schedule.value())

    def _read_edge(self, loss: StepLoss, stop_here: bool) -> list[float]:
        """The one host read of a step: loss sum, tokens, ranks that ask to stop, gradient norm, skipped."""
        info = self._update_info
        assert info is not None, "the plan's STEP op runs before a step ends"
        counted = self.mesh.tp.rank == 0  # the ranks of a TP group hold the same loss
        mine = torch.stack(
            [loss.loss_sum.double() * counted, loss.tokens.double() * counted, loss.loss_sum.new_full((), stop_here).double()]
        )
        total = self.mesh.world.all_reduce(mine)
        values: list[float] = torch.cat([total, torch.stack([info.grad_norm.double(), info.found_inf.double()])]).tolist()
        return values

    def _refuse_endless_skipping(self, report: StepReport) -> None:
        """Count steps in a row that are not finite, and give up beyond the limit; every rank does at the same step."""
        self._bad_steps = self._bad_steps + 1 if report.skipped or not math.isfinite(report.loss_sum) else 0
        limit = self.run.training.max_skipped_steps
        if self._bad_steps > limit:
            kept = f"the last checkpoint is that of iteration {self._saved_at}" if self._saved_at else "this run has saved no checkpoint"
            raise TrainingError(
                f"loss or gradient was not finite in {self._bad_steps} step(s) in a row, the last at iteration {report.iteration} "
                f"(loss {report.loss}, gradient norm {report.grad_norm}); --max-skipped-steps {limit} ends the run here. No weight took part "
                f"in these steps; {kept}. Lower --lr, lengthen --lr-warmup-iters, or look at the data of these iterations."
            )

    def _refuse_other_model(self, state: dict[str, Any], folder: str) -> None:
        mine, theirs = spelt_out(asdict(self.run.model)), spelt_out(state["model"])
        differing = [name for name in mine if name not in LEFT_OPEN_TO_RESUME and name in theirs and mine[name] != theirs[name]]
        if differing:
            words = ", ".join(f"--{name.replace('_', '-')} {theirs[name]} there, {mine[name]} here" for name in differing)
            raise ConfigError(f"--load {folder} holds another model: {words}. Give the flags that it was trained with.")
        if self.tokenizer_identity and state.get("tokenizer") and state["tokenizer"] != self.tokenizer_identity:
            self.console("warning: the checkpoint was trained with another tokenizer; its token ids mean other text")

    def _due(self, interval: int | None) -> bool:
        return bool(interval) and self.iteration % interval == 0  # type: ignore[operator]

    def training_batches(self) -> MicroBatches:
        """What this rank has yet to read of the training split."""
        return MicroBatches(self.data.train, self.consumed_samples, self.run.training.micro_batch_size, self.mesh, self.run.data)

    def _open_log(self) -> TensorBoardLog | None:
        folder = self.run.logging.tensorboard_dir
        if folder is None or self.mesh.world.rank != 0:
            return None
        log = TensorBoardLog.open(folder, self.iteration, self.consumed_samples)
        if log is not None:
            log.settings(flat_values(self.run))
        return log

    def _report(self, report: StepReport, interval: LogInterval, log: TensorBoardLog | None) -> None:
        interval.add(report)
        if report.iteration % self.run.logging.log_interval == 0:
            self.console(interval.line(report, self.run.training.train_iters, datetime.now()))
            interval.clear()
        if log is not None and report.iteration % self.run.logging.tensorboard_log_interval == 0:
            log.step(report)

    def _recorder(self, begin: int) -> Recorder | None:
        """One for the step that ``--timeline`` asks for, on rank 0."""
        wanted = self.run.logging.timeline is not None and self.iteration - begin + 1 == self.run.logging.timeline_iteration
        return Recorder() if wanted and self.mesh.world.rank == 0 else None

    def _write_timeline(self, recorder: Recorder) -> None:
        """Chrome trace and picture; what cannot be written is a warning, since training does not need it."""
        assert self.run.logging.timeline is not None
        stem = self.run.logging.timeline.removesuffix(".json").removesuffix(".png")
        layout = f"TP {self.mesh.tp.size} x DP {self.mesh.dp.size}"
        timeline = Timeline.of(recorder.spans, f"step {self.iteration}, rank 0", {"layout": layout, "device": self.mesh.device.type})
        try:
            os.makedirs(os.path.dirname(stem) or ".", exist_ok=True)
            timeline.write_trace(f"{stem}.json")
            draw(timeline, f"{stem}.png")
            self.console(f"wrote the timeline of step {self.iteration} to {stem}.json and {stem}.png")
        except (OSError, MissingMatplotlibError) as error:
            warnings.warn(f"--timeline {self.run.logging.timeline}: {error}", stacklevel=2)

    def _evaluate_split(self, split: str, log: TensorBoardLog | None, at_end: bool = False) -> None:
        for number, dataset in enumerate(self.data.evaluated(split)):
            several = len(self.data.evaluated(split)) > 1
            key = f"{split} {number}" if several else split
            if self._evaluated.get(key, (None,))[0] != self.iteration:
                self._evaluated[key] = (self.iteration, self.evaluate(dataset))
                if log is not None and split == "valid":
                    suffix = f"-{number}" if several else ""
                    log.validation(self.iteration, self.consumed_samples, self._evaluated[key][1], suffix)
            name = {"valid": "validation", "test": "test"}[split] if at_end or several else None
            self.console(validation_line(self.iteration, self._evaluated[key][1], f"{name}-{number}" if several else name))

    def _evaluate_at_end(self, log: TensorBoardLog | None) -> None:
        for split in ("valid", "test"):
            self._evaluate_split(split, log, at_end=True)


def schedule_reason(run: RunConfig, tp_size: int) -> str:
    """Which schedule runs, in words, and why."""
    micro, kind = run.training.micro_batch_size, run.schedule.resolved(tp_size)
    rows, along = run.schedule.rows(micro, tp_size), run.schedule.row_dim(micro)
    if rows > 1:
        sizes = cut(micro, rows) if along == "batch" else cut(run.model.seq_length, rows, tp_size if run.schedule.sequence_parallel else 1)
        what = f"{rows} rows of {' + '.join(map(str, sizes))} {'sequences' if along == 'batch' else 'tokens'}"
        return f"{kind}, {what}: the all-reduce of one row travels while the others compute"
    if run.schedule.domino_column_slices > 1:
        return f"{kind}, {run.schedule.domino_column_slices} column blocks: each is reduced while the next is computed"
    if run.schedule.schedule == "baseline":
        return "baseline: Megatron's order, nothing is cut"
    if tp_size == 1:
        return "baseline: one tensor-parallel rank has no all-reduce to hide (--domino-row-slices cuts all the same)"
    return "domino with a single row, as the flags say: it hides next to nothing"


def spelt_out(model: dict[str, Any]) -> dict[str, Any]:
    """A model's settings, or some of them, with what defaults stand for in place of the defaults, so that they compare."""
    try:
        config = ModelConfig(**model)
    except TypeError:  # some of them, or those of another version
        return model
    resolved: dict[str, Any] = {
        "ffn_hidden_size": config.ffn_width,
        "kv_channels": config.head_width,
        "num_query_groups": config.query_groups,
    }
    resolved["group_query_attention"] = config.query_groups != config.num_attention_heads
    learned = config.position_embedding_type == "learned_absolute"
    resolved["max_position_embeddings"] = config.position_rows if learned else None
    return {**model, **resolved, "rotary_base": None if learned else config.rotary_base}


def parameter_count(stack: Stack) -> int:
    """True parameters of the unsharded model, vocabulary padding left out."""
    specs = [parameter.spec for parameter in stack.parameters()]
    return sum(math.prod(spec.shape if spec.vocab_rows is None else (spec.vocab_rows, *spec.shape[1:])) for spec in specs)
