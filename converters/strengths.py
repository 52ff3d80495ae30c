"""What a part of the latents costs: held-out loss at the strengths that `--latent-strength` may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches
from mla_cli.calibration.texts import CalibrationTexts, first
from mla_cli.checkpoint.latent_strength import channels_ordered, kept_channels
from mla_cli.converters.held_out import Loss, measure_texts, source_and
from mla_cli.converters.plan import ConversionPlan
from mla_cli.model.latent_weights import LatentWeights

STRENGTHS = (1.0, 0.75, 0.5, 0.25)
SEQUENCES = 4  # strengths differ by far more than a few sequences do


@dataclass(frozen=True)
class StrengthLoss:
    """One strength: numbers cached a token over all layers, and losses on the same text of the model and of the source."""

    strength: float
    cached_per_token: int
    loss: Loss
    source: Loss


def parts_of(layers: Sequence[LatentWeights], strength: float) -> tuple[LatentWeights, ...]:
    """The layers with the first channels of their latents alone, as `--latent-strength` reads them."""
    return tuple(layer.narrowed(kept_channels(layer.spec.kv_lora_rank, strength)) for layer in layers)


def losses_by_strength(
    bank: LayerBank,
    plan: ConversionPlan,
    layers: Sequence[LatentWeights],
    unseen: CalibrationTexts,
    batches: Batches,
) -> list[StrengthLoss]:
    """Losses of a converted model at each strength, on a few held-out sequences; none where its latents have no order."""
    # A gate or a norm reads all channels.
    if any(
        layer.spec.norm_eps is not None or layer.gate is not None or not channels_ordered(layer) for layer in layers
    ):
        return []
    parts = {strength: parts_of(layers, strength) for strength in STRENGTHS}
    stages = source_and(bank, {str(strength): part for strength, part in parts.items()})
    found = measure_texts("reading parts of the latents", stages, first(unseen, SEQUENCES), batches)
    return [
        StrengthLoss(
            strength,
            # Whole, the stock form also caches its constant channels.
            plan.cached_per_token if strength == 1 else sum(layer.spec.cached_per_token for layer in part),
            found[str(strength)],
            found["source"],
        )
        for strength, part in parts.items()
    ]
