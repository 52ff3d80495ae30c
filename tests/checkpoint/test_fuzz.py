"""A damaged checkpoint is read or refused in one line: no traceback, no hang, no memory that a number in a file asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.fuzzing import Fuzzer, family_configs, fuzz
from tests.model.test_families import CONFIGS


def test_damaged_checkpoints_are_read_or_refused(tmp_path: Path) -> None:
    refused, read = fuzz(Fuzzer(tmp_path, CONFIGS), range(900))
    assert refused > 300
    assert read > 30


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_many_damaged_checkpoints_of_every_family_are_read_or_refused(tmp_path: Path, part: int) -> None:
    """Altogether 120,000."""
    refused, read = fuzz(Fuzzer(tmp_path, family_configs()), range(part * 30_000, (part + 1) * 30_000))
    print(f"{refused:,} refused, {read:,} read")
    assert refused > 10_000
    assert read > 1_000
