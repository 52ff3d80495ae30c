"""Reports that every reader can parse, whatever the numbers (cases EV-05, EV-11, CL-09)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mla_cli.checkpoint import disk
from mla_cli.errors import OutputError
from mla_cli.evaluation.report import Report, check_out, compare_tasks, write_report
from mla_cli.evaluation.results import Measured, TaskResult
from mla_cli.evaluation.statistics import Items, value

MODEL = {"name": "a|b [v2]", "dtype": "float32", "kv_dtype": "int8", "cache_bytes_per_token": 96}
FACTS = {
    "checkpoint": MODEL, "baseline": None, "variants": {"lambada": "lambada_openai: OpenAI's text"}, "text": None,
    "window": 1024, "limit": 4, "max_drop": 2.3,
}  # fmt: skip


def measured(items: Items, *, higher: bool = True, gated: bool = True) -> Measured:
    return Measured(value(items), items, higher, gated)


def a_report(ours: dict[str, Measured], theirs: dict[str, Measured] | None, **facts: Any) -> Report:
    baseline = {} if theirs is None else {"lambada": TaskResult(theirs, 4)}
    return Report(
        tasks=compare_tasks({"lambada": TaskResult(ours, 4)}, baseline, max_drop=2.3, seed=0),
        samples={"lambada": 4},
        seconds=1.23456,
        compared=theirs is not None,
        facts={**FACTS, "baseline": None if theirs is None else MODEL, **facts},
    )


def test_a_comparison_in_json() -> None:
    found = a_report(
        {
            "acc": measured(Items.of([1, 0, 1, 0])),
            "perplexity": measured(Items.of([2, 2, 1, 1], transform="exp"), higher=False),
        },
        {
            "acc": measured(Items.of([1, 1, 1, 0])),
            "perplexity": measured(Items.of([2, 2, 2, 1], transform="exp"), higher=False),
        },
    )
    written = json.loads(json.dumps(found.as_json(), allow_nan=False))
    metrics = written["tasks"]["lambada"]
    assert set(metrics["acc"]) == {"value", "stderr", "baseline", "diff", "ci95", "relative_drop_percent", "passed"}
    assert (metrics["acc"]["value"], metrics["acc"]["baseline"], metrics["acc"]["diff"]) == (0.5, 0.75, -0.25)
    assert metrics["acc"]["relative_drop_percent"] == pytest.approx(100 / 3)
    assert metrics["acc"]["passed"] is False
    assert metrics["acc"]["ci95"][0] < 0 <= metrics["acc"]["ci95"][1]
    assert metrics["perplexity"]["relative_drop_percent"] < 0  # lower is better
    assert metrics["perplexity"]["passed"] is True
    assert written["passed"] is False
    assert (written["samples"], written["samples_per_task"], written["seconds"]) == (4, {"lambada": 4}, 1.235)
    assert found.missed == [("lambada", "acc")]


def test_without_a_baseline_nothing_is_judged() -> None:
    found = a_report({"acc": measured(Items.of([1, 0, 1, 0]))}, None)
    metric = found.as_json()["tasks"]["lambada"]["acc"]
    assert found.passed is None
    assert metric["stderr"] is not None
    assert [metric[name] for name in ("baseline", "diff", "ci95", "relative_drop_percent", "passed")] == [None] * 5


def test_unknown_numbers_are_null_and_a_broken_candidate_does_not_pass() -> None:
    overflowing = measured(Items.of([1000.0] * 4, transform="exp"), higher=False)
    found = a_report(
        {"perplexity": overflowing, "acc": measured(Items.of([1.0]))},
        {"perplexity": measured(Items.of([1.0] * 4, transform="exp"), higher=False), "acc": measured(Items.of([0.0]))},
    )
    text = json.dumps(found.as_json(), allow_nan=False)
    assert "NaN" not in text
    assert found.tasks["lambada"]["perplexity"].value is None
    assert found.tasks["lambada"]["perplexity"].passed is False
    assert found.tasks["lambada"]["acc"].relative_drop_percent is None
    assert found.tasks["lambada"]["acc"].passed is True
    assert "| lambada | perplexity | 2.7183 | - | - | - | - | MISSED |" in found.markdown()


def test_a_second_view_of_the_same_answers_has_no_gate() -> None:
    found = a_report(
        {"acc_bytes": measured(Items.of([0, 0]), gated=False)}, {"acc_bytes": measured(Items.of([1, 1]), gated=False)}
    )
    assert found.tasks["lambada"]["acc_bytes"].passed is None
    assert found.passed is True


def test_tables_name_the_variant_the_models_and_the_verdict() -> None:
    found = a_report({"acc": measured(Items.of([1, 0, 1, 0]))}, {"acc": measured(Items.of([1, 1, 1, 0]))})
    for text in (found.table(), found.markdown()):
        assert "lambada_openai: OpenAI's text" in text
        assert "a|b [v2], float32, cache int8, 96 bytes a token" in text
        assert "MISSED" in text
        assert "first 4 items" in text
    assert all(len(line) <= 120 for line in found.table().splitlines())


def test_an_interrupted_write_leaves_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = a_report({"acc": measured(Items.of([1, 0]))}, None)

    def interrupted(path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(disk, "write_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_report(found, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_report_replaces_an_earlier_one(tmp_path: Path) -> None:
    out = tmp_path / "a [v2]" / "out"
    for items in ([1, 0], [1, 1]):
        found = a_report({"acc": measured(Items.of(items))}, None)
        assert [file.name for file in write_report(found, out)] == ["mla_eval.md", "mla_eval.json"]
    assert json.loads((out / "mla_eval.json").read_text())["tasks"]["lambada"]["acc"]["value"] == 1.0
    assert sorted(file.name for file in out.iterdir()) == ["mla_eval.json", "mla_eval.md"]


def test_a_file_is_no_folder_for_reports(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check_out(tmp_path / "new/deep")
    for out in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(OutputError, match="needs a folder"):
            check_out(out)
