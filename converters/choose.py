"""Which plan: those worth trying, by the configuration; the best of them, by measured loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches
from mla_cli.calibration.texts import CalibrationTexts, first
from mla_cli.checkpoint.load import ModelSource
from mla_cli.console import note
from mla_cli.converters.allocate import choose_common_slots, choose_slots, slot_worth
from mla_cli.converters.closed_form import Ranks, closed_form
from mla_cli.converters.heal_options import check_gate
from mla_cli.converters.held_out import Loss, loss_of
from mla_cli.converters.options import PILOT_HELD_OUT, PILOT_SAMPLES, ConvertOptions
from mla_cli.converters.plan import ConversionPlan, Form, choose_form, make_plan, rope_candidates, standard_layers
from mla_cli.converters.presets import check_ratio, choose_ratio, ratios_to_try
from mla_cli.converters.statistics import SourceStatistics
from mla_cli.errors import UsageError


def plan_conversion(model: ModelSource, options: ConvertOptions) -> list[ConversionPlan]:
    """The plans worth trying: one, unless the rotary width or the ratio is to be chosen by measured loss.

    Raises:
        UsageError: an option is outside its range for this model, or beyond what the preset allows.
    """
    plans = _worth_trying(model, options)
    check_gate(options.heal, plans[0].form, model.spec.max_position_embeddings)
    return plans


def _worth_trying(model: ModelSource, options: ConvertOptions) -> list[ConversionPlan]:
    if options.kv_lora_rank is not None:
        plans = _plans_of(model, options)
        check_ratio(options.preset, plans[0].ratio, where="--kv-lora-rank")
        return plans
    ratios = ratios_to_try(options.preset, options.ratio)
    return [plan for ratio in ratios for plan in _plans_of(model, replace(options, ratio=ratio))]


def _plans_of(model: ModelSource, options: ConvertOptions) -> list[ConversionPlan]:
    form, reason = choose_form(model.spec, options.format, options.qk_rope_head_dim)
    try:
        return _plans(model, options, form, reason)
    except UsageError as refusal:
        if options.format != "auto" or form == "native":
            raise
        return _plans(model, options, "native", refusal.what)


def _plans(model: ModelSource, options: ConvertOptions, form: Form, reason: str) -> list[ConversionPlan]:
    shape = {"ratio": options.ratio, "kv_lora_rank": options.kv_lora_rank}
    whole = standard_layers(model.spec)[0]
    widths = [options.qk_rope_head_dim]
    if options.qk_rope_head_dim is None:
        budget = int(whole.cached_per_token / options.ratio) if options.ratio is not None else 1 << 30
        widths = list(rope_candidates(model.spec, form, budget))
        if options.kv_lora_rank is not None:
            widths = widths[:1]  # the rank is fixed, so a wider rotary key only adds quality
    return [make_plan(model.spec, form=form, reason=reason, qk_rope_head_dim=w, **shape) for w in widths]  # type: ignore[arg-type]


def choose_plan(
    bank: LayerBank,
    plans: list[ConversionPlan],
    statistics: Sequence[SourceStatistics],
    fitted: CalibrationTexts,
    unseen: CalibrationTexts,
    batches: Batches,
    options: ConvertOptions,
) -> ConversionPlan:
    """Of each ratio the plan with the least held-out divergence after a rough closed form; then the preset's ratio."""
    if len(plans) == 1:
        return plans[0]
    few, probe = first(fitted, PILOT_SAMPLES), first(unseen, PILOT_HELD_OUT)
    best: dict[float | None, tuple[Loss, ConversionPlan]] = {}
    for plan in plans:
        rough = closed_form(
            bank, plan, statistics, few, batches,
            objective=options.objective, mixing=options.mixing, ranks=ranks_of(plan, options), seed=options.seed,
        )  # fmt: skip
        loss = loss_of(bank, rough.narrow, probe, batches)
        rope, rank = (  # on average: layers may have frequencies of their own
            sum(getattr(layer, name) for layer in plan.layers) / len(plan.layers)
            for name in ("qk_rope_head_dim", "kv_lora_rank")
        )
        note(f"ratio {plan.ratio:.3g}, rotary key of {rope:.4g} beside a latent of {rank:.4g}: KL {loss.kl:.4f}")
        if plan.asked_ratio not in best or loss.kl < best[plan.asked_ratio][0].kl:
            best[plan.asked_ratio] = loss, plan
    chosen = next(iter(best))
    if len(best) > 1:
        found = {ratio: loss.perplexity for ratio, (loss, _) in best.items() if ratio is not None}
        chosen = choose_ratio(options.preset, found)
        note(
            f"ratio {chosen:g}: the largest of {', '.join(f'{r:g}' for r in found)} that costs little over the smallest"
        )
    return best[chosen][1]


def ranks_of(plan: ConversionPlan, options: ConvertOptions) -> Ranks:
    """How ranks are shared out in this form."""
    return options.ranks if plan.form == "native" else "uniform"


def with_ranks(plan: ConversionPlan, ranks: tuple[int, ...]) -> ConversionPlan:
    """The plan with the ranks that were found."""
    if plan.form != "native":
        return plan
    layers = (
        replace(layer, kv_lora_rank=rank, fitted_rank=rank) for layer, rank in zip(plan.layers, ranks, strict=True)
    )
    return replace(plan, layers=tuple(layers))


def with_slots(bank: LayerBank, plan: ConversionPlan, statistics: Sequence[SourceStatistics]) -> ConversionPlan:
    """The plan with its rotary slots given to the frequencies that lose most without one.

    The native form shares them out over all layers, so that layers differ but all together cache what was planned. The stock
    form has one table of frequencies for all layers.
    """
    layers = standard_layers(bank.model.spec)
    shapes = {(a.num_kv_heads, a.rotary.dim) if a.rotary is not None else None for a in layers}
    if None in shapes or len(shapes) > 1 or any(a.rotary is not None and a.rotary.by_length for a in layers):
        return plan  # no layer turns, or some do not: each keeps its even share
    if not plan.layers[0].slots:
        return plan
    worths = [slot_worth(bank.source_attention(i), seen) for i, seen in enumerate(statistics)]
    count = len(plan.layers[0].slots)
    if plan.form == "deepseek":
        common = choose_common_slots(worths, count)
        return replace(plan, layers=tuple(replace(layer, slots=common) for layer in plan.layers))
    planned = [
        replace(layer, slots=slots) for layer, slots in zip(plan.layers, choose_slots(worths, count), strict=True)
    ]
    return replace(plan, layers=tuple(planned))
