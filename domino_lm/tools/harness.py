"""A trained model as lm-evaluation-harness asks for one. That package (``lm_eval``) is the user's to install; nothing else needs it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lm_eval.api.model import LM

from domino_lm.config.settings import ConfigError
from domino_lm.model.decoding import Decoder, Draw, generate
from domino_lm.tools.generate import Wording
from domino_lm.tools.scoring import Piece, pieces_of, score
from domino_lm.tools.trained_model import TrainedModel

if TYPE_CHECKING:
    import torch

MOST_NEW_TOKENS = 256
"""Tokens to generate at most where a task does not say."""


class HarnessModel(LM):  # type: ignore[misc]  # the package has no types
    """Answers what tasks ask. Every rank of the model's mesh holds one and answers the same requests.

    For use from Python: ``lm_eval.simple_evaluate(model=HarnessModel(model), tasks=[...])``.
    """

    def __init__(self, model: TrainedModel, batch_size: int = 8) -> None:
        super().__init__()
        self.model = model
        self.batch_size = batch_size
        self.tokenizer = model.text_tokenizer()

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of each request's ``(context, continuation)``: log-likelihood of the second, and whether greedy choice would give it."""
        return list(score(self.model, [self._piece(*request.args) for request in requests], self.batch_size))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each request's whole text."""
        found = []
        for request in requests:
            ids = [*self._beginning(), *self.model.encode(request.args[0])]
            pieces = pieces_of(ids, self.model.positions, self.model.positions)
            found.append(sum(log_likelihood for log_likelihood, _ in score(self.model, pieces, self.batch_size)))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each request's ``(context, arguments)``, up to one of the texts that end it."""
        return [self._continue(*request.args) for request in requests]

    def _beginning(self) -> list[int]:
        """What stands before a text: an end of document, as in training."""
        if self.tokenizer.eod is None:
            raise ConfigError("a text without context is judged after an end of document, which this tokenizer does not have.")
        return [self.tokenizer.eod]

    def _piece(self, context: str, continuation: str) -> Piece:
        spaces = len(context) - len(context.rstrip())
        if spaces:  # tokenizers join a space to the word behind it
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        before = self.model.encode(context) if context else []
        ids = self.model.encode(context + continuation)
        judged = len(ids) - len(before)
        if not before:
            ids = [*self._beginning(), *ids]
        if judged < 1:
            raise ConfigError(f"the continuation {continuation!r} has no tokens of its own.")
        if judged > self.model.positions:
            raise ConfigError(f"a continuation has {judged} tokens, but the model has {self.model.positions} positions.")
        return Piece(ids[-self.model.positions - 1 :], judged)

    def _continue(self, context: str, arguments: dict[str, Any]) -> str:
        until = arguments.get("until") or []
        stops = [until] if isinstance(until, str) else [text for text in until if text]
        most = min(int(arguments.get("max_gen_toks", MOST_NEW_TOKENS)), self.model.positions - 1)
        prompt = (self.model.encode(context) if context else self._beginning())[-(self.model.positions - most) :]
        temperature = float(arguments.get("temperature") or 0) if arguments.get("do_sample", True) else 0.0
        draw = Draw(temperature, float(arguments.get("top_p") or 1), self._generator())
        decoder = Decoder(self.model.stack, len(prompt) + most)
        wording, text = Wording(self.tokenizer, prompt, stops), ""
        for token in itertools.islice(generate(decoder, prompt, draw, self.model.vocab_size), most):
            if token == self.tokenizer.eod:
                break
            text += wording.add(token)
            if wording.stopped:
                break
        return text + wording.rest()

    def _generator(self) -> torch.Generator:
        import torch

        return torch.Generator(self.model.mesh.device).manual_seed(1234)


def evaluate(
    model: TrainedModel, tasks: Sequence[str], batch_size: int, include_path: str | None = None, **settings: Any
) -> dict[str, Any]:
    """What lm-evaluation-harness measures of ``tasks``, by task; ``include_path`` is a folder with more than it brings."""
    import lm_eval

    if include_path is not None:
        from lm_eval.tasks import TaskManager

        settings["task_manager"] = TaskManager(include_path=include_path)
    try:
        found = lm_eval.simple_evaluate(model=HarnessModel(model, batch_size), tasks=list(tasks), **settings)
    except KeyError as error:
        raise ConfigError(f"--tasks: lm-evaluation-harness refuses them ({error.args[0] if error.args else error}).") from error
    results: dict[str, Any] = found["results"]
    return results
