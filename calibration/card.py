"""What a calibration adds to a checkpoint's model card."""

from __future__ import annotations

from typing import Any

from mla_cli.report.values import brief

HEADING = "## Quantised cache"
_GRANULARITY = {"token": "a range for each token", "page": "a range for each page of 16", "static": "one range a layer"}


def cached_as(report: dict[str, Any]) -> str:
    """How latents are cached, in words."""
    part = "" if report["strength"] == 1 else f"the first {report['strength']:.1%} of the "
    if report["kv_dtype"] == "bf16":
        return f"{part}latents as they are"
    turned = "" if report["rotation"]["kind"] == "none" else f", turned ({report['rotation']['kind']})"
    return f"{part}latents in {report['kv_dtype']}, {_GRANULARITY[report['scales']]}{turned}"


def with_cache(card: str, report: dict[str, Any]) -> str:
    """The card with a last section on the cache, in place of an earlier calibration's."""
    held, size, text = report["heldout"], report["bytes_per_token"], report["calibration"]
    wide = sum(layer["dtype"] == "bf16" for layer in report["layers"]) if report["kv_dtype"] != "bf16" else 0
    words = [
        f"Calibrated by `mla calibrate` on {text['sequences']:,} sequences ({text['origin']}): {cached_as(report)}, "
        f"rotary keys in {report['rope_dtype']}"
        + (f"; {wide} of {len(report['layers'])} layers stay in bfloat16." if wide else "."),
        f"The cache holds {size['quantised']:,} bytes a token instead of {size['unquantised']:,}. Perplexity on "
        f"{held['tokens']:,} held-out calibration tokens: {brief(held['ppl_unquantised'])} unquantised, "
        f"{brief(held['ppl_quantised'])} cached so ({held['ppl_change_percent']:+.2f} %); KL {held['kl']:.4g} nats a "
        "token.",
    ]
    if report["rotation"]["kind"] != "none":
        words.append("The latents' channels are turned in the weights, so that they have no order any longer: "
                     "`--latent-strength` is refused.")  # fmt: skip
    before = card.split(f"\n{HEADING}\n")[0].rstrip("\n")
    return f"{before}\n\n{HEADING}\n\n" + "\n".join(words) + "\n"
