"""What a part of the latents costs: held-out loss at the strengths that `--latent-strength` may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mla_cli.calibration.layer_bank import LayerBank, specs_of
from mla_cli.calibration.layerwise import Batches
from mla_cli.calibration.offload import Mapped
from mla_cli.calibration.texts import CalibrationTexts, first
from mla_cli.checkpoint.latent_strength import channels_ordered, kept_channels
from mla_cli.converters.held_out import Loss, measure_texts, source_and
from mla_cli.converters.plan import ConversionPlan
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.model.spec import LatentAttentionSpec

STRENGTHS = (1.0, 0.75, 0.5, 0.25)
SEQUENCES = 4  # strengths differ by far more than a few sequences do


@dataclass(frozen=True)
class StrengthLoss:
    """One strength: numbers cached a token over all layers, and losses on the same text of the model and of the source."""

    strength: float
    cached_per_token: int
    loss: Loss
    source: Loss


def parts_of(layers: Sequence[LatentWeights], strength: float) -> Sequence[LatentWeights]:
    """The layers with the first channels of their latents alone, as `--latent-strength` reads them; made as they are read."""
    return Mapped(layers, lambda layer: layer.narrowed(kept_channels(layer.spec.kv_lora_rank, strength)))


def losses_by_strength(
    bank: LayerBank,
    plan: ConversionPlan,
    layers: Sequence[LatentWeights],
    unseen: CalibrationTexts,
    batches: Batches,
) -> list[StrengthLoss]:
    """Losses of a converted model at each strength, on a few held-out sequences; none where its latents have no order."""
    specs = specs_of(layers)
    # A gate or a norm reads all channels.
    if any(spec.norm_eps is not None or spec.gate_chunk is not None for spec in specs):
        return []
    if not all(channels_ordered(layer) for layer in layers):
        return []
    parts = {strength: parts_of(layers, strength) for strength in STRENGTHS}
    stages = source_and(bank, {str(strength): part for strength, part in parts.items()})
    found = measure_texts("reading parts of the latents", stages, first(unseen, SEQUENCES), batches)
    return [
        StrengthLoss(
            strength,
            # Whole, the stock form also caches its constant channels.
            plan.cached_per_token
            if strength == 1
            else sum(_narrowed(spec, strength).cached_per_token for spec in specs),
            found[str(strength)],
            found["source"],
        )
        for strength in parts
    ]


def _narrowed(spec: LatentAttentionSpec, strength: float) -> LatentAttentionSpec:
    return replace(spec, kv_lora_rank=kept_channels(spec.kv_lora_rank, strength))
