"""What a conversion will do, decided from the configuration alone: form, ranks, rotary slots, cache bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mla_cli.checkpoint.deepseek_form import constant_channels, free_rank, why_not_stock
from mla_cli.converters.rotary_split import default_slots
from mla_cli.errors import UnsupportedError, UsageError
from mla_cli.model.spec import DecoderSpec, StandardAttentionSpec

Form = Literal["deepseek", "native"]
DEFAULT_RATIO = 4.0
MIN_RANK = 8  # below this a latent holds next to nothing; only a tiny budget goes lower


@dataclass(frozen=True)
class LayerPlan:
    """One layer: `kv_lora_rank` numbers of latent, of which `fitted_rank` are fitted, and the rotary slots."""

    kv_lora_rank: int
    fitted_rank: int
    slots: tuple[int, ...]
    key_factors: int = 0  # numbers that a norm of the keys divides by, cached beside the latent

    @property
    def qk_rope_head_dim(self) -> int:
        """Width of the shared rotary key."""
        return 2 * len(self.slots)

    @property
    def cached_per_token(self) -> int:
        """Numbers cached per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim + self.key_factors


@dataclass(frozen=True)
class ConversionPlan:
    """Form of the output, why that one, every layer's shape, and the ratio that was asked for (None: a rank was)."""

    form: Form
    reason: str
    layers: tuple[LayerPlan, ...]
    source_cached_per_token: int
    asked_ratio: float | None = None

    @property
    def cached_per_token(self) -> int:
        """Numbers cached per token over all layers."""
        return sum(layer.cached_per_token for layer in self.layers)

    @property
    def ratio(self) -> float:
        """Cached numbers of the source over ours."""
        return self.source_cached_per_token / self.cached_per_token

    @property
    def warning(self) -> str | None:
        """What speaks against the plan: a cache that is no smaller than the source's."""
        if self.cached_per_token < self.source_cached_per_token:
            return None
        return (
            f"the cache will be no smaller than the source's: {self.cached_per_token:,} numbers a token instead of "
            f"{self.source_cached_per_token:,} (lower --kv-lora-rank or --qk-rope-head-dim, or give --ratio)"
        )


def standard_layers(spec: DecoderSpec) -> tuple[StandardAttentionSpec, ...]:
    """The decoder's layers, all of which must be standard attention.

    Raises:
        UnsupportedError: the model is a latent one already.
    """
    layers = tuple(a for a in spec.attention if isinstance(a, StandardAttentionSpec))
    if len(layers) != spec.num_layers:
        raise UnsupportedError(
            "the source already has latent attention; there is nothing to convert",
            fix="calibrate, evaluate or run it as it is, or convert its own source at another --ratio",
        )
    return layers


def choose_form(
    spec: DecoderSpec, wanted: Literal["auto", "deepseek", "native"], qk_rope_head_dim: int | None = None
) -> tuple[Form, str]:
    """The output form and the reason for it.

    Args:
        qk_rope_head_dim: width of the rotary key; None: not chosen yet, then never 0 in the stock form.

    Raises:
        UsageError: the stock form was asked for and cannot say what the source does.
    """
    obstacle = why_not_stock(spec)
    if obstacle is None and qk_rope_head_dim == 0:
        obstacle = "attention without a rotary key (--qk-rope-head-dim 0)"
    if wanted == "native":
        return "native", "asked for"
    if wanted == "deepseek":
        if obstacle:
            raise UsageError(
                f"the stock DeepSeek form cannot express {obstacle}",
                where="--format deepseek",
                fix="use --format native",
            )
        return "deepseek", "asked for"
    if obstacle:
        return "native", f"the stock DeepSeek form cannot express {obstacle}"
    return "deepseek", "the source can be expressed in it, so transformers and vLLM run the output unchanged"


def rope_candidates(spec: DecoderSpec, form: Form, budget: int) -> list[int]:
    """Widths of the rotary key worth trying within `budget` cached numbers a layer, widest first; never none."""
    rotaries = [attention.rotary for attention in standard_layers(spec) if attention.rotary is not None]
    if not rotaries:
        return [0]
    whole = min(rotary.dim for rotary in rotaries)
    widths = [whole * share // 4 for share in (4, 3, 2, 1) if whole * share % 8 == 0]
    if form == "deepseek" and rotaries[0].by_length:
        widths = [whole]
    least = max(1, min(MIN_RANK, budget // 2))
    return [w for w in widths if budget - w >= least] or widths[-1:]


def make_plan(
    spec: DecoderSpec,
    *,
    form: Form,
    reason: str,
    ratio: float | None = None,
    kv_lora_rank: int | None = None,
    qk_rope_head_dim: int,
) -> ConversionPlan:
    """The plan for a rotary width and either a ratio or a rank.

    Raises:
        UsageError: a value is outside its range; the message gives the range.
    """
    layers = standard_layers(spec)
    plans = []
    some_turn, asked = any(attention.rotary is not None for attention in layers), qk_rope_head_dim
    for attention in layers:
        rotary = attention.rotary
        rotary_keys = attention.num_kv_heads * rotary.dim if rotary is not None else 0
        # Among layers that have one, a layer without a rotary embedding needs no rotary key.
        qk_rope_head_dim = 0 if rotary is None and some_turn else asked
        if qk_rope_head_dim < 0 or qk_rope_head_dim % 2 or qk_rope_head_dim > rotary_keys:
            raise UsageError(
                f"the rotary key can have an even width from 0 to {rotary_keys}, not {qk_rope_head_dim}",
                where="--qk-rope-head-dim",
            )
        rank = kv_lora_rank
        if rank is None:
            rank = int(attention.cached_per_token / (ratio or DEFAULT_RATIO)) - qk_rope_head_dim - attention.key_factors
        full = min(attention.cached_per_token, spec.hidden_size)
        if not 1 <= rank <= attention.cached_per_token:
            least = attention.cached_per_token / (attention.cached_per_token - 1)
            most = attention.cached_per_token / (qk_rope_head_dim + attention.key_factors + 1)
            raise UsageError(
                f"a latent of {rank} beside a rotary key of {qk_rope_head_dim} is not possible: kv_lora_rank goes from 1 to "
                f"{attention.cached_per_token} (lossless from {full}), the ratio from {least:.3g} to {most:.3g}",
                where="--kv-lora-rank" if kv_lora_rank is not None else "--ratio",
            )
        plans.append(_layer_plan(attention, form, rank, qk_rope_head_dim))
    return ConversionPlan(form, reason, tuple(plans), sum(a.cached_per_token for a in layers), ratio)


def _layer_plan(attention: StandardAttentionSpec, form: Form, rank: int, rope_dim: int) -> LayerPlan:
    if form == "native":
        frequencies = attention.rotary.dim // 2 if attention.rotary is not None else 0
        slots = default_slots(frequencies, rope_dim, attention.num_kv_heads)
        return LayerPlan(rank, rank, slots, attention.key_factors)
    assert attention.rotary is not None  # why_not_stock has refused it
    if attention.rotary.by_length and rope_dim != attention.rotary.dim:
        raise UsageError(
            f"the stock DeepSeek form cannot have a rotary key of {rope_dim} for this source: its frequencies would not match",
            where="--qk-rope-head-dim",
            fix=f"use {attention.rotary.dim}, or --format native",
        )
    if free_rank(rank) < 1:
        raise UsageError(
            f"a stock latent of {rank} has no room beside its {len(constant_channels(rank))} constant channel(s)",
            where="--kv-lora-rank",
            fix="use at least 8, or --format native",
        )
    slots = default_slots(attention.rotary.dim // 2, rope_dim, attention.num_kv_heads)
    return LayerPlan(rank, free_rank(rank), slots)
