"""Ranges: what one costs is what quantising with it costs, and one is cut only where that pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_cli.calibration.clipping import UNCLIPPED, Clip, choose_clip, group_losses
from mla_cli.calibration.observers import LatentObserver, LatentRange, grouped_amax, page_reach
from mla_cli.kernels.quantized import LatentQuantizer, group_of

WIDTH = 80  # INT4: two groups of 32, and one of 16
LENGTHS = (100, 33, 1, 16) * 5
Weigh = Callable[[Tensor, Tensor], Tensor]


def sequences() -> tuple[Tensor, Tensor]:
    """Latents `[B, T, WIDTH]` of tokens of many sizes, the first tokens the largest by far; and which `[B, T]` count."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.exp2(torch.rand(len(LENGTHS), 100, 1, generator=generator) * 4 - 2)
    latents = torch.randn(len(LENGTHS), 100, WIDTH, generator=generator) * spread
    latents *= torch.logspace(0.5, -0.5, WIDTH)
    latents[:, 0] *= 10
    return latents, torch.arange(100) < torch.tensor(LENGTHS)[:, None]


def observed(latents: Tensor, valid: Tensor, dtype: Any, granularity: Any) -> LatentRange:
    observer = LatentObserver(0, group_of(dtype))
    reach = page_reach(latents, valid, group_of(dtype))[valid] if granularity == "page" else None
    observer.add(latents[valid], reach)
    return observer.result()


def by_group(groups: Tensor, sizes: Tensor) -> Tensor:
    return 1.0 + groups.double() + 0 * sizes.double()


def by_size(groups: Tensor, sizes: Tensor) -> Tensor:
    """As gradients are: the larger a token, the less it minds."""
    return (1.0 + groups.double()) / (1e-3 + sizes.double()).square()


def range_loss(
    seen: LatentRange, weights: Tensor, dtype: Any, granularity: Any, clip: float | Sequence[float]
) -> float:
    """What ranges that reach this far are foretold to cost, of all groups together."""
    losses = group_losses(seen, weights, dtype, granularity)
    clips = [clip] * len(losses) if isinstance(clip, float) else clip
    return sum(loss.at(reach) for loss, reach in zip(losses, clips, strict=True))


def chosen_clip(seen: LatentRange, weights: Tensor, dtype: Any, granularity: Any) -> Clip:
    return choose_clip(group_losses(seen, weights, dtype, granularity))


def direct_loss(latents: Tensor, valid: Tensor, quantizer: LatentQuantizer, weigh: Weigh) -> float:
    """`1/2 sum_i w_i E[e_i^2]`, from what the quantizer gives back."""
    latents = latents.double() * valid[..., None]
    error = (quantizer.rounded(latents) - latents)[valid]  # [n, r]
    group = quantizer.group
    sizes = page_reach(latents, valid, group) if quantizer.granularity == "page" else grouped_amax(latents, group)
    weights = weigh(torch.arange(sizes.shape[-1]), sizes[valid])  # [n, G]
    spread = weights.repeat_interleave(group or WIDTH, dim=-1)[:, :WIDTH]
    return float((spread * error.square()).sum(dim=-1).mean()) / 2


@pytest.mark.parametrize("weigh", [by_group, by_size])
@pytest.mark.parametrize("granularity", ["token", "static"])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_the_loss_of_a_range_is_what_quantising_costs(dtype: Any, granularity: Any, weigh: Weigh) -> None:
    latents, valid = sequences()
    seen = observed(latents, valid, dtype, granularity)
    weights = weigh(seen.groups, seen.rows)
    for share in (1.0, 0.5, 0.1, 0.02):
        estimate = range_loss(seen, weights, dtype, granularity, seen.amax * share)
        quantizer = LatentQuantizer(dtype, granularity, seen.amax * share)
        assert estimate == pytest.approx(direct_loss(latents, valid, quantizer, weigh), rel=0.1), share


@pytest.mark.parametrize("granularity", ["token", "static"])
def test_each_group_has_its_own_range(granularity: Any) -> None:
    latents, valid = sequences()
    seen = observed(latents, valid, "int4", granularity)
    weights = by_group(seen.groups, seen.rows)
    for clip in ((9.0, 3.0, 1.0), (1.0, 3.0, 9.0), (2.0, UNCLIPPED if granularity == "token" else 300.0, 0.3)):
        estimate = range_loss(seen, weights, "int4", granularity, clip)
        quantizer = LatentQuantizer("int4", granularity, clip)
        assert estimate == pytest.approx(direct_loss(latents, valid, quantizer, by_group), rel=0.1), clip


@pytest.mark.parametrize("weigh", [by_group, by_size])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_the_loss_of_pages_is_that_of_the_range_they_have_in_the_end(dtype: Any, weigh: Weigh) -> None:
    latents, valid = sequences()
    seen = observed(latents, valid, dtype, "page")
    weights = weigh(seen.groups, seen.rows)
    whole = range_loss(seen, weights, dtype, "page", UNCLIPPED)
    # (What is rounded anew while a page's range still grows is not told apart.)
    assert whole == pytest.approx(direct_loss(latents, valid, LatentQuantizer(dtype, "page"), weigh), rel=0.15)
    for share in (0.5, 0.1, 0.02, 0.005):
        cut = direct_loss(latents, valid, LatentQuantizer(dtype, "page", seen.amax * share), weigh)
        estimate = range_loss(seen, weights, dtype, "page", seen.amax * share)
        assert estimate == pytest.approx(cut, rel=0.15), share


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_page_that_grows_ends_at_the_clip(dtype: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    reach = torch.rand(40, 100, 1, generator=generator) * 0.4 + 0.55
    latents = (2 * torch.rand(40, 100, WIDTH, generator=generator) - 1) * reach
    latents[:, 5::16] *= 1.02 / latents[:, 5::16].abs().amax(
        dim=-1, keepdim=True
    )  # one token of a page, beyond by a little
    valid = torch.ones(40, 100, dtype=torch.bool)
    seen = observed(latents, valid, dtype, "page")
    estimate = range_loss(seen, by_group(seen.groups, seen.rows), dtype, "page", 1.0)
    assert estimate == pytest.approx(
        direct_loss(latents, valid, LatentQuantizer(dtype, "page", 1.0), by_group), rel=0.2
    )


@pytest.mark.parametrize("granularity", ["token", "page", "static"])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("weigh", [by_group, by_size])
def test_a_chosen_range_is_about_the_best_and_never_worse_than_none(dtype: Any, granularity: Any, weigh: Weigh) -> None:
    latents, valid = sequences()
    seen = observed(latents, valid, dtype, granularity)
    clip = chosen_clip(seen, weigh(seen.groups, seen.rows), dtype, granularity)

    def loss(reach: float | tuple[float, ...]) -> float:
        return direct_loss(latents, valid, LatentQuantizer(dtype, granularity, reach), weigh)

    own = loss(clip.reach or UNCLIPPED)
    assert clip.loss == pytest.approx(own, rel=0.1 if granularity != "page" else 0.25)
    assert own <= 1.02 * loss(seen.amax)
    grid = [seen.amax * 2 ** (-k / 4) for k in range(32)]
    if dtype != "int4":
        assert own <= (1.1 if granularity != "page" else 1.25) * min(map(loss, grid))


def test_a_range_is_cut_only_where_that_pays() -> None:
    outlier = torch.randn(3000, 64, generator=torch.Generator().manual_seed(0))
    outlier[17, 5] = 400.0
    seen = observed(outlier[None], torch.ones(1, 3000, dtype=torch.bool), "int8", "static")
    weights = torch.ones(len(seen.rows), dtype=torch.float64)
    # Told apart by nothing, one value of 400 counts for all the others' rounding: it keeps most of its range.
    whole = chosen_clip(seen, weights, "int8", "static")
    assert whole.reach is not None
    assert whole.reach > 100  # type: ignore[operator]
    # One that the loss does not mind takes no range of all others.
    static = chosen_clip(seen, torch.where(seen.rows > 100, 1e-6, 1.0).double(), "int8", "static")
    assert static.reach is not None
    assert static.reach < 20  # type: ignore[operator]
    assert static.loss < 0.05 * whole.loss
    assert chosen_clip(seen, weights, "int8", "token").reach is None  # each token has a range of its own
    even = observed(torch.rand(1, 100, 64) + 1, torch.ones(1, 100, dtype=torch.bool), "int8", "static")
    assert chosen_clip(even, torch.ones(len(even.rows)).double(), "int8", "static").reach == even.amax


def test_only_the_groups_that_gain_are_cut() -> None:
    latents = torch.ones(400, WIDTH)  # exact as they are
    latents[:, 32:64] += torch.rand(400, 32, generator=torch.Generator().manual_seed(1))
    seen = observed(latents[None], torch.ones(1, 400, dtype=torch.bool), "int4", "token")
    clip = chosen_clip(seen, torch.ones(len(seen.rows), dtype=torch.float64), "int4", "token")
    assert isinstance(clip.reach, tuple)
    assert clip.reach[0] == clip.reach[2] == UNCLIPPED
    assert 1.5 < clip.reach[1] < 2
    cut, own = (LatentQuantizer("int4", "token", reach).rounded(latents) for reach in (clip.reach, UNCLIPPED))
    assert float((cut - latents).norm()) < 0.98 * float((own - latents).norm())


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("granularity", ["token", "page", "static"])
def test_silent_layers_get_a_range_that_can_be_used(granularity: Any, dtype: Any) -> None:
    seen = observed(torch.zeros(1, 10, WIDTH), torch.ones(1, 10, dtype=torch.bool), dtype, granularity)
    clip = chosen_clip(seen, torch.ones(len(seen.rows)), dtype, granularity)
    assert clip.loss == 0
    if granularity != "static":
        assert clip.reach is None
        return
    assert clip.reach is not None
    quantizer = LatentQuantizer(dtype, "static", clip.reach)
    assert not quantizer.rounded(torch.zeros(3, WIDTH)).any()
