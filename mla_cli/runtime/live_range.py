"""Static ranges while text is generated: how far latents reach now, and the ranges that follow from that.

    range = calibrated range * clamp(reach now / reach at calibration, 1/4, 4)

A token's reach is the largest absolute value of its latent; what counts is how far nine tokens in ten reach. Beyond that are
tokens with huge latents of their own (the first of a text, line ends), whose share says more about the text than about ranges.

Every `every` tokens that a sequence generates, its ranges are derived anew from these tokens, for those to come: what is cached
keeps the scales it was written with. A sequence goes by its own tokens, so its text does not depend on what runs beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_cli.checkpoint.kv_cache import REACH_QUANTILE, KvScheme
from mla_cli.runtime.sequence import ActiveSequence

WIDEST = 4.0  # and 1 / 4: beyond, the text is unlike all that ranges were chosen for, and so is their shape
# Factors are steps of a sixteenth of an octave: near 1 they are 1, and the rounding of a batch does not show in them.
STEPS_PER_OCTAVE = 16
WINDOW = 1000  # tokens that are looked back at, at most
FEWEST = 50  # tokens that say how far nine in ten reach

# The leading bits of a float32 number its bin: exponent and four bits of the mantissa, 16 bins an octave.
_SHIFT = 23 - 4
_BINS = 256 << 4


@dataclass(frozen=True)
class StaticRanges:
    """What calibration says of the layers whose scales are static, in their order.

    Attributes:
        every: tokens between two derivations of a sequence's ranges; None: they stay as calibrated.
        reach: how far nine in ten tokens reached, one a layer; None: not known, and the layer's range stays as it is.
    """

    every: int | None
    reach: tuple[float | None, ...]

    @staticmethod
    def of(scheme: KvScheme | None) -> StaticRanges | None:
        """Those of a scheme; None if its scales are not static."""
        if scheme is None or scheme.granularity != "static":
            return None
        return StaticRanges(scheme.every, tuple(x.token_amax for x in scheme.layers if x.dtype != "bf16"))


class LiveRange:
    """Watches how far the latents of all sequences reach, and derives the ranges of each.

    Attributes:
        ranges: what calibration says.
    """

    def __init__(self, ranges: StaticRanges) -> None:
        self.ranges = ranges
        self._counts: Tensor | None = None  # [L, bins]
        self._windows: dict[ActiveSequence, _Window] = {}

    def see(self, reach: Tensor | None, counts: Tensor) -> None:
        """Count a step's tokens.

        Args:
            reach: `[L, B, T]` as `Cache.latest_ranges` gives it.
            counts: `[B]` tokens of each row that are no padding.
        """
        if reach is None:
            return
        valid = torch.arange(reach.shape[2], device=reach.device) < counts.to(reach.device)[:, None]  # [B, T]
        bins = reach[:, valid].float().contiguous().view(torch.int32) >> _SHIFT  # [L, tokens]
        if self._counts is None:
            self._counts = torch.zeros(reach.shape[0], _BINS, dtype=torch.int64, device=reach.device)
        self._counts.scatter_add_(1, bins.long(), torch.ones_like(bins, dtype=torch.int64))

    def step(self, reach: Tensor | None, sequences: Sequence[ActiveSequence]) -> Iterator[tuple[int, list[float]]]:
        """Take the reach `[L, B, 1]` of one generated token a sequence; the rows whose ranges change, and their factors."""
        if reach is None:
            return
        self.see(reach, torch.ones(len(sequences), dtype=torch.int64))
        if self.ranges.every is None:
            return
        for row, sequence in enumerate(sequences):
            window = self._windows.setdefault(sequence, _Window(min(self.ranges.every, WINDOW), reach))
            window.push(reach[:, row, 0])
            if window.tokens % self.ranges.every == 0:
                yield row, factors(window.reach(), self.ranges.reach)

    def forget(self, sequence: ActiveSequence) -> None:
        """A sequence is done."""
        self._windows.pop(sequence, None)

    @property
    def drift(self) -> float | None:
        """How far nine in ten tokens reach, over how far they did at calibration, of the layer where that is the most.

        None before enough tokens were seen, or where calibration does not say.
        """
        if self._counts is None or int(self._counts[0].sum()) < FEWEST:
            return None
        below = self._counts.cumsum(dim=1)  # [L, bins]
        rank = (below[:, -1:].double() * REACH_QUANTILE).long()
        low = torch.searchsorted(below, rank, right=True)[:, 0].int()  # [L] its bin
        edges = (torch.stack((low, low + 1)) << _SHIFT).view(torch.float32).double()
        known = zip(edges.mean(dim=0).tolist(), self.ranges.reach, strict=True)
        return max((now / then for now, then in known if then), default=None)


class _Window:
    """The reach of a sequence's last tokens, `[L]` each."""

    def __init__(self, size: int, like: Tensor) -> None:
        self.tokens = 0
        self._reach = like.new_zeros(size, like.shape[0])  # [n, L]

    def push(self, reach: Tensor) -> None:
        self._reach[self.tokens % len(self._reach)] = reach
        self.tokens += 1

    def reach(self) -> list[float]:
        """How far nine in ten of the tokens reach, one a layer; call it when the window is full."""
        ordered = self._reach.sort(dim=0).values
        return ordered[int(REACH_QUANTILE * len(ordered))].tolist()  # type: ignore[no-any-return]


def factors(now: Sequence[float], then: Sequence[float | None]) -> list[float]:
    """What to multiply calibrated ranges by, one a layer, for a reach that was `then` and is `now`."""
    return [_factor(here, there) for here, there in zip(now, then, strict=True)]


def _factor(now: float, then: float | None) -> float:
    if not now or not then:
        return 1.0  # silence says nothing about what comes after it
    steps = round(STEPS_PER_OCTAVE * math.log2(now / then))
    return float(min(WIDEST, max(1 / WIDEST, 2.0 ** (steps / STEPS_PER_OCTAVE))))
