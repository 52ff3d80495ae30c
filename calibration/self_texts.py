"""Calibration sequences that the model writes itself: no data needed, and in its own languages and domains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import torch

from mla_cli.calibration.material import Content
from mla_cli.calibration.texts import CalibrationTexts, Tokenizer
from mla_cli.console import progress
from mla_cli.errors import InputError
from mla_cli.model.decoder import Decoder

BATCH = 48  # sequences written at once: keeps the cache of a small model under a gigabyte
# With openings of a domain, one sequence in so many still begins at random: what else the model knows must not be lost.
RANDOM_EVERY = 4


def sample_texts(
    decoder: Decoder,
    tokenizer: Tokenizer,
    *,
    samples: int,
    seq_len: int,
    seed: int,
    openings: Sequence[Content] = (),
) -> CalibrationTexts:
    """Sequences sampled from the model at temperature 1, each begun by one random ordinary token or an opening.

    A random beginning spreads the sequences over what the model knows; from BOS alone most would start alike (the idea of
    LLM-QAT, arXiv 2305.17888). Each sequence depends on the seed and its index only.

    Args:
        openings: texts and conversations of a domain, each used equally often; a conversation goes through the chat template.
    """
    special = set(getattr(tokenizer, "eos_ids", ())) | {tokenizer.bos_id}
    ordinary = [
        i for i in range(min(decoder.spec.vocab_size, getattr(tokenizer, "vocab_size", 1 << 30))) if i not in special
    ]
    length = min(seq_len, decoder.spec.max_position_embeddings)
    opened = [ids for content in openings if (ids := _opening(content, tokenizer, max(1, length // 2)))]
    Random(f"{seed}/openings").shuffle(opened)
    written: list[torch.Tensor] = []
    steps = iter(progress(range(length * ((samples + BATCH - 1) // BATCH)), "writing calibration text", unit="step"))
    for first in range(0, samples, BATCH):
        rows = range(first, min(first + BATCH, samples))
        generators = [torch.Generator(device=decoder.device).manual_seed(seed * 1_000_003 + row) for row in rows]
        starts = []
        for row, generator in zip(rows, generators, strict=True):
            turn, place = divmod(row, RANDOM_EVERY)
            if opened and place < RANDOM_EVERY - 1:
                starts.append(opened[(turn * (RANDOM_EVERY - 1) + place) % len(opened)])
            else:
                pick = torch.randint(len(ordinary), (1,), generator=generator, device=decoder.device)
                starts.append([*_bos(tokenizer), ordinary[int(pick)]])
        written.append(_write(decoder, starts, length, generators, steps))
    sequences = torch.cat(written).cpu()
    lengths = torch.full((samples,), sequences.shape[1], dtype=torch.int64)
    begun = f", {RANDOM_EVERY - 1} of {RANDOM_EVERY} begun by openings of the domain" if opened else ""
    return CalibrationTexts(sequences, lengths, "self: sampled from the source model" + begun, 0, samples)


def _bos(tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []


def _opening(content: Content, tokenizer: Tokenizer, limit: int) -> list[int]:
    """Ids of an opening, at most `limit`, so that most of the sequence is the model's own."""
    if isinstance(content, list):
        try:
            return tokenizer.encode_chat(content)[:limit]
        except InputError:  # no template, or one that refuses: as dialogues are written in plain text
            turns = [f"{str(message['role']).capitalize()}: {message['content']}\n" for message in content]
            content = "".join(turns) + "Assistant:"
    # Not `special`: some tokenizers end every text with EOS, after which no model goes on.
    return [*_bos(tokenizer), *tokenizer.encode(content or "", special=False)][:limit]


@torch.inference_mode()
def _write(
    decoder: Decoder, starts: list[list[int]], length: int, generators: list[torch.Generator], steps: Iterator[int]
) -> torch.Tensor:
    """Sequences `[B, length]` that go on from `starts`, which may differ in length."""
    cache = decoder.make_cache(len(starts), length)
    shared = min(len(start) for start in starts)
    new = torch.tensor([start[:shared] for start in starts], device=decoder.device)
    tokens = [new]
    for place in range(shared, length):
        next(steps, None)
        scores = decoder.logits(decoder(new, cache)[:, -1])  # [B, V]
        probabilities = scores.float().softmax(dim=-1)
        picks = [
            new.new_tensor([start[place]]) if place < len(start) else torch.multinomial(p, 1, generator=g)
            for start, p, g in zip(starts, probabilities, generators, strict=True)
        ]
        new = torch.stack(picks)  # [B, 1]
        tokens.append(new)
    return torch.cat(tokens, dim=1)
