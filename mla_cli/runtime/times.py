"""Durations as a long run counts them: by bounds, with the latest kept as they are for quantiles."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

WINDOW = 1 << 16  # durations that are kept: half a megabyte


class Times:
    """Durations in seconds, however many.

    Attributes:
        bounds: upper ones of the classes that are counted, ascending; counts: of each class, and of what is longer than all.
        count, total: of all, in number and in seconds.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.count, self.total = 0, 0.0
        self._latest = array("d")

    def append(self, seconds: float) -> None:
        """Count one more."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        if len(self._latest) < WINDOW:
            self._latest.append(seconds)
        else:
            self._latest[self.count % WINDOW] = seconds
        self.count += 1
        self.total += seconds

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[float]:
        return iter(self._latest[:])

    def quantile(self, share: float) -> float | None:
        """The smallest of the latest that at least `share` of them do not exceed; None of none."""
        values = np.array(self._latest[:])  # a copy: while its buffer is lent, `append` of another thread would fail
        if not len(values):
            return None
        rank = min(int(share * len(values)), len(values) - 1)
        return float(np.partition(values, rank)[rank])
