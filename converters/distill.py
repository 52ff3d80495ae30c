"""How far the student's next-token distribution is from the source's, and which way its last hidden state should move.

The gradient of `KL(source || student)` with respect to the student's logits is `softmax(student) - softmax(source)`. It goes
through the head in pieces, so that the scores of a few hundred tokens over the vocabulary are all that is ever held.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_cli.model.decoder import Decoder

SCORED_AT_ONCE = 512  # tokens whose scores over the vocabulary are held at a time


def divergence(frame: Decoder, hidden: Tensor, target: Tensor, *, gradient: bool) -> tuple[float, Tensor | None]:
    """Sum of `KL(source || student)` over tokens, in nats, and its gradient with respect to `hidden`.

    Args:
        hidden: `[N, D]` the student's states before the final norm. target: `[N, D]` the source's.
        gradient: whether to take it.

    Returns:
        The sum, and `[N, D]` in the type of `hidden` (None where it was not asked for).
    """
    total = 0.0
    slopes = torch.empty_like(hidden) if gradient else None
    for begin in range(0, hidden.shape[0], SCORED_AT_ONCE):
        part = slice(begin, begin + SCORED_AT_ONCE)
        x = hidden[part].detach().requires_grad_(gradient)
        with torch.set_grad_enabled(gradient):
            scores = _scores(frame, x)  # [n, V]
        with torch.no_grad():
            ours = torch.log_softmax(scores.float(), dim=-1)
            source = torch.log_softmax(_scores(frame, target[part]).float(), dim=-1)
            probabilities = source.exp()
            total += float((probabilities * (source - ours)).sum())
            if slopes is not None:
                slope = ours.exp_().sub_(probabilities).to(scores.dtype)
                (slopes[part],) = torch.autograd.grad(scores, x, slope)
    return total, slopes


def _scores(frame: Decoder, hidden: Tensor) -> Tensor:
    return frame.logits(frame.norm(hidden.to(frame.dtype)))
