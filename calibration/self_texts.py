"""Calibration sequences that the model writes itself: no data needed, and in its own languages and domains."""

from __future__ import annotations

import torch

from mla_cli.calibration.texts import CalibrationTexts, Tokenizer
from mla_cli.console import progress
from mla_cli.model.decoder import Decoder

BATCH = 48  # sequences written at once: keeps the cache of a small model under a gigabyte


def sample_texts(decoder: Decoder, tokenizer: Tokenizer, *, samples: int, seq_len: int, seed: int) -> CalibrationTexts:
    """Sequences sampled from the model at temperature 1, each begun by one random ordinary token.

    A random beginning spreads the sequences over what the model knows; from BOS alone most would start alike (the idea of
    LLM-QAT, arXiv 2305.17888). Each sequence depends on the seed and its index only.
    """
    special = set(getattr(tokenizer, "eos_ids", ())) | {tokenizer.bos_id}
    ordinary = [
        i for i in range(min(decoder.spec.vocab_size, getattr(tokenizer, "vocab_size", 1 << 30))) if i not in special
    ]
    length = min(seq_len, decoder.spec.max_position_embeddings)
    written: list[torch.Tensor] = []
    steps = iter(progress(range(length * ((samples + BATCH - 1) // BATCH)), "writing calibration text", unit="step"))
    for first in range(0, samples, BATCH):
        rows = range(first, min(first + BATCH, samples))
        generators = [torch.Generator(device=decoder.device).manual_seed(seed * 1_000_003 + row) for row in rows]
        starts = [[tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else [] for _ in rows]
        for start, generator in zip(starts, generators, strict=True):
            pick = torch.randint(len(ordinary), (1,), generator=generator, device=decoder.device)
            start.append(ordinary[int(pick)])
        written.append(_write(decoder, torch.tensor(starts, device=decoder.device), length, generators, steps))
    sequences = torch.cat(written).cpu()
    lengths = torch.full((samples,), sequences.shape[1], dtype=torch.int64)
    return CalibrationTexts(sequences, lengths, "self: sampled from the source model", 0, samples)


@torch.inference_mode()
def _write(
    decoder: Decoder, start: torch.Tensor, length: int, generators: list[torch.Generator], steps: object
) -> torch.Tensor:
    cache = decoder.make_cache(start.shape[0], length)
    tokens, new = [start], start
    while sum(t.shape[1] for t in tokens) < length:
        next(steps, None)  # type: ignore[call-overload]
        scores = decoder.logits(decoder(new, cache)[:, -1])  # [B, V]
        probabilities = scores.float().softmax(dim=-1)
        picks = [torch.multinomial(p, 1, generator=g) for p, g in zip(probabilities, generators, strict=True)]
        new = torch.stack(picks)  # [B, 1]
        tokens.append(new)
    return torch.cat(tokens, dim=1)
