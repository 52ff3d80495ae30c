"""Token caches of one batch: keys and values of standard attention, latents and rotary keys of latent attention.

Sequences of a batch may differ in length: each occupies the first `lengths[b]` places, the rest is never read.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mla_cli.errors import MlaError
from mla_cli.kernels.dispatch import Backend
from mla_cli.kernels.quantized import PAGE, LatentQuantizer
from mla_cli.model.cache_store import PAGE_TOKENS, EntryStore, PlainStore, Span, StaticStore, Store, quantized_store
from mla_cli.model.latent_pages import LatentPages, PagedStep, page_layout
from mla_cli.model.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec

GROWTH = 256  # tokens; growing in steps keeps a long generation from copying its cache at every token


@dataclass
class LayerCache:
    """One layer's storage: keys or latents, then values or rotary keys; or pages of both, which kernels read and write."""

    stores: tuple[Store, ...]

    @property
    def first(self) -> EntryStore:
        """Keys or latents."""
        return cast(EntryStore, self.stores[0])

    @property
    def second(self) -> EntryStore:
        """Values or rotary keys."""
        return cast(EntryStore, self.stores[1])


class Cache:
    """Cache of a whole decoder for `batch` sequences of at most `capacity` tokens.

    Args:
        spec: the decoder; its layers decide what is stored.
        batch: sequences.
        capacity: most tokens a sequence may hold; writing past it raises `MlaError`.
        dtype: data type of what is not quantised.
        quantizers: one a layer (None: stored in `dtype`), or None for no quantisation at all.
        kernels: what writes and reads the latents of each layer in pages (see `LatentPages`), None for a layer without;
            empty: no layer has any.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        quantizers: tuple[LatentQuantizer | None, ...] | None = None,
        kernels: tuple[Backend | None, ...] = (),
    ) -> None:
        self.capacity = capacity
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.host_lengths = torch.zeros(
            batch, dtype=torch.int64
        )  # the same on the host: a step never waits for the device
        self._room = min(GROWTH, capacity)
        self._span = Span(self.host_lengths, self.host_lengths, 0)
        self._paged_step: PagedStep | None = None  # of the step that has begun, once a layer asked for it
        each: Sequence[LatentQuantizer | None] = quantizers or [None] * spec.num_layers
        by: Sequence[Backend | None] = kernels or [None] * spec.num_layers
        self.layers = [
            _layer_cache(attention, quantizer, backend, batch, self._room, dtype, device)
            for attention, quantizer, backend in zip(spec.attention, each, by, strict=True)
        ]

    @property
    def longest(self) -> int:
        """Tokens held by the longest sequence."""
        return int(self.host_lengths.max()) if self.host_lengths.numel() else 0

    def bytes_per_token(self) -> int:
        """Bytes one token takes over all layers, its scales (of a page: its share, rounded up) included."""
        return -(-sum(store.page_bytes() for layer in self.layers for store in layer.stores) // PAGE)

    def allocated_bytes(self) -> int:
        """Bytes allocated now for all sequences."""
        return sum(store.allocated_bytes() for layer in self.layers for store in layer.stores)

    def begin(self, new_tokens: int, ends: Tensor) -> None:
        """Make room for a step that writes `new_tokens` places a sequence (padding included), after which they hold `ends`."""
        longest = int(ends.max()) if ends.numel() else 0
        if longest > self.capacity:
            raise MlaError(f"the cache holds at most {self.capacity} tokens a sequence, {longest} were asked for")
        need = self.longest + new_tokens
        if need > self._room:
            self.reserve(max(need, min(self.capacity, self._room + max(GROWTH, self._room // 2))))
        self._span = Span(self.host_lengths, ends.cpu() - self.host_lengths, new_tokens)
        self._paged_step = None

    def reserve(self, room: int) -> None:
        """Take memory for `room` tokens a sequence now, where there is less."""
        if room > self._room:
            self._room = room
            for layer in self.layers:
                for store in layer.stores:
                    store.grow(room)

    def pages(self, layer: int) -> LatentPages | None:
        """The pages of a layer that kernels write and read, None for one that `write` and `read` are for."""
        store = self.layers[layer].stores[0]
        return store if isinstance(store, LatentPages) else None

    def paged_step(self, pages: LatentPages) -> PagedStep:
        """Where the tokens of the step that has begun are in the pages of any layer."""
        if self._paged_step is None:
            self._paged_step = pages.step(self._span)
        return self._paged_step

    def write(self, layer: int, places: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Store a step's new entries and return them as later steps will read them.

        Args:
            places: `[B, T]` where each token goes: from each sequence's end on, as `begin` was told.
            first: `[B, T, ...]` keys or latents; `second`: values or rotary keys.

        Returns:
            Both as stored (rounded to the cache's types, quantised and back), in the type they came in.
        """
        store = self.layers[layer]
        return (
            store.first.write(self._span, places, first, layer),
            store.second.write(self._span, places, second, layer),
        )

    def read(self, layer: int, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The first `length` places of a layer, in `dtype`: `[B, length, ...]` each."""
        store = self.layers[layer]
        return store.first.read(length, dtype), store.second.read(length, dtype)

    def read_at(self, layer: int, places: Tensor, dtype: torch.dtype) -> Tensor:
        """What a layer holds first (keys or latents) at one place `[B]` of each sequence: `[B, ...]`."""
        return self.layers[layer].first.read_at(places, dtype)

    def as_stored(self, layer: int, first: Tensor) -> Tensor:
        """A key or latent of each sequence `[B, ...]` as it would be read after `write`."""
        return self.layers[layer].first.as_stored(first, layer)

    def advance(self, ends: Tensor) -> None:
        """The sequences now hold `ends` `[B]` tokens."""
        self.lengths = ends.to(self.lengths.device)
        self.host_lengths = ends.cpu()

    def truncate(self, lengths: Tensor) -> None:
        """Forget all tokens past `lengths` `[B]` (shorter than now)."""
        self.advance(torch.minimum(self.host_lengths, lengths.cpu()))

    def select(self, rows: Tensor) -> Cache:
        """A copy that holds the given sequences, in that order; a sequence may be repeated (shared contexts)."""
        other = copy.copy(self)
        other.lengths = self.lengths[rows].clone()
        other.host_lengths = self.host_lengths[rows.cpu()].clone()
        other.layers = [LayerCache(tuple(store.select(rows) for store in layer.stores)) for layer in self.layers]
        return other

    def add_pages(self, pages: int) -> None:
        """Of the storage of a pool: have so many pages at least (see `PagePool`)."""
        for layer in self.layers:
            for store in layer.stores:
                store.add_pages(pages)

    def view(self, table: Tensor, lengths: Tensor, rows: Sequence[Cache] = ()) -> Cache:
        """Of the storage of a pool: a cache of sequences that consist of pages `table` `[B, P]` (see `PagePool`)."""
        other = copy.copy(self)
        other._room = other.capacity = table.shape[1] * PAGE_TOKENS
        other.host_lengths, other.lengths = lengths, lengths.to(self.lengths.device)
        at = table.to(self.lengths.device)
        other.layers = [
            LayerCache(
                tuple(store.view(at, [row.layers[i].stores[n] for row in rows]) for n, store in enumerate(layer.stores))
            )
            for i, layer in enumerate(self.layers)
        ]
        return other

    def rows_of_next(self, count: int) -> Cache:
        """Of one sequence: a cache of `count` rows, each of which is the sequence up to one of its next tokens.

        A step of these rows by the kernels for single tokens writes and reads the sequence's own places: of a pool, or, in one
        piece, as if they were pages of one.
        """
        self.begin(count, self.host_lengths + count)
        table = self.layers[0].stores[0].table
        if table is None:
            table = torch.arange(-(-self._room // PAGE_TOKENS), device=self.lengths.device)[None]
        other = copy.copy(self)
        other.host_lengths = self.host_lengths + torch.arange(count)
        other.lengths = other.host_lengths.to(self.lengths.device)
        rows = table.expand(count, -1).contiguous()
        other.layers = [LayerCache(tuple(_with_table(store, rows) for store in layer.stores)) for layer in self.layers]
        return other

    def put(self, rows: Sequence[int], other: Cache) -> None:
        """Replace sequences by those of a cache of the same kind, in order."""
        index = torch.tensor(rows)
        ends = self.host_lengths.clone()
        ends[index] = 0
        self.advance(ends)
        ends = ends.clone()
        ends[index] = other.host_lengths
        longest = other.longest
        self.begin(max(longest - self.longest, 0), ends)  # makes room
        at = index.to(self.lengths.device)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            for store, source in zip(mine.stores, theirs.stores, strict=True):
                store.put(at, source, longest)
        self.advance(ends)

    def latest_ranges(self) -> Tensor | None:
        """Largest absolute value of each token's latent in the last step, by layers whose scales are static, `[L, B, T]`.

        Padding is among it. None where no layer's scales are static.
        """
        found = [store.latest for store in self._static_stores() if store.latest is not None]
        return torch.stack(found) if found else None

    def rescale(self, row: int, factors: Sequence[float]) -> None:
        """From its next token on, a sequence's static ranges are these multiples of the calibrated ones.

        Args:
            factors: one a layer whose scales are static, in their order.
        """
        start = int(self.host_lengths[row])
        for store, factor in zip(self._static_stores(), factors, strict=True):
            store.rescale(row, factor, start)

    def _static_stores(self) -> list[StaticStore]:
        return [layer.stores[0] for layer in self.layers if isinstance(layer.stores[0], StaticStore)]


def _with_table(store: Store, table: Tensor) -> Store:
    other = copy.copy(store)
    other.table = table
    return other


def _layer_cache(
    attention: AttentionSpec,
    quantizer: LatentQuantizer | None,
    kernels: Backend | None,
    batch: int,
    room: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> LayerCache:
    if not isinstance(attention, LatentAttentionSpec):
        shape = (attention.num_kv_heads, attention.head_dim)
        return LayerCache(
            (PlainStore(batch, room, shape, dtype, device), PlainStore(batch, room, shape, dtype, device))
        )
    if kernels is not None:
        layout = page_layout(attention, quantizer)
        if isinstance(layout, str):
            raise MlaError(f"the kernels were to read a cache that they cannot: {layout}")
        return LayerCache((LatentPages(batch, room, layout, kernels, quantizer, device),))
    rank, rope = attention.kv_lora_rank, attention.qk_rope_head_dim + attention.key_factors
    latents: EntryStore
    if quantizer is None:
        latents = PlainStore(batch, room, (rank,), dtype, device)
        return LayerCache((latents, PlainStore(batch, room, (rope,), dtype, device)))
    latents = quantized_store(batch, room, rank, quantizer, device)
    if quantizer.rope is not None and rope and not attention.key_factors:
        return LayerCache((latents, quantized_store(batch, room, rope, quantizer.rope, device)))
    # By default the rotary key stays in bfloat16: it is small, and errors in it ruin positions.
    return LayerCache((latents, PlainStore(batch, room, (rope,), torch.bfloat16, device)))
