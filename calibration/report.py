"""What a calibration found, for `mla_report.json`; nothing in it depends on when or how fast it ran."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mla_cli.calibration.choose import Candidate, Plan
from mla_cli.calibration.choose_clips import ChosenClips
from mla_cli.calibration.fallback import Fallback
from mla_cli.calibration.observers import QUANTILES, LatentRange
from mla_cli.calibration.passes import HeldOutCost
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.checkpoint.engine_scales import EngineScales
from mla_cli.checkpoint.kv_cache import KvScheme, Quantizers
from mla_cli.kernels.quantized import LIMITS

# The attention output of a layer that quantises well is off by one percent in INT8 and four in FP8. Well beyond that, outliers
# (a huge bias on a channel, say) take the range, however small the latents' own error looks.
MOST_ATTENTION_ERROR = 0.10
MOST_LOSS_PERCENT = 1.0


@dataclass(frozen=True)
class Calibration:
    """Everything that a calibration found out.

    Attributes:
        cost: of all layers quantised, with what each layer costs by itself.
        chosen: the ranges of all layers.
        candidates: plans that were compared, on the text `compared`. budget: bytes a token that were to be kept to.
        bytes: what a token takes over all layers with given quantizers; unquantised_bytes: of the checkpoint as it is.
        earlier: the comparison that chose the rotation, where an earlier calibration did.
    """

    plan: Plan
    scheme: KvScheme
    ranges: Sequence[LatentRange | None]
    chosen: ChosenClips
    cost: HeldOutCost
    fallback: Fallback
    candidates: Sequence[Candidate]
    fitted: CalibrationTexts
    unseen: CalibrationTexts
    weighed: CalibrationTexts
    compared: CalibrationTexts | None
    budget: int | None
    watched_in: torch.dtype
    measured_in: torch.dtype
    bytes: Callable[[Quantizers], int]
    unquantised_bytes: int
    earlier: Sequence[dict[str, Any]] = ()


def build_report(found: Calibration, scales: EngineScales) -> dict[str, Any]:
    """The report as a JSON object; `scales`: what other engines are told of the cache."""
    scheme, final = found.scheme, found.fallback.chosen.cost
    layers = [_layer_report(found, index) for index in range(len(scheme.layers))]
    measured = [_candidate_report(candidate) for candidate in found.candidates]
    chosen = found.plan.dtype or "bf16"
    return {
        "kv_dtype": chosen,
        "scales": scheme.granularity,
        "rope_dtype": scheme.rope_dtype,
        "every": scheme.every,
        "strength": scheme.strength,
        "rotation": {
            "kind": scheme.rotation,
            "measured": (measured or list(found.earlier)) if found.budget is None else [],
        },
        "ranges": {
            "wider": found.chosen.wider,
            "measured": [
                {"wider": share, "ppl_change_percent": cost.change_percent, "kl": cost.kl}
                for share, cost in found.chosen.measured
            ],
        },
        "budget": None if found.budget is None else {"bytes_per_token": found.budget, "candidates": measured},
        "calibration": {
            "origin": found.fitted.origin,
            "requested": found.fitted.requested,
            "sequences": len(found.fitted.lengths),
            "tokens": found.fitted.tokens,
            "skipped": found.fitted.skipped,
            "weighed_sequences": len(found.weighed.lengths),
            "compared_sequences": 0 if found.compared is None else len(found.compared.lengths),
            "heldout_sequences": len(found.unseen.lengths),
            "dtype": _name(found.watched_in),
        },
        "bytes_per_token": {
            "unquantised": found.unquantised_bytes,
            "quantised": found.bytes(found.fallback.quantizers),
        },
        "heldout": {
            "ppl_unquantised": _perplexity(final.plain_nll),
            "ppl_quantised": _perplexity(final.quantised_nll),
            "ppl_change_percent": final.change_percent,
            "kl": final.kl,
            "tokens": final.tokens,
            "dtype": _name(found.measured_in),
        },
        "max_loss_percent": scheme.max_loss,
        "trade": [
            {
                "bf16_layers": list(point.layers),
                "bytes_per_token": found.bytes(point.quantizers),
                "ppl_change_percent": point.cost.change_percent,
                "kl": point.cost.kl,
                "chosen": point == found.fallback.chosen,
            }
            for point in found.fallback.trade
        ],
        "engine_scales": {"written": bool(scales.tensors), "why_none": scales.why_none},
        "layers": layers,
        "warnings": _warnings(found, layers, scales),
    }


def _layer_report(found: Calibration, index: int) -> dict[str, Any]:
    stored, seen, clip = found.scheme.layers[index], found.ranges[index], found.chosen.clips[index]
    loss = found.cost.layers[index]
    return {
        "layer": index,
        "dtype": stored.dtype,
        "amax": stored.amax,
        "token_amax": None
        if seen is None
        else {f"p{100 * q:g}": v for q, v in zip(QUANTILES, seen.token_amax, strict=True)},
        "clip": stored.clip,
        "scale": _scale(found, index),
        "clipped_share": loss.clipped_share,
        "latent_error": loss.latent_error,
        "attention_error": loss.attention_error,
        "expected_loss": 0.0 if clip is None else clip.loss,
    }


def _scale(found: Calibration, index: int) -> float | list[float] | None:
    """The scales of a static layer; others have one for each token or page."""
    quantizer = found.fallback.quantizers[index]
    if quantizer is None or quantizer.granularity != "static":
        return None
    clips = quantizer.clip if isinstance(quantizer.clip, tuple) else (quantizer.clip,)
    scales = [clip / LIMITS[quantizer.dtype] for clip in clips]
    return scales if isinstance(quantizer.clip, tuple) else scales[0]


def _candidate_report(candidate: Candidate) -> dict[str, Any]:
    assert candidate.cost is not None
    return {
        "kv_dtype": candidate.plan.dtype or "bf16",
        "rotation": candidate.plan.rotation,
        "strength": candidate.plan.strength,
        "bytes_per_token": candidate.bytes_per_token,
        "ppl_change_percent": candidate.cost.change_percent,
        "kl": candidate.cost.kl,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _perplexity(nll: float) -> float | None:
    # JSON has no infinity: null stands for it.
    return math.exp(nll) if nll < 700 else None


def _warnings(found: Calibration, layers: Sequence[dict[str, Any]], scales: EngineScales) -> list[str]:
    said = []
    change, most = found.fallback.chosen.cost.change_percent, found.scheme.max_loss
    bad = [layer for layer in layers if layer["dtype"] != "bf16" and layer["attention_error"] > MOST_ATTENTION_ERROR]
    if bad:
        named = ", ".join(f"{layer['layer']} ({100 * layer['attention_error']:.0f} %)" for layer in bad)
        said.append(f"quantised latents change the attention output a lot in layer: {named}")
    kept = found.fallback.chosen.layers
    if kept:
        named = ", ".join(map(str, kept))
        said.append(
            f"{len(kept)} of {len(layers)} layers stay unquantised, to cost at most {most:g} % perplexity: {named} "
            f"(all quantised: {found.cost.change_percent:+.2f} %)"
        )
    if change > (MOST_LOSS_PERCENT if most is None else most):
        raised = "latents with fewer channels" if found.scheme.strength < 1 else "quantised latents"
        said.append(f"{raised} raise the perplexity of held-out text by {change:.1f} %")
    if scales.why_none is not None:
        said.append(f"no FP8 scales for vLLM: {scales.why_none}")
    return said
