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


def choose_clip(seen: LatentRange, weights: Tensor, dtype: CacheDtype, granularity: Granularity) -> Clip:
    """The range of a layer: None leaves each token (or page) its own; `static` always has one.

    Args:
        weights: `[R]` mean squared gradient of the loss, a value, for each row of `seen`.
    """
    chosen = [_group_clip(seen, weights, group, dtype, granularity) for group in range(len(seen.group_amax))]
    loss = sum(cost for _, cost in chosen)
    reaches = [reach for reach, _ in chosen]
    if all(reach is None for reach in reaches):
        return Clip(None, loss)
    known = tuple(UNCLIPPED if reach is None else reach for reach in reaches)
    return Clip(known if dtype == "int4" else known[0], loss)


def clip_loss(
    seen: LatentRange, weights: Tensor, dtype: CacheDtype, granularity: Granularity, clip: float | Sequence[float]
) -> float:
    """What quantising with a range costs, in nats a token to second order."""
    clips = [clip] * len(seen.group_amax) if isinstance(clip, float | int) else clip
    return sum(_group_loss(seen, weights, group, dtype, granularity, reach) for group, reach in enumerate(clips))


def _group_clip(
    seen: LatentRange, weights: Tensor, group: int, dtype: CacheDtype, granularity: Granularity
) -> tuple[float | None, float]:
    static = granularity == "static"
    amax = seen.group_amax[group]
    if amax == 0:
        return (1.0 if static else None), 0.0  # zeros stay zeros in any range
    reached = float(seen.rows[seen.groups == group].max())
    candidates = [max(amax, reached) * 2 ** (-k / STEPS_PER_OCTAVE) for k in range(SEARCHED_OCTAVES * STEPS_PER_OCTAVE)]
    losses: list[float] = []
    for clip in candidates:
        losses.append(_group_loss(seen, weights, group, dtype, granularity, clip))
        if losses[-1] > FAR_BEYOND * min(losses):
            break
    best = losses.index(min(losses))
    if losses[best] < (1 - LEAST_GAIN) * losses[0]:
        return candidates[best], losses[best]
    return (amax if static else None), losses[0]


def _group_loss(
    seen: LatentRange, weights: Tensor, group: int, dtype: CacheDtype, granularity: Granularity, clip: float
) -> float:
    mine = seen.groups == group
    rows, counts, weights = seen.rows[mine], seen.counts[mine].double(), weights[mine]
    own = rows <= clip if granularity != "static" else torch.zeros_like(rows, dtype=torch.bool)  # [R]
    total = 0.0
    if bool(own.any()):
        # In a token's own range the error relative to what it reaches is the same at every size.
        per_share = _unit_error(dtype)  # [COLUMNS]
        total += float((weights[own] * rows[own].square()) @ (counts[own] @ per_share))
    cut = ~own & (rows > 0)
    if bool(cut.any()):
        values = rows[cut][:, None, None] * _shares()  # [R, COLUMNS, points]
        error = _squared_error(values, LatentQuantizer(dtype, "static", clip))  # [R, COLUMNS]
        total += float(weights[cut] @ (counts[cut] * error).sum(dim=-1))
    return total / seen.tokens / 2


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
