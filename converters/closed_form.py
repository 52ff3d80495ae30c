"""Steps 1 to 3 over all layers: rotary split, statistics of the split model, factorisation, refit. Training-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mla_cli.calibration.layer_bank import LayerBank, StoredLayers
from mla_cli.calibration.layerwise import Batches, steps_in, ticking
from mla_cli.calibration.offload import Mapped, Series
from mla_cli.calibration.precision import fast_dtype
from mla_cli.calibration.texts import CalibrationTexts
from mla_cli.console import note, progress
from mla_cli.converters.allocate import choose_ranks, turned_energy
from mla_cli.converters.compensate import Compensated, compensate
from mla_cli.converters.factorize import Objective, Spectrum, activation_weight, factorize, output_weight
from mla_cli.converters.plan import ConversionPlan
from mla_cli.converters.rotary_split import Mixing, split_error, split_rotary
from mla_cli.converters.statistics import LatentStatistics, SourceStatistics, latent_statistics, source_statistics
from mla_cli.model.latent_weights import LatentWeights

Ranks = Literal["uniform", "global"]
Moments = tuple[Tensor, Tensor | None]  # second moment of a layer's inputs, and weight of errors in its latent

ROUNDING = 1e-6  # nats: where nothing was lost, there is nothing to gain either


@dataclass(frozen=True)
class ClosedForm:
    """Every layer after step 1 (`wide`), step 2 (`narrow`) and step 3 (`layers`), with what each step lost.

    Attributes:
        split_errors: share of the rotary keys' energy that is left without rotation.
        spectra: what each latent channel is worth.
        ranks: fitted rank of each layer.
        fisher_tokens: tokens that the Fisher information was taken over (0: another objective).
        moments: per layer, what the factorisation weighed inputs and errors by; weigh_input: see `factorize`.
        moments_seconds: how long they took. batches: say where layers are kept.
        compensated: what the refit of step 3 did; None where it was not asked for, or did not beat `narrow`.
    """

    wide: Sequence[LatentWeights]
    narrow: Sequence[LatentWeights]
    split_errors: tuple[float, ...]
    spectra: tuple[Spectrum, ...]
    ranks: tuple[int, ...]
    fisher_tokens: int
    moments: Sequence[Moments]
    weigh_input: bool
    moments_seconds: float
    batches: Batches
    compensated: Compensated | None = None

    @property
    def layers(self) -> Sequence[LatentWeights]:
        """The layers that come out."""
        return self.narrow if self.compensated is None else self.compensated.layers

    def at(self, ranks: Sequence[int]) -> Sequence[LatentWeights]:
        """The layers narrowed to other ranks, without a refit."""
        return _narrowed(self.wide, ranks, self.moments, self.batches, weigh_input=self.weigh_input)[0]


def gather_source_statistics(bank: LayerBank, texts: CalibrationTexts, batches: Batches) -> Series[SourceStatistics]:
    """Forward statistics of the source over all calibration sequences."""
    layers = bank.model.spec.num_layers
    with ticking("reading activations", steps_in(batches, len(texts.lengths), layers, backward=False)) as tick:
        return source_statistics(bank.frame, bank.source_layer, texts.sequences, texts.lengths, batches, tick=tick)


def measure_latents(
    bank: LayerBank, layers: Sequence[LatentWeights], texts: CalibrationTexts, batches: Batches, *, seed: int
) -> Series[LatentStatistics]:
    """What matters in the latents of these layers: Fisher information and weighted inputs over all of `texts`."""
    steps = steps_in(batches, len(texts.lengths), len(layers), backward=True)
    with ticking("measuring what matters", steps) as tick:
        return latent_statistics(
            bank.latent_frame(layers), bank.latent_layers(layers), texts.sequences, texts.lengths, batches,
            seed=seed, compute=fast_dtype(bank.device), tick=tick,
        )  # fmt: skip


def objective_moments(
    bank: LayerBank,
    wide: Sequence[LatentWeights],
    statistics: Sequence[SourceStatistics],
    texts: CalibrationTexts,
    batches: Batches,
    objective: Objective,
    *,
    seed: int,
) -> tuple[Sequence[Moments], int]:
    """Moments of every split layer under an objective, and the tokens that gradients were taken over (0: none were)."""
    if objective == "fisher":
        latents = measure_latents(bank, wide, texts, batches, seed=seed)
        return Mapped(latents, lambda seen: (seen.input_moment, seen.fisher)), latents[0].tokens

    def moments(index: int) -> Moments:
        moment = statistics[index].input_moment
        if objective == "query-output":
            return moment, output_weight(wide[index], statistics[index].query_moment)
        return moment, activation_weight(wide[index], moment) if objective == "activation" else None

    return Mapped(range(len(wide)), moments), 0


def weighs_input(objective: Objective) -> bool:
    """Whether an objective goes by what the inputs are (see `factorize`)."""
    return objective != "weight"


def closed_form(
    bank: LayerBank,
    plan: ConversionPlan,
    statistics: Sequence[SourceStatistics],
    texts: CalibrationTexts,
    batches: Batches,
    *,
    objective: Objective,
    mixing: Mixing = "complex",
    ranks: Ranks = "uniform",
    compensation: bool = False,
    check: Callable[[Sequence[LatentWeights]], float] | None = None,
    seed: int = 0,
) -> ClosedForm:
    """Convert every layer in closed form.

    Args:
        statistics: of the source, one a layer. texts: sequences for the Fisher information and the refit.
        ranks: `global` shares the plan's ranks out over the layers by one threshold over their spectra.
        compensation: refit queries and outputs (step 3).
        check: loss of some layers on held-out text. Where given, ranks that were shared out must beat even ones, and
            refitted layers those that were not.
    """
    layers = range(bank.model.spec.num_layers)
    wide, errors = StoredLayers(batches.workplace.series()), []
    for index in layers:
        attention, seen = bank.source_attention(index), statistics[index]
        turned = mixing == "complex"
        split = split_rotary(
            attention, seen.input_moment, turned_energy(seen) if turned else seen.query_energy, plan.layers[index].slots,
            turn=seen.mean_turn if turned else None, mixing=mixing,
        )  # fmt: skip
        errors.append(split_error(attention, split, seen.input_moment, seen.query_energy))
        wide.append(split)

    begun = time.monotonic()
    moments, tokens = objective_moments(bank, wide, statistics, texts, batches, objective, seed=seed)
    seconds = time.monotonic() - begun
    weigh_input = weighs_input(objective)
    even = tuple(layer.fitted_rank for layer in plan.layers)
    narrow, spectra = _narrowed(wide, even, moments, batches, weigh_input=weigh_input)
    chosen = even
    if ranks == "global":
        shared = choose_ranks(spectra, sum(even), even=sum(even) // len(even))
        if shared != even:
            other, _ = _narrowed(wide, shared, moments, batches, weigh_input=weigh_input)
            what = "ranks by one threshold over all layers"
            if check is None or _better(what, check(other), "even ranks", check(narrow)):
                narrow, chosen = other, shared
    refitted = None
    if compensation:
        with ticking("refitting queries and outputs", len(layers)) as tick:
            refitted = compensate(bank, narrow, texts, batches, tick=tick)
        if check is not None and not _better("refitted layers", check(refitted.layers), "without", check(narrow)):
            refitted = None
    return ClosedForm(
        wide, narrow, tuple(errors), spectra, chosen, tokens, moments, weigh_input, seconds, batches, refitted
    )


def _narrowed(
    wide: Sequence[LatentWeights],
    ranks: Sequence[int],
    moments: Sequence[Moments],
    batches: Batches,
    *,
    weigh_input: bool,
) -> tuple[Sequence[LatentWeights], tuple[Spectrum, ...]]:
    layers, spectra = StoredLayers(batches.workplace.series()), []
    for index in progress(range(len(wide)), "factorising", unit="layer"):
        layer, spectrum = factorize(wide[index], ranks[index], *moments[index], weigh_input=weigh_input)
        layers.append(layer)
        spectra.append(spectrum)
    return layers, tuple(spectra)


def _better(what: str, found: float, other: str, before: float) -> bool:
    taken = found < before - ROUNDING
    note(f"{what}: KL {found:.4f}, {other} {before:.4f}: {'taken' if taken else 'not taken'}")
    return taken
