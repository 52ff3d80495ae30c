"""Thresholds of a generator's figures, and what is said when one is crossed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Alert:
    """A figure beyond its threshold."""

    name: str
    value: float
    threshold: float

    def __str__(self) -> str:
        title, advice = _SHOWN[self.name]
        if self.name.endswith("_ms"):
            value, limit = f"{self.value:,.1f} ms", f"{self.threshold:g} ms"
        else:
            value, limit = f"{self.value:.0%}", f"{self.threshold:.0%}"
        return f"{title} is {value}, beyond {limit}: {advice}"


@dataclass(frozen=True)
class Thresholds:
    """What is too much. None: there is no such alert.

    Attributes:
        ttft_p99_ms: of 99 requests in a hundred, from their handing in to the first token.
        cache_use: share of the pool's pages that requests use.
        fragmentation, ratio_drift: see `Picture`; a drift is too much in both directions.
        fallback_rate: share of requests that were computed beside the pool (see `Fallback`).
    """

    ttft_p99_ms: float | None = 50.0
    cache_use: float | None = 0.85
    fragmentation: float | None = 0.25
    ratio_drift: float | None = 0.10
    fallback_rate: float | None = 0.05

    @property
    def names(self) -> Sequence[str]:
        """Of the alerts that there are."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]

    def crossed(self, figures: Mapping[str, float | None]) -> list[Alert]:
        """The alerts of these figures; one that is not known crosses nothing."""
        found = []
        for name in self.names:
            value, threshold = figures.get(name), getattr(self, name)
            if value is not None and abs(value) > threshold:
                found.append(Alert(name, value, threshold))
        return found


_SHOWN = {
    "ttft_p99_ms": (
        "the time to the first token (99 %)", "requests wait for a place, or prompts are long; try a larger --max-batch"
    ),
    "cache_use": ("the share of the cache in use", "raise --pool-size, or requests will be computed again"),
    "fragmentation": ("the fragmentation of the cache", "used pages lie far apart; no page is lost by it"),
    "ratio_drift": ("the drift of the compression ratio", "below 0, pages are partly empty; above 0, requests share them"),
    "fallback_rate": ("the share of requests computed beside the pool", "memory runs out; lower --max-batch or --pool-size"),
}  # fmt: skip
