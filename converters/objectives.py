"""What the closed form loses under every objective, on the same statistics and at the same ranks, on held-out text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, get_args

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches, LayerAt
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.converters.closed_form import ClosedForm, Moments, objective_moments, weighs_input
from mla_cli.converters.factorize import Objective, factorize
from mla_cli.converters.held_out import Loss, measure_texts
from mla_cli.converters.report import finite
from mla_cli.converters.statistics import SourceStatistics
from mla_cli.model.decoder import Decoder, DecoderLayer

OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


def compare_objectives(
    bank: LayerBank,
    closed: ClosedForm,
    known: tuple[Objective, Loss],
    statistics: Sequence[SourceStatistics],
    texts: CalibrationTexts,
    unseen: CalibrationTexts,
    batches: Batches,
    *,
    seed: int,
) -> list[dict[str, Any]]:
    """`objectives` of the report: one entry an objective: its held-out loss, and the seconds that its moments took.

    Args:
        closed: the closed form under the objective that was asked for. known: that objective, and its loss on `unseen`.
        statistics: of the source. texts: sequences for the Fisher information.
    """
    losses = {known[0]: known[1]}
    seconds = {known[0]: closed.moments_seconds}
    stages: dict[str, tuple[Decoder, LayerAt]] = {"source": (bank.frame, bank.source_layer)}
    for name in OBJECTIVES:
        if name == known[0]:
            continue
        begun = time.monotonic()
        moments, _ = objective_moments(bank, closed.wide, statistics, texts, batches, name, seed=seed)
        seconds[name] = time.monotonic() - begun
        stages[name] = (bank.frame, _fitted(bank, closed, moments, weigh_input=weighs_input(name)))
    found = measure_texts("comparing objectives", stages, unseen, batches)
    losses.update((name, found[name]) for name in OBJECTIVES if name in found)
    return [
        {
            "objective": name, "perplexity": finite(losses[name].perplexity), "kl": finite(losses[name].kl),
            "seconds": round(seconds[name], 2),
        }
        for name in OBJECTIVES
    ]  # fmt: skip


def _fitted(bank: LayerBank, closed: ClosedForm, moments: Sequence[Moments], *, weigh_input: bool) -> LayerAt:
    """Layers that are factorised when they are asked for, so that one objective's layers are never all in memory."""

    def layer_at(index: int) -> DecoderLayer:
        narrow, _ = factorize(closed.wide[index], closed.ranks[index], *moments[index], weigh_input=weigh_input)
        return bank.source_layer(index).with_attention(narrow.module(index, device=bank.device))

    return layer_at
