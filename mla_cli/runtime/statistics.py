"""What a run of the generator took: times, rates, memory."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mla_cli.runtime.live_range import LiveRange


@dataclass
class Statistics:
    """Counted while a generator runs; `summary` makes figures of it.

    Attributes:
        first_token_s: one a request, from its handing in to its first token, waiting for a place included.
        between_tokens_s: one a token after the first of its request, as a reader of the stream waits for it.
        prefill_s: spent on prompts; busy_s: on all.
        shared_tokens: of prompts, which others had left in the cache; prompt_tokens: those that were read.
        preemptions: times that a request lost its pages and was computed again.
        live: watches latents whose ranges are static, if there are any.
        cache_bytes_per_token: of one sequence, over all layers; cache_bytes: most that was allocated for all sequences.
    """

    cache_bytes_per_token: int = 0
    cache_bytes: int = 0
    live: LiveRange | None = None
    prompt_tokens: int = 0
    new_tokens: int = 0
    shared_tokens: int = 0
    preemptions: int = 0
    prefill_s: float = 0.0
    busy_s: float = 0.0
    first_token_s: array[float] = field(default_factory=lambda: array("d"))
    between_tokens_s: array[float] = field(default_factory=lambda: array("d"))

    def summary(self) -> dict[str, Any]:
        """The figures by name, in milliseconds and bytes; None where nothing was measured."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "shared_prompt_tokens": self.shared_tokens,
            "preemptions": self.preemptions,
            "ttft_ms": _ms(quantile(self.first_token_s, 0.5)),
            "ms_per_token_median": _ms(quantile(self.between_tokens_s, 0.5)),
            "ms_per_token_p99": _ms(quantile(self.between_tokens_s, 0.99)),
            "tokens_per_s": _rate(self.new_tokens, self.busy_s),
            "prefill_tokens_per_s": _rate(self.prompt_tokens, self.prefill_s),
            "cache_bytes_per_token": self.cache_bytes_per_token,
            "cache_bytes": self.cache_bytes,
            "latent_range_drift": None if self.live is None else self.live.drift,
            "peak_rss_bytes": peak_rss_bytes(),
            "peak_device_bytes": peak_device_bytes(),
        }


_ROWS = (
    ("prompt tokens", "prompt_tokens", "count"),
    ("new tokens", "new_tokens", "count"),
    ("prompt tokens not read again", "shared_prompt_tokens", "count"),
    ("requests made to wait again", "preemptions", "count"),
    ("time to first token", "ttft_ms", "ms"),
    ("time per token, median", "ms_per_token_median", "ms"),
    ("time per token, 99 %", "ms_per_token_p99", "ms"),
    ("new tokens per second", "tokens_per_s", "rate"),
    ("prompt tokens per second", "prefill_tokens_per_s", "rate"),
    ("cache bytes per token", "cache_bytes_per_token", "count"),
    ("cache bytes allocated", "cache_bytes", "count"),
    ("latent range drift", "latent_range_drift", "ratio"),
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
    if unit == "ratio":
        return f"{value:.2f}"
    return f"{value:,}" if unit == "count" else f"{value:,.1f}{' ms' if unit == 'ms' else ''}"


def quantile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed; None of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


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


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 and count else None
