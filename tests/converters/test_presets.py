"""Presets: limits, defaults and the choice by measurement."""

from __future__ import annotations

import math

import pytest

from mla_cli.calibration.mixes import MIXES
from mla_cli.converters.plan import DEFAULT_RATIO
from mla_cli.converters.presets import PRESETS, check_ratio, choose_ratio, find_preset, ratios_to_try
from mla_cli.errors import UsageError


@pytest.mark.parametrize(("preset", "limit"), [("math", 12.0), ("chat", 16.0), ("code", 12.0)])
def test_a_ratio_above_the_limit_is_refused_with_the_limit_and_a_way_out(preset: str, limit: float) -> None:
    for ratio in (1.5, 4.0, limit):
        check_ratio(preset, ratio)
    for ratio in (limit + 0.01, 64.0, math.inf, math.nan):
        with pytest.raises(UsageError) as caught:
            check_ratio(preset, ratio)
        assert f"up to a ratio of {limit:g}" in caught.value.what
        assert caught.value.where == "--ratio"
        assert f"{limit:g} or less" in (caught.value.fix or "")
        assert "--preset general" in (caught.value.fix or "")


def test_general_has_no_limit_and_the_default_of_the_command() -> None:
    check_ratio("general", 1000.0)
    assert ratios_to_try("general", None) == (DEFAULT_RATIO,)


def test_a_refusal_of_a_rank_names_its_option() -> None:
    with pytest.raises(UsageError) as caught:
        check_ratio("math", 20.0, where="--kv-lora-rank")
    assert caught.value.where == "--kv-lora-rank"
    assert "latent" in (caught.value.fix or "")


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    for call in (
        lambda: find_preset("poetry"),
        lambda: check_ratio("poetry", 2.0),
        lambda: ratios_to_try("poetry", None),
    ):
        with pytest.raises(UsageError, match=r"no preset 'poetry'.*general, math, chat, code"):
            call()


def test_what_is_asked_for_goes_before_what_the_preset_has() -> None:
    assert ratios_to_try("code", None) == (8.0, 10.0, 12.0)
    assert ratios_to_try("code", 3.0) == (3.0,)
    with pytest.raises(UsageError):
        ratios_to_try("code", 13.0)


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        ({8.0: 30.0, 10.0: 30.5, 12.0: 30.6}, 12.0),
        ({8.0: 30.0, 10.0: 30.5, 12.0: 31.0}, 10.0),
        ({8.0: 30.0, 10.0: 40.0, 12.0: 60.0}, 8.0),
        ({12.0: 30.0, 8.0: 30.0}, 12.0),
        ({8.0: 30.0, 10.0: None, 12.0: math.inf}, 8.0),
        ({8.0: None, 10.0: 30.0}, 8.0),
        ({8.0: math.inf, 10.0: 30.0}, 8.0),
        ({9.0: 30.0}, 9.0),
    ],
)
def test_code_takes_the_largest_ratio_that_costs_little(measured: dict[float, float | None], chosen: float) -> None:
    assert choose_ratio("code", measured) == chosen


def test_every_preset_is_complete_and_keeps_its_own_limit() -> None:
    assert list(PRESETS) == list(MIXES) == ["general", "math", "chat", "code"]
    for name, preset in PRESETS.items():
        assert preset.name == name
        assert preset.summary
        assert preset.ratio_reason
        assert list(preset.ratios) == sorted(preset.ratios)
        assert (preset.max_ratio is None) == (not preset.limit_reason)
        for ratio in preset.ratios:
            check_ratio(name, ratio)
    assert [name for name, preset in PRESETS.items() if preset.latent_norm] == ["chat"]
