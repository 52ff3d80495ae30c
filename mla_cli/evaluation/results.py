"""What measuring one model gives: metrics by task, with their items so that models can be paired."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mla_cli.evaluation.statistics import Items


@dataclass(frozen=True)
class Measured:
    """One metric of one task on one model; `items` is None where it is not a mean of items (then no interval)."""

    value: float | None
    items: Items | None
    higher_is_better: bool
    gated: bool = True


@dataclass(frozen=True)
class TaskResult:
    """One task on one model; `count`: items that were run."""

    metrics: Mapping[str, Measured]
    count: int
