"""Cut or re-order the latents of layers that were healed, by what matters to the healed model.

A latent may be turned by any invertible matrix, as long as what reads it is turned back: healing leaves the channels in some
turn of their own. The factorisation of step 2, applied to the healed layer itself, finds the turn that orders the channels by
importance, at no cost where all are kept; and the best narrower latent, where some are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.converters.closed_form import measure_latents
from mla_cli.converters.factorize import factorize
from mla_cli.converters.layer_bank import LayerBank
from mla_cli.converters.layerwise import Batches
from mla_cli.model.latent_weights import LatentWeights

# Sequences whose gradients order the channels: the order settles sooner than the channels themselves.
ORDER_SAMPLES = 16


def recut(
    bank: LayerBank,
    layers: Sequence[LatentWeights],
    ranks: Sequence[int],
    texts: CalibrationTexts,
    batches: Batches,
    *,
    seed: int = 0,
) -> tuple[LatentWeights, ...]:
    """The layers with latents of these ranks, channels ordered by importance.

    Args:
        layers: any latent layers without gates. ranks: one a layer, at most what it has; where it is just that, the layer
            computes what it did.
        texts: sequences for the Fisher information of `layers`.
    """
    seen = measure_latents(bank, layers, texts, batches, seed=seed)
    return tuple(
        factorize(layer, rank, found.input_moment, found.fisher, reorder=True)[0]
        for layer, rank, found in zip(layers, ranks, seen, strict=True)
    )
