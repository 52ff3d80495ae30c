"""What a calibration found, for `mla_report.json`; nothing in it depends on when or how fast it ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from mla_cli.calibration.observers import QUANTILES, LatentRange
from mla_cli.calibration.passes import HeldOutCost
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.kv_cache import KvScheme, Quantizers
from mla_cli.checkpoint.load import ModelSource
from mla_cli.kernels.quantized import LIMITS
from mla_cli.model.cache import Cache

# The attention output of a layer that quantises well is off by one percent in INT8 and four in FP8. Well beyond that, outliers
# (a huge bias on a channel, say) take the range, however small the latents' own error looks.
MOST_ATTENTION_ERROR = 0.10
MOST_LOSS_PERCENT = 1.0


def build_report(
    model: ModelSource,
    scheme: KvScheme,
    ranges: Sequence[LatentRange | None],
    cost: HeldOutCost,
    fitted: CalibrationTexts,
    unseen: CalibrationTexts,
    *,
    watched_in: torch.dtype,
    measured_in: torch.dtype,
) -> dict[str, Any]:
    """The report as a JSON object."""
    layers = [_layer_report(scheme, ranges, cost, i) for i in range(model.spec.num_layers)]
    plain, quantised = _perplexity(cost.plain_nll), _perplexity(cost.quantised_nll)
    change = 100 * math.expm1(min(700.0, cost.quantised_nll - cost.plain_nll))
    return {
        "kv_dtype": scheme.dtype,
        "scales": scheme.granularity,
        "rope_dtype": scheme.rope_dtype,
        "calibration": {
            "origin": fitted.origin,
            "requested": fitted.requested,
            "sequences": len(fitted.lengths),
            "tokens": fitted.tokens,
            "skipped": fitted.skipped,
            "heldout_sequences": len(unseen.lengths),
            "dtype": str(watched_in).removeprefix("torch."),
        },
        "bytes_per_token": {
            "unquantised": _bytes_per_token(model, None),
            "quantised": _bytes_per_token(model, scheme.quantizers()),
        },
        "heldout": {
            "ppl_unquantised": plain,
            "ppl_quantised": quantised,
            "ppl_change_percent": change,
            "kl": cost.kl,
            "tokens": cost.tokens,
            "dtype": str(measured_in).removeprefix("torch."),
        },
        "layers": layers,
        "warnings": _warnings(layers, change),
    }


def _layer_report(
    scheme: KvScheme, ranges: Sequence[LatentRange | None], cost: HeldOutCost, index: int
) -> dict[str, Any]:
    stored, seen, loss = scheme.layers[index], ranges[index], cost.layers[index]
    static = scheme.granularity == "static" and stored.clip is not None
    return {
        "layer": index,
        "dtype": stored.dtype,
        "amax": stored.amax,
        "token_amax": None
        if seen is None
        else {f"p{100 * q:g}": v for q, v in zip(QUANTILES, seen.token_amax, strict=True)},
        "clip": stored.clip,
        "scale": _scale(stored.clip, LIMITS[stored.dtype]) if static and stored.clip is not None else None,
        "clipped_share": loss.clipped_share,
        "latent_error": loss.latent_error,
        "attention_error": loss.attention_error,
    }


def _scale(clip: float | tuple[float, ...], limit: float) -> float | list[float]:
    return [one / limit for one in clip] if isinstance(clip, tuple) else clip / limit


def _bytes_per_token(model: ModelSource, quantizers: Quantizers | None) -> int:
    """From what a cache really allocates, in the type the weights are stored in."""
    dtype = torch.float32 if model.stored_dtype == torch.float64 else model.stored_dtype
    return Cache(model.spec, 1, 1, dtype=dtype, quantizers=quantizers).bytes_per_token()


def _perplexity(nll: float) -> float | None:
    # JSON has no infinity: null stands for it.
    return math.exp(nll) if nll < 700 else None


def _warnings(layers: Sequence[dict[str, Any]], change: float) -> list[str]:
    found = []
    bad = [layer for layer in layers if layer["attention_error"] > MOST_ATTENTION_ERROR]
    if bad:
        named = ", ".join(f"{layer['layer']} ({100 * layer['attention_error']:.0f} %)" for layer in bad)
        found.append(f"quantised latents change the attention output a lot in layer: {named}")
    if change > MOST_LOSS_PERCENT:
        found.append(f"quantised latents raise the perplexity of held-out text by {change:.1f} %")
    return found
