"""Numeric answers compared as numbers: `$1,000.00` is `1000`."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

_MARK = "####"
_NUMBER = re.compile(r"-?\$?\s?-?\d[\d,]*(?:\.\d+)?|-?\.\d+")


def target_of(answer: str) -> str:
    """What stands after `####` in a reference answer, or all of it."""
    return answer.split(_MARK)[-1].strip()


def number_in(text: str) -> Decimal | None:
    """The number a text consists of, with currency sign, thousands separators, emphasis and full stop removed."""
    found = _NUMBER.fullmatch(text.replace("\\$", "$").strip().strip("*_ ").rstrip(".").strip())
    if found is None:
        return None
    try:
        return Decimal(re.sub(r"[$,\s]", "", found[0]))
    except InvalidOperation:
        return None


def same_number(answer: str, target: str) -> bool:
    """Whether both texts are the same number; a text that is no number is never right."""
    ours, theirs = number_in(answer), number_in(target_of(target))
    return ours is not None and ours == theirs
