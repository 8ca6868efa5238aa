"""What a link means for a step: bytes of a step, seconds at a rate."""

from __future__ import annotations

from domino_lm.config.arguments import parse_arguments
from domino_lm.launch.traffic import Traffic, traffic_of
from domino_lm.tools.node_checks import step_text

MODEL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128 --lr 1 --train-iters 1 --mock-data "
    "--micro-batch-size 2 --global-batch-size 8 --tensor-model-parallel-size 2"
)


def test_a_step_all_reduces_four_activations_a_layer_and_the_gradients_of_a_rank() -> None:
    alone, two = (traffic_of(parse_arguments(MODEL.split()), ranks) for ranks in (2, 4))
    assert alone == Traffic(4 * 3 * 8 * 32 * 64 * 4, 0.0)
    assert two.tensor_bytes == alone.tensor_bytes / 2
    assert 4 * 3 * 12 * 64**2 / 2 < two.gradient_bytes < 4 * 3 * 12 * 64**2
    whole = traffic_of(parse_arguments(f"{MODEL} --recompute-granularity full --recompute-method uniform".split()), 2)
    assert whole.tensor_bytes == 1.5 * alone.tensor_bytes


def test_the_seconds_of_a_step_are_those_of_the_slower_kind_at_the_least() -> None:
    text = step_text(Traffic(2e9, 3e9), {"TP": 6.25e6, "DP": 1e9})
    assert text == "takes at least 320 s at these rates, however well they are hidden: tensor-parallel 2 GB in 320 s, gradients 3 GB in 3 s"
    assert step_text(Traffic(0.0, 0.0), {}) == "sends nothing"
