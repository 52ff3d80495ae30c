"""The section of the report page about a calibrated cache: what `mla calibrate` found (`calibration_kv` of the report)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mla_cli.report.tables import soft, table
from mla_cli.report.values import mapping, number, objects, shown


def cache_section(calibration: Mapping[str, Any]) -> str:
    """Tables of the whole, of bytes against loss, of what was compared, and of the layers; empty if there is none."""
    if not calibration:
        return ""
    return _whole(calibration) + _trade(calibration) + _compared(calibration) + _layers(calibration)


def _whole(calibration: Mapping[str, Any]) -> str:
    size, held = mapping(calibration.get("bytes_per_token")), mapping(calibration.get("heldout"))
    rows = [
        ("latents as they are", shown(size.get("unquantised"), "?"), shown(held.get("ppl_unquantised")), ""),
        (
            _name(calibration), shown(size.get("quantised"), "?"), shown(held.get("ppl_quantised")),
            _percent(held.get("ppl_change_percent")),
        ),
    ]  # fmt: skip
    told = f"KL between the two: {shown(held.get('kl'))} nats a token."
    if number(held.get("tokens")) is not None:
        told += f" Measured on {shown(held['tokens'])} tokens that no range was taken from."
    names = ("cache", "bytes a token, all layers", "perplexity", "change")
    return table("The cache as calibrated", names, rows) + soft(told)


def _name(calibration: Mapping[str, Any]) -> str:
    said = [f"{calibration.get('kv_dtype', '?')} latents", f"scales: {calibration.get('scales', '?')}"]
    kind = mapping(calibration.get("rotation")).get("kind", "none")
    if kind != "none":
        said.append(f"rotation: {kind}")
    share = number(calibration.get("strength"))
    if share is not None and share < 1:
        said.append(f"first {100 * share:.3g} % of the channels")
    said.append(f"rotary keys: {calibration.get('rope_dtype', '?')}")
    return ", ".join(said)


def _trade(calibration: Mapping[str, Any]) -> str:
    points = objects(calibration.get("trade"))
    if len(points) < 2:
        return ""
    rows = [
        (
            str(len(layers) if isinstance(layers := point.get("bf16_layers"), (list, tuple)) else "?"),
            shown(point.get("bytes_per_token"), "?"), _percent(point.get("ppl_change_percent")), shown(point.get("kl")),
            "yes" if point.get("chosen") else "",
        )
        for point in points
    ]  # fmt: skip
    names = ("layers in bfloat16", "bytes a token, all layers", "perplexity", "KL (nats a token)", "chosen")
    return table("Bytes against loss, the worst layers in bfloat16", names, rows)


def _compared(calibration: Mapping[str, Any]) -> str:
    budget = mapping(calibration.get("budget"))
    found = objects(budget.get("candidates")) or objects(mapping(calibration.get("rotation")).get("measured"))
    if not found:
        return ""
    rows = [
        (
            str(row.get("kv_dtype", "?")), str(row.get("rotation", "?")), shown(row.get("strength"), "?"),
            shown(row.get("bytes_per_token"), "?"), _percent(row.get("ppl_change_percent")), shown(row.get("kl")),
        )
        for row in found
    ]  # fmt: skip
    names = ("type", "rotation", "share of the latent", "bytes a token, all layers", "perplexity", "KL (nats a token)")
    return table("Caches compared", names, rows)


def _layers(calibration: Mapping[str, Any]) -> str:
    rows = [
        (
            str(layer.get("layer", i)), str(layer.get("dtype", "?")), shown(layer.get("amax"), "?"), _range(layer),
            _share(layer.get("clipped_share")), _share(layer.get("latent_error")), _share(layer.get("attention_error")),
        )
        for i, layer in enumerate(objects(calibration.get("layers")))
    ]  # fmt: skip
    names = ("layer", "cached as", "largest", "range", "clipped", "latent error", "attention error")
    return table("Cache of each layer", names, rows, tall=len(rows) > 20) if rows else ""


def _range(layer: Mapping[str, Any]) -> str:
    value = layer.get("clip")
    if layer.get("dtype") == "bf16":
        return "–"
    if isinstance(value, (list, tuple)):
        return "by group"
    return "own" if value is None else shown(value)


def _share(value: object) -> str:
    return "?" if number(value) is None else f"{float(value):.2%}"  # type: ignore[arg-type]


def _percent(value: object) -> str:
    return "?" if number(value) is None else f"{float(value):+.2f} %"  # type: ignore[arg-type]
