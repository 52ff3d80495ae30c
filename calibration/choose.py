"""What latents are cached as: turned how, and, where only the bytes are given, in which type and how many channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_cli.calibration.cache_sizes import TYPES, CacheSizes, bytes_per_token
from mla_cli.calibration.passes import HeldOut, HeldOutCost
from mla_cli.calibration.rotate import rotation
from mla_cli.calibration.rotate_model import NORM, norm_shares, turned_channels
from mla_cli.calibration.sensitivity import Sensitivity
from mla_cli.calibration.variants import Turns, Variant, make_variant, own_channels
from mla_cli.checkpoint.kv_cache import Rotation
from mla_cli.checkpoint.latent_strength import kept_channels
from mla_cli.checkpoint.load import ModelSource
from mla_cli.errors import UsageError
from mla_cli.kernels.quantized import CacheDtype, group_of
from mla_cli.model.spec import LatentAttentionSpec


@dataclass(frozen=True)
class Plan:
    """How latents are to be cached.

    Attributes:
        dtype: of the codes; None: not quantised. rotation: what is in the weights in the end.
        turns: what has to be folded into them for that. strength: share of each latent's channels that is cached.
    """

    dtype: CacheDtype | None
    rotation: Rotation
    turns: Turns | None = None
    strength: float = 1.0

    def variant(self, model: ModelSource) -> Variant:
        """The layers that this makes of a model's."""
        return make_variant(model, self.turns, self.strength)


@dataclass(frozen=True)
class Candidate:
    """A plan, the bytes a token takes with it over all layers, and what it costs on a few sequences (None: not measured)."""

    plan: Plan
    bytes_per_token: int
    cost: HeldOutCost | None = None


class Chooser:
    """Compares plans for a model by what they cost on text; ranges are each token's own in all of them.

    Args:
        sensitivity: one a layer. text: sequences that plans are measured on. sizes: what caches take.
    """

    def __init__(
        self,
        model: ModelSource,
        sensitivity: Sequence[Sensitivity | None],
        text: HeldOut,
        sizes: CacheSizes,
    ) -> None:
        self.model, self.sensitivity, self.text, self.sizes = model, sensitivity, text, sizes

    @property
    def folded(self) -> Rotation:
        """The rotation that the checkpoint's weights hold already."""
        return self.sizes.folded

    def plan(self, dtype: CacheDtype | None, kind: Rotation, strength: float = 1.0) -> Plan:
        """A plan with its turns; a rotation that is in the weights already needs none."""
        if kind in ("none", self.folded):
            return Plan(dtype, self.folded, strength=strength)
        group = None if dtype is None else group_of(dtype)
        turns = [
            None if seen is None else self._turn(index, seen, kind, group, strength)
            for index, seen in enumerate(self.sensitivity)
        ]
        return Plan(dtype, kind, turns, strength)

    def sensitivity_with(self, plan: Plan) -> list[Sensitivity | None]:
        """Of the layers that a plan makes."""
        found: list[Sensitivity | None] = []
        for index, seen in enumerate(self.sensitivity):
            turn = None if plan.turns is None else plan.turns[index]
            if seen is not None and turn is not None:
                seen = seen.turned(turn, self._norm_shares(index))
            if seen is not None and plan.strength < 1:
                seen = seen.narrowed(kept_channels(own_channels(self._attention(index)), plan.strength))
            found.append(seen)
        return found

    def measure(self, plans: Sequence[Plan], title: str = "comparing rotations") -> list[Candidate]:
        """What plans cost."""
        variants = [plan.variant(self.model).cached(self.sizes.dynamic(plan.dtype)) for plan in plans]
        costs = self.text.costs(variants, title=title)
        return [
            Candidate(plan, bytes_per_token(self.model, variant.spec, variant.quantizers), cost)
            for plan, variant, cost in zip(plans, variants, costs, strict=True)
        ]

    def _attention(self, index: int) -> LatentAttentionSpec:
        attention = self.model.spec.attention[index]
        assert isinstance(attention, LatentAttentionSpec)
        return attention

    def _norm(self, index: int) -> Tensor | None:
        name = f"model.layers.{index}.self_attn.{NORM}"
        return self.model.tensor(name) if self._attention(index).norm_eps is not None else None

    def _norm_shares(self, index: int) -> Tensor:
        norm = self._norm(index)
        return norm_shares(norm, turned_channels(self._attention(index), norm))

    def _turn(self, index: int, seen: Sensitivity, kind: Rotation, group: int | None, strength: float) -> Tensor:
        width = turned_channels(self._attention(index), self._norm(index))
        if strength < 1:  # what is dropped must not be mixed into what is kept
            width = kept_channels(own_channels(self._attention(index)), strength)
        if kind != "learned":
            return rotation(width, kind)
        level = seen.turned(torch.eye(0, dtype=torch.float64), self._norm_shares(index)).narrowed(width)
        return rotation(width, kind, moment=level.moment, fisher=level.fisher, group=group)


def check_rotation(folded: Rotation, asked: Rotation | None) -> None:
    """Refuse a rotation where another is in the weights already.

    Raises:
        UsageError: it is.
    """
    if folded != "none" and asked not in (None, folded):
        raise UsageError(
            f"the latents of this checkpoint are turned ({folded}) already",
            where=f"--rotation {asked}",
            fix="calibrate the checkpoint that it was made from, or leave the option out",
        )


def choose_rotation(
    chooser: Chooser, dtype: CacheDtype, asked: Rotation | None, max_loss: float
) -> tuple[Plan, list[Candidate]]:
    """How to turn latents of a type, and what was measured to find out.

    INT4 is turned the way that diverges least from the unquantised model. INT8 and FP8 hardly need it, and a turn has a price
    (the channels' order, and new weights): they are turned only where they would cost more than `max_loss` percent without, and
    less with it.

    Args:
        asked: the rotation that the user named (see `check_rotation`); None: by measurement.
    """
    if chooser.folded != "none":
        return Plan(dtype, chooser.folded), []
    if asked is not None:
        return chooser.plan(dtype, asked), []
    if dtype == "int4":
        found = chooser.measure([chooser.plan(dtype, kind) for kind in ("none", "hadamard", "learned")])
        return least(found).plan, found
    found = chooser.measure([chooser.plan(dtype, "none")])
    if _cost(found[0]).change_percent <= max_loss:
        return found[0].plan, found
    found += chooser.measure([chooser.plan(dtype, kind) for kind in ("hadamard", "learned")])
    return least(found).plan, found


def choose_within(
    chooser: Chooser, budget: int, asked: Rotation | None, dtype: CacheDtype | None = None
) -> tuple[Plan, list[Candidate]]:
    """The plan of least divergence among those that take at most `budget` bytes a token over all layers.

    Of each type it is the one with the most channels, the same share in all layers.

    Args:
        asked, dtype: the rotation and the type that the user named; None: by measurement.

    Raises:
        UsageError: not even the smallest fits.
    """
    chooser.sizes.check(budget, dtype)
    plans = []
    for kv_dtype in TYPES if dtype is None else (dtype,):
        strength = chooser.sizes.largest_strength(kv_dtype, budget)
        if strength is not None:
            plans += [chooser.plan(kv_dtype, kind, strength) for kind in _kinds(chooser, kv_dtype, asked)]
    found = chooser.measure(plans, "comparing caches")
    return least(found).plan, found


def _kinds(chooser: Chooser, dtype: CacheDtype | None, asked: Rotation | None) -> Sequence[Rotation]:
    if dtype is None or chooser.folded != "none":
        return ("none",)  # as the weights are: numbers that are not quantised gain nothing
    if asked is not None:
        return (asked,)
    return ("none", "hadamard", "learned") if dtype == "int4" else ("none", "hadamard")


def least(found: Sequence[Candidate]) -> Candidate:
    """The first of least divergence."""
    return min(found, key=lambda candidate: _cost(candidate).kl)


def _cost(candidate: Candidate) -> HeldOutCost:
    assert candidate.cost is not None
    return candidate.cost
