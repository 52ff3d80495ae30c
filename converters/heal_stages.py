"""Step 4 as a whole: everything that is learned after the closed form, in its order, and what the report says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches
from mla_cli.calibration.texts import first
from mla_cli.console import warn
from mla_cli.converters.convert_texts import ConversionTexts
from mla_cli.converters.heal import heal
from mla_cli.converters.heal_gate import gate_line, learn_gates, shared_with_gate
from mla_cli.converters.heal_state import HealState
from mla_cli.converters.latent_norm import choose_norm, norm_line, why_no_norm
from mla_cli.converters.options import ConvertOptions
from mla_cli.converters.plan import ConversionPlan
from mla_cli.converters.presets import find_preset
from mla_cli.converters.progressive import heal_and_cut, shared_options
from mla_cli.converters.recut import ORDER_SAMPLES, put_in_order
from mla_cli.converters.report import Timings
from mla_cli.converters.strengths import SEQUENCES
from mla_cli.model.latent_weights import LatentWeights

LayerErrors = tuple[tuple[float, float], ...]


def heal_in_stages(
    bank: LayerBank,
    plan: ConversionPlan,
    layers: Sequence[LatentWeights],
    texts: ConversionTexts,
    batches: Batches,
    options: ConvertOptions,
    state: HealState,
    timings: Timings,
    facts: dict[str, Any],
    notes: list[str],
    *,
    opening: int | None,
) -> tuple[Sequence[LatentWeights], LayerErrors]:
    """The layers after a milder rank (`--progressive`), a norm's trial (`chat`), healing, ordering and gates (`--gate`).

    Args:
        layers: the closed form. opening: token that every sequence starts with.
        facts, notes: get what the report says.

    Returns:
        The layers, and each one's error before and after healing layer by layer (none without it).
    """
    asked, gate_options = shared_with_gate(options.heal)
    record: dict[str, Any] = {}
    errors: LayerErrors = ()
    if options.progressive:
        with timings.timed("milder_healing"):
            share, asked = shared_options(asked)
            milder, losses = heal_and_cut(
                bank, plan, layers, texts.to_heal, texts.long_unseen, first(texts.fitted, options.fisher_samples), texts.unseen,
                batches, share, state, opening=opening,
            )  # fmt: skip
        layers, record = milder.layers, {"milder": milder.record}
        facts["held_out"] |= {name: asdict(loss) for name, loss in losses.items()}
    if find_preset(options.preset).latent_norm:
        with timings.timed("latent_norm"):
            reason = why_no_norm(plan.form, options.heal)
            facts["latent_norm"] = {"kept": False, "reason": reason}
            if reason is None:
                norm = choose_norm(
                    bank, layers, texts.to_heal, texts.long_unseen, texts.unseen, batches, asked, state, opening=opening
                )
                layers, asked, facts["latent_norm"] = norm.layers, norm.rest, norm.record
        notes.append(norm_line(facts["latent_norm"]))
        if options.heal.nested and facts["latent_norm"]["kept"]:
            notes.append("--nested has no effect: a norm on the latent reads all of its channels")
            warn(notes[-1])
    if options.heal.mode != "none":
        with timings.timed("healing"):
            healed = heal(
                bank.model, layers, texts.to_heal, texts.long_unseen, asked, state, device=bank.device, opening=opening
            )
        layers, errors, facts["healing"] = healed.layers, healed.layer_errors, healed.record | record
        if all(layer.spec.norm_eps is None for layer in layers):  # a norm weighs channels where they stand
            with timings.timed("ordering"):
                seen, probe = first(texts.fitted, ORDER_SAMPLES), first(texts.unseen, SEQUENCES)
                layers = put_in_order(bank, layers, seen, probe, batches, seed=options.seed)
    if gate_options.gate:
        with timings.timed("gate"):
            gated = learn_gates(
                bank.model, layers, texts.healing, texts.long_unseen, gate_options, state, device=bank.device
            )
        layers, facts["healing"]["gate"] = gated.layers, gated.record
        notes.append(gate_line(gated.record))
        if options.heal.nested and any(layer["kept"] for layer in gated.record["layers"]):
            notes.append("--nested is of no use: a gate reads all channels of a latent, so that none can be left out")
            warn(notes[-1])
    return layers, errors
