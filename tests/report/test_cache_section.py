"""The page about a calibrated cache: everything that was measured is there, whatever is missing or hostile."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mla_cli.report.cache import cache_section
from mla_cli.report.charts import charts
from mla_cli.report.page import report_page, report_plot
from tests.report.support import HOSTILE, Page


def calibration(**changes: Any) -> dict[str, Any]:
    """As `mla calibrate` writes it."""
    full = {
        "kv_dtype": "int8", "scales": "token", "rope_dtype": "bfloat16", "every": None, "strength": 1.0,
        "rotation": {"kind": "none", "measured": [candidate()]},
        "budget": None,
        "calibration": {"origin": "files: a.txt", "sequences": 480, "tokens": 245760},
        "bytes_per_token": {"unquantised": 11520, "quantised": 8170},
        "heldout": {
            "ppl_unquantised": 20.125, "ppl_quantised": 20.25, "ppl_change_percent": 0.62, "kl": 0.00123, "tokens": 8176,
        },
        "max_loss_percent": 1.0,
        "trade": [
            {"bf16_layers": [], "bytes_per_token": 7800, "ppl_change_percent": 3.5, "kl": 0.03, "chosen": False},
            {"bf16_layers": [4, 9], "bytes_per_token": 8170, "ppl_change_percent": 0.62, "kl": 0.00123, "chosen": True},
            {"bf16_layers": [1, 4, 9], "bytes_per_token": 8294, "ppl_change_percent": 0.4, "kl": 0.001, "chosen": False},
        ],
        "engine_scales": {"written": False, "why_none": None},
        "layers": [layer(0), layer(1, clip=[1.0, 2.0]), layer(2, dtype="bf16", clip=None), layer(3, clip=None)],
        "warnings": [],
    }  # fmt: skip
    return {**full, **changes}


def candidate(**changes: Any) -> dict[str, Any]:
    return {
        "kv_dtype": "int8", "rotation": "none", "strength": 1.0, "bytes_per_token": 7800, "ppl_change_percent": 3.5,
        "kl": 0.03, **changes,
    }  # fmt: skip


def layer(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "layer": index, "dtype": "int8", "amax": 12.5, "token_amax": {"p90": 4.0}, "clip": 8.25, "scale": None,
        "clipped_share": 0.0125, "latent_error": 0.0312, "attention_error": 0.0456, "expected_loss": 1e-4, **changes,
    }  # fmt: skip


def text_of(found: dict[str, Any]) -> str:
    return Page(report_page({"source": "org/model", "calibration_kv": found})).text


def test_the_page_says_what_was_measured() -> None:
    text = text_of(calibration())
    for fact in (
        "int8 latents, scales: token, rotary keys: bfloat16", "11,520", "8170", "20.12", "20.25", "+0.62 %", "0.00123",
        "8176 tokens that no range was taken from", "12.5", "8.25", "by group", "own", "1.25%", "3.12%", "4.56%",
        "+3.50 %", "8294", "yes",
    ):  # fmt: skip
        assert fact in text, fact
    assert "2bf1612.5–" in text  # a layer that is not quantised has no range
    assert "rotation:" not in text
    assert "of the channels" not in text


def test_a_part_of_turned_latents_is_named() -> None:
    found = calibration(
        kv_dtype="int4", strength=0.5, rotation={"kind": "learned", "measured": []},
        budget={"bytes_per_token": 6000, "candidates": [candidate(strength=0.75, bytes_per_token=5987)]},
    )  # fmt: skip
    text = text_of(found)
    assert "int4 latents, scales: token, rotation: learned, first 50 % of the channels" in text
    assert "0.75" in text
    assert "5987" in text


def trade_chart(found: dict[str, Any]) -> Any:
    drawn = [chart for chart in charts({"calibration_kv": found}) if chart.key == "trade"]
    return drawn[0] if drawn else None


def test_the_trade_is_drawn() -> None:
    chart = trade_chart(calibration())
    (series,) = chart.series
    assert series.x == (7800.0, 8170.0, 8294.0)
    assert series.y == (3.5, 0.62, 0.4)
    assert chart.marks == ((8170.0, 0.62),)
    assert chart.reference == ("most allowed", 1.0)
    assert "7,800 bytes: 3.5 %; 8,170 bytes: 0.62 %" in chart.alt
    assert "(%)" in chart.y_label
    page = Page(report_page({"calibration_kv": calibration()}))
    assert page.count("svg") == 1
    assert report_plot({"calibration_kv": calibration()}).startswith(b"\x89PNG")


def test_one_point_is_no_trade() -> None:
    found = calibration(trade=calibration()["trade"][:1])
    assert trade_chart(found) is None
    page = Page(report_page({"calibration_kv": found}))
    assert page.count("svg") == 0
    assert "layers in bfloat16" not in page.text
    assert "8170" in page.text


def test_a_trade_within_a_budget_has_no_limit() -> None:
    assert trade_chart(calibration(max_loss_percent=None)).reference is None


def test_without_a_calibration_there_is_no_section() -> None:
    assert cache_section({}) == ""
    assert "Cache of each layer" not in report_page({"source": "org/model"})
    assert trade_chart({}) is None


def nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [nulls(item) for item in value]
    return None if isinstance(value, (int, float)) else value


@pytest.mark.parametrize(
    "found",
    [
        nulls(calibration()),
        dict.fromkeys(calibration(), 7),
        dict.fromkeys(calibration(), "text"),
        {key: [None, 3] for key in calibration()},
        {"layers": [{}], "trade": [{}, {}], "rotation": {}, "budget": {"candidates": [{}]}},
        calibration(heldout={"ppl_quantised": math.inf, "ppl_change_percent": math.nan, "kl": math.inf}),
        calibration(trade=[{"bytes_per_token": math.nan, "ppl_change_percent": math.inf}, *calibration()["trade"]]),
        calibration(layers=[layer(i) for i in range(80)]),
    ],
    ids=["null", "numbers", "text", "lists", "empty", "infinite", "infinite trade", "many layers"],
)
def test_a_page_is_drawn_whatever_a_calibration_holds(found: dict[str, Any]) -> None:
    text = report_page({"calibration_kv": found})
    page = Page(text)
    assert "nan" not in page.text.lower().split()
    assert not [attrs for _, attrs in page.tags for value in attrs.values() if value and "nan" in value.split()]
    assert report_plot({"calibration_kv": found}).startswith(b"\x89PNG")


def hostile(value: Any) -> Any:
    """The same shape with every text, and every name of no meaning, hostile."""
    if isinstance(value, dict):
        return {key: hostile(item) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def test_every_text_is_escaped() -> None:
    text = report_page({"calibration_kv": hostile(calibration())})
    text.encode("utf-8")
    page = Page(text)
    assert not page.count("script")
    assert not page.count("b")
    assert page.text.count("alert('x')") >= 8  # the cache's name, a candidate's type and rotation, three layers
    assert report_plot({"calibration_kv": hostile(calibration())}).startswith(b"\x89PNG")
