"""What happens when memory for the cache runs out again and again: some requests are computed beside the pool.

A pool grows by copying itself, so it may find no memory where there is enough for one request. After a few allocations in
a row that failed, it stays as it is, and the next requests get caches of their own, each in one piece and no larger than its
request can become. What they hold, and so what they give, is the same to the last bit; they share nothing with others.
"""

from __future__ import annotations

from mla_cli.console import warn
from mla_cli.model.page_pool import PagePool
from mla_cli.runtime.choices import COOL_DOWN
from mla_cli.runtime.statistics import Statistics

FAILURES = 3  # allocations in a row without memory


class Fallback:
    """Counts requests that are computed apart.

    Args:
        cool_down: how many are (one at least), before the pool is tried again.

    Attributes:
        left: requests that are to be computed apart before that; 0: the pool is in use.
    """

    def __init__(self, pool: PagePool, statistics: Statistics, cool_down: int = COOL_DOWN) -> None:
        self.left = 0
        self._pool, self._statistics, self._cool_down = pool, statistics, max(1, cool_down)

    def check(self) -> None:
        """Begin, if so many allocations have failed."""
        if not self.left and self._pool.refusals >= FAILURES:
            self.begin()

    def begin(self) -> None:
        """Let the pool rest."""
        self.left = self._cool_down
        self._pool.hold()
        if not self._statistics.fallbacks:
            warn(
                f"memory for the cache ran out {FAILURES} times in a row: the next {self.left} requests get caches of their "
                "own, one each, and share nothing; lower --max-batch, --max-context or --pool-size (said once)"
            )
        self._statistics.fallbacks += 1

    def count(self) -> None:
        """A request is computed apart."""
        self.left -= 1
        self._statistics.computed_apart += 1
        if not self.left:
            self._pool.resume()
