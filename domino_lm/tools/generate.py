"""Continue a text with a trained model. Tokens appear as they come; messages go to standard error."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from functools import partial

from domino_lm.config.foreign_text import int_of_flag
from domino_lm.config.settings import ConfigError, RunConfig, refuse
from domino_lm.data.tokenizers.tokenizer import Tokenizer
from domino_lm.tools.trained_model import TrainedModel, Use, add_model_flags, read_run, use_model

REPLACEMENT = "\ufffd"
"""What decoders give for the bytes of a character that is not whole."""
LOOKED_BACK = 8
"""Tokens before the new ones that are decoded with them, since tokenizers spell a text's first token in another way."""


def flag_parser() -> argparse.ArgumentParser:
    """The flags of this tool; those of training that describe a model are read beside them."""
    found = argparse.ArgumentParser(
        description="Continue a text with a trained model. Runs as one process, or under torchrun with the model cut over its ranks.",
        epilog='example: %(prog)s --load checkpoints/my --prompt "To be, or" --temperature 0.8 --top-p 0.95',
        allow_abbrev=False,
    )
    text = found.add_argument_group("text")
    text.add_argument("--prompt", metavar="TEXT", help="text to continue")
    text.add_argument("--prompt-file", metavar="FILE", help="file that holds it, whole; - reads standard input")
    text.add_argument("--max-new-tokens", type=int_of_flag, default=128, metavar="N", help="tokens to generate at most (default: 128)")
    text.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times. The end of document always ends",
    )
    draw = found.add_argument_group("choice of tokens")
    draw.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token; default: 0, or 1 with --top-p")
    draw.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens whose probabilities sum to P (default: all)")
    draw.add_argument("--seed", type=int_of_flag, default=1234, metavar="N", help="of the draws (default: 1234)")
    found.add_argument(
        "--no-kv-cache", action="store_true", help="compute the whole text again for each token; the same tokens, more slowly"
    )
    add_model_flags(found)
    return found


def faults(own: argparse.Namespace) -> list[str]:
    """What is wrong with the flags of this tool, one line each."""
    found = []
    if (own.prompt is None) == (own.prompt_file is None):
        found.append("--prompt or --prompt-file says what to continue; give one of them.")
    if own.max_new_tokens < 1:
        found.append(f"--max-new-tokens {own.max_new_tokens} must be above 0.")
    if "" in own.stop:
        found.append("--stop is empty, which every text holds; give at least one character.")
    if own.temperature is not None and not 0 <= own.temperature < float("inf"):
        found.append(f"--temperature {own.temperature:g} must be 0 or a number above it.")
    if own.top_p is not None and not 0 < own.top_p <= 1:
        found.append(f"--top-p {own.top_p:g} must be above 0 and at most 1.")
    if own.top_p is not None and own.temperature == 0:
        found.append(f"--top-p {own.top_p:g} cuts what --temperature 0 never draws from; leave one out.")
    if not 0 <= own.seed < 2**63:
        found.append(f"--seed {own.seed} must be from 0 to 2^63 - 1.")
    return found


def prompt_of(own: argparse.Namespace) -> str:
    """The text to continue. Raises ConfigError if it is empty or its file cannot be read."""
    text, flag = own.prompt, "--prompt"
    if text is None:
        flag = f"--prompt-file {own.prompt_file}"
        try:
            if own.prompt_file == "-":
                text = sys.stdin.buffer.read().decode("utf-8")
            else:
                with open(own.prompt_file, encoding="utf-8", newline="") as file:
                    text = file.read()
        except OSError as error:
            raise ConfigError(f"{flag}: {(error.strerror or str(error)).lower()}; give a text file.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{flag} is not UTF-8 text ({error}).") from error
    if not text:
        raise ConfigError(f"{flag} is empty; give at least one character to continue.")
    return str(text)


class Wording:
    """The text of tokens as they come, given out as soon as later tokens cannot change it.

    What follows ``prompt``, ids of a text, is decoded with the tokens before it. Text from the first of ``stops`` on is never
    given out, and neither is the beginning of what may become one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._before, self._new = list(prompt[-LOOKED_BACK:]), list[int]()
        self._stops = stops
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """What ``token`` makes certain."""
        self._new.append(token)
        text = self._undecided()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._before, self._new = self._new, []
        return self._without_stops(text)

    def rest(self) -> str:
        """What is left when no token follows."""
        certain = "" if self.stopped else self._without_stops(self._undecided())
        held, self._held = ("" if self.stopped else self._held), ""
        return certain + held

    def _undecided(self) -> str:
        known = self._tokenizer.decode(self._before)
        return self._tokenizer.decode([*self._before, *self._new])[len(known) :]

    def _without_stops(self, text: str) -> str:
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.stopped = True
            certain, self._held = self._held[: min(places)], ""
            return certain
        held = max((n for stop in self._stops for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0)
        certain, self._held = self._held[: len(self._held) - held], self._held[len(self._held) - held :]
        return certain


def continue_text(model: TrainedModel, own: argparse.Namespace, text: str) -> int:
    """Print what the model makes of ``text``; the exit code. Raises ConfigError if the text is too long, NotFiniteError."""
    import torch

    from domino_lm.model.decoding import Decoder, Draw, generate

    tokenizer = model.text_tokenizer()
    prompt = model.encode(text)
    if not prompt:
        raise ConfigError("the prompt has no tokens; give more than white space.")
    if len(prompt) > model.positions:
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens, but the model has {model.positions} positions (--seq-length); give a shorter one."
        )
    temperature = own.temperature if own.temperature is not None else 0.0 if own.top_p is None else 1.0
    draw = Draw(temperature, own.top_p or 1.0, torch.Generator(model.mesh.device).manual_seed(own.seed))
    decoder = Decoder(model.stack, min(model.positions, len(prompt) + own.max_new_tokens), keep=not own.no_kv_cache)
    wording, began, count, reason = Wording(tokenizer, prompt, own.stop), time.perf_counter(), 0, ""
    for token in itertools.islice(generate(decoder, prompt, draw, model.vocab_size), own.max_new_tokens):
        count += 1
        if token == tokenizer.eod:
            reason = "end of document"
            break
        say(model, wording.add(token))
        if wording.stopped:
            reason = "stop text"
            break
    else:
        reason = "--max-new-tokens" if count == own.max_new_tokens else f"the model's {model.positions} positions are full"
    say(model, wording.rest() + "\n")
    if model.speaks:
        seconds = time.perf_counter() - began
        how = "" if decoder.keeps else ", without a key-value cache"
        told = (
            f"{len(prompt)} tokens of prompt, {count} generated in {seconds:.2f} s ({count / seconds:.1f} a second){how}; ended: {reason}"
        )
        print(told, file=sys.stderr, flush=True)
    return 0


def say(model: TrainedModel, text: str) -> None:
    if model.speaks and text:
        sys.stdout.write(text)
        sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Read flags, load, generate; the exit code."""

    def read(world_size: int) -> tuple[RunConfig, Use]:
        own, rest = flag_parser().parse_known_args(argv)
        refuse(faults(own))
        text = prompt_of(own)
        run = read_run(own, rest, world_size)
        return run, partial(continue_text, own=own, text=text)

    return use_model(read)


if __name__ == "__main__":
    sys.exit(main())
