"""`mla inspect`: what a model is, what its cache costs, and what a conversion would make of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mla_cli import console
from mla_cli.commands import options

if TYPE_CHECKING:
    from mla_cli.checkpoint.load import ModelSource

RATIOS = (2, 3, 4, 8)


def inspect(
    src: options.Source,
    json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Show what a model is and what its cache costs.

    Also what a conversion would make of it, or, for a converted checkpoint, what each layer lost.

    Examples:

      mla inspect smollm2-135m

      mla inspect ./converted --json
    """
    console.set_quiet(quiet)
    from mla_cli.checkpoint.load import open_model

    facts = describe(open_model(src))
    if json:
        console.result_json(facts)
    else:
        console.result(as_text(facts))


def describe(model: ModelSource) -> dict[str, Any]:
    """What is known of a model from its configuration, its tensor headers and its conversion report."""
    import math

    spec, infos = model.spec, model.source.tensors.infos
    element = model.stored_dtype.itemsize
    facts: dict[str, Any] = {
        "source": model.source.name,
        "folder": str(model.source.folder),
        "model_type": spec.model_type,
        "attention": "latent" if spec.is_latent else "standard",
        "dtype": str(model.stored_dtype).removeprefix("torch."),
        "parameters": sum(math.prod(infos[name].shape) for name in {rule.source for rule in model.rules.values()}),
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "tied": spec.tied,
        "cached_per_token": spec.cached_per_token,
        "cache_bytes_per_token": spec.cached_per_token * element,
        "notes": list(model.notes),
    }
    if spec.is_latent:
        return facts | _latent(model)
    return facts | _standard(model, element)


def _standard(model: ModelSource, element: int) -> dict[str, Any]:
    from mla_cli.checkpoint.deepseek_form import why_not_stock
    from mla_cli.model.spec import StandardAttentionSpec

    first = model.spec.attention[0]
    assert isinstance(first, StandardAttentionSpec)
    obstacle = why_not_stock(model.spec)
    return {
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "format": "native" if obstacle else "deepseek",
        "format_reason": f"the stock DeepSeek form cannot express {obstacle}"
        if obstacle
        else "the stock form says it all",
        "cache_bytes_per_token_at_ratio": {
            str(ratio): sum(a.cached_per_token // ratio for a in model.spec.attention) * element for ratio in RATIOS
        },
    }


def _latent(model: ModelSource) -> dict[str, Any]:
    import json

    from mla_cli.calibration.cache_sizes import bytes_per_token
    from mla_cli.calibration.variants import narrowed_spec
    from mla_cli.checkpoint.kv_cache import KEY, cache_plan
    from mla_cli.errors import InputError
    from mla_cli.model.spec import LatentAttentionSpec

    layers = [
        {"kv_lora_rank": a.kv_lora_rank, "qk_rope_head_dim": a.qk_rope_head_dim}
        | ({} if a.gate_chunk is None else {"gate_chunk": a.gate_chunk})
        | ({} if a.norm_eps is None else {"norm_eps": a.norm_eps})
        for a in model.spec.attention
        if isinstance(a, LatentAttentionSpec)
    ]
    found: dict[str, Any] = {"latent_layers": layers, "kv_cache": None}
    try:
        plan = cache_plan(model.source.config, model.spec, "auto")
        if plan.scheme is not None:
            spec = narrowed_spec(model.spec, plan.strength)
            found["kv_cache"] = model.source.config[KEY]
            found["kv_cache_bytes_per_token"] = bytes_per_token(model, spec, plan.quantizers)
    except InputError as unsound:
        found["notes"] = [*model.notes, str(unsound)]
    report = model.source.folder / "mla_report.json"
    if report.is_file():
        try:
            made = json.loads(report.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            made = {}
        if isinstance(made, dict):
            found["conversion"] = {key: made[key] for key in ("source", "ratio", "heldout", "layers") if key in made}
    return found


def as_text(facts: dict[str, Any]) -> str:
    """The facts as a short table."""
    lines = [
        f"{facts['source']}: {facts['model_type']}, {facts['attention']} attention, {facts['parameters']:,} parameters "
        f"in {facts['dtype']}",
        f"  layers       {facts['layers']}, hidden size {facts['hidden_size']}, vocabulary {facts['vocab_size']:,}"
        f"{', tied head' if facts['tied'] else ''}",
        f"  context      {facts['max_position_embeddings']:,} tokens",
        f"  cache        {facts['cache_bytes_per_token']:,} bytes a token ({facts['cached_per_token']:,} numbers)",
    ]
    if "num_attention_heads" in facts:
        lines += [
            f"  heads        {facts['num_attention_heads']} for queries, {facts['num_key_value_heads']} for keys and values, "
            f"{facts['head_dim']} wide",
            "  converted    "
            + ", ".join(
                f"{size:,} at ratio {ratio}" for ratio, size in facts["cache_bytes_per_token_at_ratio"].items()
            ),
            f"  format       {facts['format']}: {facts['format_reason']}",
        ]
    else:
        lines += _latent_lines(facts)
    lines += [f"  note         {note}" for note in facts["notes"]]
    return "\n".join(lines)


def _latent_lines(facts: dict[str, Any]) -> list[str]:
    shapes = {(layer["kv_lora_rank"], layer["qk_rope_head_dim"]) for layer in facts["latent_layers"]}
    lines = ["  latent       " + ", ".join(f"kv_lora_rank {r} + qk_rope_head_dim {d}" for r, d in sorted(shapes))]
    gates = sorted({layer["gate_chunk"] for layer in facts["latent_layers"] if "gate_chunk" in layer})
    lines += [f"  gate         over chunks of {', '.join(map(str, gates))} tokens"] if gates else []
    normed = sum("norm_eps" in layer for layer in facts["latent_layers"])
    lines += [f"  norm         on the latent of {normed} layers"] if normed else []
    scheme = facts["kv_cache"]
    lines.append(f"  calibrated   {_calibrated(facts) if scheme else 'no'}")
    made = facts.get("conversion")
    if made:
        lines.append(f"  made from    {made.get('source')}, ratio {_number(made.get('ratio'), '.3g')}")
        lines.append("  layer        rotary split error, factorisation error (shares of what each step had to keep)")
        layers = made.get("layers")
        for index, layer in enumerate(layers if isinstance(layers, list) else []):
            errors = layer if isinstance(layer, dict) else {}
            split, narrow = _number(errors.get("rope_split_error")), _number(errors.get("factorization_error"))
            lines.append(f"  {index:5}        {split}  {narrow}")
    return lines


def _calibrated(facts: dict[str, Any]) -> str:
    scheme = facts["kv_cache"]
    wide = sum(layer["dtype"] == "bf16" for layer in scheme["layers"])
    parts = [
        f"{facts['kv_cache_bytes_per_token']:,} bytes a token: {scheme['dtype']}, {scheme['granularity']} scales",
        f"the first {scheme['strength']:.0%} of each latent" if scheme.get("strength", 1) < 1 else "",
        f"turned ({scheme['rotation']})" if scheme.get("rotation", "none") != "none" else "",
        f"{wide} of {len(scheme['layers'])} layers in bfloat16" if wide else "",
    ]
    return ", ".join(part for part in parts if part)


def _number(value: Any, style: str = ".3f") -> str:
    # The report is a file anyone may have edited.
    return format(value, style) if isinstance(value, (int, float)) else "unknown"
