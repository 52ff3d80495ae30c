"""Steps 1 and 2 over all layers: rotary split, statistics of the split model, factorisation. Training-free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.console import progress
from mla_cli.converters.factorize import Objective, Spectrum, factorize, output_weight
from mla_cli.converters.layer_bank import LayerBank
from mla_cli.converters.layerwise import Batches, Tick, steps_in
from mla_cli.converters.plan import ConversionPlan
from mla_cli.converters.rotary_split import Mixing, split_error, split_rotary
from mla_cli.converters.statistics import SourceStatistics, latent_statistics, source_statistics
from mla_cli.model.latent_weights import LatentWeights


@dataclass(frozen=True)
class ClosedForm:
    """Every layer after step 1 (`wide`) and step 2 (`narrow`), with what each step lost.

    Attributes:
        split_errors: share of the rotary keys' energy that is left without rotation.
        spectra: what each latent channel is worth.
        fisher_tokens: tokens that the Fisher information was taken over (0: another objective).
    """

    wide: tuple[LatentWeights, ...]
    narrow: tuple[LatentWeights, ...]
    split_errors: tuple[float, ...]
    spectra: tuple[Spectrum, ...]
    fisher_tokens: int


@contextmanager
def ticking(description: str, total: int) -> Iterator[Tick]:
    """A progress bar that a computation advances by calling what it is given."""
    bar = progress(range(total), description, total=total, unit="layer")

    def tick() -> None:
        next(bar, None)

    next(bar, None)  # shows the bar at once
    try:
        yield tick
    finally:
        close = getattr(bar, "close", None)
        if close is not None:
            close()


def gather_source_statistics(bank: LayerBank, texts: CalibrationTexts, batches: Batches) -> list[SourceStatistics]:
    """Forward statistics of the source over all calibration sequences."""
    layers = bank.model.spec.num_layers
    with ticking("reading activations", steps_in(batches, len(texts.lengths), layers, backward=False)) as tick:
        return source_statistics(bank.frame, bank.source_layer, texts.sequences, texts.lengths, batches, tick=tick)


def closed_form(
    bank: LayerBank,
    plan: ConversionPlan,
    statistics: Sequence[SourceStatistics],
    texts: CalibrationTexts,
    batches: Batches,
    *,
    objective: Objective,
    mixing: Mixing = "complex",
    seed: int = 0,
) -> ClosedForm:
    """Convert every layer in closed form.

    Args:
        statistics: of the source, one a layer. texts: sequences for the Fisher information (objective `fisher` only).
    """
    layers = range(bank.model.spec.num_layers)
    wide, errors = [], []
    for index in layers:
        attention, seen = bank.source_attention(index), statistics[index]
        split = split_rotary(
            attention, seen.input_moment, seen.query_energy, plan.layers[index].slots,
            turn=seen.mean_turn if mixing == "complex" else None, mixing=mixing,
        )  # fmt: skip
        errors.append(split_error(attention, split, seen.input_moment, seen.query_energy))
        wide.append(split)

    narrow, spectra, tokens = [], [], 0
    weight: Tensor | None
    if objective == "fisher":
        steps = steps_in(batches, len(texts.lengths), len(layers), backward=True)
        with ticking("measuring what matters", steps) as tick:
            latents = latent_statistics(
                bank.latent_frame(wide), bank.latent_layers(wide), texts.sequences, texts.lengths, batches,
                seed=seed, tick=tick,
            )  # fmt: skip
        tokens = latents[0].tokens
    for index in progress(layers, "factorising", unit="layer"):
        rank = plan.layers[index].fitted_rank
        if objective == "fisher":
            moment, weight = latents[index].input_moment, latents[index].fisher
        else:
            moment = statistics[index].input_moment
            weight = output_weight(wide[index], statistics[index].query_moment) if objective == "activation" else None
        layer, spectrum = factorize(wide[index], rank, moment, weight, weigh_input=objective != "weight")
        narrow.append(layer)
        spectra.append(spectrum)
    return ClosedForm(tuple(wide), tuple(narrow), tuple(errors), tuple(spectra), tokens)
