"""Ways to cache a model's latents: turned or not, all channels or the first ones, in this or that type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from mla_cli.calibration.rotate_model import turned_layer
from mla_cli.checkpoint.deepseek_form import free_rank
from mla_cli.checkpoint.kv_cache import Quantizers
from mla_cli.checkpoint.latent_strength import kept_channels, narrowed_layer
from mla_cli.checkpoint.load import ModelSource
from mla_cli.model.decoder import DecoderLayer
from mla_cli.model.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec

Change = Callable[[int, DecoderLayer], DecoderLayer]
Turns = Sequence[Tensor | None]
"""One a layer: `[k, k]` orthogonal; None: the layer stays as it is."""


def unchanged(index: int, layer: DecoderLayer) -> DecoderLayer:
    """The layer as it is stored."""
    return layer


@dataclass(frozen=True)
class Variant:
    """A model as it may be written and run.

    Attributes:
        spec: of the decoder that runs. change: makes its layers of the stored ones.
        quantizers: one a layer, None where latents stay in the type that is computed in.
    """

    spec: DecoderSpec
    quantizers: Quantizers
    change: Change = unchanged

    def cached(self, quantizers: Quantizers) -> Variant:
        """The same layers with other caches."""
        return replace(self, quantizers=quantizers)


def make_variant(model: ModelSource, turns: Turns | None = None, strength: float = 1.0) -> Variant:
    """Layers of a model, turned as they will be written, then narrowed as they will be run; not quantised."""
    stored = model.stored_dtype

    def change(index: int, layer: DecoderLayer) -> DecoderLayer:
        turn = None if turns is None else turns[index]
        return narrowed_layer(layer if turn is None else turned_layer(layer, turn, stored), strength)

    spec = narrowed_spec(model.spec, strength)
    return Variant(spec, (None,) * spec.num_layers, unchanged if turns is None and strength == 1 else change)


def narrowed_spec(spec: DecoderSpec, strength: float) -> DecoderSpec:
    """What a decoder caches at a latent strength."""
    return spec.with_attention(tuple(_narrowed_attention(attention, strength) for attention in spec.attention))


def _narrowed_attention(attention: AttentionSpec, strength: float) -> AttentionSpec:
    if strength == 1 or not isinstance(attention, LatentAttentionSpec):
        return attention
    return replace(attention, kv_lora_rank=kept_channels(own_channels(attention), strength), norm_eps=None)


def own_channels(attention: LatentAttentionSpec) -> int:
    """Latent channels of a converted layer without the constant ones of the stock form."""
    return attention.kv_lora_rank if attention.norm_eps is None else free_rank(attention.kv_lora_rank)
