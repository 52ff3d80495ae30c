"""Figures of a report as people read them. JSON has no infinity: null stands for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def number(value: object) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def numbers(value: object) -> list[float | None]:
    """The items of a list as finite numbers, None for every other; empty where there is no list."""
    return [number(item) for item in value] if isinstance(value, (list, tuple)) else []


def shown(value: object, absent: str = "infinite") -> str:
    """A number as people read it."""
    known = number(value)
    if known is None:
        return absent
    return f"{known:,.0f}" if 1e4 <= abs(known) < 1e9 else f"{known:.4g}"


def brief(value: float | None) -> str:
    """A measured number in four digits; None: it is too large to be told."""
    return "infinite" if value is None else f"{value:.4g}"


def span(values: Sequence[float]) -> str:
    """One number where all are alike, else the least and the most."""
    least, most = shown(min(values)), shown(max(values))
    return least if least == most else f"{least} to {most}"


def over(value: object, base: object) -> str:
    """A number, and by how much it exceeds another."""
    grown = increase(value, base)
    return f"{shown(value)} ({grown})" if grown else shown(value)


def increase(value: object, base: object) -> str:
    """By how much a number exceeds another, in per cent or, if it is many times that, in times; empty where unknown."""
    known, source = number(value), number(base)
    if known is None or source is None or source <= 0:
        return ""
    return f"{known / source:.3g} times" if known > 10 * source else f"{100 * (known / source - 1):+.1f} %"


def objects(value: object) -> list[Mapping[str, Any]]:
    """The objects of a list; none where there is no list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, (list, tuple)) else []


def mapping(value: object) -> Mapping[str, Any]:
    """An object; an empty one where there is none."""
    return value if isinstance(value, Mapping) else {}
