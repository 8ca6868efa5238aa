"""`--schedule auto` takes the fastest schedule that fits, and says why it left the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from domino_lm.config.settings import ConfigError, ModelConfig, ScheduleConfig
from domino_lm.simulate.auto import Choice, choose
from domino_lm.simulate.hardware import find_hardware
from domino_lm.simulate.predict import Setting

MODEL = ModelConfig(num_layers=8, hidden_size=4096, num_attention_heads=32, seq_length=1024, vocab_size=50257, hidden_dropout=0.0)
SETTING = Setting(model=MODEL, hardware=find_hardware("dgx-h100"), tensor_parallel=16, micro_batch_size=8, micro_batches=2)
AUTO = ScheduleConfig(schedule="auto")


def names(choice: Choice, *, tried: bool) -> set[str]:
    return {candidate.name for candidate in choice.candidates if (candidate.prediction is not None) is tried}


def test_nothing_that_fits_is_faster_by_a_fiftieth_than_what_is_taken() -> None:
    choice = choose(SETTING, AUTO)
    steps = [c.prediction.step_s for c in choice.candidates if c.prediction is not None and not c.refused]
    assert choice.chosen.prediction is not None
    assert choice.chosen.prediction.step_s <= 1.02 * min(steps)
    assert len(steps) > 10


def test_of_what_is_equally_fast_the_least_cut_is_taken() -> None:
    choice = choose(replace(SETTING, tensor_parallel=8), AUTO)
    assert choice.chosen.prediction is not None
    best_s = min(c.prediction.step_s for c in choice.candidates if c.prediction is not None and not c.refused)
    as_fast = [c.schedule for c in choice.candidates if c.prediction is not None and not c.refused and c.prediction.step_s <= 1.02 * best_s]
    taken = choice.chosen.schedule
    assert len(as_fast) > 1, "the claim needs a tie"
    assert all(
        (s.domino_row_slices or 1) * s.domino_column_slices >= (taken.domino_row_slices or 1) * taken.domino_column_slices for s in as_fast
    )


def test_across_nodes_rows_win_and_one_rank_stays_uncut() -> None:
    assert choose(SETTING, AUTO).chosen.schedule.domino_row_slices > 1  # type: ignore[operator]
    alone = choose(replace(SETTING, tensor_parallel=1), AUTO)
    assert alone.chosen.name == "baseline"


def test_a_micro_batch_of_one_sequence_is_cut_along_the_sequence_only() -> None:
    choice = choose(replace(SETTING, micro_batch_size=1), AUTO)
    assert {"rows 2", "row groups"} <= names(choice, tried=False)
    assert {"sequence rows 2", "columns 2", "baseline"} <= names(choice, tried=True)


def test_collectives_bound_by_latency_are_not_cut() -> None:
    tiny = replace(
        SETTING, model=replace(MODEL, hidden_size=64, num_attention_heads=16, seq_length=32), micro_batch_size=4, micro_batches=1
    )
    choice = choose(tiny, AUTO)
    assert choice.chosen.name == "baseline"
    assert "latency-bound" in str(choice)


def test_what_needs_too_much_memory_is_not_taken() -> None:
    free = choose(SETTING, AUTO)
    assert free.chosen.prediction is not None
    needs = sorted(c.prediction.memory.total for c in free.candidates if c.prediction is not None)
    tight = choose(SETTING, AUTO, memory_bytes=(needs[0] + needs[1]) / 2)
    assert tight.chosen.prediction is not None
    assert tight.chosen.prediction.memory.total == needs[0]
    assert "over the limit" in str(tight)


def test_where_nothing_fits_the_way_out_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--schedule auto.*--recompute-granularity"):
        choose(SETTING, AUTO, memory_bytes=1e6)


def test_sequence_parallelism_and_recompute_are_kept_as_asked() -> None:
    asked = replace(AUTO, sequence_parallel=True, recompute_granularity="full", recompute_method="uniform")
    chosen = choose(SETTING, asked).chosen.schedule
    assert (chosen.sequence_parallel, chosen.recompute_granularity) == (True, "full")


def test_the_table_holds_every_candidate_and_marks_the_one_taken() -> None:
    choice = choose(SETTING, AUTO)
    lines = str(choice).splitlines()
    assert len(lines) == 1 + len(choice.candidates)
    (taken,) = (line for line in lines if "<- taken" in line)
    assert taken.startswith(choice.chosen.name)
