"""What a metric's items say: its value, its standard error, and how sure a difference between two models is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]

RESAMPLES = 2000  # the 2.5 % and 97.5 % points then move by less than 5 % of the interval from seed to seed
_BLOCK = 2**22  # drawn indices held at a time


@dataclass(frozen=True)
class Items:
    """Per-item results whose metric is `sum(totals) / sum(weights)`, or the exponential of that (perplexities).

    Attributes:
        totals: `[n]`, e.g. 1 where an item is right, or its negative log-likelihood.
        weights: `[n]`, e.g. 1, or its number of tokens.
        scale: applied to the ratio.
        identity: what the items are; only items of one identity can be paired.
    """

    totals: Numbers
    weights: Numbers
    transform: Literal["mean", "exp"] = "mean"
    scale: float = 1.0
    identity: int = 0

    @staticmethod
    def of(
        totals: Sequence[float],
        weights: Sequence[float] | None = None,
        transform: Literal["mean", "exp"] = "mean",
        scale: float = 1.0,
    ) -> Items:
        """Items from plain numbers; every item weighs 1 where no weights are given."""
        values = np.asarray(totals, dtype=np.float64)
        return Items(
            values, np.ones_like(values) if weights is None else np.asarray(weights, np.float64), transform, scale
        )

    @property
    def count(self) -> int:
        """Number of items."""
        return int(self.totals.size)


def value(items: Items) -> float | None:
    """The metric; None where it is not a finite number."""
    return finite(float(_metric(items, items.totals.sum(), items.weights.sum())))


def standard_error(items: Items) -> float | None:
    """Standard error of the metric (for a ratio by the delta method); None for fewer than two items."""
    n, metric, weight = items.count, value(items), float(items.weights.sum())
    if n < 2 or metric is None or weight <= 0:
        return None
    residuals = items.totals - items.totals.sum() / weight * items.weights
    spread = math.sqrt(n / (n - 1) * float(np.square(residuals).sum())) / weight
    slope = metric if items.transform == "exp" else 1.0
    return finite(abs(items.scale) * spread * slope)


def paired_interval(
    candidate: Items, baseline: Items, *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """95 % interval of `candidate - baseline` by bootstrap over items, the same draw for both.

    None where the items cannot be paired or there are fewer than two.
    """
    n = candidate.count
    if n < 2 or n != baseline.count or candidate.identity != baseline.identity:
        return None
    if not np.array_equal(candidate.weights, baseline.weights):
        return None
    generator = np.random.default_rng(seed)
    differences = []
    rows = max(1, _BLOCK // n)
    for start in range(0, resamples, rows):
        drawn = generator.integers(0, n, size=(min(rows, resamples - start), n))
        weights = candidate.weights[drawn].sum(axis=1)
        ours, theirs = (_metric(items, items.totals[drawn].sum(axis=1), weights) for items in (candidate, baseline))
        with np.errstate(invalid="ignore"):
            differences.append(ours - theirs)
    drawn_differences = np.concatenate(differences)
    if not np.isfinite(drawn_differences).all():
        return None
    low, high = np.quantile(drawn_differences, (0.025, 0.975))
    return float(low), float(high)


def relative_drop_percent(candidate: float | None, baseline: float | None, higher_is_better: bool) -> float | None:
    """How much worse the candidate is, in percent of the baseline; negative where it is better.

    None where the baseline is zero or a value is missing.
    """
    if candidate is None or baseline is None or baseline == 0:
        return None
    worse = baseline - candidate if higher_is_better else candidate - baseline
    return finite(100.0 * worse / abs(baseline))


def within(candidate: float | None, baseline: float | None, higher_is_better: bool, max_drop: float) -> bool:
    """Whether the candidate is at most `max_drop` percent worse; a candidate without a value never is."""
    if candidate is None:
        return False
    if baseline is None:
        return True  # the baseline itself has no finite value: nothing to fall short of
    drop = relative_drop_percent(candidate, baseline, higher_is_better)
    if drop is None:
        return candidate >= baseline if higher_is_better else candidate <= baseline
    return drop <= max_drop


def finite(number: float) -> float | None:
    """The number, or None in place of NaN and infinity, which JSON does not have."""
    return number if math.isfinite(number) else None


def _metric(items: Items, totals: Numbers, weights: Numbers) -> Numbers:
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        ratio = np.divide(totals, weights) * items.scale
        return np.exp(ratio) if items.transform == "exp" else ratio
