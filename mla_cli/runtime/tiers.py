"""Where chunks of prompts go that the pool has no more place for, and how they come back: host memory, then a file.

A chunk is brought back when a request asks for it; or before that, by a thread beside the computation, because a request that
waits will ask for it, or because the one that comes next probably will (see `PrefixTree`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from time import perf_counter

from torch import Tensor

from mla_cli.model.page_bytes import Bytes, PageBytes
from mla_cli.model.page_pool import PagePool
from mla_cli.runtime import choices
from mla_cli.runtime.kept_file import KeptFile
from mla_cli.runtime.prefix_tree import PrefixTree
from mla_cli.runtime.tier_counts import TierCounts

MOST_UNWRITTEN = 8  # chunks on their way to the file: more would be memory that nobody has allowed
FEWEST_OUTCOMES = 8  # of guesses, before they are judged; the latest so many times four count


@dataclass(frozen=True)
class Prefetch:
    """How far ahead chunks are brought back.

    Attributes:
        lookahead: most chunks at a time. threshold: how sure a guess must be.
        fallback: share of right guesses below which guessing pauses for `cool_down` requests; 0: never.
    """

    lookahead: int = choices.LOOKAHEAD
    threshold: float = choices.LOOK_THRESHOLD
    fallback: float = choices.FALLBACK_THRESHOLD
    cool_down: int = choices.COOL_DOWN


@dataclass
class _Load:
    """A chunk on its way to the pool: the thread's work, and the pages that it fills."""

    work: Future[tuple[list[Tensor], str, float] | None]
    pages: list[int]
    guessed: bool


@dataclass
class _Guesses:
    """Chunks brought back by a guess: those that are open, with the requests they may still wait for, and how others ended."""

    open: dict[bytes, int] = field(default_factory=dict)
    outcomes: deque[bool] = field(default_factory=lambda: deque(maxlen=4 * FEWEST_OUTCOMES))
    pause: int = 0  # requests that guessing still pauses for


class Tiers:
    """Both tiers below a pool. All methods belong to the thread that computes.

    Args:
        host_bytes: most bytes of chunks in host memory. file: the tier below, if any; it is closed by `close`.
        prefetch: how to bring back ahead; None: not at all.
    """

    def __init__(
        self, pool: PagePool, *, host_bytes: int, file: KeptFile | None = None, prefetch: Prefetch | None = None
    ) -> None:
        self.counts = TierCounts()
        self._pool, self._file, self._prefetch = pool, file, prefetch
        self._pages, self._pages_of_thread = PageBytes(pool.storage), PageBytes(pool.storage)
        self._host: OrderedDict[bytes, Bytes] = OrderedDict()  # latest use last
        self._host_limit, self._host_bytes = host_bytes, 0
        self._lock = Lock()  # of host memory and what is on its way to the file
        self._file_lock = Lock()  # which the thread holds for as long as a chunk takes
        self._thread = ThreadPoolExecutor(1, "mla-tiers")
        self._unwritten: OrderedDict[bytes, Bytes] = OrderedDict()
        self._loads: dict[bytes, _Load] = {}
        self._came: dict[bytes, tuple[float, int]] = {}  # prefetched, not yet wanted: seconds that it took, and pages
        self._tree, self._guesses = PrefixTree(), _Guesses()
        pool.below = self

    def save(self, name: bytes, pages: Sequence[int]) -> None:
        """Take over a chunk that is about to leave the pool."""
        self.counts.pool_evictions += 1
        self._came.pop(name, None)
        with self._lock:
            known = name in self._host
            if known:
                self._host.move_to_end(name)
        size = len(pages) * self._pages.page_bytes
        if not known and not (size > self._host_limit and self._file is not None and name in self._file):
            self._store(name, self._pages.read(pages))

    def fetch(self, name: bytes) -> bool:
        """Bring a chunk back to the pool, for a request that wants it now; whether it is there."""
        began = perf_counter()
        if name in self._loads and self._settle(name):
            self.counts.load_s += perf_counter() - began
            return True
        found = self._look_up(name)
        if found is None:
            return False
        data, tier = found
        pages = self._pool.take(len(data))
        if pages is None:
            return False
        self._pages.write(pages, data)
        self._keep(name, pages)
        self._count_found(tier)
        self.counts.load_s += perf_counter() - began
        return True

    def joined(self, names: Sequence[bytes], found: int) -> None:
        """A request with chunks of these names has got pages, and found the first so many of them."""
        self.counts.from_nowhere += len(names) - found
        self.counts.from_pool = self._pool.found
        for name in names[:found]:
            came = self._came.pop(name, None)
            if came is not None:
                self.counts.wanted += 1
                self.counts.saved_s += came[0]
        if self._prefetch is None:
            return
        self._judge(names)
        self._tree.add(names)
        if self._guesses.pause:
            self._guesses.pause -= 1
            return
        self._bring(self._tree.expected(self._prefetch.lookahead, self._prefetch.threshold), guessed=True)

    def look_ahead(self, names: Iterable[bytes], *, running: int) -> None:
        """Between two turns: take in what the thread has brought, and send for chunks that requests wait for.

        Args:
            names: of chunks that waiting requests begin with. running: requests that may soon want a page each.
        """
        for name in [name for name, load in self._loads.items() if load.work.done()]:
            self._settle(name)
        self._bring(names, guessed=False, spare=running)

    @property
    def looks_ahead(self) -> bool:
        """Whether `look_ahead` does anything."""
        return self._prefetch is not None

    def settle(self) -> None:
        """Wait until no page is being filled: before pages are moved."""
        for name in list(self._loads):
            self._settle(name)

    def close(self, *, keep: bool = True) -> None:
        """End the thread, and put all that is kept into the file, if there is one; without `keep` the file is removed."""
        self.settle()
        self._thread.shutdown()
        self._pool.below = None
        if self._file is None:
            return
        try:
            if keep:
                for name, data in list(self._host.items()):
                    self._file.put(name, data)
                for name, pages in self._pool.kept_chunks():
                    if name not in self._file:
                        self._file.put(name, self._pages.read(pages))
        finally:
            self._file.close(keep=keep)

    def _store(self, name: bytes, data: Bytes) -> None:
        """To host memory, and what has no place there any more to the file."""
        if data.nbytes <= self._host_limit:
            leaving = []
            with self._lock:
                while self._host_bytes + data.nbytes > self._host_limit:
                    leaving.append(self._host.popitem(last=False))
                    self._host_bytes -= leaving[-1][1].nbytes
                self._host[name] = data
                self._host_bytes += data.nbytes
            self.counts.host_evictions += len(leaving)
        else:
            leaving = [(name, data)]
        self.counts.host_bytes = self._host_bytes
        if self._file is not None:
            for gone, its in leaving:
                self._write_behind(gone, its)

    def _write_behind(self, name: bytes, data: Bytes) -> None:
        with self._lock:
            full = len(self._unwritten) >= MOST_UNWRITTEN
            if not full:
                self._unwritten[name] = data
        if full:
            self._put(name, data)
        else:
            self._thread.submit(self._write, name, data)

    def _write(self, name: bytes, data: Bytes) -> None:
        self._put(name, data)  # in the thread
        with self._lock:
            self._unwritten.pop(name, None)  # gone already if it left host memory twice before it was written

    def _put(self, name: bytes, data: Bytes) -> None:
        assert self._file is not None
        with self._file_lock:
            self._file.put(name, data)
        self.counts.file_bytes, self.counts.file_evictions = self._file.held_bytes, self._file.evictions

    def _look_up(self, name: bytes) -> tuple[Bytes, str] | None:
        """A chunk and the tier that it was in; any thread may ask."""
        with self._lock:
            data = self._host.get(name)
            if data is not None:
                self._host.move_to_end(name)
                return data, "host"
            data = self._unwritten.get(name)
        if data is None and self._file is not None:
            with self._file_lock:
                data = self._file.get(name)
            self.counts.damaged = self._file.damaged
        return None if data is None else (data, "file")

    def _bring(self, names: Iterable[bytes], *, guessed: bool, spare: int = 0) -> None:
        """Send for chunks that are in a tier below, as far as there are pages that nobody uses."""
        assert self._prefetch is not None
        wanted = list(names)
        for name in wanted:
            if len(self._loads) >= self._prefetch.lookahead:
                return
            if self._pool.has(name) or name in self._loads:
                continue
            count = self._pages_in(name)
            if not count:
                continue
            # Not in the place of what was brought before and is still to be used: that would go round in circles.
            used = sum(
                pages for other, (_, pages) in self._came.items() if other in wanted or other in self._guesses.open
            )
            if count + used + spare > self._pool.available:
                return
            pages = self._pool.take(count)
            if pages is not None:
                self._loads[name] = _Load(self._thread.submit(self._load, name, pages), pages, guessed)

    def _pages_in(self, name: bytes) -> int:
        with self._lock:
            data = self._host.get(name, self._unwritten.get(name))
        if data is not None:
            return len(data)
        return 0 if self._file is None else self._file.pages_of(name)

    def _load(self, name: bytes, pages: Sequence[int]) -> tuple[list[Tensor], str, float] | None:
        """In the thread: fill pages; the tensors that they were in, the tier that it came from, and how long it took."""
        began = perf_counter()
        found = self._look_up(name)
        if found is None or len(found[0]) != len(pages):
            return None
        written = self._pages_of_thread.write(pages, found[0])
        return written, found[1], perf_counter() - began

    def _settle(self, name: bytes) -> bool:
        """Wait for a chunk that is on its way; whether it is in the pool now."""
        load = self._loads.pop(name)
        given = load.work.result()
        # A pool that has grown meanwhile is in other tensors than those that were filled.
        if given is None or any(a is not b for a, b in zip(given[0], self._pages.tensors(), strict=True)):
            self._pool.release(load.pages)
            return False
        self._keep(name, load.pages)
        self._count_found(given[1])
        self.counts.prefetched += 1
        self._came[name] = (given[2], len(load.pages))
        if load.guessed and self._prefetch is not None:
            self.counts.guesses += 1
            self._guesses.open[name] = self._prefetch.lookahead
        return True

    def _keep(self, name: bytes, pages: Sequence[int]) -> None:
        self._pool.keep(name, pages)
        self._pool.release(pages)
        self.counts.loaded_bytes += len(pages) * self._pages.page_bytes

    def _count_found(self, tier: str) -> None:
        if tier == "host":
            self.counts.from_host += 1
        else:
            self.counts.from_file += 1

    def _judge(self, names: Sequence[bytes]) -> None:
        """Which guesses were right, now that another request has come; too few of them, and guessing pauses."""
        assert self._prefetch is not None
        guesses = self._guesses
        for name in list(guesses.open):
            guesses.open[name] -= 1
            if name in names or not guesses.open[name]:
                del guesses.open[name]
                guesses.outcomes.append(name in names)
                self.counts.right += name in names
        known = len(guesses.outcomes)
        if known >= FEWEST_OUTCOMES and sum(guesses.outcomes) < self._prefetch.fallback * known:
            guesses.outcomes.clear()
            guesses.pause = self._prefetch.cool_down
            self.counts.fallbacks += 1
