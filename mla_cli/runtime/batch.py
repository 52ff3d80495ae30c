"""Sequences that run together on pages of one pool: each reads its prompt in chunks of its own, then all decode in one step.

What a sequence computes depends on its own tokens alone: its prompt is cut at places of its own, whatever else waits, and it
shares with others only what they have computed from the same chunks. A sequence whose pages were taken away reads its prompt
again and is then fed the tokens it had, in the steps of the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import pairwise

import torch
from torch import Tensor

from mla_cli.model.cache import Cache
from mla_cli.model.cache_store import PAGE_TOKENS
from mla_cli.model.decoder import FAST_LOGITS, Decoder
from mla_cli.model.page_pool import PagePool, pages_for
from mla_cli.runtime.live_range import LiveRange
from mla_cli.runtime.sampling import RowSampler, Sampled
from mla_cli.runtime.sequence import ActiveSequence

SHORTEST_CHUNK, LONGEST_CHUNK = 512, 2048  # tokens of a prompt that are read at once
MIDDLE_CHUNK = 256


def chunk_ends(tokens: int, *, fine: bool = False) -> list[int]:
    """Where a prompt of that length is cut: after 512, 1,024 and 2,048 tokens, then every 2,048, and at its end.

    Args:
        fine: also at the last multiple of 256 before its end, and then every 64 tokens: where `read_chunk` is fast for few.

    Prompts that begin alike are cut alike, whatever their lengths, so that they can share what was computed. Short chunks come
    first because a beginning is what prompts share; long ones cost less (prompt of 4,096 tokens on two cores, all chunks of
    2,048 against all of 768: .75 of the time in bfloat16, .95 in float32).
    """
    ends: list[int] = []
    end = SHORTEST_CHUNK
    while end < tokens:
        ends.append(end)
        end += min(end, LONGEST_CHUNK)
    if fine:
        last = ends[-1] if ends else 0
        middle = (tokens - 1) // MIDDLE_CHUNK * MIDDLE_CHUNK
        ends += range(middle if middle > last else last + PAGE_TOKENS, tokens, PAGE_TOKENS)
    return [*ends, tokens]


def reads_few_fast(decoder: Decoder, cache: Cache) -> bool:
    """Whether few tokens of a prompt are read by the kernels for single tokens (see `read_chunk`)."""
    return decoder.fast_step is not None and decoder.fast_step.takes(cache)


def prompt_cuts(decoder: Decoder, cache: Cache, tokens: int) -> list[int]:
    """Where a decoder cuts a prompt of that length that it reads into a cache (see `chunk_ends`)."""
    # The frequencies of dynamic scaling depend on the length so far: chunks would turn keys by others than a whole.
    if any(a.rotary is not None and a.rotary.kind == "dynamic" for a in decoder.spec.attention):
        return [tokens]
    return chunk_ends(tokens, fine=reads_few_fast(decoder, cache))


def prefill(
    decoder: Decoder,
    cache: Cache,
    prompt: Sequence[int],
    see: Callable[[Tensor | None, Tensor], None] | None = None,
) -> Tensor:
    """Read a prompt into an empty cache of one sequence; gives `[1, V]` logits after it.

    Args:
        see: is shown how large the latents of each chunk were (see `Cache.latest_ranges`), and its length.
    """
    start = 0
    for end in prompt_cuts(decoder, cache, len(prompt)):
        hidden = read_chunk(decoder, cache, prompt[start:end], see)
        start = end
    return decoder.logits(hidden)


def read_chunk(
    decoder: Decoder,
    cache: Cache,
    tokens: Sequence[int],
    see: Callable[[Tensor | None, Tensor], None] | None = None,
) -> Tensor:
    """Read more of one sequence's prompt; gives the hidden state `[1, D]` after it (see `prefill`).

    Few tokens go through the kernels for single tokens, one a row: these read the weights as they are stored, where a product
    of all tokens widens them first (24 tokens behind 512 on two cores: 44 ms against 134; 64 tokens: 110 against 210).
    """
    if len(tokens) <= PAGE_TOKENS and len(cache.host_lengths) == 1 and reads_few_fast(decoder, cache):
        hidden = decoder(torch.tensor(list(tokens))[:, None], cache.rows_of_next(len(tokens)))  # [T, 1, D]
        cache.advance(cache.host_lengths + len(tokens))
        return hidden[-1]
    count = torch.tensor([len(tokens)])
    hidden = decoder(torch.tensor([list(tokens)], device=decoder.device), cache, count)  # [1, T, D]
    if see is not None:
        see(cache.latest_ranges(), count)
    return hidden[:, -1]


class Batch:
    """Sequences that have pages.

    Attributes:
        rows: the sequences, in the order in which they came in.
        shared_tokens: tokens of prompts that were there already.
    """

    def __init__(self, decoder: Decoder, pool: PagePool, *, live: LiveRange | None = None, share: bool = True) -> None:
        self.rows: list[ActiveSequence] = []
        self.shared_tokens = 0
        self._decoder, self._pool, self._live, self._share = decoder, pool, live, share
        self._growths = pool.growths
        self._stepping: list[ActiveSequence] = []  # the rows of what follows
        self._cache: Cache | None = None  # None: the rows or their pages have changed
        self._sampler: tuple[list[ActiveSequence], RowSampler] | None = None

    def cut(self, sequence: ActiveSequence) -> None:
        """Say where a sequence's prompt is cut into chunks, and what these are called."""
        if not sequence.ends:
            sequence.ends = prompt_cuts(self._decoder, self._pool.storage, len(sequence.prompt))
            sequence.names = _names(sequence.prompt, sequence.ends) if self._share else []

    def join_apart(self, sequence: ActiveSequence) -> bool:
        """Take in a sequence with a cache of its own; False, and nothing done, if there is no memory for it."""
        cache = self._pool.take_apart(sequence.most_tokens)
        if cache is None:
            return False
        self.cut(sequence)
        sequence.names = []
        sequence.cache, sequence.apart = cache, True
        self.rows.append(sequence)
        return True

    def join(self, sequence: ActiveSequence) -> bool:
        """Take in a sequence, with what others have left of its prompt; False, and nothing done, if pages are wanting."""
        self.cut(sequence)
        pages = self._shared(sequence.names)
        more = self._pool.take(pages_for(len(sequence.prompt) + 1) - len(pages))
        if more is None:
            self._pool.release(pages)
            return False
        if self._pool.below is not None:
            found = bisect_right(sequence.ends, len(pages) * PAGE_TOKENS)
            self._pool.below.joined(sequence.names, found)
        sequence.pages, sequence.cached = pages + more, len(pages) * PAGE_TOKENS
        sequence.cache = self._pool.view([sequence.pages], [sequence.cached])
        self.shared_tokens += sequence.cached
        self.rows.append(sequence)
        return True

    def leave(self, sequence: ActiveSequence, *, broken: bool = False) -> None:
        """Give a sequence's pages back; `broken`: they may hold what is not finite."""
        self.rows.remove(sequence)
        if broken:
            self._pool.clear(sequence.pages)
        self._pool.release(sequence.pages)
        self._pool.touch(reversed(sequence.names))  # a chunk is of no use without those before it: these leave last
        if sequence.apart:
            self._pool.release_apart(sequence.most_tokens)
        sequence.pages, sequence.cache, sequence.cached, sequence.apart = [], None, 0, False
        self._cache = self._sampler = None
        if self._live is not None:
            self._live.forget(sequence)

    def next_chunk(self, sequence: ActiveSequence) -> int:
        """Tokens of a sequence's prompt that it reads next; 0: it has read all."""
        return next((end - sequence.cached for end in sequence.ends if end > sequence.cached), 0)

    def adopt(self, sequence: ActiveSequence) -> int:
        """Take what others have read of a prompt since its sequence came in; tokens that it reads next (see `next_chunk`)."""
        found = self._shared(sequence.names[bisect_right(sequence.ends, sequence.cached) :])
        if found:
            first = sequence.cached // PAGE_TOKENS
            own = slice(first, first + len(found))
            self._pool.release(sequence.pages[own])
            sequence.pages[own] = found
            sequence.cached += len(found) * PAGE_TOKENS
            self.shared_tokens += len(found) * PAGE_TOKENS
            sequence.cache = self._pool.view([sequence.pages], [sequence.cached], [self._view(sequence)])
        return self.next_chunk(sequence)

    @torch.inference_mode()
    def read(self, sequence: ActiveSequence) -> Sampled | None:
        """Read a chunk of a prompt; after the last one, the first token, unless the sequence has it already."""
        self._renew()
        cache, count = self._view(sequence), self.next_chunk(sequence)
        start, end = sequence.cached, sequence.cached + count
        see = None if self._live is None else self._live.see
        hidden = read_chunk(self._decoder, cache, sequence.prompt[start:end], see)
        sequence.cached = end
        chunk = sequence.ends.index(end)
        if chunk < len(sequence.names):
            self._pool.keep(sequence.names[chunk], sequence.pages[start // PAGE_TOKENS : end // PAGE_TOKENS])
        if end < len(sequence.prompt) or sequence.tokens:
            return None
        return self._new_sampler([sequence])(self._decoder.logits(hidden))

    def extend(self, sequence: ActiveSequence) -> bool:
        """See to it that there is a page for a sequence's next token; False: there is none."""
        if sequence.apart or sequence.cached < len(sequence.pages) * PAGE_TOKENS:
            return True
        more = self._pool.take(1)
        if more is None:
            return False
        sequence.pages += more
        sequence.cache = self._pool.view([sequence.pages], [sequence.cached], [self._view(sequence)])
        self._cache = None
        return True

    @torch.inference_mode()
    def step(self, sequences: list[ActiveSequence]) -> tuple[list[ActiveSequence], Sampled | None]:
        """Feed each sequence its next token; those that have no more to be fed, and a new token for each of these.

        Args:
            sequences: some that have pages, or one that is apart.
        """
        decoder = self._decoder
        self._renew()
        cache = self._view(sequences[0]) if sequences[0].apart else self._joint(sequences)
        fed = [[s.tokens[s.cached - len(s.prompt)]] for s in sequences]
        hidden = decoder(torch.tensor(fed, device=decoder.device), cache)[:, -1]  # [B, D]
        for sequence in sequences:
            sequence.cached += 1
        if self._live is not None:
            for row, factors in self._live.step(cache.latest_ranges(), sequences):
                own = self._view(sequences[row])
                own.advance(torch.tensor([sequences[row].cached]))
                own.rescale(0, factors)
                if own is not cache:
                    cache.rescale(row, factors)
        ready = [row for row, s in enumerate(sequences) if s.cached == len(s.prompt) + len(s.tokens)]
        if not ready:
            return [], None
        given = [sequences[row] for row in ready]
        if len(ready) < len(sequences):
            hidden = hidden[ready]
        if self._sampler is None or self._sampler[0] != given:
            self._sampler = (given, self._new_sampler(given))
        # A few rows at a time: so many that a row's scores do not depend on the others.
        logits = torch.cat([decoder.logits(part) for part in hidden.split(FAST_LOGITS)])
        return given, self._sampler[1](logits)

    def _shared(self, names: Sequence[bytes]) -> list[int]:
        """Pages that others have left of these chunks, for one more user, up to the first chunk that nobody has left."""
        pages: list[int] = []
        for name in names:
            found = self._pool.share(name)
            if not found:
                break
            pages += found
        return pages

    def _joint(self, sequences: list[ActiveSequence]) -> Cache:
        """One cache of several sequences; the last one if neither they nor their pages have changed."""
        if self._cache is None or sequences != self._stepping:
            self._stepping = sequences
            self._cache = self._pool.view(
                [s.pages for s in sequences], [s.cached for s in sequences], [self._view(s) for s in sequences]
            )
        return self._cache

    def _view(self, sequence: ActiveSequence) -> Cache:
        assert sequence.cache is not None, "the sequence has no pages"
        return sequence.cache

    def _renew(self) -> None:
        """After the pool has grown, look at the pages where they are now."""
        if self._growths != self._pool.growths:
            self._growths, self._cache = self._pool.growths, None
            for s in (row for row in self.rows if not row.apart):
                s.cache = self._pool.view([s.pages], [s.cached], [self._view(s)])

    def _new_sampler(self, sequences: list[ActiveSequence]) -> RowSampler:
        return RowSampler(
            [s.params for s in sequences],
            [s.random for s in sequences],
            [s.history for s in sequences],
            self._decoder.spec.vocab_size,
            device=self._decoder.device,
            logprobs=any(s.likeliest is not None for s in sequences),
            likeliest=max(s.likeliest or 0 for s in sequences),
        )


def _names(prompt: Sequence[int], ends: Sequence[int]) -> list[bytes]:
    """Names of the chunks of a prompt but the last one: each follows from all tokens up to its end."""
    names: list[bytes] = []
    before = sha256().digest()
    for start, end in pairwise((0, *ends[:-1])):
        before = sha256(before + b" ".join(b"%d" % token for token in prompt[start:end])).digest()
        names.append(before)
    return names
