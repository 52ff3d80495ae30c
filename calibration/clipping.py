"""Where a layer's range is cut: the clip that costs the model's loss least, by the counts of an observer.

    loss = 1/2 E[e^T F e] ~ 1/2 sum_i w_i E[e_i^2]   (nats a token, to second order)

with `e` the error of a latent, `F` the Fisher information of the loss about it, and `w` its diagonal, which depends on the
group and on how large the token's latents are: the first token of a text, often a thousand times larger than the others, would
decide alone in a plain sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mla_cli.calibration.observers import COLUMN_BITS, COLUMNS, OCTAVES, LatentRange
from mla_cli.kernels.quantized import CacheDtype, Granularity, LatentQuantizer

# A clip saturates what calibration has not seen, so it has to pay: this much of the loss.
LEAST_GAIN = 0.05
STEPS_PER_OCTAVE = 8
SEARCHED_OCTAVES = 12  # the first token of a text may hold values a thousand times those of the others
FAR_BEYOND = 4.0  # times the least loss so far: narrower ranges only clip more
UNCLIPPED = 3e38  # of a group whose neighbours are clipped: no float32 latent that is finite is beyond
_POINTS = 4  # a bin stands for this many values spread over it


@dataclass(frozen=True)
class Clip:
    """A layer's range: `reach` as schemes store it (None: each token's own), `loss` what quantising costs with it."""

    reach: float | tuple[float, ...] | None
    loss: float


@dataclass(frozen=True)
class GroupLoss:
    """What it costs to quantise one group of a layer's channels, by how far its range may reach.

    Attributes:
        amax: the largest value seen; rows: `[R]` float64, what the group reaches (see `LatentRange`).
        counts: `[R, COLUMNS]` float64 values; weights: `[R]` mean squared gradient of the loss, a value.
        own: `[R]` float64, what each row's values cost in ranges that end where they do; None: static ranges, one for all.
        tokens: tokens seen.
    """

    dtype: CacheDtype
    amax: float
    rows: Tensor
    counts: Tensor
    weights: Tensor
    own: Tensor | None
    tokens: int

    @property
    def widest(self) -> float:
        """The least range that cuts nothing: a page may be made for more than it holds."""
        return max(self.amax, float(self.rows.max()))

    def at(self, clip: float) -> float:
        """The cost of a range that reaches at most `clip`, in nats a token to second order."""
        within = self.rows <= clip if self.own is not None else torch.zeros_like(self.rows, dtype=torch.bool)  # [R]
        total = float(self.own[within].sum()) if self.own is not None else 0.0
        cut = ~within & (self.rows > 0)
        if bool(cut.any()):
            values = self.rows[cut][:, None, None] * _shares()  # [R, COLUMNS, points]
            error = _squared_error(values, LatentQuantizer(self.dtype, "static", clip))  # [R, COLUMNS]
            total += float(self.weights[cut] @ (self.counts[cut] * error).sum(dim=-1))
        return total / self.tokens / 2


def group_losses(seen: LatentRange, weights: Tensor, dtype: CacheDtype, granularity: Granularity) -> list[GroupLoss]:
    """What quantising a layer costs, one for each group of channels that has a range.

    Args:
        weights: `[R]` mean squared gradient of the loss, a value, for each row of `seen`.
    """
    found = []
    for group, amax in enumerate(seen.group_amax):
        mine = seen.groups == group
        rows, counts, weighed = seen.rows[mine], seen.counts[mine].double(), weights[mine].double()
        own = None
        if granularity != "static":
            # In a token's own range the error relative to what it reaches is the same at every size.
            own = weighed * rows.square() * (counts @ _unit_error(dtype))
        found.append(GroupLoss(dtype, amax, rows, counts, weighed, own, seen.tokens))
    return found


def choose_clip(losses: Sequence[GroupLoss]) -> Clip:
    """The range of a layer: None leaves each token (or page) its own; `static` always has one."""
    chosen = [_group_clip(loss) for loss in losses]
    return _clip(losses, [reach for reach, _ in chosen], sum(cost for _, cost in chosen))


def widened(clip: Clip, losses: Sequence[GroupLoss], share: float) -> Clip:
    """A range that is cut less.

    Args:
        losses: of the layer that `clip` was chosen for. share: of the way, in octaves, to a range that cuts nothing (1).
    """
    reaches: list[float | None] = []
    chosen = clip.reach if isinstance(clip.reach, tuple) else (clip.reach,) * len(losses)
    for reach, loss in zip(chosen, losses, strict=True):
        if reach is None or reach >= loss.amax:
            reaches.append(reach)
        elif share < 1:
            reaches.append(reach ** (1 - share) * loss.widest**share)
        else:
            reaches.append(loss.amax if loss.own is None else None)
    cost = sum(loss.at(UNCLIPPED if reach is None else reach) for reach, loss in zip(reaches, losses, strict=True))
    return _clip(losses, reaches, cost)


def _clip(losses: Sequence[GroupLoss], reaches: Sequence[float | None], cost: float) -> Clip:
    if all(reach in (None, UNCLIPPED) for reach in reaches):
        return Clip(None, cost)
    known = tuple(UNCLIPPED if reach is None else reach for reach in reaches)
    return Clip(known if losses[0].dtype == "int4" else known[0], cost)


def _group_clip(loss: GroupLoss) -> tuple[float | None, float]:
    """The range of one group (None: each token's own), and what it costs."""
    static = loss.own is None
    if loss.amax == 0:
        return (1.0 if static else None), 0.0  # zeros stay zeros in any range
    candidates = [loss.widest * 2 ** (-k / STEPS_PER_OCTAVE) for k in range(SEARCHED_OCTAVES * STEPS_PER_OCTAVE)]
    losses: list[float] = []
    for clip in candidates:
        losses.append(loss.at(clip))
        if losses[-1] > FAR_BEYOND * min(losses):
            break
    best = losses.index(min(losses))
    if losses[best] < (1 - LEAST_GAIN) * losses[0]:
        return candidates[best], losses[best]
    return (loss.amax if static else None), losses[0]


def _shares() -> Tensor:
    """`[COLUMNS, points]` float64: what share of the reach each bin of an observer stands for."""
    index = torch.arange(COLUMNS - 1, dtype=torch.float64)
    within = (torch.arange(_POINTS, dtype=torch.float64) + 0.5) / _POINTS
    octave, part = (index // 2**COLUMN_BITS) - OCTAVES, (index % 2**COLUMN_BITS)[:, None]
    shares = torch.exp2(octave)[:, None] * (1 + (part + within) / 2**COLUMN_BITS)  # [COLUMNS - 1, points]
    shares[0] = 0  # everything smaller than the bins
    return torch.cat((shares, torch.ones(1, _POINTS, dtype=torch.float64)))


@cache
def _unit_error(dtype: CacheDtype) -> Tensor:
    """`[COLUMNS]` mean squared error of each bin in a range that ends where the values do, over its square."""
    return _squared_error(_shares(), LatentQuantizer(dtype, "static", 1.0))


def _squared_error(values: Tensor, quantizer: LatentQuantizer) -> Tensor:
    """Mean squared error over the last dimension, by the quantizer itself."""
    flat = values.flatten()  # one long latent: a few values each would fill groups with padding
    return (quantizer.rounded(flat) - flat).square().view(values.shape).mean(dim=-1)
