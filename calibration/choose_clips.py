"""The ranges of all layers: searched layer by layer, then judged by what the whole model does with them.

What a range costs is known to second order, and from the diagonal of the Fisher information (`clipping`): right for rounding,
whose errors average out. What is cut off a token does not: it points the same way in token after token and layer after layer,
and the first token of a text, which all others attend to, may be among those that are cut. So ranges that cut are measured
beside wider ones, on text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mla_cli.calibration.clipping import Clip, GroupLoss, choose_clip, group_losses, widened
from mla_cli.calibration.observers import LatentRange
from mla_cli.calibration.passes import HeldOut, HeldOutCost
from mla_cli.calibration.sensitivity import Sensitivity
from mla_cli.calibration.variants import Variant
from mla_cli.checkpoint.kv_cache import Quantizers
from mla_cli.console import progress
from mla_cli.kernels.quantized import CacheDtype, Granularity, LatentQuantizer, RopeDtype, group_of

WIDER = (0.0, 0.5, 1.0)  # shares of the way to ranges that cut nothing
# Divergences that differ by less are alike: the narrower ranges are taken then, whatever the last bits say.
ALIKE = 0.01


@dataclass(frozen=True)
class ChosenClips:
    """One range a layer (None: no latent, or not quantised), and the quantizers that have them.

    Attributes:
        measured: what was compared to choose: the share of the way to ranges that cut nothing, and what that costs.
        wider: the share that was chosen.
    """

    clips: tuple[Clip | None, ...]
    quantizers: Quantizers
    measured: tuple[tuple[float, HeldOutCost], ...] = ()
    wider: float = 0.0


def choose_clips(
    seen: Sequence[LatentRange | None],
    sensitivity: Sequence[Sensitivity | None],
    variant: Variant,
    text: HeldOut,
    *,
    dtype: CacheDtype | None,
    granularity: Granularity,
    rope_dtype: RopeDtype,
) -> ChosenClips:
    """Ranges of least divergence among those that are foretold to be best and wider ones.

    Args:
        seen, sensitivity: one a layer. variant: the layers that were watched. text: what ranges that cut are measured on.
        dtype: None: nothing is quantised.
    """
    if dtype is None:
        return ChosenClips((None,) * len(seen), (None,) * len(seen))
    losses: list[list[GroupLoss]] = []
    clips: list[Clip | None] = []
    layers = list(zip(seen, sensitivity, strict=True))
    for latents, weighed in progress(layers, "choosing ranges", unit="layer"):
        if latents is None or weighed is None:
            losses.append([])
            clips.append(None)
            continue
        # A page's range says little about how large its tokens are.
        weights = weighed.weights(latents, group_of(dtype), by_size=granularity != "page")
        losses.append(group_losses(latents, weights, dtype, granularity))
        clips.append(choose_clip(losses[-1]))
    wider = [
        tuple(None if clip is None else widened(clip, loss, share) for clip, loss in zip(clips, losses, strict=True))
        for share in WIDER
    ]
    quantizers = [tuple(_quantizer(clip, dtype, granularity, rope_dtype) for clip in each) for each in wider]
    if quantizers[0] == quantizers[-1]:  # nothing is cut
        return ChosenClips(tuple(clips), quantizers[0])
    costs = text.costs([variant.cached(each) for each in quantizers], title="comparing ranges")
    least = min(cost.kl for cost in costs)
    best = next(index for index, cost in enumerate(costs) if cost.kl <= (1 + ALIKE) * least)
    return ChosenClips(wider[best], quantizers[best], tuple(zip(WIDER, costs, strict=True)), WIDER[best])


def _quantizer(
    clip: Clip | None, dtype: CacheDtype, granularity: Granularity, rope_dtype: RopeDtype
) -> LatentQuantizer | None:
    if clip is None:
        return None
    return LatentQuantizer(dtype, granularity, math.inf if clip.reach is None else clip.reach, rope_dtype)
