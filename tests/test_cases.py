"""Every public bug report has a test that exists."""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path

import pytest

from tests.cases import CASES

TESTS = Path(__file__).parent


@cache
def functions(file: Path) -> frozenset[str]:
    """The names of a file's functions."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("case", CASES)
def test_the_tests_of_a_case_are_there(case: str) -> None:
    for place in CASES[case].split():
        file, _, name = place.partition("::")
        assert name.startswith("test_")
        assert name in functions(TESTS / file), place


def test_every_case_has_one(data_dir: Path) -> None:
    file = data_dir.parent / "cases" / "cases.json"
    if not file.is_file():
        pytest.skip(f"no cases at {file}")
    assert {case["id"] for case in json.loads(file.read_text(encoding="utf-8"))} == set(CASES)
