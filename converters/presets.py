"""Presets of `mla convert`: what a model will be used for decides how far it may be compressed and what it is fitted to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from mla_cli.converters.plan import DEFAULT_RATIO
from mla_cli.errors import UsageError


@dataclass(frozen=True)
class Preset:
    """One use of a model. Its calibration text is `mla_cli.calibration.mixes.MIXES[name]`.

    Attributes:
        ratios: tried where the user asks for none, ascending; the first is the default, the others need a measurement.
        ratio_reason: why these.
        max_ratio: largest that may be asked for; None: whatever the plan allows.
        limit_reason: why no further, as the end of a sentence.
        latent_norm: in the native form a norm on the latent is tried, and kept where it costs nothing after healing (see
            `latent_norm`). The stock form has a norm of its own kind there, which is neutralised exactly.
        max_rise_percent: how much worse than at the first ratio the perplexity may be for a larger one to be taken.
    """

    name: str
    summary: str
    ratios: tuple[float, ...]
    ratio_reason: str
    max_ratio: float | None = None
    limit_reason: str = ""
    latent_norm: bool = False
    max_rise_percent: float = 0.0


_ALL = (
    Preset(
        "general",
        "any use",
        ratios=(DEFAULT_RATIO,),
        ratio_reason="what the command does without a preset; measure before going further",
    ),
    Preset(
        "math",
        "calculations and proofs",
        # Errors compound: every step of a solution reads the digits of the steps before it.
        ratios=(DEFAULT_RATIO,),
        ratio_reason="a wrong digit spoils every step after it, so no more than in general",
        max_ratio=12.0,
        limit_reason="a narrower latent does not promise to read digits back exactly",
    ),
    Preset(
        "chat",
        "dialogues",
        # The cache of long dialogues is what bounds how many run at once, and many replies are as good as the one lost.
        ratios=(8.0,),
        ratio_reason="half of the limit: long dialogues gain most from a small cache and bear rephrasing",
        max_ratio=16.0,
        limit_reason="a narrower latent does not promise to keep what was said in earlier turns",
        # Turns of very different style follow each other: the norm keeps the latent's scale the same over all of them.
        latent_norm=True,
    ),
    Preset(
        "code",
        "source code",
        # Code repeats itself, so much of its cache is redundant; how much differs between models, so it is measured.
        ratios=(8.0, 10.0, 12.0),
        ratio_reason="code is repetitive; the largest of these that costs little over the smallest is taken",
        max_ratio=12.0,
        limit_reason="a narrower latent does not promise to copy names exactly",
        max_rise_percent=2.3,  # the loss that `mla eval` lets pass unless told otherwise
    ),
)
PRESETS: Mapping[str, Preset] = {preset.name: preset for preset in _ALL}
DEFAULT_PRESET = "general"


def find_preset(name: str) -> Preset:
    """A preset by its name.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in PRESETS:
        raise UsageError(f"there is no preset '{name}'", where="--preset", fix=f"use one of {', '.join(PRESETS)}")
    return PRESETS[name]


def check_ratio(preset: str, ratio: float, *, where: str = "--ratio") -> None:
    """Refuse a ratio above the preset's limit.

    Check what was asked for: a plan rounds ranks down, so its ratio may lie a little above that. For `--kv-lora-rank`
    check the plan's ratio, with `where="--kv-lora-rank"`.

    Raises:
        UsageError: the ratio is too large, or not a number.
    """
    chosen = find_preset(preset)
    limit = math.inf if chosen.max_ratio is None else chosen.max_ratio
    if not ratio <= limit:
        less = f"a ratio of {limit:g} or less" if where == "--ratio" else f"a latent that makes it {limit:g} or less"
        raise UsageError(
            f"the preset {chosen.name} goes up to a ratio of {limit:g}, not {ratio:.4g}: {chosen.limit_reason}",
            where=where,
            fix=f"use {less}, or --preset {DEFAULT_PRESET}, which has no limit",
        )


def ratios_to_try(preset: str, ratio: float | None) -> tuple[float, ...]:
    """The ratio that was asked for, or the preset's; more than one are to be measured and given to `choose_ratio`.

    Raises:
        UsageError: the ratio is above the preset's limit.
    """
    if ratio is None:
        return find_preset(preset).ratios
    check_ratio(preset, ratio)
    return (ratio,)


def choose_ratio(preset: str, perplexities: Mapping[float, float | None]) -> float:
    """The largest ratio whose held-out perplexity is near enough to that of the smallest.

    Args:
        perplexities: by ratio, all measured alike; None or infinity where it overflows.
    """
    chosen = find_preset(preset)
    smallest = min(perplexities)
    base = perplexities[smallest]
    if base is None or not math.isfinite(base):
        return smallest
    bound = base * (1 + chosen.max_rise_percent / 100)
    return max(
        ratio for ratio, value in perplexities.items() if ratio == smallest or (value is not None and value <= bound)
    )
