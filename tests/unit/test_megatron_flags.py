"""Megatron's own command lines: what needs no setting here is told, what is not there is refused."""

from __future__ import annotations

import pytest

from domino_lm.arguments import parse_command, settings
from domino_lm.config import ConfigError
from domino_lm.megatron_flags import IGNORED

REQUIRED = "--preset debug-gpt --lr 1e-3 --micro-batch-size 2 --train-iters 10"


def test_flags_that_ask_for_nothing_else_are_ignored_with_their_reason() -> None:
    line = f"{REQUIRED} --use-mcore-models --transformer-impl local --pipeline-model-parallel-size 1 --seed 3 --attention-backend=auto"
    command = parse_command(line.split())
    assert command.run.training.seed == 3
    assert [text.split(":")[0] for text in command.ignored] == [
        "--use-mcore-models",
        "--transformer-impl local",
        "--pipeline-model-parallel-size 1",
        "--attention-backend auto",
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2: pipeline parallelism is not there, only 1"),
        ("--bf16", "--bf16: mixed precision is not there"),
        ("--optimizer sgd", "--optimizer sgd: AdamW is the only optimizer"),
    ],
)
def test_what_is_not_there_is_refused_by_name(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_command(f"{REQUIRED} {flags}".split())
    assert message in str(raised.value)


def test_no_ignored_flag_is_a_setting() -> None:
    assert not set(IGNORED) & {item.flag for item in settings()}
