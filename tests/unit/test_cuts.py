"""What can be cut is one question with one answer, whoever asks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from domino_lm.config.data import DataConfig
from domino_lm.config.settings import ConfigError, ModelConfig, OptimizerConfig, ParallelConfig, RunConfig, ScheduleConfig, TrainingConfig
from domino_lm.launch.checks import check_run
from domino_lm.launch.summary import memory_estimate, schedule_reason
from domino_lm.schedule.cuts import Uncut, resolve_cut
from domino_lm.schedule.step import compute_plan
from domino_lm.simulate.auto import choose
from domino_lm.simulate.hardware import HARDWARE
from domino_lm.simulate.predict import SCHEDULES, Setting, obstacle, predict, sliced
from domino_lm.tools.sweep import Grid, sweep
from tests.chains import transformer_chain

H100 = HARDWARE["dgx-h100"]


def refuses(ask: Callable[..., Any], *values: Any) -> bool:
    try:
        ask(*values)
    except ConfigError:
        return True
    return False


@st.composite
def runs(draw: st.DrawFn) -> RunConfig:
    """A model of any small size under any cut."""
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    dims: list[Any] = [None, "batch", "sequence"]
    schedule = ScheduleConfig(
        schedule=draw(st.sampled_from([None, "domino"])),
        domino_row_slices=draw(st.sampled_from([None, 1, 2, 3, 4, 9])),
        domino_row_dim=draw(st.sampled_from(dims)),
        domino_column_slices=draw(st.sampled_from([1, 2, 3, 5])),
        domino_pair=draw(st.sampled_from([None, "row-groups"])),
        sequence_parallel=draw(st.booleans()),
    )
    model = ModelConfig(
        num_layers=1,
        hidden_size=8 * draw(st.integers(1, 4)),
        num_attention_heads=8,
        seq_length=draw(st.integers(1, 32)),
        position_embedding_type="learned_absolute",
        vocab_size=64,
    )
    training = TrainingConfig(micro_batch_size=draw(st.integers(1, 5)), train_iters=1)
    return RunConfig(
        model=model,
        parallel=ParallelConfig(tensor_model_parallel_size=tp),
        schedule=schedule,
        optimizer=OptimizerConfig(lr=1e-3),
        training=training,
        data=DataConfig(mock_data=True),
    )


@settings(max_examples=300, deadline=None)
@given(runs())
def test_everybody_has_the_same_answer_to_what_can_be_cut(run: RunConfig) -> None:
    """Start-up checks, the planner, auto, prediction, the sweep and the summary."""
    tp, schedule = run.parallel.tensor_model_parallel_size, run.schedule
    setting = Setting.of(run, tp, H100)
    answers = {
        "checks": refuses(check_run, run, tp),
        "plan": refuses(lambda: compute_plan(transformer_chain(1), schedule, resolve_cut(schedule, Uncut.of(run)))),
        "auto and compare": bool(obstacle(setting, schedule)),
        "prediction": refuses(predict, setting, schedule),
        "reason": refuses(schedule_reason, run),
        "memory": refuses(memory_estimate, run, tp, "cpu"),
    }
    assert len(set(answers.values())) == 1, answers


@settings(max_examples=30, deadline=None)
@given(runs(), st.integers(1, 5), st.sampled_from([1, 2, 3, 5]))
def test_a_sweep_holds_what_checks_let_pass(run: RunConfig, rows: int, cols: int) -> None:
    tp = run.parallel.tensor_model_parallel_size
    grid = Grid(
        devices=(tp,),
        tensor_parallel=(tp,),
        rows=(rows,),
        cols=(cols,),
        micro_batch_size=(run.training.micro_batch_size,),
        seq_length=(run.model.seq_length,),
    )
    nothing_to_hide = tp == 1 and rows * cols > 1
    refused = nothing_to_hide or refuses(check_run, replace(run, schedule=sliced(rows, cols)), tp)
    assert refuses(sweep, run.model, H100, grid, 1) is refused


@settings(max_examples=30, deadline=None)
@given(runs())
def test_auto_tries_nothing_that_checks_refuse(run: RunConfig) -> None:
    tp = run.parallel.tensor_model_parallel_size
    setting = Setting.of(run, tp, H100)
    if refuses(check_run, replace(run, schedule=ScheduleConfig(sequence_parallel=run.schedule.sequence_parallel)), tp):
        return
    tried = [
        c.schedule for c in choose(setting, ScheduleConfig(sequence_parallel=run.schedule.sequence_parallel)).candidates if c.prediction
    ]
    assert tried
    assert not any(refuses(check_run, replace(run, schedule=schedule), tp) for schedule in tried)


def test_sixteen_tokens_on_eight_ranks_make_four_sequence_rows() -> None:
    uncut = Uncut(micro_batch_size=1, seq_length=16, hidden_size=64, tensor_parallel=8)
    assert resolve_cut(SCHEDULES["sequence rows 4"], uncut).row_sizes == (4, 4, 4, 4)


@given(st.integers(1, 8), st.integers(1, 64), st.sampled_from([1, 2, 8]), st.booleans())
def test_the_default_cut_always_fits(micro_batch_size: int, seq_length: int, tp: int, sequence_parallel: bool) -> None:
    uncut = Uncut(micro_batch_size, seq_length * (tp if sequence_parallel else 1), 64, tp)
    cut = resolve_cut(ScheduleConfig(sequence_parallel=sequence_parallel), uncut)
    assert sum(cut.row_sizes) == (uncut.seq_length if cut.sequence_rows else micro_batch_size)
    assert cut.rows <= 4
