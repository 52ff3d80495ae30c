"""What an evaluation found, as JSON, Markdown and a plain table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mla_cli.checkpoint.disk import check_report_folder, write_report_files
from mla_cli.errors import MlaError
from mla_cli.evaluation.results import Measured, TaskResult
from mla_cli.evaluation.statistics import paired_interval, relative_drop_percent, standard_error, within

JSON_NAME, MARKDOWN_NAME = "mla_eval.json", "mla_eval.md"

_COMPARED = ("task", "metric", "baseline", "value", "difference", "95 % interval", "drop %", "verdict")
_ALONE = ("task", "metric", "value", "stderr", "items")


@dataclass(frozen=True)
class Comparison:
    """One metric; None where a number is unknown. `ci95` is of `diff`, `value - baseline`, paired over items.

    `passed` is None where there is no baseline or the metric has no gate.
    """

    value: float | None
    stderr: float | None
    baseline: float | None
    diff: float | None
    ci95: tuple[float, float] | None
    relative_drop_percent: float | None
    passed: bool | None


@dataclass(frozen=True)
class Report:
    """A finished evaluation.

    Attributes:
        tasks: task to metric to numbers; samples: items a task ran on one model.
        facts: how it was run: models, variants, seeds, versions.
        failed: why tasks have no numbers.
    """

    tasks: Mapping[str, Mapping[str, Comparison]]
    samples: Mapping[str, int]
    seconds: float
    compared: bool
    facts: Mapping[str, Any]
    failed: Mapping[str, MlaError] = field(default_factory=dict)

    @property
    def passed(self) -> bool | None:
        """Whether every gate holds; None without a baseline, and where a task that could miss one has failed."""
        if self.missed:
            return False
        return True if self.compared and not self.failed else None

    @property
    def missed(self) -> list[tuple[str, str]]:
        """Task and metric of every gate that does not hold."""
        return [(task, name) for task, ms in self.tasks.items() for name, m in ms.items() if m.passed is False]

    def as_json(self) -> dict[str, Any]:
        """One JSON object, without NaN or infinity."""
        return {
            "tasks": {task: {name: asdict(m) for name, m in metrics.items()} for task, metrics in self.tasks.items()},
            "passed": self.passed,
            "failed": {task: str(error) for task, error in self.failed.items()},
            "samples": sum(self.samples.values()),
            "samples_per_task": dict(self.samples),
            "seconds": round(self.seconds, 3),
            **self.facts,
        }

    def table(self) -> str:
        """A table for the terminal."""
        rows = [self._header, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(self._header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:], "", *self._remarks()])

    def markdown(self) -> str:
        """The same as a Markdown document."""
        rows = [self._header, ("---",) * len(self._header), *self._rows()]
        lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        return "\n".join(["# Evaluation", "", *lines, "", *(f"- {remark}" for remark in self._remarks()), ""])

    @property
    def _header(self) -> tuple[str, ...]:
        return _COMPARED if self.compared else _ALONE

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for task, metrics in self.tasks.items():
            for name, m in metrics.items():
                numbers: tuple[str, ...]
                if self.compared:
                    interval = (
                        "-" if m.ci95 is None else f"{_shown(m.ci95[0], sign=True)} .. {_shown(m.ci95[1], sign=True)}"
                    )
                    verdict = {None: "-", True: "ok", False: "MISSED"}[m.passed]
                    drop = "-" if m.relative_drop_percent is None else f"{m.relative_drop_percent:.2f}"
                    numbers = (_shown(m.baseline), _shown(m.value), _shown(m.diff, sign=True), interval, drop, verdict)
                else:
                    count = self.samples.get(task, 0)
                    numbers = (_shown(m.value), _shown(m.stderr), str(count) if count else "-")
                rows.append((task, name, *numbers))
        return rows

    def _remarks(self) -> list[str]:
        checkpoint, baseline = self.facts["checkpoint"], self.facts["baseline"]
        remarks = [f"model: {_described(checkpoint)}"]
        if baseline:
            remarks.append(f"baseline: {_described(baseline)}")
        remarks += [f"{label}: {variant}" for label, variant in self.facts["variants"].items()]
        if self.facts["text"]:
            remarks.append(f"text: {self.facts['text']}, windows of {self.facts['window']} tokens")
        if self.facts["limit"] is not None:
            remarks.append(f"only the first {self.facts['limit']} items of each task (--limit)")
        remarks += [f"{task}: failed: {error}" for task, error in self.failed.items()]
        if self.passed is not None:
            verdict = "passed" if self.passed else "MISSED"
            remarks.append(f"gate: at most {self.facts['max_drop']:g} % worse than the baseline: {verdict}")
        return remarks


def compare(ours: Measured, theirs: Measured | None, *, max_drop: float, seed: int) -> Comparison:
    """A metric of the candidate beside the same metric of the baseline, if there is one."""
    stderr = None if ours.items is None else standard_error(ours.items)
    if theirs is None:
        return Comparison(ours.value, stderr, None, None, None, None, None)
    interval = None
    if ours.items is not None and theirs.items is not None:
        interval = paired_interval(ours.items, theirs.items, seed=seed)
    better = ours.higher_is_better
    return Comparison(
        value=ours.value,
        stderr=stderr,
        baseline=theirs.value,
        diff=None if ours.value is None or theirs.value is None else ours.value - theirs.value,
        ci95=interval,
        relative_drop_percent=relative_drop_percent(ours.value, theirs.value, better),
        passed=within(ours.value, theirs.value, better, max_drop) if ours.gated else None,
    )


def compare_tasks(
    ours: Mapping[str, TaskResult], theirs: Mapping[str, TaskResult], *, max_drop: float, seed: int
) -> dict[str, dict[str, Comparison]]:
    """Every metric of every task beside the baseline's."""
    return {
        task: {
            name: compare(measured, _metric(theirs, task, name), max_drop=max_drop, seed=seed)
            for name, measured in result.metrics.items()
        }
        for task, result in ours.items()
    }


def failure(failed: Mapping[str, MlaError]) -> MlaError:
    """What to tell of tasks that failed."""
    whats = [f"task '{task}' could not be evaluated: {error.what}" for task, error in failed.items()]
    wheres = dict.fromkeys(error.where for error in failed.values() if error.where)
    fixes = dict.fromkeys(error.fix for error in failed.values() if error.fix)
    return MlaError("; ".join(whats), where="; ".join(wheres) or None, fix="; ".join(fixes) or None)


def write_report(report: Report, out: Path) -> list[Path]:
    """Write the report to a folder, each file whole or not at all; replaces an earlier report.

    Raises:
        OutputError: it cannot be written.
    """
    text = json.dumps(report.as_json(), ensure_ascii=False, allow_nan=False, indent=2) + "\n"
    return write_report_files(out, {MARKDOWN_NAME: report.markdown().encode(), JSON_NAME: text.encode()})


def check_out(out: Path) -> None:
    """Refuse a report folder that cannot be one, before any work.

    Raises:
        OutputError: it is a file, cannot be written to, or holds folders where the report's files go.
    """
    check_report_folder(out, (MARKDOWN_NAME, JSON_NAME))


def _metric(results: Mapping[str, TaskResult], task: str, name: str) -> Measured | None:
    result = results.get(task)
    return None if result is None else result.metrics.get(name)


def _described(facts: Mapping[str, Any]) -> str:
    strength = facts.get("latent_strength", 1.0)
    narrowed = "" if strength == 1 else f", latent strength {strength:g}"
    return (
        f"{facts['name']}, {facts['dtype']}, cache {facts['kv_dtype']}, {facts['cache_bytes_per_token']} bytes a token"
        + narrowed
    )


def _shown(number: float | None, *, sign: bool = False) -> str:
    if number is None:
        return "-"
    form = "+" if sign else ""
    digits: Sequence[str] = (f"{number:{form}.4f}", f"{number:{form}.4g}")
    return digits[0] if abs(number) < 1e4 else digits[1]
