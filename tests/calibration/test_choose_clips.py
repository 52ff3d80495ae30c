"""Ranges of all layers: what is cut must pay in the whole model, or it is not cut."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_cli.calibration import choose_clips as module
from mla_cli.calibration.calibrate import calibrate
from mla_cli.calibration.choose_clips import ChosenClips, choose_clips
from mla_cli.calibration.clipping import UNCLIPPED, Clip, choose_clip, group_losses, widened
from mla_cli.calibration.observers import LatentObserver, LatentRange
from mla_cli.calibration.passes import HeldOutCost
from mla_cli.calibration.variants import Variant
from mla_cli.checkpoint.kv_cache import KEY
from mla_cli.kernels.quantized import group_of
from tests.calibration.support import CPU, options, read

WIDTH = 70


def observed(dtype: Any, tail: bool = True) -> LatentRange:
    """Latents of one layer, spread evenly, a few values of which are far beyond the others."""
    latents = torch.rand(500, WIDTH, generator=torch.Generator().manual_seed(1)) + 0.1
    latents[7, ::9] *= 40 if tail else 1
    observer = LatentObserver(0, group_of(dtype))
    observer.add(latents)
    return observer.result()


def flat(seen: LatentRange) -> torch.Tensor:
    return torch.where(seen.rows > 20, 1e-6, 1.0).double()  # what is large does not matter, so cutting it pays


def reaches(clip: Clip) -> list[float]:
    found = clip.reach if isinstance(clip.reach, tuple) else (clip.reach,)
    return [UNCLIPPED if reach is None else reach for reach in found]


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("granularity", ["token", "page", "static"])
def test_a_range_is_widened_step_by_step_until_nothing_is_cut(dtype: Any, granularity: Any) -> None:
    seen = observed(dtype)
    losses = group_losses(seen, flat(seen), dtype, granularity)
    amax = seen.group_amax
    cut = Clip(tuple(most / 9 for most in amax) if dtype == "int4" else amax[0] / 9, 0.0)
    steps = [widened(cut, losses, share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert reaches(steps[0]) == pytest.approx(reaches(cut), rel=1e-12)
    assert reaches(steps[2]) == pytest.approx([most / 3 for most in amax], rel=1e-9)  # half of the way, in octaves
    for narrow, wide in pairwise(steps):
        assert all(one < other for one, other in zip(reaches(narrow), reaches(wide), strict=steps[-1] is not wide))
    assert steps[-1].reach == (None if granularity != "static" else amax if dtype == "int4" else amax[0])
    for clip in steps:
        told = [loss.at(reach) for loss, reach in zip(losses, reaches(clip), strict=False)]
        if len(told) == len(losses):
            assert clip.loss == pytest.approx(sum(told), rel=1e-9)
    # What cuts nothing stays what it is.
    whole = Clip(None if granularity != "static" else amax if dtype == "int4" else amax[0], 0.0)
    assert all(widened(whole, losses, share).reach == whole.reach for share in (0.0, 0.5, 1.0))


class Text:
    """Text on which ranges cost what they are said to, and that counts what is measured."""

    def __init__(self, *kl: float) -> None:
        self.kl, self.measured = kl, 0

    def costs(self, variants: list[Variant], title: str) -> list[HeldOutCost]:
        self.measured += len(variants)
        return [HeldOutCost(2.0, 2.0, kl, 100) for kl in self.kl[: len(variants)]]


def chosen(text: Text, tail: bool = True, granularity: Any = "static") -> ChosenClips:
    seen = observed("int8", tail)
    weigh: Any = SimpleNamespace(weights=lambda latents, group, by_size: flat(latents))
    variant = Variant(None, (None, None))  # type: ignore[arg-type]
    return choose_clips(
        [seen, None], [weigh, None], variant, text, dtype="int8", granularity=granularity, rope_dtype="bfloat16"  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kl", "wider"),
    [((0.1, 0.2, 0.3), 0.0), ((0.3, 0.2, 0.1), 1.0), ((0.3, 0.1, 0.2), 0.5), ((0.1005, 0.1, 0.2), 0.0), ((0.0, 0.0, 0.0), 0.0)],
)  # fmt: skip
def test_ranges_of_least_divergence_are_taken_and_the_narrower_of_those_alike(kl: Any, wider: float) -> None:
    found = chosen(Text(*kl))
    assert found.wider == wider
    assert [share for share, _ in found.measured] == [0.0, 0.5, 1.0]
    assert found.clips[1] is None
    assert found.quantizers[1] is None
    seen = observed("int8")
    assert found.clips[0] is not None
    assert found.quantizers[0] is not None
    assert found.quantizers[0].clip == found.clips[0].reach
    searched = choose_clip(group_losses(seen, flat(seen), "int8", "static"))
    assert found.clips[0] == widened(searched, group_losses(seen, flat(seen), "int8", "static"), wider)
    assert (found.clips[0].reach == seen.amax) == (wider == 1.0)


@pytest.mark.parametrize("granularity", ["token", "static"])
def test_nothing_is_measured_where_nothing_is_cut(granularity: Any) -> None:
    text = Text()
    found = chosen(text, tail=False, granularity=granularity)
    assert (text.measured, found.measured, found.wider) == (0, (), 0.0)


@pytest.mark.parametrize(("kv_dtype", "scales"), [("int8", "static"), ("int4", "page"), ("int8", "token")])
def test_a_cut_that_ruins_the_model_is_undone(
    native: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: Any, scales: Any
) -> None:
    chosen = options(native, kv_dtype=kv_dtype, scales=scales, rotation="none", max_loss=1000.0)
    sound = calibrate(str(native), None, chosen, CPU)

    def cut_short(losses: Any) -> Clip:
        return widened(
            Clip(tuple(x.amax / 50 for x in losses) if kv_dtype == "int4" else losses[0].amax / 50, 0), losses, 0
        )

    monkeypatch.setattr(module, "choose_clip", cut_short)
    report = calibrate(str(native), None, chosen, CPU)
    told = report["ranges"]
    assert told["wider"] == 1.0
    assert [one["wider"] for one in told["measured"]] == [0.0, 0.5, 1.0]
    assert told["measured"][0]["kl"] > 10 * told["measured"][2]["kl"]
    assert report["heldout"]["kl"] < 3 * sound["heldout"]["kl"] + 1e-4
    for layer in read(native / "config.json")[KEY]["layers"]:
        if scales == "static":
            assert layer["clip"] == layer["amax"]
        else:
            assert layer["clip"] is None
