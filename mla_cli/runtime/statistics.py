"""What a run of the generator took: times, rates, memory."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from mla_cli.runtime.live_range import LiveRange
from mla_cli.runtime.tier_counts import TIER_ROWS, TierCounts, tier_figures
from mla_cli.runtime.times import Times

# Seconds, close enough for quantiles: from a fast GPU's token to a long queue.
TOKEN_BOUNDS = (.001, .0025, .005, .0075, .01, .015, .02, .03, .05, .075, .1, .15, .25, .5, 1, 2.5)  # fmt: skip
TTFT_BOUNDS = (.005, .01, .025, .05, .075, .1, .15, .25, .5, .75, 1, 2.5, 5, 10, 30, 60, 300)  # fmt: skip


@dataclass
class Statistics:
    """Counted while a generator runs; `summary` makes figures of it.

    Attributes:
        first_token_s: one a request, from its handing in to its first token, waiting for a place included.
        between_tokens_s: one a token after the first of its request, as a reader of the stream waits for it.
        prefill_s: spent on prompts; busy_s: on all.
        shared_tokens: of prompts, which others had left in the cache; prompt_tokens: those that were read.
        preemptions: times that a request lost its pages and was computed again.
        admissions: times that a request got pages; prefix_hits: those where others had left a beginning of its prompt.
        fallbacks: times that memory ran out for the pool so often that it was let rest; computed_apart: requests that had
            caches of their own then.
        completed, failed: requests that ended so.
        most_pages: most pages of the pool that requests used at a time; page_limit: most that there may be.
        fragmentation, joules: see `Picture`, the highest of its kind; None where nobody looked, or the machine does not say.
        alerts: times that a threshold was crossed for the first time.
        tiers: counts of the tiers below the pool, if there are any.
        live: watches latents whose ranges are static, if there are any.
        cache_bytes_per_token: of one sequence, over all layers; cache_bytes: most that was allocated for all sequences.
    """

    cache_bytes_per_token: int = 0
    cache_bytes: int = 0
    live: LiveRange | None = None
    tiers: TierCounts | None = None
    prompt_tokens: int = 0
    new_tokens: int = 0
    shared_tokens: int = 0
    preemptions: int = 0
    admissions: int = 0
    prefix_hits: int = 0
    fallbacks: int = 0
    computed_apart: int = 0
    completed: int = 0
    failed: int = 0
    most_pages: int = 0
    page_limit: int = 0
    alerts: int = 0
    fragmentation: float | None = None
    joules: float | None = None
    prefill_s: float = 0.0
    busy_s: float = 0.0
    first_token_s: Times = field(default_factory=lambda: Times(TTFT_BOUNDS))
    between_tokens_s: Times = field(default_factory=lambda: Times(TOKEN_BOUNDS))

    @property
    def fallback_rate(self) -> float:
        """Share of the admissions to caches of their own."""
        return self.computed_apart / self.admissions if self.admissions else 0.0

    def summary(self) -> dict[str, Any]:
        """The figures by name, in milliseconds and bytes; None where nothing was measured."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "shared_prompt_tokens": self.shared_tokens,
            "prefix_hit_rate": _rate(self.prefix_hits, self.admissions) if self.prefix_hits else 0.0,
            "preemptions": self.preemptions,
            "fallback_rate": self.fallback_rate,
            "requests_completed": self.completed,
            "requests_failed": self.failed,
            "ttft_ms": milliseconds(self.first_token_s.quantile(0.5)),
            "ttft_ms_p99": milliseconds(self.first_token_s.quantile(0.99)),
            "ms_per_token_median": milliseconds(self.between_tokens_s.quantile(0.5)),
            "ms_per_token_p99": milliseconds(self.between_tokens_s.quantile(0.99)),
            "tokens_per_s": _rate(self.new_tokens, self.busy_s),
            "prefill_tokens_per_s": _rate(self.prompt_tokens, self.prefill_s),
            "cache_bytes_per_token": self.cache_bytes_per_token,
            "cache_bytes": self.cache_bytes,
            "cache_use": _rate(self.most_pages, self.page_limit),
            "cache_fragmentation": self.fragmentation,
            **tier_figures(self.tiers, self.busy_s),
            "latent_range_drift": None if self.live is None else self.live.drift,
            "joules_per_token": None if self.joules is None else _rate(self.joules, self.new_tokens),
            "peak_rss_bytes": peak_rss_bytes(),
            "peak_device_bytes": peak_device_bytes(),
        }


_ROWS = (
    ("prompt tokens", "prompt_tokens", "count"),
    ("new tokens", "new_tokens", "count"),
    ("prompt tokens not read again", "shared_prompt_tokens", "count"),
    ("requests that found a beginning", "prefix_hit_rate", "share"),
    ("requests made to wait again", "preemptions", "count"),
    ("requests with caches of their own", "fallback_rate", "share"),
    ("requests answered", "requests_completed", "count"),
    ("requests failed", "requests_failed", "count"),
    ("time to first token, median", "ttft_ms", "ms"),
    ("time to first token, 99 %", "ttft_ms_p99", "ms"),
    ("time per token, median", "ms_per_token_median", "ms"),
    ("time per token, 99 %", "ms_per_token_p99", "ms"),
    ("new tokens per second", "tokens_per_s", "rate"),
    ("prompt tokens per second", "prefill_tokens_per_s", "rate"),
    ("cache bytes per token", "cache_bytes_per_token", "count"),
    ("cache bytes allocated", "cache_bytes", "count"),
    ("cache in use at most", "cache_use", "share"),
    ("fragmentation at most", "cache_fragmentation", "share"),
    *TIER_ROWS,
    ("latent range drift", "latent_range_drift", "ratio"),
    ("joules per new token", "joules_per_token", "ratio"),
    ("peak memory of the process", "peak_rss_bytes", "MiB"),
    ("peak memory of the device", "peak_device_bytes", "MiB"),
)


def table(summary: dict[str, Any]) -> str:
    """The figures of `Statistics.summary` as lines of text; what was not measured is left out."""
    rows = [(title, _shown(summary[key], unit)) for title, key, unit in _ROWS if summary[key] is not None]
    width, right = max(len(title) for title, _ in rows), max(len(value) for _, value in rows)
    return "\n".join(f"{title:<{width}}  {value:>{right}}" for title, value in rows)


def _shown(value: float, unit: str) -> str:
    if unit == "MiB":
        return f"{value / 2**20:,.0f} MiB"
    if unit == "share":
        return f"{value:.1%}"
    if unit == "ratio":
        return f"{value:.2f}"
    return f"{value:,}" if unit == "count" else f"{value:,.1f}{' ms' if unit == 'ms' else ''}"


def peak_rss_bytes() -> int | None:
    """Most memory the process has held so far; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes() -> int | None:
    """Most memory PyTorch has held on the GPU so far; None where none is used."""
    return torch.cuda.max_memory_allocated() or None if torch.cuda.is_available() else None


def milliseconds(seconds: float | None) -> float | None:
    """Of seconds; None of None."""
    return None if seconds is None else seconds * 1e3


def _rate(count: float, seconds: float) -> float | None:
    return count / seconds if seconds > 0 and count else None
