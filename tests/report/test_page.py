"""The report for people: one page and one picture of any report, however little or however hostile its content."""

from __future__ import annotations

import copy
import json
import math
import struct
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from mla_cli.report import chart_png
from mla_cli.report.charts import PALETTE, Chart, Series, charts, spectrum_points
from mla_cli.report.page import report_page, report_plot
from tests.report.support import HOSTILE, Page


def layer(index: int = 0) -> dict[str, Any]:
    energy = [math.exp(-channel / (20 + index)) for channel in range(384)]
    return {
        "kv_lora_rank": 128,
        "fitted_rank": 126,
        "qk_rope_head_dim": 64,
        "rope_split_error": 0.02 + 0.001 * index,
        "factorization_error": 1e-5 * (index + 1),
        "healed_error": 0.01,
        "spectrum": spectrum_points(energy, keep=126),
    }


def report(count: int = 3, /, **changes: Any) -> dict[str, Any]:
    full = {
        "source": "org/model",
        "source_sha256": "ab" * 32,
        "source_revision": None,
        "format": "deepseek",
        "format_reason": "the source can be expressed in it",
        "dtype": "bfloat16",
        "ratio": 2.0,
        "cache_bytes_per_token": {"source": 23040, "mla": 11520},
        "layers": [layer(i) for i in range(count)],
        "heldout": {
            "ppl_source": 27.53, "ppl_rope_split": 30.04, "ppl_closed_form": 32.82, "ppl_final": 28.9, "kl_final": 0.2224,
            "tokens": 8176,
        },
        "healing": {
            "mode": "full",
            "curve": [
                {
                    "minutes": m / 2, "tokens": 4096 * m, "train_kl": 0.2 / (m + 1),
                    "heldout_kl": None if m % 4 else 0.3 / (m + 1),
                }
                for m in range(20)
            ],
            "gains": [1.0 + 0.01 * i for i in range(count)],
        },
        "latent_strength": [{"strength": s, "perplexity": 30 / s, "kl": 0.2 / s} for s in (0.25, 0.5, 1.0)],
        "objectives": [
            {"objective": name, "perplexity": value, "kl": 0.3, "seconds": 60.0}
            for name, value in (("fisher", 28.9), ("activation", 33.0), ("weight", 60.0))
        ],
        "verification": {"reloaded": True, "nll_difference": 1e-4},
        "calibration": {"origin": "files: a.txt", "sequences": 480, "tokens": 245760, "skipped": 0},
        "options": {"ratio": 2.0, "objective": "fisher"},
        "notes": ["weights are written in bfloat16"],
        "seconds": {"open": 0.1, "closed_form": 600.0, "total": 986.0},
        "peak_rss_bytes": 3_500_000_000,
        "versions": {"mla": "0.1.0", "torch": "2.13.0"},
        "command": "mla convert org/model out --ratio 2",
    }  # fmt: skip
    return {**full, **changes}


def without_optional(full: dict[str, Any]) -> dict[str, Any]:
    bare = {
        key: value for key, value in full.items() if key not in ("healing", "latent_strength", "objectives", "command")
    }
    bare["layers"] = [{key: value for key, value in one.items() if key != "spectrum"} for one in full["layers"]]
    return bare


def nulls(value: Any) -> Any:
    """The same shape with every number gone."""
    if isinstance(value, dict):
        return {key: nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [nulls(item) for item in value]
    return None if isinstance(value, (int, float)) else value


SHAPES = {
    "full": report(),
    "optional keys absent": without_optional(report()),
    "optional keys null": report(healing=None, latent_strength=None, objectives=None, command=None, notes=None),
    "every number null": nulls(report()),
    "one layer": report(1),
    "eighty layers": report(80),
    "nothing": {},
    "not what it should be": dict.fromkeys(report(), 7),
    "infinite": report(heldout={"ppl_source": 27.0, "ppl_final": math.inf, "kl_final": math.nan, "tokens": 1}),
    "far apart": report(heldout={"ppl_source": 27.0, "ppl_rope_split": None, "ppl_final": 9.3e9, "kl_final": None}),
    "zeros": report(
        layers=[{"kv_lora_rank": 8, "rope_split_error": 0, "spectrum": {"rank": [0, 8], "loss": [0, 0]}}],
        seconds={"open": 0, "total": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_a_page_is_well_formed_whatever_the_report_holds(shape: str) -> None:
    text = report_page(SHAPES[shape])
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert len(text.encode()) < 1_000_000
    assert "nan" not in page.text.lower().split()
    assert not [attrs for _, attrs in page.tags for value in attrs.values() if value and "nan" in value.split()]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_picture_is_drawn_whatever_the_report_holds(shape: str) -> None:
    picture = report_plot(SHAPES[shape])
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    assert 1000 <= width <= 2000
    assert 300 <= height <= 4000
    assert len(picture) < 2_000_000


def test_the_page_needs_nothing_else_and_fits_every_screen() -> None:
    page = Page(report_page(report()))
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe", "object", "base")]
    linked = [attrs for _, attrs in page.tags for name in attrs if name in ("src", "href", "srcset", "xlink:href")]
    assert not linked
    assert not [attrs for _, attrs in page.tags for name in attrs if name.startswith("on")]
    style = report_page(report())
    assert "prefers-color-scheme: dark" in style
    assert "url(" not in style
    assert "@import" not in style
    viewports = [attrs["content"] for tag, attrs in page.tags if tag == "meta" and attrs.get("name") == "viewport"]
    assert viewports == ["width=device-width, initial-scale=1"]


def test_the_page_says_what_the_report_says() -> None:
    text = Page(report_page(report())).text
    for fact in (
        "org/model with latent attention", "23,040 → 11,520", "27.53 → 28.9", "+5.0 %", "0.2224", "16 min", "3.5 GB",
        "mla convert org/model out --ratio 2", "rotary split", "30.04", "kv_lora_rank", "files: a.txt", "2.13.0",
        "weights are written in bfloat16", "activation", "Healing: full. Trained on 77,824 tokens in 9.5 minutes.",
    ):  # fmt: skip
        assert fact in text, fact


def test_null_is_infinite_where_a_loss_is_meant_and_absent_elsewhere() -> None:
    changed = report(heldout={"ppl_source": 27.53, "ppl_closed_form": None, "ppl_final": None, "kl_final": None})
    changed["layers"][0]["healed_error"] = None
    text = Page(report_page(changed)).text
    assert "27.53 → infinite" in text
    assert "KL(source, final): infinite" in text
    assert "–" in text


def test_a_stage_that_this_version_does_not_know_is_shown_before_the_last() -> None:
    changed = report()
    changed["heldout"]["ppl_after_compensation"] = 31.5
    (chart,) = [chart for chart in charts(changed) if chart.key == "stages"]
    assert chart.categories == ("source", "rotary split", "closed form", "after compensation", "final")


def test_every_text_is_escaped() -> None:
    hostile = report(
        source=HOSTILE, source_revision=HOSTILE, format=HOSTILE, format_reason=HOSTILE, notes=[HOSTILE], command=HOSTILE,
        options={HOSTILE: HOSTILE}, calibration={"origin": HOSTILE, "nested": {HOSTILE: [HOSTILE]}},
        versions={"mla": HOSTILE}, seconds={HOSTILE: 3.0, "total": 4.0},
        objectives=[{"objective": HOSTILE, "perplexity": 3.0, "kl": 1.0, "seconds": 1}],
    )  # fmt: skip
    hostile["heldout"][f"ppl_{HOSTILE}"] = 30.0
    hostile["healing"]["mode"] = HOSTILE
    text = report_page(hostile)
    text.encode("utf-8")
    page = Page(text)
    assert not page.count("script")
    assert not page.count("b")
    assert "\x00" not in text
    assert "\u202e" not in text, "would turn the direction of what follows"
    assert page.text.count("alert('x')") >= 12
    assert report_plot(hostile).startswith(b"\x89PNG")


def test_every_plot_has_words_for_who_does_not_see_it() -> None:
    text = report_page(report())
    drawings = [part.partition("</svg>")[0] for part in text.split("<svg")[1:]]
    assert len(drawings) == len(charts(report())) == 9
    for drawing in drawings:
        tree = ElementTree.fromstring(f"<svg{drawing}</svg>")
        assert tree.get("role") == "img"
        ids = {node.get("id"): node.text or "" for node in tree if node.get("id")}
        assert set((tree.get("aria-labelledby") or "").split()) == set(ids)
        assert all(ids.values())
    ids = [attrs["id"] for _, attrs in Page(text).tags if attrs.get("id")]
    assert len(ids) == len(set(ids))


def test_everything_is_drawn_inside_its_plot() -> None:
    for shape in SHAPES.values():
        for part in report_page(shape).split("<svg")[1:]:
            tree = ElementTree.fromstring(f"<svg{part.partition('</svg>')[0]}</svg>")
            _, _, width, height = map(float, (tree.get("viewBox") or "").split())
            for node in tree:  # the legend's entries are drawn about their own origin
                for name, most in (("x", width), ("cx", width), ("y", height), ("cy", height)):
                    if node.get(name):
                        assert -0.1 <= float(node.get(name, "0")) <= most, ElementTree.tostring(node)


def test_axes_have_names_and_units() -> None:
    for chart in charts(report()):
        assert chart.x_label
        assert chart.y_label or chart.kind == "bars"
    labels = " ".join(f"{chart.x_label} {chart.y_label}" for chart in charts(report()))
    for unit in ("(s)", "(minutes)", "(nats a token)", "(%)", "cached numbers a token"):
        assert unit in labels


def test_colours_stand_out_from_the_ground() -> None:
    light, _, dark = report_page(report()).partition("@media (prefers-color-scheme: dark)")
    for style, ground, colours in (
        (light, "#ffffff", PALETTE),
        (dark, "#14181d", ("#56b4e9", "#ff9a4d", "#2ccf9f")),
    ):
        for colour in colours:
            assert colour in report_page(report())
            assert contrast(ground, colour) >= 4.5
        assert ground[:4] in style


def contrast(first: str, second: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_no_two_lines_of_a_picture_look_alike() -> None:
    axes = Figure().add_subplot()
    series = tuple(Series(f"line {i}", (1.0, 2.0), (1.0, 2.0)) for i in range(9))
    chart_png._lines(axes, Chart("many", "many", "lines", "x", "y", "nine lines", series))
    looks = [(line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.get_lines()]
    assert len(set(looks)) == 9


def test_a_report_read_back_from_its_file_gives_the_same_page_and_picture() -> None:
    full = report()
    again = json.loads(json.dumps(full))
    before = copy.deepcopy(full)
    assert report_page(full) == report_page(again)
    assert report_plot(full) == report_plot(again)
    assert full == before, "the report itself is not changed"


def test_spectrum_points_keep_the_ends_and_the_chosen_rank() -> None:
    energy = [2.0**-i for i in range(500)]
    points = spectrum_points(energy, keep=123)
    assert len(points["rank"]) == len(points["loss"]) <= 64
    assert points["rank"][0] == 0
    assert points["rank"][-1] == 500
    assert 123 in points["rank"]
    assert points["loss"][0] == pytest.approx(2.0)
    assert points["loss"][-1] == 0
    assert points["loss"] == sorted(points["loss"], reverse=True)
    assert points["loss"][points["rank"].index(123)] == pytest.approx(2.0**-122)
    assert spectrum_points([3.0, 1.0]) == {"rank": [0.0, 1.0, 2.0], "loss": [4.0, 1.0, 0.0]}


def test_matplotlib_is_loaded_for_the_picture_only() -> None:
    code = (
        "import sys, mla_cli.report.page as r; r.report_page({}); "
        "assert not {'matplotlib', 'numpy', 'torch'} & set(sys.modules); r.report_plot({}); "
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
