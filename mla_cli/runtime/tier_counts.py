"""What tiers of kept prompts did: counted while they work, shown as figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class TierCounts:
    """Chunks of prompts, by where they were found, and what moving them took.

    Attributes:
        from_pool: chunks that requests found in the pool; from_nowhere: that they had to read.
        from_host, from_file: chunks that came back from there, for a request or ahead of one.
        pool_evictions, host_evictions, file_evictions: chunks that made place for others; damaged: in the file, not as written.
        host_bytes, file_bytes: held now. loaded_bytes: brought back to the pool.
        load_s: that requests waited for chunks to come back.
        prefetched: chunks brought back before a request came to them; wanted: of these, those that one then used; saved_s: what
            these requests would have waited for them.
        fallbacks: times that guessing was given up for a while; guesses, right: chunks brought back by a guess, and those of
            them that soon were used.
    """

    from_pool: int = 0
    from_host: int = 0
    from_file: int = 0
    from_nowhere: int = 0
    pool_evictions: int = 0
    host_evictions: int = 0
    file_evictions: int = 0
    damaged: int = 0
    host_bytes: int = 0
    file_bytes: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    prefetched: int = 0
    wanted: int = 0
    saved_s: float = 0.0
    guesses: int = 0
    right: int = 0
    fallbacks: int = 0


def tier_figures(counts: TierCounts | None, busy_s: float) -> dict[str, Any]:
    """Figures by name; None where there are no tiers, or nothing was measured.

    Args:
        busy_s: seconds spent computing.
    """
    if counts is None:
        return dict.fromkeys((key for _, key, _ in TIER_ROWS), None)
    c = counts
    whole = busy_s + c.load_s
    guessing = c.prefetched or c.guesses or c.fallbacks
    return {
        "chunks_from_pool": c.from_pool,
        "chunks_from_host": c.from_host,
        "chunks_from_file": c.from_file,
        "chunks_read": c.from_nowhere,
        "chunks_evicted_from_pool": c.pool_evictions,
        "chunks_evicted_from_host": c.host_evictions,
        "chunks_evicted_from_file": c.file_evictions,
        "chunks_damaged": c.damaged,
        "host_tier_bytes": c.host_bytes,
        "file_tier_bytes": c.file_bytes,
        "loaded_bytes": c.loaded_bytes,
        "loading_share": c.load_s / whole if whole else None,
        "prefetch_hit_rate": c.wanted / c.prefetched if c.prefetched else None,
        "prefetch_saved_ms": c.saved_s * 1e3 if guessing else None,
        "prefetch_guess_hit_rate": c.right / c.guesses if c.guesses else None,
        "prefetch_fallbacks": c.fallbacks if guessing else None,
    }


TIER_ROWS = (
    ("chunks of prompts found in the pool", "chunks_from_pool", "count"),
    ("chunks back from host memory", "chunks_from_host", "count"),
    ("chunks back from the file", "chunks_from_file", "count"),
    ("chunks read, not found", "chunks_read", "count"),
    ("chunks that left the pool", "chunks_evicted_from_pool", "count"),
    ("chunks that left host memory", "chunks_evicted_from_host", "count"),
    ("chunks that left the file", "chunks_evicted_from_file", "count"),
    ("chunks damaged in the file", "chunks_damaged", "count"),
    ("kept in host memory", "host_tier_bytes", "MiB"),
    ("kept in the file", "file_tier_bytes", "MiB"),
    ("brought back to the pool", "loaded_bytes", "MiB"),
    ("time spent bringing back", "loading_share", "share"),
    ("prefetched chunks that were wanted", "prefetch_hit_rate", "share"),
    ("waiting saved by prefetching", "prefetch_saved_ms", "ms"),
    ("guesses that were right", "prefetch_guess_hit_rate", "share"),
    ("times that guessing was given up", "prefetch_fallbacks", "count"),
)
