"""Log-likelihoods of continuations, sorted by length, in batches; a context that several requests share runs once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from mla_cli.errors import MlaError
from mla_cli.evaluation.requests import Request, clip
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.cache import Cache
from mla_cli.model.decoder import Decoder

_T = TypeVar("_T")
Quantizers = tuple[LatentQuantizer | None, ...]

# Tokens of a batch, padding included. Past it a CPU loses (SmolLM2-135M: 3.1 ms of CPU a token at 1,024, 3.8 ms at 2,048,
# 3.7 ms one sequence at a time, since its caches no longer hold a layer's activations); a GPU needs more to be busy.
CPU_TOKENS = 1024
CUDA_TOKENS = 32768

# Numbers in one block of logits, whatever the vocabulary: 16 MiB in float32 stay in a CPU's caches until they are summed up.
LOGITS_BLOCK = 2**22
CUDA_LOGITS_BLOCK = 2**26

# Below this a shared context costs less to repeat than to copy from a cache.
MIN_SHARED_CONTEXT = 16


@dataclass(frozen=True)
class Score:
    """Sum of the continuation's log-probabilities, and whether greedy decoding would give exactly it."""

    logprob: float
    greedy: bool


@dataclass(frozen=True)
class _Shared:
    """Requests (by their index) that continue one context."""

    context: tuple[int, ...]
    members: tuple[tuple[int, tuple[int, ...]], ...]


def score(
    decoder: Decoder,
    requests: Sequence[Request],
    *,
    max_length: int,
    batch_size: int | None = None,
    quantizers: Quantizers | None = None,
) -> Iterator[tuple[int, Score]]:
    """Score every request; yields its index and its score, in the order that runs fastest.

    Which requests share a forward pass depends on `batch_size`, but never what a request attends to, so that scores do
    not depend on it beyond float noise.

    Args:
        requests: their contexts are cut on the left where `context + continuation` exceeds `max_length + 1` tokens.
        batch_size: sequences of a forward pass; None: as many as suit the device.
        quantizers: store latents quantised, so that attention reads what a quantised cache would give it.

    Raises:
        MlaError: the model's output is not finite.
    """
    clipped = [clip(request, max_length) for request in requests]
    by_context: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, request in enumerate(clipped):
        by_context[request.context].append(index)
    shared: list[_Shared] = []
    alone: list[int] = []
    for context, indices in by_context.items():
        if len(indices) > 1 and len(context) >= MIN_SHARED_CONTEXT:
            shared.append(_Shared(context, tuple((index, clipped[index].continuation) for index in indices)))
        else:
            alone += indices
    shared.sort(key=lambda group: (-len(group.context), group.context))

    def size(index: int) -> int:
        return len(clipped[index].context) + len(clipped[index].continuation)

    alone.sort(key=lambda index: (-size(index), index))
    budget = token_budget(decoder)
    for groups in batches(shared, lambda group: len(group.context), batch_size, budget):
        yield from _score_shared(decoder, groups, batch_size, quantizers)
    for rows in batches(alone, size, batch_size, budget):
        yield from zip(rows, _score_alone(decoder, [clipped[row] for row in rows], quantizers), strict=True)


def batches(
    items: Sequence[_T], length: Callable[[_T], int], batch_size: int | None, budget: int
) -> Iterator[list[_T]]:
    """Neighbouring items in batches of `batch_size`, or of at most `budget` tokens, padding included."""
    batch: list[_T] = []
    longest = 0
    for item in items:
        longest = max(longest, length(item))
        full = (len(batch) + 1) * longest > budget if batch_size is None else len(batch) == batch_size
        if batch and full:
            yield batch
            batch, longest = [], length(item)
        batch.append(item)
    if batch:
        yield batch


def token_budget(decoder: Decoder) -> int:
    """Tokens of a batch that suit the decoder's device."""
    return CUDA_TOKENS if decoder.device.type == "cuda" else CPU_TOKENS


def pad(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows padded on the right to `[B, T]`, and their lengths `[B]` on the host."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
    return tokens.to(device), lengths


@torch.inference_mode()
def _score_alone(decoder: Decoder, requests: Sequence[Request], quantizers: Quantizers | None) -> list[Score]:
    tokens, lengths = pad([(*r.context, *r.continuation[:-1]) for r in requests], decoder.device)  # [B, T]
    cache = scoring_cache(decoder, tokens, quantizers)
    hidden = decoder(tokens, cache, lengths)  # [B, T, D]
    # The continuation's first token is predicted where the context ends.
    wanted = [hidden[row, len(r.context) - 1 : int(lengths[row])] for row, r in enumerate(requests)]
    counts = [len(r.continuation) for r in requests]
    return _sums(*token_scores(decoder, torch.cat(wanted), [t for r in requests for t in r.continuation]), counts)


@torch.inference_mode()
def _score_shared(
    decoder: Decoder, groups: Sequence[_Shared], batch_size: int | None, quantizers: Quantizers | None
) -> list[tuple[int, Score]]:
    tokens, lengths = pad([group.context for group in groups], decoder.device)  # [G, C]
    longest = max(len(continuation) for group in groups for _, continuation in group.members)
    cache = decoder.make_cache(len(groups), tokens.shape[1] + longest, quantizers)
    hidden = decoder(tokens, cache, lengths)  # [G, C, D]
    ends = hidden[torch.arange(len(groups)), lengths.to(hidden.device) - 1]  # [G, D]
    rows = [(place, index, ids) for place, group in enumerate(groups) for index, ids in group.members]
    rows.sort(key=lambda row: -len(row[2]))
    found: list[tuple[int, Score]] = []

    def size(row: tuple[int, int, tuple[int, ...]]) -> int:
        return len(groups[row[0]].context) + len(row[2])

    for part in batches(rows, size, batch_size, token_budget(decoder)):
        places = torch.tensor([place for place, _, _ in part], device=decoder.device)
        wanted = [[end] for end in ends[places][:, None]]  # the first token of each continuation
        going_on = [row for row, (_, _, ids) in enumerate(part) if len(ids) > 1]
        if going_on:
            later, counts = pad([part[row][2][:-1] for row in going_on], decoder.device)  # [R, T]
            hidden = decoder(later, cache.select(places[going_on]), counts)  # [R, T, D]
            for row, states, count in zip(going_on, hidden, counts.tolist(), strict=True):
                wanted[row].append(states[:count])
        states = torch.cat([piece.view(-1, ends.shape[-1]) for pieces in wanted for piece in pieces])
        scores = token_scores(decoder, states, [token for _, _, ids in part for token in ids])
        sums = _sums(*scores, [len(ids) for _, _, ids in part])
        found += [(index, value) for (_, index, _), value in zip(part, sums, strict=True)]
    return found


def scoring_cache(decoder: Decoder, tokens: Tensor, quantizers: Quantizers | None) -> Cache | None:
    """A cache that `[B, T]` tokens pass through on their way; None where nothing would be read from it."""
    if not quantizers and not decoder.kernels:
        return None
    return decoder.make_cache(tokens.shape[0], tokens.shape[1], quantizers)


def token_scores(decoder: Decoder, hidden: Tensor, targets: Sequence[int]) -> tuple[Tensor, Tensor]:
    """How likely the model finds `targets` `[P]` from its hidden states `[P, D]`, softmax in float32.

    Returns:
        Log-probabilities `[P]` float32 and whether each target is the most likely token `[P]` bool, on the host.

    Raises:
        MlaError: a logit that matters is NaN or infinite.
    """
    wanted = torch.tensor(targets, device=hidden.device)
    logprobs, hits = [], []
    block = CUDA_LOGITS_BLOCK if hidden.is_cuda else LOGITS_BLOCK
    size = max(1, block // decoder.spec.vocab_size)
    for states, ids in zip(torch.split(hidden, size), torch.split(wanted, size), strict=True):
        logits = decoder.logits(states).float()  # [p, V]
        logprobs.append(logits.gather(-1, ids[:, None])[:, 0] - logits.logsumexp(dim=-1))
        hits.append(logits.argmax(dim=-1) == ids)
    logprob = torch.cat(logprobs).cpu()
    if not bool(torch.isfinite(logprob).all()):
        raise not_finite()
    return logprob, torch.cat(hits).cpu()


def not_finite() -> MlaError:
    """The model gave NaN or infinity: no score of it can be trusted."""
    return MlaError(
        "the model's output holds NaN or infinity, so it cannot be evaluated",
        fix="try --dtype float32; if it stays, the checkpoint is damaged: convert or download it again",
    )


def _sums(logprobs: Tensor, hits: Tensor, counts: Sequence[int]) -> list[Score]:
    sizes = list(counts)
    parts = zip(torch.split(logprobs.double(), sizes), torch.split(hits, sizes), strict=True)
    return [Score(float(values.sum()), bool(hit.all())) for values, hit in parts]
