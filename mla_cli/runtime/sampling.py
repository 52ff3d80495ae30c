"""From logits to the next token: greedy, or drawn after the usual cuts, each row by its own parameters and numbers.

The cuts are those of transformers, in its order: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_cli.runtime.sampling_params import SamplingParams

__all__ = ["RowSampler", "Sampled", "SamplingParams", "sample"]

# Below this a temperature is as good as 0, and logits divided by it would leave float32.
LEAST_TEMPERATURE = 1e-30
NUCLEUS = 1024  # tokens that top-p looks at before it sorts all
BLOCK = 256


@dataclass(frozen=True)
class Sampled:
    """One step's tokens.

    Attributes:
        ids: `[B]` int64; -1 where the logits hold NaN or infinity.
        logprobs: `[B]` float32 log-probability of each under the model itself (before any cut), if asked for.
        likeliest: `[B, K]` ids of the likeliest tokens, and their log-probabilities, likeliest first, if asked for.
    """

    ids: Tensor
    logprobs: Tensor | None
    likeliest: tuple[Tensor, Tensor] | None = None


class RowSampler:
    """The parameters of a batch's rows as tensors, made once for as long as the same rows run together.

    A row's tokens depend on its logits, parameters and generator alone. Random numbers are drawn on the CPU, one a
    token, so that every device draws the same.

    Args:
        params: one a row; generators: one a row (CPU), used only where the temperature is not 0.
        history: each row's tokens so far, for the repetition penalty.
        vocab_size: columns of the logits.
        logprobs: also give log-probabilities, and likeliest: those of so many of the likeliest tokens.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        generators: Sequence[torch.Generator],
        history: Sequence[Sequence[int]],
        vocab_size: int,
        *,
        device: torch.device | str = "cpu",
        logprobs: bool = False,
        likeliest: int = 0,
    ) -> None:
        self._logprobs, self._likeliest = logprobs, min(likeliest, vocab_size)
        drawn = [row for row, p in enumerate(params) if p.temperature > 0]
        self._generators = [generators[row] for row in drawn]
        self._all_drawn = len(drawn) == len(params)
        self._drawn = torch.tensor(drawn, dtype=torch.int64, device=device)  # [N] rows that are not greedy
        chosen = [params[row] for row in drawn]

        def column(values: Sequence[float], kind: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=kind, device=device)[:, None]  # [N, 1]

        self._temperature = column([max(p.temperature, LEAST_TEMPERATURE) for p in chosen])
        ks = [min(p.top_k, vocab_size) or vocab_size for p in chosen]
        self._top_k = column(ks, torch.int64)
        self._largest_k = max((k for k in ks if k < vocab_size), default=0)
        self._has_top_k = column([k < vocab_size for k in ks], torch.bool)
        self._top_p_rows = [row for row, p in enumerate(chosen) if p.top_p < 1]
        self._top_p = column([chosen[row].top_p for row in self._top_p_rows], torch.float64)
        self._min_p = column([p.min_p for p in chosen])
        self._any_min_p = any(p.min_p > 0 for p in chosen)
        self._seen: Tensor | None = None
        if any(p.repetition_penalty != 1 for p in params):
            self._penalty = column([p.repetition_penalty for p in params])
            self._seen = torch.zeros(len(params), vocab_size, dtype=torch.bool, device=device)  # [B, V]
            for row, tokens in enumerate(history):
                self._seen[row, torch.tensor(list(tokens), dtype=torch.int64, device=device)] = True

    def __call__(self, logits: Tensor) -> Sampled:
        """Choose a token for each row of `[B, V]` logits."""
        logits = logits.float()
        scores = logits
        if self._seen is not None:
            penalised = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
            scores = torch.where(self._seen, penalised, scores)
        best, ids = scores.max(dim=-1)  # [B]
        if self._generators:
            drawn = self._draw(scores if self._all_drawn else scores[self._drawn])  # [N]
            ids = drawn if self._all_drawn else ids.index_copy(0, self._drawn, drawn)
        if self._seen is not None:
            self._seen.scatter_(1, ids[:, None], True)
        chosen, likeliest = None, None
        if self._logprobs:
            total = logits.logsumexp(dim=-1)  # [B]
            chosen = logits.gather(1, ids[:, None])[:, 0] - total
            if self._likeliest:
                top = logits.topk(self._likeliest)  # [B, K]
                likeliest = (top.indices, top.values - total[:, None])
        return Sampled(torch.where(best.isfinite(), ids, -1), chosen, likeliest)

    def allowed(self, scores: Tensor) -> Tensor:
        """`[N, V]` scores of the rows that are drawn, warmed by temperature, minus infinity where cut."""
        scores = scores / self._temperature
        if self._largest_k:
            kth = scores.topk(self._largest_k).values.gather(1, self._top_k.clamp(max=self._largest_k) - 1)  # [N, 1]
            scores = scores.masked_fill((scores < kth) & self._has_top_k, -math.inf)
        if self._top_p_rows:
            rows = self._top_p_rows if len(self._top_p_rows) < len(scores) else slice(None)
            scores = scores.clone() if isinstance(rows, list) else scores
            scores[rows] = _nucleus(scores[rows], self._top_p)
        if self._any_min_p:
            probabilities = scores.softmax(dim=-1)
            least = self._min_p * probabilities.amax(dim=-1, keepdim=True)
            scores = scores.masked_fill(probabilities < least, -math.inf)
        return scores

    def _draw(self, scores: Tensor) -> Tensor:
        probabilities = self.allowed(scores).softmax(dim=-1)  # [N, V]
        random = [torch.rand((), generator=generator, dtype=torch.float64) for generator in self._generators]
        return _pick(probabilities, torch.stack(random).to(scores.device))


def _nucleus(scores: Tensor, top_p: Tensor) -> Tensor:
    """Scores of the fewest likeliest tokens that together have probability `top_p` `[N, 1]`, the others cut."""
    probabilities = scores.softmax(dim=-1)  # [N, V]
    # Sorting a whole vocabulary takes longer than a small model's step; the nucleus is nearly always among the first.
    for first in (min(NUCLEUS, scores.shape[-1]), scores.shape[-1]):
        likeliest, order = probabilities.topk(first)  # [N, first], descending
        before = likeliest.double().cumsum(dim=-1) - likeliest  # probability of all that are likelier
        cut = before >= top_p
        cut[:, 0] = False
        if first == scores.shape[-1] or bool(cut[:, -1].all()):
            break
    outside = torch.ones_like(probabilities, dtype=torch.bool).scatter_(1, order, cut)
    return scores.masked_fill(outside, -math.inf)


def _pick(probabilities: Tensor, random: Tensor) -> Tensor:
    """The token at which the summed probability of `[N, V]` passes `random` `[N]` in [0, 1)."""
    # In two levels, because a running sum over a vocabulary is slow: first the block, then the place in it.
    blocks = F.pad(probabilities, (0, -probabilities.shape[-1] % BLOCK)).view(len(probabilities), -1, BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64)  # [N, n]
    mass = sums.cumsum(dim=-1)
    point = random[:, None] * mass[:, -1:]  # [N, 1]
    block = torch.searchsorted(mass, point, right=True).clamp(max=mass.shape[-1] - 1)  # [N, 1]
    inside = blocks.take_along_dim(block[..., None], dim=1)[:, 0].double().cumsum(dim=-1)  # [N, BLOCK]
    rest = point - (mass - sums).gather(1, block)
    place = torch.searchsorted(inside, rest, right=True).clamp(max=BLOCK - 1)
    ids = (block * BLOCK + place).clamp(max=probabilities.shape[-1] - 1)
    # A point within rounding of a block's end can land on a token that was cut.
    return torch.where(probabilities.gather(1, ids) > 0, ids, probabilities.argmax(dim=-1, keepdim=True))[:, 0]


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    generators: Sequence[torch.Generator],
    history: Sequence[Sequence[int]],
) -> Tensor:
    """One step for `[B, V]` logits: `[B]` token ids (see `RowSampler`)."""
    return RowSampler(params, generators, history, logits.shape[-1], device=logits.device)(logits).ids
