"""How likely a trained model finds given tokens: in batches of pieces of any lengths, over all replicas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from domino_lm.model.batch import to_device
from domino_lm.model.decoding import NotFiniteError, judge
from domino_lm.tools.trained_model import TrainedModel


class Piece(NamedTuple):
    """Tokens, the last ``judged`` of which are to be judged by those before them."""

    tokens: Sequence[int]
    judged: int


def pieces_of(tokens: Sequence[int], positions: int, stride: int) -> Iterator[Piece]:
    """Pieces of ``positions`` + 1 tokens, ``stride`` apart, that judge each of ``tokens`` but the first once.

    All but the first ``stride`` tokens of a sequence are judged by at least ``positions`` - ``stride`` before them.
    """
    judged, start = 1, 0
    while judged < len(tokens):
        end = min(start + positions + 1, len(tokens))
        yield Piece(tokens[start:end], end - judged)
        judged, start = end, start + stride


def score(model: TrainedModel, pieces: Iterable[Piece], batch_size: int) -> Iterator[tuple[float, bool]]:
    """Log-likelihood in nats of each piece's judged tokens, and whether each of them is the likeliest where it stands.

    All ranks call this with the same pieces, ``batch_size`` of which a replica computes at a time. Raises NotFiniteError.
    """
    dp, remaining = model.mesh.dp, iter(pieces)
    while group := list(islice(remaining, batch_size * dp.size)):
        mine = group[dp.rank * batch_size : (dp.rank + 1) * batch_size]
        found = torch.zeros(batch_size, 2, dtype=torch.float64, device=model.mesh.device)
        if mine:
            found[: len(mine)] = _score_batch(model, mine)
        everyone = dp.all_gather_start(found).wait().flatten(0, 1)
        for log_likelihood, greedy in everyone[: len(group)].tolist():
            if log_likelihood != log_likelihood or log_likelihood == float("inf"):
                raise NotFiniteError("a log-likelihood is not a number")
            yield log_likelihood, bool(greedy)


def _score_batch(model: TrainedModel, pieces: Sequence[Piece]) -> Tensor:
    """Log-likelihood, and 1 if all is likeliest, of each piece: [b, 2] float64."""
    length = max(len(piece.tokens) for piece in pieces) - 1
    tokens = torch.zeros(length + 1, len(pieces), dtype=torch.int64)  # padded behind, where causal attention does not look
    judged = torch.zeros(length, len(pieces), dtype=torch.bool)
    for column, piece in enumerate(pieces):
        end = len(piece.tokens)
        tokens[:end, column] = torch.as_tensor(piece.tokens, dtype=torch.int64)
        judged[end - 1 - piece.judged : end - 1, column] = True
    on_device, mask = to_device(tokens, model.mesh.device), to_device(judged, model.mesh.device)
    losses, likeliest = judge(model.stack, on_device[:-1], on_device[1:])  # 2 x [s, b]
    sums = -torch.where(mask, losses.double(), 0).sum(0)
    return torch.stack((sums, (likeliest | ~mask).all(0).double()), -1)
