"""How well a model predicts a text, and how far its predictions are from those of the model it was made from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_cli.errors import InputError
from mla_cli.evaluation.scoring import (
    LOGITS_BLOCK,
    Quantizers,
    not_finite,
    pad,
    scoring_cache,
    token_budget,
    token_scores,
)
from mla_cli.model.decoder import Decoder
from mla_cli.model.spec import DecoderSpec

# Long enough that most tokens have context, short enough for every model; the usual choice of compression papers.
WINDOW = 1024


@dataclass(frozen=True)
class WindowLoss:
    """One window of text: the summed negative log-likelihood of its tokens but the first, how many of those the model
    finds the most likely of all, and how many they are."""

    nll: float
    hits: int
    tokens: int


@dataclass(frozen=True)
class WindowDivergence:
    """One window: summed `KL(source || ours)` in nats, tokens on whose most likely successor both agree, positions.

    `source` and `ours` are what `perplexity` gives for each model; they fall out of the same forward passes.
    """

    divergence: float
    agreed: int
    positions: int
    source: WindowLoss
    ours: WindowLoss


def windows(
    tokens: Sequence[int], *, max_length: int, size: int = WINDOW, limit: int | None = None
) -> list[tuple[int, ...]]:
    """A text's tokens in windows that do not overlap; the last may be shorter, but holds something to predict.

    Raises:
        InputError: the text has fewer than two tokens.
    """
    size = min(size, max_length)
    cut = [tuple(tokens[start : start + size]) for start in range(0, len(tokens), size)]
    whole = [window for window in cut if len(window) > 1]
    if not whole:
        raise InputError("the text is too short: perplexity needs at least two tokens", fix="give a longer --text")
    return whole[:limit]


def perplexity(
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    *,
    batch_size: int | None = None,
    quantizers: Quantizers | None = None,
) -> Iterator[WindowLoss]:
    """Loss and hits of each window in turn; every token but a window's first is scored. See `windows`.

    Raises:
        MlaError: the model's output is not finite.
    """
    size = batch_size or max(1, token_budget(decoder) // max(len(text) for text in texts))
    for start in range(0, len(texts), size):
        yield from _losses(decoder, texts[start : start + size], quantizers)


def check_vocabularies(source: DecoderSpec, ours: DecoderSpec) -> None:
    """Refuse models whose predictions are not over the same tokens.

    Raises:
        InputError: the vocabularies differ.
    """
    if source.vocab_size != ours.vocab_size:
        raise InputError(
            f"KL divergence needs one vocabulary; the models have {source.vocab_size} and {ours.vocab_size} tokens",
            fix="compare with the model that the checkpoint was converted from",
        )


def kl_divergence(
    source: Decoder, ours: Decoder, texts: Sequence[Sequence[int]], *, quantizers: Quantizers | None = None
) -> Iterator[WindowDivergence]:
    """Divergence of `ours` from `source` over each window in turn; `quantizers` belong to `ours`.

    Hidden states of a window are held for both; logits only for a block of positions at a time.

    Raises:
        InputError: the vocabularies differ. MlaError: an output is not finite.
    """
    check_vocabularies(source.spec, ours.spec)
    for text in texts:
        yield _divergence(source, ours, text, quantizers)


@torch.inference_mode()
def _losses(decoder: Decoder, texts: Sequence[Sequence[int]], quantizers: Quantizers | None) -> list[WindowLoss]:
    hidden, lengths = _hidden(decoder, texts, quantizers)  # [B, T, D]
    wanted = torch.cat([states[: length - 1] for states, length in zip(hidden, lengths, strict=True)])
    scores = token_scores(decoder, wanted, [token for text in texts for token in text[1:]])  # [P], [P]
    parts = zip(*(torch.split(values, [length - 1 for length in lengths]) for values in scores), strict=True)
    return [WindowLoss(-float(logprobs.double().sum()), int(hits.sum()), hits.numel()) for logprobs, hits in parts]


@torch.inference_mode()
def _divergence(source: Decoder, ours: Decoder, text: Sequence[int], quantizers: Quantizers | None) -> WindowDivergence:
    source_hidden = _hidden(source, [text], None)[0][0]  # [T, D]
    our_hidden = _hidden(ours, [text], quantizers)[0][0]  # [T, D']
    following = torch.tensor([*text[1:], 0], device=ours.device)  # what each position should predict; the last: nothing
    total, agreed, nlls, hits = 0.0, 0, [0.0, 0.0], [0, 0]
    size = max(1, LOGITS_BLOCK // (2 * source.spec.vocab_size))
    for start in range(0, len(text), size):
        p = source.logits(source_hidden[start : start + size]).float().log_softmax(dim=-1)  # [t, V]
        q = ours.logits(our_hidden[start : start + size]).float().log_softmax(dim=-1)  # [t, V]
        likeliest = [p.argmax(dim=-1), q.argmax(dim=-1)]  # [t] each
        agreed += int((likeliest[0] == likeliest[1]).sum())
        total += float((p.exp() * (p - q)).sum(dim=-1).double().sum())
        wanted = following[start : start + size][: len(text) - 1 - start]
        for model, logprobs in enumerate((p, q)):
            nlls[model] -= float(logprobs[: len(wanted)].gather(-1, wanted[:, None]).double().sum())
            hits[model] += int((likeliest[model][: len(wanted)] == wanted).sum())
    if not all(map(math.isfinite, (total, *nlls))):
        raise not_finite()
    source_loss, our_loss = (WindowLoss(nll, hit, len(text) - 1) for nll, hit in zip(nlls, hits, strict=True))
    return WindowDivergence(total, agreed, len(text), source_loss, our_loss)


def _hidden(
    decoder: Decoder, texts: Sequence[Sequence[int]], quantizers: Quantizers | None
) -> tuple[Tensor, list[int]]:
    tokens, lengths = pad(texts, decoder.device)  # [B, T]
    return decoder(tokens, scoring_cache(decoder, tokens, quantizers), lengths), lengths.tolist()
