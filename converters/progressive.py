"""Progressive conversion: heal at a milder rank, cut the healed latents further, and heal again.

Every cut is then a small one, made by what matters to a model that works. The first stage's ranks are half-way between the
source's and the target's, as ratios go; rotary slots are the target's from the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

from mla_cli.calibration.layer_bank import LayerBank, specs_of
from mla_cli.calibration.layerwise import Batches
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.console import note
from mla_cli.converters.heal import Healed, heal
from mla_cli.converters.heal_options import HealOptions
from mla_cli.converters.heal_state import HealState, layers_from
from mla_cli.converters.held_out import Loss, measure_texts, source_and
from mla_cli.converters.plan import ConversionPlan
from mla_cli.converters.recut import recut
from mla_cli.model.latent_weights import LatentWeights
from mla_cli.report.values import span

FIRST_SHARE = 0.5  # of the time, or of the steps


def milder_ranks(plan: ConversionPlan, whole: Sequence[int]) -> tuple[int, ...]:
    """Ranks of the first stage: the geometric mean of the plan's and the `whole` ranks of the source."""
    return tuple(
        max(layer.fitted_rank, round(math.sqrt(layer.fitted_rank * rank)))
        for layer, rank in zip(plan.layers, whole, strict=True)
    )


def shared_options(options: HealOptions) -> tuple[HealOptions, HealOptions]:
    """What each of the two stages gets of the time, or of the steps."""
    return options.divided(FIRST_SHARE)


def heal_and_cut(
    bank: LayerBank,
    plan: ConversionPlan,
    layers: Sequence[LatentWeights],
    healing: CalibrationTexts,
    long_unseen: CalibrationTexts,
    fitted: CalibrationTexts,
    unseen: CalibrationTexts,
    batches: Batches,
    options: HealOptions,
    state: HealState,
    *,
    opening: int | None,
) -> tuple[Healed, dict[str, Loss]]:
    """The first stage: heal layers of milder ranks, and cut them to the plan's.

    Args:
        layers: the closed form at milder ranks. healing, long_unseen: see `heal`.
        fitted: sequences for the Fisher information that the cut goes by. unseen: for the report.

    Returns:
        The cut layers with the record of their healing, and held-out losses before (`milder_healed`) and after the cut (`cut`).
    """
    earlier = state.load_layers_and_facts("cut")
    if earlier is not None:
        tensors, facts = earlier
        return Healed(layers_from(bank.model.spec, plan, tensors), (), facts["record"]), {
            name: Loss(**loss) for name, loss in facts["losses"].items()
        }
    ranks = [spec.kv_lora_rank for spec in specs_of(layers)]
    note(f"first stage: latents of {span(ranks)}")
    healed = heal(
        bank.model, layers, healing, long_unseen, options, state.stage("milder"), device=bank.device, opening=opening
    )
    final = [layer.fitted_rank for layer in plan.layers]
    cut = recut(bank, healed.layers, final, fitted, batches, seed=options.seed)
    stages = source_and(bank, {"milder_healed": healed.layers, "cut": cut})
    losses = measure_texts("checking the cut on held-out text", stages, unseen, batches)
    del losses["source"]
    note(
        f"second stage: latents of {span(final)}; KL {losses['milder_healed'].kl:.4f} before the cut, "
        f"{losses['cut'].kl:.4f} after it"
    )
    record: dict[str, object] = {**healed.record, "kv_lora_rank": ranks}
    state.save_layers_and_facts(
        "cut", cut, {"record": record, "losses": {name: asdict(loss) for name, loss in losses.items()}}
    )
    return Healed(cut, (), record), losses
