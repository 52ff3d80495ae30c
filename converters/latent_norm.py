"""A norm on the latent (preset `chat`): `c' = w c / sqrt(mean(c^2) + eps)`, kept where it does not cost anything.

An RMSNorm drops the length of each token's latent, which nothing after it can give back: with the usual small eps the first
token's latent, short because inputs are taken about a mean that this token dominates, is blown up to the others' size. With an
eps far above the mean square of the latents the norm is nearly a constant factor, which `w` undoes: typical tokens pass as they
are, and those whose latents stand out are bounded. As eps grows it becomes the identity.

Both variants of the closed form heal alike for a share of the time; the norm stays where the model with it is no further from
the source on held-out text than the model without, and the rest of the healing goes on with that one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mla_cli.calibration.layer_bank import LayerBank
from mla_cli.calibration.layerwise import Batches, run
from mla_cli.calibration.texts import CalibrationTexts, first
from mla_cli.console import note
from mla_cli.converters.heal import heal
from mla_cli.converters.heal_options import HealOptions
from mla_cli.converters.heal_state import HealState
from mla_cli.converters.held_out import loss_of
from mla_cli.model.attention import Record
from mla_cli.model.latent_weights import LatentWeights

# eps over the mean square of the latents: a token of twice the mean square is read 4 % weaker, one of half of it 2 % stronger.
SOFTNESS = 10.0
# Of the healing, each of the two variants gets so much.
TRIAL_SHARE = 0.2
# Steps that two trials and what follows them take at the least.
TRIAL_STEPS = 3
# Sequences that the mean square is taken over: one number a layer settles at once.
POWER_SAMPLES = 8


@dataclass(frozen=True)
class NormChoice:
    """Layers to go on with, the healing that is left for them, and what the report says (`latent_norm`)."""

    layers: Sequence[LatentWeights]
    rest: HealOptions
    record: dict[str, Any]


def why_no_norm(form: str, options: HealOptions) -> str | None:
    """Why a norm cannot be tried; None if it can."""
    if form == "deepseek":
        return "the stock form neutralises its norm on the latent"
    if options.mode == "none":
        return "it is judged after healing, and there is none"
    few = options.steps is not None and options.steps < TRIAL_STEPS
    return f"two trials and the healing after them need {TRIAL_STEPS} steps at the least" if few else None


def choose_norm(
    bank: LayerBank,
    layers: Sequence[LatentWeights],
    healing: CalibrationTexts,
    long_unseen: CalibrationTexts,
    unseen: CalibrationTexts,
    batches: Batches,
    options: HealOptions,
    state: HealState,
    *,
    opening: int | None,
) -> NormChoice:
    """Heal with and without norms for a while, and take what is nearer to the source on `unseen`.

    Args:
        layers: a closed form. healing, long_unseen, opening: see `heal`.
    """
    trial, rest = shared(options)
    seen = first(healing, POWER_SAMPLES)
    variants = {"without": layers, "with": with_norms(layers, latent_power(bank, layers, seen, batches))}
    healed, kl = {}, {}
    for name, variant in variants.items():
        note(f"healing for a while {name} a norm on the latent")
        healed[name] = heal(
            bank.model, variant, healing, long_unseen, trial, state.stage(f"norm-{name}"),
            device=bank.device, opening=opening,
        ).layers  # fmt: skip
        kl[name] = loss_of(bank, healed[name], unseen, batches).kl
    kept = kl["with"] <= kl["without"] or (math.isnan(kl["without"]) and not math.isnan(kl["with"]))
    note(f"norm on the latent: KL {kl['with']:.4f} with, {kl['without']:.4f} without: {'kept' if kept else 'not kept'}")
    record = {"kept": kept, "kl_with": kl["with"], "kl_without": kl["without"]}
    return NormChoice(healed["with" if kept else "without"], rest, record)


def norm_line(record: dict[str, Any]) -> str:
    """What came of it, in one line for the report."""
    if "reason" in record:
        return f"no norm on the latent: {record['reason']}"
    told = f"held-out KL {record['kl_with']:.4f} with it, {record['kl_without']:.4f} without, healed alike"
    return f"a norm on the latent: {told}" if record["kept"] else f"no norm on the latent, which would cost: {told}"


def shared(options: HealOptions) -> tuple[HealOptions, HealOptions]:
    """Options of each of the two trials, and of the healing after them."""
    trial, rest = options.divided(TRIAL_SHARE, times=2)
    return replace(trial, mode="layers"), rest


def latent_power(
    bank: LayerBank, layers: Sequence[LatentWeights], texts: CalibrationTexts, batches: Batches
) -> list[float]:
    """Mean square of each layer's latents over a text."""
    sums = [0.0] * len(layers)

    def observe(layer: int, record: Record, valid: Tensor) -> None:
        sums[layer] += float(record["latent"][valid].double().square().mean(dim=-1).sum())

    run(bank.latent_frame(layers), bank.latent_layers(layers), texts.sequences, texts.lengths, batches, observe=observe)
    return [total / texts.tokens for total in sums]


def with_norms(layers: Sequence[LatentWeights], powers: Sequence[float]) -> tuple[LatentWeights, ...]:
    """The layers with norms that leave a latent of the mean square of its layer as it is."""
    found = []
    for layer, power in zip(layers, powers, strict=True):
        eps = SOFTNESS * max(power, 1e-12)
        weight = torch.full((layer.spec.kv_lora_rank,), (power + eps) ** 0.5, dtype=torch.float64)
        found.append(layer.with_norm(eps, weight))
    return tuple(found)
