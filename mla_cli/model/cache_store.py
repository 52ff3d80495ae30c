"""Where a cache keeps one kind of entry of one layer: as it is, or as codes with a scale a token, a page or a layer.

A store holds `[B, room, ...]` places, or is a view of `[pages, 64, ...]` through the page table of its rows. It is
written one step at a time and gives back what later steps will read. What it holds does not depend on how the tokens were cut
into steps, nor on the other rows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from mla_cli.kernels.quantized import PAGE, LatentQuantizer, decode

_Store = TypeVar("_Store", bound="Store")

PAGE_TOKENS = 64  # of a page of a pool: whole blocks of the CPU kernels, and four pages of scales
ALIGNMENT = 128  # bytes: entries of a page share no line of memory with those of another


@dataclass(frozen=True)
class Span:
    """The places that one step fills: row `b` gets `counts[b]` of the step's `tokens`, from `starts[b]` on.

    The rest is padding. It may be written past a row's end, where it is never read, but must not decide anything.
    `starts` and `counts` are `[B]` int64 on the host, so that a step never waits for the device.
    """

    starts: Tensor
    counts: Tensor
    tokens: int

    @cached_property
    def pages(self) -> PageSpan:
        """The same by pages; all layers of a step share it."""
        rows, tokens = (torch.arange(self.tokens) < self.counts[:, None]).nonzero().unbind(dim=1)  # [M]
        places = self.starts[rows] + tokens
        most = int(places.max()) // PAGE + 1 if len(places) else 1
        keys, page_of = torch.unique(rows * most + places // PAGE, return_inverse=True)  # [N], [M]
        slots = places % PAGE
        first = torch.full_like(keys, PAGE).scatter_reduce(0, page_of, slots, "amin")
        counts = torch.bincount(page_of, minlength=len(keys))
        return PageSpan(keys // most, keys % most, first, counts, rows, tokens, page_of, slots)


@dataclass(frozen=True)
class PageSpan:
    """`N` pages that a step adds to, and its `M` tokens, padding left out; all on the host.

    Attributes:
        rows, pages: `[N]` which they are; first: `[N]` place in the page of its first new token; counts: `[N]` new tokens.
        token_rows, tokens: `[M]` where a token is in the step; page_of, slots: `[M]` where it goes.
    """

    rows: Tensor
    pages: Tensor
    first: Tensor
    counts: Tensor
    token_rows: Tensor
    tokens: Tensor
    page_of: Tensor
    slots: Tensor


class Store:
    """What all stores do alike with their tensors, which `parts` names."""

    # Tensors `[B, room / n, ...]`, and how many places `n` share an entry.
    parts: ClassVar[dict[str, int]]
    table: Tensor | None = None  # [B, P] pages of each row in turn; None: rows have places of their own

    def page_bytes(self) -> int:
        """Bytes of 16 places of one row."""
        found = 0
        for name, places in self.parts.items():
            tensor: Tensor = getattr(self, name)
            found += tensor[0, 0].numel() * tensor.element_size() * PAGE // places
        return found

    def allocated_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(getattr(self, name).nbytes for name in self.parts)

    def grow(self, room: int) -> None:
        """Make place for `room` tokens a row."""
        for name, places in self.parts.items():
            old: Tensor = getattr(self, name)
            new = old.new_zeros(old.shape[0], -(-room // places), *old.shape[2:])
            new[:, : old.shape[1]] = old
            setattr(self, name, new)

    def add_pages(self, pages: int) -> None:
        """Have so many pages at least, each aligned to `ALIGNMENT` bytes; those that are there keep what they hold."""
        for name in self.parts:
            old: Tensor = getattr(self, name)
            if len(old) >= pages:  # from a time when memory ran out before all had got theirs
                continue
            new = _aligned_zeros((pages, *old.shape[1:]), old)
            new[: len(old)] = old
            setattr(self, name, new)

    def view(self: _Store, table: Tensor, rows: Sequence[_Store]) -> _Store:
        """The same pages, as rows that consist of those in `table` `[B, P]`; `rows` are views `[1, ...]` of each before."""
        other = copy.copy(self)
        other.table = table
        return other

    def _at(self, rows: Tensor, places: Tensor, per: int = 1) -> tuple[Tensor, Tensor]:
        """Where places (or, with `per`, runs of so many) of rows are in the tensors."""
        if self.table is None:
            return rows, places
        runs = PAGE_TOKENS // per
        return self.table[rows, places // runs], places % runs

    def _first(self, tensor: Tensor, length: int, per: int = 1) -> Tensor:
        """The first `length` places of all rows."""
        entries = -(-length // per)
        if self.table is None:
            return tensor[:, :entries]
        return tensor[self.table[:, : -(-length // PAGE_TOKENS)]].flatten(1, 2)[:, :entries]

    def select(self: _Store, rows: Tensor) -> _Store:
        """A copy with the rows `[n]`, in that order."""
        other = copy.copy(self)
        for name in self.parts:
            setattr(other, name, getattr(self, name)[rows])
        return other

    def put(self: _Store, rows: Tensor, other: _Store, length: int) -> None:
        """Replace `rows` `[n]` by those of a store of the same kind, of which the first `length` places count."""
        for name, places in self.parts.items():
            entries = -(-length // places)
            getattr(self, name)[rows, :entries] = getattr(other, name)[:, :entries]


class EntryStore(Store):
    """A store of one kind of entry, which is written and read as it is."""

    def write(self, span: Span, places: Tensor, values: Tensor, layer: int) -> Tensor:
        """Store `values` `[B, T, ...]` at `places` `[B, T]` (those of `span`); what was stored, in the type of `values`."""
        raise NotImplementedError

    def read(self, length: int, dtype: torch.dtype) -> Tensor:
        """The first `length` places, `[B, length, ...]`."""
        raise NotImplementedError

    def read_at(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        """One place `[B]` of each row: `[B, ...]`."""
        raise NotImplementedError

    def as_stored(self, values: Tensor, layer: int) -> Tensor:
        """One entry a row `[B, ...]` as it would be read after `write`."""
        raise NotImplementedError


class PlainStore(EntryStore):
    """Entries of any shape, rounded to a data type."""

    parts: ClassVar[dict[str, int]] = {"values": 1}

    def __init__(
        self, batch: int, room: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.values = torch.zeros(batch, room, *shape, dtype=dtype, device=device)  # [B, room, ...]

    def write(self, span: Span, places: Tensor, values: Tensor, layer: int) -> Tensor:
        kept = values.to(self.values.dtype)
        self.values[self._at(_rows(places)[:, None], places)] = kept
        return kept.to(values.dtype)

    def read(self, length: int, dtype: torch.dtype) -> Tensor:
        return self._first(self.values, length).to(dtype)

    def read_at(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        return self.values[self._at(_rows(places), places)].to(dtype)

    def as_stored(self, values: Tensor, layer: int) -> Tensor:
        return values.to(self.values.dtype).to(values.dtype)


class TokenStore(EntryStore):
    """Codes, and scales for each token."""

    parts: ClassVar[dict[str, int]] = {"codes": 1, "scales": 1}

    def __init__(
        self, batch: int, room: int, width: int, quantizer: LatentQuantizer, device: torch.device | str
    ) -> None:
        self.width, self.quantizer = width, quantizer
        self.codes, self.scales = _codes(quantizer, width, (batch, room), (batch, room), device)

    def write(self, span: Span, places: Tensor, values: Tensor, layer: int) -> Tensor:
        at = self._at(_rows(places)[:, None], places)
        codes, scales = self.quantizer.quantize(values, layer)
        self.codes[at], self.scales[at] = codes, scales
        return decode(codes, scales, self.width, values.dtype)

    def read(self, length: int, dtype: torch.dtype) -> Tensor:
        return decode(self._first(self.codes, length), self._first(self.scales, length), self.width, dtype)

    def read_at(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        at = self._at(_rows(places), places)
        return decode(self.codes[at], self.scales[at], self.width, dtype)

    def as_stored(self, values: Tensor, layer: int) -> Tensor:
        return self.quantizer.rounded(values, layer)


class PageStore(EntryStore):
    """Codes, and scales for each page of 16 places, which grow while it fills (see `LatentQuantizer.fill_pages`).

    A token is read at the scales that its page has by then. Cut back into the middle of a page, a row keeps the page's scales;
    from the start of a page on it begins anew.
    """

    parts: ClassVar[dict[str, int]] = {"codes": PAGE, "scales": PAGE}

    def __init__(
        self, batch: int, room: int, width: int, quantizer: LatentQuantizer, device: torch.device | str
    ) -> None:
        self.width, self.quantizer = width, quantizer
        pages = -(-room // PAGE)
        self.codes, self.scales = _codes(quantizer, width, (batch, pages, PAGE), (batch, pages), device)

    def write(self, span: Span, places: Tensor, values: Tensor, layer: int) -> Tensor:
        at = span.pages
        entries = values.new_zeros(len(at.rows), PAGE, self.width)  # [N, 16, r]
        entries[at.page_of, at.slots] = values[at.token_rows, at.tokens]
        where = self._at(at.rows, at.pages, PAGE)
        codes, scales = self.codes[where], self.scales[where]
        codes, scales = self.quantizer.fill_pages(codes, scales, entries, at.first, at.counts, layer)
        self.codes[where], self.scales[where] = codes, scales
        kept = values.clone()
        read = decode(codes[at.page_of, at.slots], scales[at.page_of], self.width, values.dtype)  # [M, r]
        kept[at.token_rows, at.tokens] = read
        return kept

    def read(self, length: int, dtype: torch.dtype) -> Tensor:
        codes, scales = self._first(self.codes, length, PAGE), self._first(self.scales, length, PAGE)
        found = decode(codes, scales[:, :, None], self.width, dtype)  # [B, P, 16, r]
        return found.flatten(1, 2)[:, :length]

    def read_at(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        rows, pages = self._at(_rows(places), places // PAGE, PAGE)
        return decode(self.codes[rows, pages, places % PAGE], self.scales[rows, pages], self.width, dtype)

    def as_stored(self, values: Tensor, layer: int) -> Tensor:
        """As its own scales would round it: what those of its page will be by then is not known yet."""
        return replace(self.quantizer, granularity="token").rounded(values, layer)


class StaticStore(EntryStore):
    """Codes alone: scales belong to the layer, and to a row from the place on where they were changed (`rescale`).

    Attributes:
        scales: `[B, E, G]` the row's scales in turn; starts: `[B, E]` first place of each, ascending, from 0. Rows that
            changed less often repeat their last.
        latest: `[B, T]` largest absolute value of each of the last step's tokens, padding included.
    """

    parts: ClassVar[dict[str, int]] = {"codes": 1}

    def __init__(
        self, batch: int, room: int, width: int, quantizer: LatentQuantizer, device: torch.device | str
    ) -> None:
        self.width, self.quantizer = width, quantizer
        self.codes, _ = _codes(quantizer, width, (batch, room), (0,), device)
        self.scales = self._scales_of(quantizer, device).expand(batch, 1, -1).clone()
        self.starts = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.latest: Tensor | None = None
        self._used = [1] * batch

    def write(self, span: Span, places: Tensor, values: Tensor, layer: int) -> Tensor:
        self.latest = self.quantizer.amax(values, layer).amax(dim=-1)
        if self.starts.shape[1] > 1:
            # A row that was cut back goes on with its newest scales.
            self.starts = torch.minimum(self.starts, places[:, :1])
        now = self.scales[:, -1:]  # [B, 1, G]
        codes = self.quantizer.encode(values, now)
        self.codes[self._at(_rows(places)[:, None], places)] = codes
        return decode(codes, now, self.width, values.dtype)

    def read(self, length: int, dtype: torch.dtype) -> Tensor:
        places = torch.arange(length, device=self.codes.device)
        codes = self._first(self.codes, length)
        return decode(codes, self._scales_at(places.expand(len(codes), -1)), self.width, dtype)

    def read_at(self, places: Tensor, dtype: torch.dtype) -> Tensor:
        return decode(
            self.codes[self._at(_rows(places), places)], self._scales_at(places[:, None])[:, 0], self.width, dtype
        )

    def as_stored(self, values: Tensor, layer: int) -> Tensor:
        self.quantizer.amax(values, layer)  # not finite: an error here too
        now = self.scales[:, -1]
        return decode(self.quantizer.encode(values, now), now, self.width, values.dtype)

    def rescale(self, row: int, factor: float, start: int) -> None:
        """From place `start` on (the row's end), a row's range is `factor` times the calibrated one."""
        clip = self.quantizer.clip
        wider = tuple(_finite(factor * each) for each in clip) if isinstance(clip, tuple) else _finite(factor * clip)
        if self._used[row] == self.starts.shape[1]:
            self.scales = torch.cat((self.scales, self.scales[:, -1:]), dim=1)
            self.starts = torch.cat((self.starts, self.starts[:, -1:]), dim=1)
        self.scales[row, self._used[row] :] = self._scales_of(replace(self.quantizer, clip=wider), self.codes.device)
        self.starts[row, self._used[row] :] = start
        self._used[row] += 1

    def allocated_bytes(self) -> int:
        return super().allocated_bytes() + self.scales.nbytes + self.starts.nbytes

    def view(self, table: Tensor, rows: Sequence[StaticStore]) -> StaticStore:  # type: ignore[override]
        other = super().view(table, rows)
        kept = rows or [self] * len(table)  # each row has scales of its own; of a pool all are as calibrated
        columns = max(row.starts.shape[1] for row in kept)
        other.scales = torch.cat([_repeat_last(row.scales[:1], columns) for row in kept])
        other.starts = torch.cat([_repeat_last(row.starts[:1], columns) for row in kept])
        other._used = [row._used[0] for row in kept]
        other.latest = None
        return other

    def select(self, rows: Tensor) -> StaticStore:
        other = super().select(rows)
        other.scales, other.starts = self.scales[rows], self.starts[rows]
        other._used = [self._used[row] for row in rows.tolist()]
        other.latest = None
        return other

    def put(self, rows: Tensor, other: StaticStore, length: int) -> None:  # type: ignore[override]
        super().put(rows, other, length)
        columns = max(self.starts.shape[1], other.starts.shape[1])
        self.scales, self.starts = _repeat_last(self.scales, columns), _repeat_last(self.starts, columns)
        self.scales[rows] = _repeat_last(other.scales, columns)
        self.starts[rows] = _repeat_last(other.starts, columns)
        for row, used in zip(rows.tolist(), other._used, strict=True):
            self._used[row] = used

    def _scales_of(self, quantizer: LatentQuantizer, device: torch.device | str) -> Tensor:
        return quantizer.scales(torch.zeros(quantizer.groups(self.width), device=device))  # [G]

    def _scales_at(self, places: Tensor) -> Tensor:
        """Scales `[B, S, G]` (or one for all `S`) at places `[B, S]`."""
        if self.starts.shape[1] == 1:
            return self.scales
        turn = torch.searchsorted(self.starts, places.contiguous(), right=True) - 1  # [B, S]
        return self.scales.gather(1, turn[..., None].expand(-1, -1, self.scales.shape[-1]))


def quantized_store(
    batch: int, room: int, width: int, quantizer: LatentQuantizer, device: torch.device | str
) -> EntryStore:
    """An empty store for vectors of `width` numbers."""
    kinds: dict[str, type[TokenStore | PageStore | StaticStore]]
    kinds = {"token": TokenStore, "page": PageStore, "static": StaticStore}
    return kinds[quantizer.granularity](batch, room, width, quantizer, device)


def _codes(
    quantizer: LatentQuantizer,
    width: int,
    places: tuple[int, ...],
    scale_places: tuple[int, ...],
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    codes = torch.zeros(*places, quantizer.code_width(width), dtype=quantizer.storage_dtype, device=device)
    scales = torch.zeros(*scale_places, quantizer.groups(width), dtype=quantizer.scale_dtype, device=device)
    return codes, scales


def _rows(places: Tensor) -> Tensor:
    return torch.arange(places.shape[0], device=places.device)


def _aligned_zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of the type and on the device of `like`, from an address that `ALIGNMENT` divides."""
    size = math.prod(shape)
    spare = ALIGNMENT // like.element_size()
    held = like.new_zeros(size + spare)
    skip = -held.data_ptr() % ALIGNMENT // like.element_size()
    return held[skip : skip + size].view(shape)


def _finite(clip: float) -> float:
    return min(clip, torch.finfo(torch.float32).max)


def _repeat_last(tensor: Tensor, columns: int) -> Tensor:
    """`[B, E, ...]` with at least so many columns."""
    more = columns - tensor.shape[1]
    return tensor if more <= 0 else torch.cat((tensor, tensor[:, -1:].repeat_interleave(more, dim=1)), dim=1)
