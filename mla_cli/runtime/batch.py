"""Sequences that decode together, one a row of a cache; they join after their prompt is read and leave when done."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mla_cli.model.cache import Cache
from mla_cli.model.decoder import Decoder
from mla_cli.runtime.live_range import LiveRange
from mla_cli.runtime.sampling import RowSampler, Sampled
from mla_cli.runtime.sequence import ActiveSequence

# Most tokens, padding included, that one forward pass over prompts takes: what bounds the memory of a prefill.
PREFILL_TOKENS = 2048


def chunk_length(tokens: int) -> int:
    """Tokens of a prompt of that length to read at once."""
    return 512 if tokens < 2048 else 768 if tokens <= 8192 else 1024


def prefill_groups(lengths: Sequence[int]) -> list[list[int]]:
    """Which prompts to read together: alike in length, so that little is padding, and few enough for the memory."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups:
            longest = lengths[groups[-1][0]]
            room = PREFILL_TOKENS // min(longest, chunk_length(longest))
            if len(groups[-1]) < room and lengths[index] * 2 >= longest:
                groups[-1].append(index)
                continue
        groups.append([index])
    return groups


def prefill(
    decoder: Decoder,
    cache: Cache,
    prompts: Sequence[Sequence[int]],
    see: Callable[[Tensor | None, Tensor], None] | None = None,
) -> Tensor:
    """Read prompts into an empty cache, in chunks; gives `[B, V]` logits after each.

    Args:
        see: is shown how large the latents of each chunk were (see `Cache.latest_ranges`), and its lengths.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    # The frequencies of dynamic scaling depend on the length so far: chunks would turn keys by others than a whole.
    whole = any(a.rotary is not None and a.rotary.kind == "dynamic" for a in decoder.spec.attention)
    chunk = longest if whole else chunk_length(longest)
    padded = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    last = torch.zeros(len(prompts), decoder.spec.hidden_size, dtype=decoder.dtype, device=decoder.device)
    for start in range(0, longest, chunk):
        tokens = padded[:, start : start + chunk].to(decoder.device)  # [B, T]
        counts = (lengths - start).clamp(0, tokens.shape[1])
        hidden = decoder(tokens, cache, counts)  # [B, T, D]
        if see is not None:
            see(cache.latest_ranges(), counts)
        ending = ((lengths > start) & (lengths <= start + chunk)).nonzero()[:, 0]
        last[ending.to(decoder.device)] = hidden[ending, counts[ending] - 1]
    return decoder.logits(last)


class Batch:
    """The rows of one running batch.

    Args:
        make_cache: an empty cache for so many sequences.
        live: watches latents whose scales are static, and changes these.

    Attributes:
        rows: the sequence of each row of the cache; None: vacant.
    """

    def __init__(
        self,
        decoder: Decoder,
        make_cache: Callable[[int], Cache],
        *,
        logprobs: bool,
        live: LiveRange | None = None,
    ) -> None:
        self.rows: list[ActiveSequence | None] = []
        self._live = live
        self._decoder, self._make_cache, self._logprobs = decoder, make_cache, logprobs
        self._cache: Cache | None = None
        self._sampler: RowSampler | None = None  # None: the rows have changed
        self._tokens: Tensor | None = None  # [B, 1] each row's last token

    @property
    def active(self) -> list[ActiveSequence]:
        """The sequences that run."""
        return [sequence for sequence in self.rows if sequence is not None]

    def cache_bytes(self) -> int:
        """Bytes of cache allocated now."""
        return 0 if self._cache is None else self._cache.allocated_bytes()

    @torch.inference_mode()
    def add(self, sequences: list[ActiveSequence]) -> Sampled:
        """Read the prompts of new sequences, give them rows, and choose their first tokens."""
        prompts = [sequence.prompt for sequence in sequences]
        see = None if self._live is None else self._live.see
        cache = self._make_cache(len(prompts))
        logits = prefill(self._decoder, cache, prompts, see)
        if not self.active:
            self._cache, self.rows = cache, list(sequences)
        else:
            self._make_vacant(len(sequences))
            vacant = [row for row, sequence in enumerate(self.rows) if sequence is None][: len(sequences)]
            self._filled.put(vacant, cache)
            for row, sequence in zip(vacant, sequences, strict=True):
                self.rows[row] = sequence
        self._sampler = None
        return self._new_sampler(sequences)(logits)

    def drop(self, sequence: ActiveSequence) -> None:
        """Make a sequence's row vacant."""
        self.rows[self.rows.index(sequence)] = None
        self._sampler = None
        if self._live is not None:
            self._live.forget(sequence)

    @torch.inference_mode()
    def step(self) -> Sampled:
        """One more token for every sequence, in the order of `active`; each must have one already."""
        if self._sampler is None or self._tokens is None:
            self._compact()
            active = self.active
            self._sampler = self._new_sampler(active)
            self._tokens = torch.tensor([[s.tokens[-1]] for s in active], device=self._decoder.device)
        hidden = self._decoder(self._tokens, self._filled)  # [B, 1, D]
        if self._live is not None:
            for row, factors in self._live.step(self._filled.latest_ranges(), self.active):
                self._filled.rescale(row, factors)
        sampled = self._sampler(self._decoder.logits(hidden[:, -1]))
        self._tokens = sampled.ids[:, None]
        return sampled

    @property
    def _filled(self) -> Cache:
        assert self._cache is not None, "no sequence has joined"
        return self._cache

    def _new_sampler(self, sequences: list[ActiveSequence]) -> RowSampler:
        return RowSampler(
            [s.params for s in sequences],
            [s.random for s in sequences],
            [s.history for s in sequences],
            self._decoder.spec.vocab_size,
            device=self._decoder.device,
            logprobs=self._logprobs,
        )

    def _make_vacant(self, wanted: int) -> None:
        """See to at least so many vacant rows."""
        if self.rows.count(None) < wanted:
            active = [row for row, sequence in enumerate(self.rows) if sequence is not None]
            self._keep(active + active[:1] * wanted)  # what a vacant row holds does not matter
            self.rows = [self.rows[row] for row in active] + [None] * wanted

    def _compact(self) -> None:
        """Leave no row vacant: each costs as much as an active one."""
        if None in self.rows:
            active = [row for row, sequence in enumerate(self.rows) if sequence is not None]
            self._keep(active)
            self.rows = [self.rows[row] for row in active]

    def _keep(self, rows: list[int]) -> None:
        self._cache = self._filled.select(torch.tensor(rows, device=self._decoder.device))
