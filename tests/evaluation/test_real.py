"""The real model, item by item as the harness's own class scores it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mla_cli.checkpoint.builtin import fetch_builtin
from mla_cli.errors import MlaError
from mla_cli.evaluation.tasks import load_tasks, plan_tasks

ITEMS = {"lambada": 20, "hellaswag": 10}


@pytest.mark.real
def test_smollm2_scores_as_the_harness_scores_it(data_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs the eval extra: pip install 'mla-cli[eval]'")
    from scripts import compare_with_harness as comparison

    try:
        fetch_builtin("smollm2-135m")
    except MlaError as error:
        pytest.skip(f"smollm2-135m cannot be fetched: {error}")
    ours, theirs = comparison.open_both("smollm2-135m", batch_size=8)
    for task, limit in ITEMS.items():
        folder = tmp_path / task
        folder.mkdir()
        plan = plan_tasks((task,), data_dir)
        loaded = load_tasks(plan, folder)
        (mine, _), (other, _) = (comparison.run(model, loaded, limit) for model in (ours, theirs))
        name = plan.harness[0]
        difference, unlike = comparison.difference(mine["samples"][name], other["samples"][name])
        assert difference < comparison.TOLERANCE
        assert unlike == 0
        for metric, value in comparison.metrics(other["results"][name]).items():
            assert mine["results"][name][f"{metric},none"] == pytest.approx(value, rel=1e-4)
