"""Cut or re-order the latents of layers that were healed, by what matters to the healed model.

A latent may be turned by any invertible matrix, as long as what reads it is turned back: healing leaves the channels in some
turn of their own. The factorisation of step 2, applied to the healed layer itself, finds the turn that orders the channels by
importance, at no cost where all are kept; and the best narrower latent, where some are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from mla_cli.calibration.layer_bank import LayerBank, StoredLayers, specs_of
from mla_cli.calibration.layerwise import Batches
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.console import note
from mla_cli.converters.closed_form import measure_latents
from mla_cli.converters.factorize import factorize
from mla_cli.converters.held_out import measure, source_and
from mla_cli.converters.strengths import parts_of
from mla_cli.model.latent_weights import LatentWeights

# Sequences whose gradients order the channels of a healed model: few, since at full width nothing is at stake.
ORDER_SAMPLES = 16
# Strength at which an order is judged.
JUDGED_AT = 0.5


def recut(
    bank: LayerBank,
    layers: Sequence[LatentWeights],
    ranks: Sequence[int],
    texts: CalibrationTexts,
    batches: Batches,
    *,
    seed: int = 0,
) -> Sequence[LatentWeights]:
    """The layers with latents of these ranks, channels ordered by importance.

    Args:
        layers: any latent layers without gates. ranks: one a layer, at most what it has; where it is just that, the layer
            computes what it did.
        texts: sequences for the Fisher information of `layers`.
    """
    seen = measure_latents(bank, layers, texts, batches, seed=seed)
    cut = StoredLayers(batches.workplace.series())
    for layer, rank, found in zip(layers, ranks, seen, strict=True):
        cut.append(factorize(layer, rank, found.input_moment, found.fisher, reorder=True)[0])
    return cut


def put_in_order(
    bank: LayerBank,
    layers: Sequence[LatentWeights],
    texts: CalibrationTexts,
    probe: CalibrationTexts,
    batches: Batches,
    *,
    seed: int = 0,
) -> Sequence[LatentWeights]:
    """The layers with their channels re-ordered, where half of each latent does better on held-out text then.

    Nested healing teaches the channels where they stand, so that their own order can be the better one.

    Args:
        texts: sequences for the Fisher information. probe: held-out ones.
    """
    whole = [spec.kv_lora_rank for spec in specs_of(layers)]
    ordered = recut(bank, layers, whole, texts, batches, seed=seed)
    halves = {"healed": parts_of(layers, JUDGED_AT), "ordered": parts_of(ordered, JUDGED_AT)}
    found = measure(source_and(bank, halves), probe.sequences, probe.lengths, batches)
    before, after = found["healed"].kl, found["ordered"].kl
    note(
        f"half of each latent: KL {before:.4f} as healed, {after:.4f} re-ordered: {'taken' if after < before else 'not taken'}"
    )
    return ordered if after < before else layers
