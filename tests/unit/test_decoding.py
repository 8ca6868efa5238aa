"""What a model says next does not depend on whether earlier tokens are kept or computed again; tokens are drawn as asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from domino_lm.data.tokenizers.sentencepiece import SentencePieceTokenizer
from domino_lm.model.attention import Attention
from domino_lm.model.build import build_stack
from domino_lm.model.decoding import Decoder, Draw, NotFiniteError, generate, judge, row_of, token_dimensions
from domino_lm.model.stack import Stack
from domino_lm.parallel.collectives import Communicator
from domino_lm.tools.generate import Wording
from domino_lm.tools.scoring import pieces_of
from tests import reference
from tests.distributed.models import GPT, LLAMA, float64_stack
from tests.distributed.test_any_transformer import MODEL as PAGE_MODEL
from tests.distributed.test_any_transformer import save_page
from tests.documents import ROOT

ALONE = Communicator.single()
MODELS = {"gpt": GPT, "llama": LLAMA, "page": PAGE_MODEL}


def stack_of(name: str) -> Stack:
    save_page()
    if name == "page":
        return build_stack(PAGE_MODEL, ALONE, 3, torch.float64)
    return float64_stack(MODELS[name], ALONE)


def ids(length: int, samples: int = 1) -> Tensor:
    return torch.randint(0, 97, (length, samples), generator=torch.Generator().manual_seed(2))


def continued(stack: Stack, sizes: list[int], keep: bool, samples: int = 1) -> tuple[Tensor, Decoder]:
    """Logits [steps, b, v] after each of the pieces that a sequence comes in."""
    decoder = Decoder(stack, sum(sizes), keep)
    return torch.stack([decoder.feed(piece) for piece in ids(sum(sizes), samples).split(sizes)]), decoder


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [[6, 1, 1, 1], [1, 1, 1], [4, 3, 2, 1]], ids=str)
def test_logits_are_the_same_whether_earlier_tokens_are_kept_or_not(name: str, sizes: list[int]) -> None:
    stack = stack_of(name)
    kept, decoder = continued(stack, sizes, keep=True, samples=3)
    anew, slow = continued(stack, sizes, keep=False, samples=3)
    assert (decoder.keeps, slow.keeps) == (True, False)
    torch.testing.assert_close(kept, anew, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_losses_are_those_of_the_reference(name: str) -> None:
    stack, tokens = stack_of(name), ids(12, 2)
    weights = {parameter.spec.name: parameter.data for parameter in stack.parameters()}
    losses, likeliest = judge(stack, tokens[:-1], tokens[1:])
    expected = reference.token_losses(weights, MODELS[name], tokens[:-1].t(), tokens[1:].t()).t()
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
    best = reference.logits(weights, MODELS[name], tokens[:-1].t())[..., :97].argmax(-1).t()
    assert torch.equal(likeliest, best == tokens[1:])


class Forgetful(Attention):
    """Looks at its own row alone, as a core that was never meant to be cut along the sequence."""

    def core(self, h: Tensor, ctx: object) -> Tensor:
        assert h.shape[0] == ctx.row.start + h.shape[0], "sees the whole sequence, or is wrong"  # type: ignore[attr-defined]
        return super().core(h, type("Own", (), {"row": ctx.row, "extend": lambda self, tensor: [tensor]})())  # type: ignore[attr-defined,arg-type]


class Summing(Attention):
    """Shares a sum over its tokens, which no later token can be put behind."""

    def core(self, h: Tensor, ctx: object) -> Tensor:
        ctx.extend(h.sum(0))  # type: ignore[attr-defined]
        return super().core(h, ctx)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Forgetful, Summing])
def test_a_core_that_cannot_continue_gets_the_whole_sequence_each_time(kind: type[Attention]) -> None:
    stack, plain = stack_of("llama"), stack_of("llama")
    for _, part in stack.blocks:
        if isinstance(part, Attention):
            part.__class__ = kind
    found, decoder = continued(stack, [5, 1, 1], keep=True)
    assert not decoder.keeps
    torch.testing.assert_close(found, continued(plain, [5, 1, 1], keep=False)[0], rtol=1e-12, atol=1e-12)


def test_tokens_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, seen = stack_of("gpt"), []
    core = Attention.core
    monkeypatch.setattr(Attention, "core", lambda self, h, ctx: seen.append(h.shape[0]) or core(self, h, ctx))
    decoder = Decoder(stack, 10)
    seen.clear()
    list(zip(range(4), generate(decoder, [1, 2, 3, 4, 5], Draw(), 97), strict=False))
    assert seen == [5, 5, 1, 1, 1, 1, 1, 1, 1, 1][: len(seen)]
    assert len(seen) >= 8


def test_keys_of_grouped_heads_lie_along_the_dimension_of_tokens() -> None:
    assert token_dimensions(stack_of("llama")) == [[2, 2], []] * 2


def drawn(draw: Draw, logits: list[float], count: int = 400) -> list[int]:
    return draw(torch.tensor([logits]).expand(count, -1)).tolist()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_temperature_0_takes_the_likeliest() -> None:
    assert set(drawn(Draw(), [0.0, 3.0, 1.0])) == {1}


@pytest.mark.parametrize(
    ("top_p", "left"), [(0.5, {0}), (0.6, {0}), (0.61, {0, 1}), (0.9, {0, 1}), (0.91, {0, 1, 2}), (1.0, {0, 1, 2}), (1e-9, {0})]
)
def test_top_p_leaves_the_fewest_tokens_that_sum_to_it(top_p: float, left: set[int]) -> None:
    logits = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log().tolist()
    assert set(drawn(Draw(1.0, top_p, seeded()), logits)) == left


def test_frequencies_are_those_of_the_temperature() -> None:
    found = drawn(Draw(2.0, 1.0, seeded()), [0.0, 2.0], 20_000)
    assert sum(found) / len(found) == pytest.approx(torch.tensor(1.0).sigmoid().item(), abs=0.01)


def test_a_tiny_temperature_is_greedy() -> None:
    assert set(drawn(Draw(1e-30, 1.0, seeded()), [1.0, 1.5, -2.0])) == {1}


def test_equal_seeds_draw_equally() -> None:
    first, second, other = (drawn(Draw(1.0, 0.9, seeded(seed)), [0.1, 0.2, 0.3, 0.4]) for seed in (1, 1, 2))
    assert first == second != other


def test_columns_of_padding_are_never_drawn() -> None:
    stack = stack_of("gpt")
    stack.head.true_columns = None  # as after a checkpoint in which padding took part
    stack.head.weight.data[97:] = 100 * stack.head.weight.data[:1]
    found = [token for token, _ in zip(generate(Decoder(stack, 16), [1], Draw(5.0, 1.0, seeded()), 97), range(15), strict=False)]
    assert max(found) < 97


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_end_it(bad: float, temperature: float) -> None:
    stack = stack_of("gpt")
    stack.final_norm.bias.data[0] = bad  # type: ignore[union-attr]
    with pytest.raises(NotFiniteError, match="token 1 are not finite"):
        next(generate(Decoder(stack, 4), [3], Draw(temperature, 1.0, seeded()), 97))


def test_generation_ends_when_the_positions_are_full() -> None:
    assert len(list(generate(Decoder(stack_of("gpt"), 8), [1, 2, 3], Draw(), 97))) == 6


@pytest.mark.parametrize(("count", "positions", "stride"), [(30, 8, 8), (30, 8, 3), (9, 8, 8), (10, 8, 8), (2, 8, 1), (1, 8, 8)])
def test_each_token_but_the_first_is_judged_once(count: int, positions: int, stride: int) -> None:
    judged = []
    for piece in pieces_of(range(count), positions, stride):
        assert len(piece.tokens) <= positions + 1
        judged += piece.tokens[-piece.judged :]
        assert piece.tokens[0] == 0 or len(piece.tokens) - piece.judged > positions - stride
    assert judged == list(range(1, count))


TOKENIZER = SentencePieceTokenizer(str(ROOT / "examples/data/sp4096.model"))
TEXT = "To be, or not to be: that is the question.\n  Whether 'tis nobler \U0001f600 \u4f60\u597d in the mind"


def worded(text: str, stops: list[str], prompt: str = "Ham.") -> list[str]:
    tokens = TOKENIZER.encode(prompt + text)
    before = TOKENIZER.encode(prompt)
    wording, pieces = Wording(TOKENIZER, before, stops), []
    assert tokens[: len(before)] == before
    for token in tokens[len(before) :]:
        pieces.append(wording.add(token))
        if wording.stopped:
            break
    return [*pieces, wording.rest()]


def test_text_appears_token_by_token_and_whole() -> None:
    pieces = worded(" " + TEXT, [])
    assert "".join(pieces) == " " + TEXT
    assert sum(map(bool, pieces)) > 20


def test_characters_in_bytes_appear_when_they_are_whole() -> None:
    assert [piece for piece in worded(" \U0001f600", []) if piece] in ([" ", "\U0001f600"], [" \U0001f600"])


@pytest.mark.parametrize(
    ("stops", "left"),
    [
        (["that"], " To be, or not to be: "),
        (["nothing of it"], " " + TEXT),
        (["is the question", "or not"], " To be, "),
        ([" To"], ""),
        (["mind!"], " " + TEXT),
    ],
)
def test_nothing_of_a_stop_text_is_given_out(stops: list[str], left: str) -> None:
    assert "".join(worded(" " + TEXT, stops)) == left


def test_half_a_character_at_the_end_is_marked() -> None:
    tokens = TOKENIZER.encode("a \U0001f600")[:-1]
    wording = Wording(TOKENIZER, tokens[:1], [])
    assert ("".join(map(wording.add, tokens[1:])) + wording.rest()).endswith("\ufffd")


def test_a_row_that_goes_on_knows_its_place() -> None:
    assert row_of(ids(3), 5).start == 5
