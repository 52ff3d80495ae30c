"""Numbers compared as numbers, beside the harness's comparison of text (case EV-08)."""

from __future__ import annotations

import re

import pytest

from mla_cli.evaluation.answers import number_in, same_number, target_of

STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")  # the harness's own patterns
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def extracted(output: str) -> tuple[str, str]:
    strict = STRICT.search(output)
    flexible = [a or b for a, b in FLEXIBLE.findall(output)]
    return (strict[1] if strict else "[invalid]"), (flexible[-1] if flexible else "[invalid]")


@pytest.mark.parametrize(
    ("output", "target", "strict", "flexible"),
    [
        ("so\n#### 1,000", "#### 1000", True, True),
        ("#### 18.", "#### 18", True, True),
        ("It costs $29.00.", "#### 29", False, True),
        ("\\$18", "#### 18", False, True),
        ("**18**", "#### 18", False, True),
        ("-3", "#### -3", False, True),
        ("#### -3", "#### 3", False, False),
        ("no number", "#### 18", False, False),
        ("#### 5 ... #### 42", "#### 5", True, False),
        ("#### 5 ... #### 42", "#### 42", False, True),
        ("$1,000.50", "1000.5", False, True),
    ],
)
def test_each_extraction_is_compared_as_a_number(output: str, target: str, strict: bool, flexible: bool) -> None:
    assert [same_number(answer, target) for answer in extracted(output)] == [strict, flexible]


@pytest.mark.parametrize(
    ("text", "number"), [("18", 18), ("-$4", -4), ("$ 7", 7), (".5", 0.5), ("1.2.3", None), ("", None), ("five", None)]
)
def test_only_a_whole_number_is_one(text: str, number: float | None) -> None:
    found = number_in(text)
    assert found == number if number is None else float(found or 0) == number


def test_the_target_is_what_stands_after_the_mark() -> None:
    assert target_of("She has 3 + 4 = 7\n#### 7") == "7"
    assert target_of("7") == "7"
