"""What a conversion did, for machines (`mla_report.json`) and for people (the model card)."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from mla_cli import __version__
from mla_cli.converters.held_out import Loss
from mla_cli.converters.plan import ConversionPlan
from mla_cli.converters.strengths import StrengthLoss
from mla_cli.report.values import brief, span

# Stages of a progressive conversion, in their order.
STAGED = ("milder_closed_form", "milder_healed", "cut")


@dataclass
class Timings:
    """Seconds of each stage, in the order they ran."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Count what runs inside as this stage's time."""
        begun = time.monotonic()
        yield
        self.seconds[stage] = time.monotonic() - begun


def peak_rss_bytes() -> int | None:
    """Most memory this process has held; None where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def versions() -> dict[str, str]:
    """Of everything that could change a number."""
    found = {"mla": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("safetensors", "tokenizers", "numpy"):
        found[name] = metadata.version(name)
    return found


def finite(value: float) -> float | None:
    """JSON has no infinity: null stands for it."""
    return value if math.isfinite(value) else None


def build_report(
    *,
    source: str,
    source_sha256: str,
    revision: str | None,
    command: str,
    plan: ConversionPlan,
    facts: dict[str, Any],
    layer_errors: tuple[tuple[float, float], ...],
    held_out: dict[str, Loss],
    strengths: list[StrengthLoss],
    calibration: dict[str, Any],
    options: dict[str, Any],
    notes: list[str],
    dtype: str,
    timings: Timings,
    verification: dict[str, Any],
) -> dict[str, Any]:
    """The report as a JSON object; the keys of cli.md, and what explains them."""
    element = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    losses = {name: finite(loss.perplexity) for name, loss in held_out.items()}
    layers = [
        {
            "kv_lora_rank": layer.kv_lora_rank,
            "fitted_rank": layer.fitted_rank,
            "qk_rope_head_dim": layer.qk_rope_head_dim,
            "rope_split_error": facts["split_errors"][i],
            "factorization_error": facts["factorization_errors"][i],
            "refit_error": facts["refit_errors"][i] if facts["refit_errors"] else None,
            "healed_error": layer_errors[i][1] if layer_errors else None,
            "spectrum": facts["spectra"][i],
        }
        for i, layer in enumerate(plan.layers)
    ]
    return {
        "source": source,
        "command": command,
        "source_sha256": source_sha256,
        "source_revision": revision,
        "format": plan.form,
        "format_reason": plan.reason,
        "dtype": dtype,
        "ratio": plan.ratio,
        "cache_bytes_per_token": {
            "source": plan.source_cached_per_token * element,
            "mla": plan.cached_per_token * element,
        },
        "layers": layers,
        "heldout": {
            "ppl_source": losses["source"],
            "ppl_rope_split": losses["rope_split"],
            "ppl_closed_form": losses["closed_form"],
            **{f"ppl_{name}": losses[name] for name in ("compensated", *STAGED) if name in losses},
            "ppl_final": losses["final"],
            "kl_final": held_out["final"].kl,
            "tokens": held_out["source"].tokens,
        },
        "latent_strength": [
            {
                "strength": row.strength,
                "cache_bytes_per_token": row.cached_per_token * element,
                "perplexity": finite(row.loss.perplexity),
                "kl": row.loss.kl,
                "source_perplexity": finite(row.source.perplexity),
                "tokens": row.loss.tokens,
            }
            for row in strengths
        ],
        "verification": verification,
        "healing": facts.get("healing"),
        "objectives": facts["objectives"],
        "latent_norm": facts.get("latent_norm"),
        "calibration": calibration,
        "options": options,
        "notes": notes,
        "seconds": {name: round(value, 2) for name, value in timings.seconds.items()},
        "peak_rss_bytes": peak_rss_bytes(),
        "versions": versions(),
    }


def model_card(report: dict[str, Any], command: str) -> str:
    """The checkpoint's README: what it is, what it costs, how it was made, how it is run."""
    held, cache = report["heldout"], report["cache_bytes_per_token"]
    lines = [
        "---",
        *(["library_name: transformers"] if report["format"] == "deepseek" else []),
        "tags: [mla, multi-head-latent-attention, kv-cache]",
        "---",
        f"# {report['source']} with multi-head latent attention",
        "",
        f"Converted by `mla` {report['versions']['mla']}. Its cache holds {cache['mla']:,} bytes a token instead of "
        f"{cache['source']:,} ({report['ratio']:.3g} times fewer): kv_lora_rank {over_layers(report, 'kv_lora_rank')}, "
        f"qk_rope_head_dim {over_layers(report, 'qk_rope_head_dim')}.",
        "",
        f"| perplexity on {held['tokens']:,} held-out calibration tokens | |",
        "|---|---|",
    ]
    for key, name in (
        ("ppl_source", "source"),
        ("ppl_rope_split", "after the rotary split"),
        ("ppl_closed_form", "after factorisation (closed form)"),
        ("ppl_compensated", "after the refit of queries and outputs"),
        ("ppl_final", "this checkpoint, read back from the file"),
    ):
        if key in held:
            lines.append(f"| {name} | {brief(held[key])} |")
    lines += [
        f"| KL(source, this checkpoint), nats a token | {brief(held['kl_final'])} |",
        *_strength_lines(report["latent_strength"]),
        "",
        "Made with:",
        "",
        "```",
        command,
        "```",
        "",
        f"Calibrated on {report['calibration']['sequences']} sequences ({report['calibration']['origin']}). "
        f"Details in `mla_report.json`.",
        "",
        "Run it:",
        "",
        "```",
        'mla generate . "Once upon a time"',
        "```",
    ]
    if report["format"] == "deepseek":
        lines += [
            "",
            "It is an unmodified `deepseek_v3` model to other engines: `AutoModelForCausalLM.from_pretrained(...)` loads it "
            "without custom code.",
        ]
    return "\n".join(lines) + "\n"


def _strength_lines(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    return [
        "",
        f"The first channels of each latent are a smaller latent (`--latent-strength`; {rows[0]['tokens']:,} held-out tokens, "
        f"perplexity of the source {brief(rows[0]['source_perplexity'])}):",
        "",
        "| strength | cache bytes a token | perplexity | KL to the source |",
        "|---|---|---|---|",
        *(
            f"| {row['strength']:g} | {row['cache_bytes_per_token']:,} | {brief(row['perplexity'])} | {brief(row['kl'])} |"
            for row in rows
        ),
    ]


def over_layers(report: dict[str, Any], key: str) -> str:
    """A width of all layers: one number where they are alike, else the least and the most."""
    return span([layer[key] for layer in report["layers"]])
