"""The whole engine worn out by `scripts/soak.py`: no page lost, no text changed, nothing that never ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.soak import run
from tests.runtime.stand_ins import save_tiny_deepseek


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latent")
    save_tiny_deepseek(folder, positions=1024)
    return folder


@pytest.mark.parametrize(
    ("kv_dtype", "requests"),
    [
        ("int8", 100),
        pytest.param("int8", 2000, marks=pytest.mark.slow),
        pytest.param("bf16", 2000, marks=pytest.mark.slow),
        pytest.param("auto", 2000, marks=pytest.mark.slow),
    ],
)
def test_requests_end_with_what_each_gives_alone(checkpoint: Path, kv_dtype: str, requests: int) -> None:
    outcome = run(str(checkpoint), requests, seed=requests, distinct=requests // 5, kv_dtype=kv_dtype)
    assert outcome.wrong == []
    assert outcome.finished + outcome.cancelled == requests
    assert outcome.finished > requests / 2
    happened = ["allocations refused", "times out of memory", "computed apart", "prompt tokens shared"]
    for what in [*happened, "put off"] if requests > 1000 else happened:
        assert outcome.counts[what] > 0, what
