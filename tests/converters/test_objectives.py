"""`--compare-objectives`: every objective on the same statistics, each as if it had been asked for alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from mla_cli.converters.factorize import Objective
from tests.tiny import run_convert

NAMES = list(get_args(Objective))


def convert(source: Path, *more: object) -> int:
    shape = ("--kv-lora-rank", 8, "--qk-rope-head-dim", 8, "--ranks", "uniform", "--heal", "none", "--force")
    return run_convert(source, *shape, *more)


def report(source: Path) -> dict[str, Any]:
    return json.loads((source.parent / "out" / "mla_report.json").read_text())


def test_each_is_measured_as_if_it_had_been_asked_for(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(source, "--objective", "activation", "--compare-objectives") == 0
    told = capsys.readouterr().out
    compared = report(source)
    rows = {row["objective"]: row for row in compared["objectives"]}
    assert list(rows) == NAMES
    assert len({round(row["kl"], 9) for row in rows.values()}) == len(NAMES)  # none stands for another
    page = (source.parent / "out" / "mla_report.html").read_text()
    for name in NAMES:
        assert convert(source, "--objective", name) == 0
        alone = report(source)
        assert rows[name]["perplexity"] == pytest.approx(alone["heldout"]["ppl_closed_form"], rel=1e-4)
        assert alone["objectives"] is None
        assert f"{name}: " in told
        assert name in page
        if name == "activation":  # the conversion went on with what was asked for
            assert compared["heldout"] == alone["heldout"]


def test_the_comparison_outlives_an_interruption(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_cli.converters.heal_layers import LayersHealing

    heal, stops = LayersHealing._heal, [True]

    def interrupted(self: LayersHealing, *given: Any) -> Any:
        if stops.pop() if stops else False:
            raise KeyboardInterrupt
        return heal(self, *given)

    monkeypatch.setattr(LayersHealing, "_heal", interrupted)
    healing = ("--heal", "layers", "--heal-steps", 2, "--compare-objectives")
    assert convert(source, *healing) == 130
    assert convert(source, *healing, "--resume") == 0
    assert [row["objective"] for row in report(source)["objectives"]] == NAMES
