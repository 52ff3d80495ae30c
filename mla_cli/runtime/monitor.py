"""What a generator does, looked at between its turns: a picture for who shows it, and alerts when a threshold is crossed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from mla_cli.model.cache_store import PAGE_TOKENS
from mla_cli.model.page_pool import PagePool
from mla_cli.runtime.alerts import Alert, Thresholds
from mla_cli.runtime.energy import EnergyMeter
from mla_cli.runtime.sequence import ActiveSequence
from mla_cli.runtime.statistics import Statistics, milliseconds

FEWEST_TOKENS = 1024  # cached, before a compression ratio says anything: a last page is filled in part


@dataclass(frozen=True)
class Picture:
    """A generator between two turns.

    Attributes:
        running, waiting: requests.
        pages: that requests use; kept: that are kept for prompts to come; held: in memory, used or not; limit: most of them.
        cached_tokens: of the requests that run, each with its own.
        fragmentation: of the pool's chunks, see `PagePool.fragmentation`.
        ratio_drift: bytes a token that the nominal figure promises over those that pages really take, minus 1. Below 0: last
            pages are partly empty; above 0: requests share pages. None: too little is cached to say.
        range_drift: see `LiveRange.drift`. joules: since the start, of all that the machine counts.
        firing: names of alerts whose thresholds are crossed now.
    """

    running: int
    waiting: int
    pages: int
    kept: int
    held: int
    limit: int
    bytes_allocated: int
    cached_tokens: int
    fragmentation: float
    ratio_drift: float | None
    range_drift: float | None
    joules: float | None
    firing: tuple[str, ...] = ()

    @property
    def use(self) -> float:
        """Share of the pages that may be held which requests use."""
        return self.pages / self.limit if self.limit else 0.0


class Monitor:
    """Looks at a generator at most every `interval` seconds, and whenever it comes to rest.

    Args:
        chunk_pages: pages of a chunk, by which fragmentation is measured.
        say: is told of an alert when its threshold is crossed for the first time.

    Attributes:
        picture: the latest.
        shows: are called with each picture. They run in the thread that computes, so they must be quick.
    """

    def __init__(
        self,
        statistics: Statistics,
        energy: EnergyMeter,
        thresholds: Thresholds,
        say: Callable[[str], None],
        *,
        chunk_pages: int,
        interval: float = 1.0,
    ) -> None:
        self.picture: Picture | None = None
        self.shows: list[Callable[[Picture], None]] = []
        self._statistics, self._energy, self._thresholds, self._say = statistics, energy, thresholds, say
        self._chunk_pages, self._interval = chunk_pages, interval
        self._next = 0.0
        self._said: set[str] = set()

    @property
    def alert_names(self) -> Sequence[str]:
        """Of all alerts that there are."""
        return self._thresholds.names

    def look(self, pool: PagePool, running: Sequence[ActiveSequence], waiting: int) -> None:
        """Between two turns: take a picture if it is time, or if nothing is left to do."""
        now = monotonic()
        if now < self._next and (running or waiting):
            return
        self._next = now + self._interval
        cached = sum(sequence.cached for sequence in running)
        kept = pool.kept
        pages = pool.used - kept
        fragmentation = pool.fragmentation(self._chunk_pages)
        drift = None
        if cached >= FEWEST_TOKENS and pages:
            drift = cached / (pages * PAGE_TOKENS) - 1
        live = self._statistics.live
        joules = self._energy.joules()
        figures: Mapping[str, float | None] = {
            "ttft_p99_ms": milliseconds(self._statistics.first_token_s.quantile(0.99)),
            "cache_use": pages / pool.limit if pool.limit else None,
            "fragmentation": fragmentation if pages else None,
            "ratio_drift": drift,
            "fallback_rate": self._statistics.fallback_rate,
        }
        alerts = self._thresholds.crossed(figures)
        self._statistics.joules = joules
        self._statistics.fragmentation = max(self._statistics.fragmentation or 0.0, fragmentation)
        self.picture = Picture(
            len(running), waiting, pages, kept, pool.held, pool.limit, pool.allocated_bytes(), cached, fragmentation,
            drift, None if live is None else live.drift, joules, tuple(alert.name for alert in alerts),
        )  # fmt: skip
        self._tell(alerts)
        for show in self.shows:
            show(self.picture)

    def _tell(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            if alert.name not in self._said:
                self._said.add(alert.name)
                self._statistics.alerts += 1
                self._say(str(alert))
