"""Nested training: in some steps only the first part of each latent works, so that a part alone stays a good latent.

Matryoshka representation learning (arXiv 2205.13147) with the widths taken in turn: the loss of a step goes to the channels
that `--latent-strength` would read. Which steps and which parts follows from the step's number alone, so that a resumed healing
repeats them.
"""

from __future__ import annotations

EVERY = 4
STRENGTHS = (0.5, 0.25, 0.75)


def strength_at(step: int, *, nested: bool) -> float:
    """Share of each latent's channels that works in a step: all of them but in every fourth step of a nested healing."""
    turn, place = divmod(step, EVERY)
    return STRENGTHS[turn % len(STRENGTHS)] if nested and place == EVERY - 1 else 1.0
