"""A pool of pages that caches of sequences are made of, and finished parts of prompts that later ones share.

A page holds 64 tokens of all layers. Pages are counted by who uses them; what a prompt has left in whole pages stays in the
pool for others that begin alike, under a name that follows from its tokens, until its place is wanted. A page that is shared
is never written to: only whole chunks of prompts are, and a sequence goes on in pages of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from mla_cli.errors import is_out_of_memory
from mla_cli.model.cache import Cache
from mla_cli.model.cache_store import PAGE_TOKENS

CHUNK_PAGES = 4  # pages that a pool grows by at least: 256 tokens


def pages_for(tokens: int) -> int:
    """Pages that so many tokens fill."""
    return -(-tokens // PAGE_TOKENS)


class Below(Protocol):
    """Where kept chunks of prompts go that the pool has no more place for."""

    def save(self, name: bytes, pages: Sequence[int]) -> None:
        """Take over a chunk that is about to leave the pool."""

    def fetch(self, name: bytes) -> bool:
        """Bring a chunk back to the pool, where it is kept then; whether it is there."""

    def joined(self, names: Sequence[bytes], found: int) -> None:
        """A request with chunks of these names has got pages, and found the first so many of them."""

    @property
    def looks_ahead(self) -> bool:
        """Whether `look_ahead` does anything."""

    def look_ahead(self, names: Iterable[bytes], *, running: int) -> None:
        """Between two turns: what the waiting requests will ask for, and how many run."""

    def settle(self) -> None:
        """Wait until no page is being filled: before pages are moved."""


class PagePool:
    """Pages, who uses them, and what of them can be used again.

    Args:
        make_cache: an empty cache of so many sequences of so many tokens.
        limit: most pages to hold. The pool begins small and grows up to it.

    Attributes:
        most_used: most pages that sequences used at a time.
        growths: times that pages may have moved; views from before then show what is no longer used.
        refusals: times in a row that there was no memory to grow.
        below: the tiers that kept prompts go to, if any. found: chunks that were found here.
    """

    def __init__(self, make_cache: Callable[[int, int], Cache], limit: int) -> None:
        self.most_used = self.growths = self.refusals = self.found = 0
        self.below: Below | None = None
        self._make_cache, self._most = make_cache, limit
        self._apart, self._held = 0, False  # pages' worth of caches beside the pool; whether it may not grow
        self._begin()

    def _begin(self) -> None:
        self._storage = self._make_cache(1, PAGE_TOKENS)  # page 0 stays empty: it fills tables up
        self._users = [1]  # of each page
        self._free: list[int] = []
        self._kept: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()  # latest use last

    @property
    def limit(self) -> int:
        """Most pages that may be in memory now: what is taken apart is none of the pool's."""
        return self.held if self._held else max(self.held, self._most - self._apart)

    @property
    def used(self) -> int:
        """Pages that sequences or kept prompts use."""
        return len(self._users) - 1 - len(self._free)

    @property
    def held(self) -> int:
        """Pages in memory, used or not."""
        return len(self._users) - 1

    @property
    def kept(self) -> int:
        """Pages that only kept prompts use: they are given up when others are wanted."""
        return sum(self._users[page] == 1 for pages in self._kept.values() for page in pages)

    @property
    def available(self) -> int:
        """Pages that can be had without taking any from a sequence, if there is memory for them."""
        return self.limit - self.used + self.kept

    @property
    def storage(self) -> Cache:
        """All pages."""
        return self._storage

    def has(self, name: bytes) -> bool:
        """Whether pages are kept under a name."""
        return name in self._kept

    def kept_chunks(self) -> Iterable[tuple[bytes, tuple[int, ...]]]:
        """Names and pages of what is kept, the latest used last."""
        return list(self._kept.items())

    def fragmentation(self, chunk: int) -> float:
        """Of the runs of `chunk` pages in which any is used: the share that would be free if used pages lay together."""
        runs = [self._users[start : start + chunk] for start in range(1, len(self._users), chunk)]
        occupied = sum(any(run) for run in runs)
        return 1 - -(-self.used // chunk) / occupied if occupied else 0.0

    def bytes_per_token(self) -> int:
        """See `Cache`."""
        return self._storage.bytes_per_token()

    def allocated_bytes(self) -> int:
        """Bytes of all pages, and about those of the caches beside them."""
        return self._storage.allocated_bytes() + self._apart * PAGE_TOKENS * self.bytes_per_token()

    def take(self, count: int) -> list[int] | None:
        """Pages for one sequence, or None if there are not so many."""
        if count > self.available:
            return None
        may_grow = True
        while len(self._free) < count:
            may_grow = may_grow and self._grow(count - len(self._free))
            if not may_grow and not self._give_up():
                return None
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        self.most_used = max(self.most_used, self.used - self.kept)
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """One user less of each."""
        for page in pages:
            self._users[page] -= 1
            assert self._users[page] >= 0, "a page was released twice"
            if self._users[page] == 0:
                self._free.append(page)

    def clear(self, pages: Sequence[int]) -> None:
        """Zero pages that hold what is not finite, before others read beside it."""
        own = torch.tensor([page for page in pages if self._users[page] == 1], dtype=torch.int64)
        for layer in self._storage.layers:
            for store in layer.stores:
                for name in store.parts:
                    tensor = getattr(store, name)
                    tensor[own.to(tensor.device)] = 0

    def keep(self, name: bytes, pages: Sequence[int]) -> None:
        """Keep whole pages for others whose prompts begin alike."""
        if name not in self._kept:
            self._kept[name] = tuple(pages)
            for page in pages:
                self._users[page] += 1

    def share(self, name: bytes) -> tuple[int, ...]:
        """The pages kept under a name, for one more user; none if there are none."""
        here = name in self._kept
        if not here and self.below is not None:
            self.below.fetch(name)
        pages = self._kept.get(name, ())
        if pages:
            self.found += here
            self._kept.move_to_end(name)
            for page in pages:
                self._users[page] += 1
            self.most_used = max(self.most_used, self.used - self.kept)
        return pages

    def touch(self, names: Iterable[bytes]) -> None:
        """These were used, the last of them last."""
        for name in names:
            if name in self._kept:
                self._kept.move_to_end(name)

    def forget_kept(self) -> None:
        """Keep nothing any longer."""
        for pages in self._kept.values():
            self.release(pages)
        self._kept.clear()

    def hold(self) -> None:
        """Grow no further until `resume`: there is no memory."""
        self._held = True

    def resume(self) -> None:
        """Grow again, up to what was allowed at first."""
        self._held, self.refusals = False, 0

    def drop(self) -> None:
        """Give all memory back, and what was kept with it, where no sequence uses any and there are no tiers."""
        if self.used == self.kept and self.held and self.below is None:  # tiers write into this very storage
            self._begin()
            self.growths += 1

    def take_apart(self, tokens: int) -> Cache | None:
        """A cache `[1]` for so many tokens beside the pages; None: no memory, or no more is allowed."""
        pages = pages_for(tokens)
        if self.held + self._apart + pages > self._most:
            return None
        try:
            cache = self._make_cache(1, tokens)
            cache.reserve(tokens)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        self._apart += pages
        return cache

    def release_apart(self, tokens: int) -> None:
        """A cache for so many tokens beside the pages is not used any more."""
        self._apart -= pages_for(tokens)
        assert self._apart >= 0, "a cache was released twice"

    def view(self, pages: Sequence[Sequence[int]], lengths: Sequence[int], before: Sequence[Cache] = ()) -> Cache:
        """A cache of sequences that consist of these pages, of which so many tokens count.

        Args:
            before: the caches `[1]` of the same sequences so far; none: they are new.
        """
        table = torch.zeros(len(pages), max(map(len, pages)), dtype=torch.int64)
        for row, own in enumerate(pages):
            table[row, : len(own)] = torch.tensor(own)
        return self._storage.view(table, torch.tensor(lengths), before)

    def _grow(self, wanted: int) -> bool:
        held = self.held
        pages = min(self.limit, held + max(wanted, CHUNK_PAGES, held // 2))
        if pages <= held:
            return False
        self.growths += 1  # also where memory runs out half-way: some layers have moved by then
        try:
            self._storage.add_pages(pages + 1)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.refusals += 1
            return False
        self.refusals = 0
        self._free += range(pages, held, -1)
        self._users += [0] * (pages - held)
        return True

    def _give_up(self) -> bool:
        """Free what was kept and not used for the longest time."""
        for name, pages in self._kept.items():
            if all(self._users[page] == 1 for page in pages):
                if self.below is not None:
                    self.below.save(name, pages)
                del self._kept[name]
                self.release(pages)
                return True
        return False
