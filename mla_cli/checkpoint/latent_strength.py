"""Latent strength: run a converted model on the first share of each latent's channels.

A conversion orders a latent's channels by importance, so the first ones are themselves a latent, only smaller. The weights are
narrowed once, when a model is loaded: whatever runs or caches it afterwards sees a smaller model. The norm and the constant
channels of the stock form, which neutralise each other, go with the rest. Calibrated ranges stay valid: a part of a latent
never exceeds the whole.

The command line checks a strength with this module, so torch is imported only where weights are touched.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from mla_cli.errors import UsageError

if TYPE_CHECKING:
    from mla_cli.checkpoint.load import ModelSource
    from mla_cli.model.attention import LatentAttention
    from mla_cli.model.decoder import DecoderLayer
    from mla_cli.model.latent_weights import LatentWeights


def check_strength(strength: float) -> float:
    """Refuse a share that is none.

    Raises:
        UsageError: it is not above 0 and at most 1.
    """
    if not 0 < strength <= 1:
        raise UsageError(
            f"a latent strength of {strength:g} is no share of a latent",
            where=f"--latent-strength {strength:g}",
            fix="give a number above 0 and at most 1, e.g. 0.5",
        )
    return strength


def kept_channels(channels: int, strength: float) -> int:
    """How many of so many channels a strength keeps: `ceil(strength * channels)`, at least one."""
    return max(1, math.ceil(strength * channels - 1e-9))  # 0.7 * 10 is a little more than 7


def channels_ordered(weights: LatentWeights) -> bool:
    """False for what a conversion leaves as it was when there is nothing to drop: the source's keys, then its values."""
    reads_key, reads_value = (up.flatten(0, 1).any(dim=0) for up in (weights.up_k, weights.up_v))  # [r]
    return not bool(reads_key.any() and reads_value.any()) or bool((reads_key & reads_value).any())


def check_latent_strength(model: ModelSource, strength: float) -> None:
    """Refuse, before the weights are loaded, a strength that a model cannot be run at.

    Raises:
        UsageError: out of range, or the model has no latents whose channels are ordered.
    """
    from mla_cli.checkpoint.kv_cache import KEY
    from mla_cli.checkpoint.load import load_layer
    from mla_cli.model.attention import LatentAttention

    if check_strength(strength) == 1:
        return
    scheme = model.source.config.get(KEY)
    turned, kept = (scheme.get("rotation"), scheme.get("strength", 1)) if isinstance(scheme, dict) else (None, 1)
    # A turn within the channels that are kept does not mix them with those that are dropped.
    if turned in ("hadamard", "learned") and isinstance(kept, (int, float)) and strength < kept:
        raise UsageError(
            f"the latents of this checkpoint are turned ({turned}), so their first channels are no smaller latent any more",
            where=f"--latent-strength {strength:g}",
            fix="use the checkpoint that it was calibrated from, or leave the option out",
        )
    for index in range(model.spec.num_layers if model.spec.is_latent else 0):
        attention = load_layer(model, index).self_attn
        if isinstance(attention, LatentAttention):
            _ordered_weights(attention)
            return
    raise UsageError(
        f"this {model.spec.model_type} model caches keys and values: it has no latents to use a part of",
        where=f"--latent-strength {strength:g}",
        fix="convert it first (`mla convert`), or leave the option out",
    )


def strength_of_width(model: ModelSource, width: int, where: str) -> float:
    """The strength at which all latents have so many channels.

    Args:
        where: the width was given, for the error.

    Raises:
        UsageError: the model has no latents that can be so wide.
    """
    from mla_cli.checkpoint.load import load_layer
    from mla_cli.model.attention import LatentAttention

    ranks = set()
    for index in range(model.spec.num_layers if model.spec.is_latent else 0):
        attention = load_layer(model, index).self_attn
        if isinstance(attention, LatentAttention):
            ranks.add(_ordered_weights(attention).spec.kv_lora_rank)
    if len(ranks) != 1 or width > max(ranks):
        held = " to ".join(str(rank) for rank in sorted({min(ranks), max(ranks)})) if ranks else ""
        what = f"the latents of this model have {held} channels" if ranks else "this model has no latents"
        fix = f"leave it out, or convert with --kv-lora-rank {width}"
        raise UsageError(f"{what}: they cannot have {width} each", where=where, fix=fix)
    return width / max(ranks)


def narrowed_layer(layer: DecoderLayer, strength: float) -> DecoderLayer:
    """A layer that caches and uses the first `ceil(strength * r)` channels of its latent, and nothing of the rest.

    The layer itself where there is nothing to narrow.

    Raises:
        UsageError: its channels are not ordered.
    """
    from mla_cli.model.attention import LatentAttention

    attention = layer.self_attn
    if strength == 1 or not isinstance(attention, LatentAttention):
        return layer
    weights, like = _ordered_weights(attention), attention.o_proj.weight
    narrow = weights.narrowed(kept_channels(weights.spec.kv_lora_rank, strength))
    return layer.with_attention(narrow.module(attention.layer, dtype=like.dtype, device=like.device))


def _ordered_weights(attention: LatentAttention) -> LatentWeights:
    """A layer's weights without norms, if a conversion made them and ordered their channels."""
    from mla_cli.checkpoint.deepseek_form import weights_of_stock
    from mla_cli.model.latent_weights import LatentWeights

    where = f"layer {attention.layer}, --latent-strength"
    if attention.spec.gate_chunk is not None:
        raise UsageError(
            "a gate mixes the latents, and reads all of their channels", where=where, fix="leave the option out"
        )
    if attention.spec.norm_eps is None:
        weights = LatentWeights.of(attention)
    else:
        found = weights_of_stock(attention)
        if found is None:
            # The mark of our stock form, in the weights themselves: a report may be lost, or belong to other weights.
            raise UsageError(
                "the latent's channels are in no known order: it has a norm over all of them, and lacks the constant channels "
                "with which `mla convert` neutralises one (and that float16 cannot hold)",
                where=where,
                fix="use one that `mla convert` wrote without a norm, and not --dtype float16, or leave the option out",
            )
        weights = found
    if not channels_ordered(weights):
        raise UsageError(
            "the latent's channels are not ordered: it holds the source's keys and values one after the other",
            where=where,
            fix="convert with a smaller latent (`mla convert --ratio`), or leave the option out",
        )
    return weights
