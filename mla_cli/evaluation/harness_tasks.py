"""Tasks of lm-evaluation-harness run on one model, with every metric's items kept.

Import this module only after `tasks.require_harness()`: it needs the `eval` extra.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.evaluator import evaluate

from mla_cli.evaluation.answers import same_number
from mla_cli.evaluation.harness import HarnessModel
from mla_cli.evaluation.results import Measured, TaskResult
from mla_cli.evaluation.statistics import Items, finite, value
from mla_cli.evaluation.tasks import FEWSHOT_SEED, quiet_harness

# Second views of answers that another metric counts already: shown, but no gate of their own.
UNGATED = ("acc_bytes", "numeric_match")


def run_tasks(model: HarnessModel, loaded: dict[str, Any], *, limit: int | None) -> dict[str, TaskResult]:
    """Run loaded tasks; the same items in the same order, with the same few-shot examples, for every model."""
    for task in loaded["tasks"].values():
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        # The harness's perplexities overflow where a model is very wrong; ours are then unknown, and the rest stands.
        task.aggregation = _SafeAggregation(task)
    with quiet_harness():
        found: Any = evaluate(model, loaded, limit=limit, bootstrap_iters=0, log_samples=True)
    results = {}
    for name, task in loaded["tasks"].items():
        metrics = _metrics(
            task, found["results"][name], found["higher_is_better"].get(name, {}), found["samples"][name]
        )
        results[name] = TaskResult(metrics, int(found["n-samples"][name]["effective"]))
    for name in loaded["groups"]:
        aggregated = _group_metrics(found["results"].get(name, {}), found["higher_is_better"].get(name, {}))
        if aggregated:
            results[name] = TaskResult(aggregated, 0)
    return results


class _SafeAggregation:
    """A task's aggregation functions, giving NaN where they overflow."""

    def __init__(self, task: Any) -> None:
        inner = task.aggregation
        self.original: Callable[[], dict[str, Any]] = inner.original if isinstance(inner, _SafeAggregation) else inner

    def __call__(self) -> dict[str, Any]:
        return {name: _nan_on_overflow(function) for name, function in self.original().items()}


def _nan_on_overflow(function: Any) -> Any:
    def aggregate(items: Sequence[Any]) -> Any:
        try:
            return function(items)
        except OverflowError:
            return float("nan")

    return aggregate


def _metrics(
    task: Any, values: Mapping[str, Any], higher: Mapping[str, bool], samples: Sequence[Mapping[str, Any]]
) -> dict[str, Measured]:
    functions = task.aggregation.original()
    by_key: dict[tuple[str, str], list[Any]] = defaultdict(list)
    numeric: dict[str, list[float]] = defaultdict(list)
    compares_numbers = task.config.task == "gsm8k"
    for sample in samples:
        for metric in sample["metrics"]:
            by_key[metric, sample["filter"]].append(sample[metric])
        if compares_numbers:
            numeric[sample["filter"]].append(float(same_number(sample["filtered_resps"][0], sample["target"])))
    metrics = {}
    for (metric, kind), results in by_key.items():
        items = _items(functions.get(metric), results)
        reported = values.get(f"{metric},{kind}")
        measured = finite(float(reported)) if isinstance(reported, (int, float)) else None
        metrics[_name(metric, kind)] = Measured(measured, items, higher.get(metric, True), metric not in UNGATED)
    for kind, right in numeric.items():
        items = Items.of(right)
        metrics[_name("numeric_match", kind)] = Measured(value(items), items, True, gated=False)
    return metrics


def _items(function: Any, results: Sequence[Any]) -> Items | None:
    """Item results as a ratio of sums, for the aggregations that are one."""
    name = getattr(function, "__name__", "mean")
    pairs = bool(results) and all(isinstance(result, tuple) and len(result) == 2 for result in results)
    if pairs and name in ("weighted_perplexity", "bits_per_byte"):
        totals, weights = ([-float(result[0]) for result in results], [float(result[1]) for result in results])
        if name == "weighted_perplexity":
            return Items.of(totals, weights, "exp")
        return Items.of(totals, weights, scale=1.4426950408889634)  # 1 / ln 2: nats to bits
    if not all(isinstance(result, (int, float)) for result in results):
        return None
    if name == "perplexity":
        return Items.of([-float(result) for result in results], transform="exp")
    return Items.of([float(result) for result in results]) if name == "mean" else None


def _group_metrics(values: Mapping[str, Any], higher: Mapping[str, bool]) -> dict[str, Measured]:
    metrics = {}
    for key, reported in values.items():
        metric, _, kind = key.partition(",")
        if kind and not metric.endswith("_stderr") and isinstance(reported, (int, float)):
            metrics[_name(metric, kind)] = Measured(finite(float(reported)), None, higher.get(metric, True))
    return metrics


def _name(metric: str, kind: str) -> str:
    return metric if kind == "none" else f"{metric},{kind}"
