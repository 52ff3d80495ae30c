"""`mla inspect` as a user meets it: on sources, on converted checkpoints, and on damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mla_cli.app import main
from tests.tiny import save_text, save_tiny, save_tokenizer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny Llama with a tokenizer."""
    save_tiny(tmp_path / "source")
    save_tokenizer(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def converted(source: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Its conversion."""
    text = save_text(source.parent / "text.txt")
    words = [source, source.parent / "out", "--ratio", 2, "--calib", text, "--samples", 8, "--seq-len", 32]
    words += ["--heal", "none"]
    assert main(["convert", *map(str, words)]) == 0
    capsys.readouterr()
    return source.parent / "out"


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_says_what_a_conversion_of_a_source_would_cache(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(source), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cached_per_token"] == 2 * 2 * 2 * 8
    assert facts["format"] == "deepseek"
    for ratio, size in facts["cache_bytes_per_token_at_ratio"].items():
        words = ["convert", str(source), "out", "--dry-run", "--json", "--ratio", ratio]
        if main(words) == 0:
            plan = json.loads(capsys.readouterr().out)["plans"][0]
            assert size == 4 * plan["cached_per_token"]["mla"]


def test_shows_what_each_layer_of_a_conversion_lost(converted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(converted)]) == 0
    shown = capsys.readouterr().out
    made = json.loads((converted / "mla_report.json").read_text())
    for layer in made["layers"]:
        assert f"{layer['rope_split_error']:.3f}  {layer['factorization_error']:.3f}" in shown


@pytest.mark.parametrize("scheme", ["x", [1], {"a": 1}, -1, 0.5, True, {"version": 1}])
def test_a_damaged_cache_scheme_is_a_note(converted: Path, capsys: pytest.CaptureFixture[str], scheme: Any) -> None:
    edit(converted / "config.json", mla_kv_cache=scheme)
    assert main(["inspect", str(converted)]) == 0
    shown = capsys.readouterr().out
    assert "calibrated   no" in shown
    assert "cache scheme cannot be used" in shown


@pytest.mark.parametrize("report", [{"ratio": "two"}, {"layers": None}, {"layers": [None, {"rope_split_error": "x"}]}])
def test_a_damaged_report_is_shown_as_far_as_it_goes(
    converted: Path, capsys: pytest.CaptureFixture[str], report: dict[str, Any]
) -> None:
    edit(converted / "mla_report.json", **report)
    assert main(["inspect", str(converted)]) == 0
    assert "made from" in capsys.readouterr().out
