"""Greedy continuations of many prompts at once, for tasks that read what the model writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_cli.evaluation.scoring import Quantizers, not_finite, pad
from mla_cli.model.decoder import Decoder


@dataclass(frozen=True)
class Prompt:
    """What one sequence starts from and when it ends.

    Attributes:
        tokens: ids to continue; max_new: most ids to add.
        finished: given the ids added so far, whether they hold a stop string.
    """

    tokens: tuple[int, ...]
    max_new: int
    finished: Callable[[Sequence[int]], bool]


@torch.inference_mode()
def continue_greedily(
    decoder: Decoder, prompts: Sequence[Prompt], *, eos_ids: frozenset[int], quantizers: Quantizers | None = None
) -> list[list[int]]:
    """The most likely next ids of each prompt, up to an EOS (not included), a stop string or its limit.

    Sequences that are done leave the batch, so that the rest runs faster; none sees the others.

    Raises:
        MlaError: the model's output is not finite.
    """
    tokens, lengths = pad([prompt.tokens for prompt in prompts], decoder.device)  # [B, T]
    room = max(len(prompt.tokens) + prompt.max_new for prompt in prompts)
    cache = decoder.make_cache(len(prompts), max(room, tokens.shape[1]), quantizers)
    hidden = decoder(tokens, cache, lengths)  # [B, T, D]
    last = hidden[torch.arange(len(prompts)), lengths.to(hidden.device) - 1]  # [B, D]
    written: list[list[int]] = [[] for _ in prompts]
    running = list(range(len(prompts)))
    while True:
        chosen = _most_likely(decoder, last)  # [B]
        going_on = []
        for place, (index, token) in enumerate(zip(running, chosen.tolist(), strict=True)):
            if token in eos_ids:
                continue
            written[index].append(token)
            prompt = prompts[index]
            if len(written[index]) < prompt.max_new and not prompt.finished(written[index]):
                going_on.append(place)
        if not going_on:
            return written
        if len(going_on) < len(running):
            rows = torch.tensor(going_on, device=decoder.device)
            cache, chosen = cache.select(rows), chosen[rows]
            running = [running[place] for place in going_on]
        last = decoder(chosen[:, None], cache)[:, 0]  # [B, D]


def _most_likely(decoder: Decoder, hidden: Tensor) -> Tensor:
    logits = decoder.logits(hidden)  # [B, V]
    # One NaN or infinity among the logits makes the row's largest or its sum not finite.
    if not bool(torch.isfinite(logits.float().sum(dim=-1)).all()):
        raise not_finite()
    return logits.argmax(dim=-1)
