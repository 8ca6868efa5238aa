"""A printed plan says of every op what it computes, or what travels and what hides it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domino_lm.config.settings import ConfigError, ScheduleConfig
from domino_lm.pretrain import main
from domino_lm.schedule.ops import Op
from domino_lm.schedule.passes import step_templates
from domino_lm.simulate.hardware import HARDWARE
from domino_lm.simulate.predict import BASELINE, Setting, named_model, planned, sliced
from domino_lm.simulate.remarks import plan_text
from domino_lm.tools import simulate
from tests.documents import ROOT, fences

BASE = "--preset debug-gpt --tensor-model-parallel-size 2 --vocab-size 512 --lr 1e-3 --micro-batch-size 4 --train-iters 10 --data-path x"
LINE = re.compile(r" *(\d+)  (m\d \S+) +(\S.*)")


def printed(schedule: ScheduleConfig, replicas: int = 1, micro_batches: int = 1, layer: int | None = None) -> str:
    model = named_model("debug-gpt", num_layers=2)
    setting = Setting(
        model=model,
        hardware=HARDWARE["dgx-h100"],
        tensor_parallel=2,
        data_parallel=replicas,
        micro_batch_size=4,
        micro_batches=micro_batches,
    )
    return plan_text(*planned(setting, schedule), micro_batches, layer)


def remarks(text: str) -> list[tuple[str, str]]:
    """Ops with their remarks, in order."""
    return [(match[2], match[3]) for match in map(LINE.fullmatch, text.splitlines()) if match]


@pytest.mark.parametrize(
    ("schedule", "op", "remark"),
    [
        (BASELINE, "m0 startF2.0", "all-reduce attention output, 128.0 KiB, 2 TP ranks, behind nothing"),
        (BASELINE, "m0 waitF2.0", "receives attention output, exposed"),
        (BASELINE, "m0 waitB2.0", "receives attention dgrad, hidden behind attention wgrad"),
        (BASELINE, "m0 startS0.*", "all-reduce gradients of bucket 0: one DP rank, nothing travels"),
        (sliced(2), "m0 startF2.0", "all-reduce attention output, 64.0 KiB, 2 TP ranks, behind attention row 1"),
        (sliced(2), "m0 waitF4.0", "receives MLP output, hidden behind MLP row 1"),
        (sliced(2), "m0 waitB4.0", "receives MLP dgrad, hidden behind MLP wgrad row 0 and backward row 1"),
        (sliced(1, 2), "m0 startF4.0", "all-reduce MLP output, 64.0 KiB, 2 TP ranks, behind MLP"),
        (sliced(1, 2), "m0 startF4.0c1", "all-reduce MLP output, 64.0 KiB, 2 TP ranks, behind nothing"),
        (
            sliced(2, sequence_parallel=True),
            "m0 startF2.1:all_gather",
            "gather attention input, 64.0 KiB, 2 TP ranks, behind attention row 0",
        ),
        (sliced(2, sequence_parallel=True), "m0 waitB4.0:gather_input", "receives MLP input, hidden behind MLP backward row 0"),
        (sliced(2, recompute_granularity="full"), "m0 recomputeB4.1", "MLP: computed again from what forward kept"),
    ],
)
def test_a_remark_says_what_travels_and_what_hides_it(schedule: ScheduleConfig, op: str, remark: str) -> None:
    assert dict(remarks(printed(schedule)))[op] == remark


def test_forward_of_one_micro_batch_hides_behind_backward_of_the_one_before() -> None:
    text = printed(sliced(1, domino_pair="micro-batches"), micro_batches=4)
    assert "backward of a micro-batch (m0) in turn with forward of the next (m1)" in text
    (wait,) = {remark for op, remark in remarks(text) if op == "m1 waitF4.0"}
    assert re.fullmatch(r"receives MLP output, hidden behind MLP backward of m0( and .*)?", wait)


def test_parameters_that_travel_into_the_next_step_hide_behind_its_forward() -> None:
    text = printed(sliced(2, use_distributed_optimizer=True, overlap_param_gather=True, ddp_bucket_size=10_000), replicas=2)
    waits = {op: remark for op, remark in remarks(text) if op.endswith(":all_gather") and "waitS" in op}
    assert any(
        re.fullmatch(r"receives parameters of bucket \d, hidden behind embedding row 0 and \d+ more", text) for text in waits.values()
    )


schedules = st.builds(
    lambda rows, cols, pair, recompute, **settings: sliced(
        4 if pair == "row-groups" else rows,
        cols,
        domino_pair=pair,
        recompute_granularity=recompute,
        recompute_method="uniform" if recompute == "full" else None,
        recompute_num_layers=1 if recompute == "full" else None,
        **settings,
    ),
    rows=st.integers(1, 4),
    cols=st.sampled_from([1, 2]),
    pair=st.sampled_from([None, "micro-batches", "row-groups"]),
    recompute=st.sampled_from([None, "full", "selective"]),
    sequence_parallel=st.booleans(),
    domino_defer_wgrad=st.booleans(),
    use_distributed_optimizer=st.booleans(),
    overlap_param_gather=st.booleans(),
    overlap_grad_reduce=st.booleans(),
)


@given(schedule=schedules, replicas=st.integers(1, 2), micro_batches=st.integers(1, 4))
def test_every_op_of_a_step_is_printed_in_order_with_a_remark(schedule: ScheduleConfig, replicas: int, micro_batches: int) -> None:
    text = printed(schedule, replicas, micro_batches)
    found = remarks(text)
    setting = Setting(
        model=named_model("debug-gpt", num_layers=2),
        hardware=HARDWARE["dgx-h100"],
        tensor_parallel=2,
        data_parallel=replicas,
        micro_batch_size=4,
        micro_batches=micro_batches,
    )
    plan, _ = planned(setting, schedule)
    ops = list(chain.from_iterable(step_templates(plan, min(3, micro_batches)))) if schedule.domino_pair == "micro-batches" else plan.ops
    assert [Op.parse(op) for op, _ in found] == list(ops)
    assert max(map(len, text.splitlines())) < 150


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_is_printed_with_its_parts_and_buckets_alone(layer: int) -> None:
    text = printed(sliced(2), replicas=2, layer=layer)
    ops = [Op.parse(op) for op, _ in remarks(text)]
    assert {op.part for op in ops if op.phase != "S"} == set(range(4 * layer + 1, 4 * layer + 5))
    assert {op.phase for op in ops} == {"F", "B", "S"}
    left_out = sum(int(count) for count in re.findall(r"\.\.\.  (\d+) of other parts", text))
    assert len(ops) + left_out == int(text.split()[0])


def test_a_layer_that_the_model_lacks_is_refused_in_a_line() -> None:
    with pytest.raises(ConfigError, match=r"--plan-layer 2: the model has 2 layer\(s\), numbered from 0; give 0 to 1\."):
        printed(BASELINE, layer=2)


def test_the_program_prints_the_plan_alone_or_after_what_a_dry_run_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*BASE.split(), "--plan-layer", "1"]) == 0
    alone = capsys.readouterr().out
    assert "embedding output joins" not in alone
    assert "m0 startF6.0" in alone
    assert main([*BASE.split(), "--plan-layer", "1", "--dry-run"]) == 0
    whole = capsys.readouterr().out
    assert alone in whole
    assert "memory    " in whole
    assert main([*BASE.split(), "--plan-layer", "4"]) == 2


def test_the_plan_of_auto_is_that_of_the_schedule_it_would_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*BASE.split(), "--schedule", "auto", "--print-plan", "--domino-calibration", "dgx-h100"]) == 0
    auto = capsys.readouterr().out
    assert main([*BASE.split(), "--schedule", "baseline", "--print-plan"]) == 0
    assert auto == capsys.readouterr().out


def test_a_plan_is_printed_without_torch() -> None:
    program = "import sys; from domino_lm.tools.simulate import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    flags = "--preset debug-gpt --devices 2 --micro-batch-size 4 --print-plan".split()
    done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, check=True)
    assert remarks(done.stdout)


def test_the_plans_that_the_document_shows_are_those_that_its_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    document = "domino_lm/schedule/README.md"
    plans = re.findall(r"^```text\n(.*?)^```", (ROOT / document).read_text(), re.S | re.M)
    for line, plan in zip(fences(document)[0].splitlines(), plans, strict=True):
        assert simulate.main(shlex.split(line)[2:]) == 0
        assert capsys.readouterr().out == plan
