"""What one layer's latents look like over all calibration text: their ranges, and how values spread below them.

Everything that is kept is a count or a maximum, so the result depends on the tokens alone: not on their order, and not on how
they were cut into batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_cli.errors import MlaError

# A float32's leading bits number its bin: exponent and the first bits of the mantissa. No range has to be assumed.
_MANTISSA_BITS = 23
_BIAS = 127
ROW_BITS = 4  # a token's largest value: 16 bins an octave, so its bin says it within 3 %
COLUMN_BITS = 5  # a value's share of its token's largest: 32 bins an octave
OCTAVES = 16  # smaller shares are one bin: under 1/500 of an int8 step
_FIRST_COLUMN = (_BIAS - OCTAVES) << COLUMN_BITS
COLUMNS = (OCTAVES << COLUMN_BITS) + 1  # the last one holds a share of exactly 1
QUANTILES = (0.5, 0.99, 0.999)
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class LatentRange:
    """One layer's latents.

    Attributes:
        tokens: tokens seen; amax: largest absolute value of all.
        token_amax: quantiles (see `QUANTILES`) of each token's largest absolute value, to the width of a bin.
        rows: `[R]` float64, the middle of each occupied bin of a token's largest value, ascending.
        counts: `[R, COLUMNS]` int64, values by their token's bin and their share of that token's largest value.
    """

    tokens: int
    amax: float
    token_amax: tuple[float, ...]
    rows: Tensor
    counts: Tensor


class LatentObserver:
    """Watches the latents of one layer, as the cache stores them (after the latent norm).

    Nothing is kept per batch: small tensors that stay, allocated among large ones that go, would tear the heap into pieces.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.tokens = 0
        self._rank = 0
        self._amax = 0.0
        self._counts: dict[int, Tensor] = {}

    def add(self, latents: Tensor) -> None:
        """Count latents `[n, r]`, padding left out by the caller.

        Raises:
            MlaError: NaN or infinity among them.
        """
        if not latents.shape[0]:
            return
        values = latents.detach().float().abs()  # [n, r]
        amax = values.amax(dim=-1)  # [n]
        if not bool(torch.isfinite(amax).all()):
            raise MlaError(
                f"the latents of layer {self.layer} hold NaN or infinity",
                fix="the weights are damaged or overflow: try --dtype float32, or check with `mla inspect`",
            )
        self.tokens, self._rank = self.tokens + latents.shape[0], latents.shape[1]
        self._amax = max(self._amax, float(amax.max()))
        rows, inverse = torch.unique(_bits(amax) >> (_MANTISSA_BITS - ROW_BITS), return_inverse=True)
        share = values / amax.clamp(min=_SMALLEST)[:, None]
        columns = ((_bits(share) >> (_MANTISSA_BITS - COLUMN_BITS)) - _FIRST_COLUMN).clamp(min=0)  # [n, r]
        cells = (inverse[:, None] * COLUMNS + columns).flatten()
        counts = torch.bincount(cells, minlength=len(rows) * COLUMNS).view(-1, COLUMNS).cpu()  # [R, COLUMNS]
        for row, count in zip(rows.tolist(), counts, strict=True):
            if row in self._counts:
                self._counts[row] += count
            else:
                self._counts[row] = count.clone()

    def result(self) -> LatentRange:
        """What was seen so far (at least one token)."""
        low = torch.tensor(sorted(self._counts), dtype=torch.int32)
        edges = torch.stack((low, low + 1)) << (_MANTISSA_BITS - ROW_BITS)
        rows = edges.view(torch.float32).double().mean(dim=0).clamp(max=self._amax)
        counts = torch.stack([self._counts[row] for row in low.tolist()])
        return LatentRange(self.tokens, self._amax, _quantiles(rows, counts.sum(dim=-1) // self._rank), rows, counts)


def check_complete(observers: Sequence[LatentObserver], tokens: int) -> None:
    """Make sure that every layer has seen every token.

    Raises:
        MlaError: the layers that have not; their ranges would be guesses.
    """
    incomplete = [observer for observer in observers if observer.tokens != tokens]
    if incomplete:
        names = ", ".join(f"{observer.layer} ({observer.tokens:,})" for observer in incomplete)
        raise MlaError(
            f"not every layer has seen all {tokens:,} calibration tokens; layer (tokens seen): {names}",
            fix="nothing was written; please report this",
        )


def _bits(values: Tensor) -> Tensor:
    """The bit patterns of floats from 0, which rise with the values."""
    return values.contiguous().view(torch.int32)


def _quantiles(rows: Tensor, tokens: Tensor) -> tuple[float, ...]:
    """Quantiles of values that are `rows` `[R]`, ascending, `tokens` `[R]` times each."""
    below = tokens.cumsum(dim=0)
    ranks = torch.tensor([int(q * int(below[-1])) for q in QUANTILES])
    return tuple(rows[torch.searchsorted(below, ranks, right=True)].tolist())
