"""Kernels under Triton's interpreter, and caches that punish whoever reads what is not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """One process for all tests: its start costs seconds."""
    pytest.importorskip("triton")
    process = Interpreter()
    yield process
    process.close()
