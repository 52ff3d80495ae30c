"""Where a layer's range is cut: the clip with the least squared error, by the counts of an observer."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_cli.calibration.observers import COLUMN_BITS, COLUMNS, OCTAVES, LatentRange
from mla_cli.kernels.quantized import CacheDtype, Granularity, LatentQuantizer

# A clip saturates what calibration has not seen, so it has to pay: this much of the squared error.
LEAST_GAIN = 0.05
STEPS_PER_OCTAVE = 8
SEARCHED_OCTAVES = 12  # the first token of a text may hold values a thousand times those of the others
FAR_BEYOND = 4.0  # times the least error so far: narrower ranges only clip more
_POINTS = 4  # a bin stands for this many values spread over it


def choose_clip(seen: LatentRange, dtype: CacheDtype, granularity: Granularity) -> float | None:
    """The range of a layer: None leaves each token its own (`token`); `static` always has one."""
    if seen.amax == 0:
        return None if granularity == "token" else 1.0  # zeros stay zeros in any range
    candidates = [seen.amax * 2 ** (-k / STEPS_PER_OCTAVE) for k in range(SEARCHED_OCTAVES * STEPS_PER_OCTAVE)]
    errors: list[float] = []
    for clip in candidates:
        errors.append(clip_error(seen, dtype, granularity, clip))
        if errors[-1] > FAR_BEYOND * min(errors):
            break
    best = errors.index(min(errors))
    if errors[best] < (1 - LEAST_GAIN) * errors[0]:
        return candidates[best]
    return None if granularity == "token" else seen.amax


def clip_error(seen: LatentRange, dtype: CacheDtype, granularity: Granularity, clip: float) -> float:
    """Mean over tokens of the squared error over the token's largest value.

    Unweighted, a few tokens with huge latents (the first of a text, often) would decide alone; weighted by the inverse square,
    they would be given up. On SmolLM2-135M at ratio 2, static INT8: KL 6.7e-4 so, 6.3e-4 and 8.4e-4 with those.
    """
    own = seen.rows <= clip if granularity == "token" else torch.zeros_like(seen.rows, dtype=torch.bool)  # [R]
    total = 0.0
    if bool(own.any()):
        # In a token's own range the error relative to its largest value is the same at every size.
        per_share = _squared_error(_shares(), LatentQuantizer(dtype, "static", 1.0))  # [COLUMNS]
        total += float(seen.rows[own] @ (seen.counts[own].double() @ per_share))
    cut = ~own & (seen.rows > 0)
    if bool(cut.any()):
        rows = seen.rows[cut]
        values = rows[:, None, None] * _shares()  # [R, COLUMNS, points]
        error = _squared_error(values, LatentQuantizer(dtype, "static", clip))  # [R, COLUMNS]
        total += float(((seen.counts[cut] * error).sum(dim=-1) / rows).sum())
    return total / seen.tokens


def _shares() -> Tensor:
    """`[COLUMNS, points]` float64: what share of a token's largest value each bin of an observer stands for."""
    index = torch.arange(COLUMNS - 1, dtype=torch.float64)
    within = (torch.arange(_POINTS, dtype=torch.float64) + 0.5) / _POINTS
    octave, part = (index // 2**COLUMN_BITS) - OCTAVES, (index % 2**COLUMN_BITS)[:, None]
    shares = torch.exp2(octave)[:, None] * (1 + (part + within) / 2**COLUMN_BITS)  # [COLUMNS - 1, points]
    shares[0] = 0  # everything smaller than the bins
    return torch.cat((shares, torch.ones(1, _POINTS, dtype=torch.float64)))


def _squared_error(values: Tensor, quantizer: LatentQuantizer) -> Tensor:
    """Mean squared error over the last dimension, by the quantizer itself."""
    return (quantizer.rounded(values) - values).square().mean(dim=-1)
