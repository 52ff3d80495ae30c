"""Into how many splits decode cuts its keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mla_cli.kernels.launch import Target
from mla_cli.kernels.tuning import MAX_SPLITS, RESIDENT, splits_for

H200 = Target("cuda", 90, 132)


def test_one_long_sequence_fills_the_machine() -> None:
    assert splits_for(H200, 1, 131072) * 1 > 0.9 * min(MAX_SPLITS, RESIDENT * 132)
    assert splits_for(H200, 32, 8192) == 8  # 256 of 264 places


def test_a_full_machine_is_not_split() -> None:
    assert splits_for(H200, 1000, 131072) == 1


@given(st.integers(1, 5000), st.integers(0, 200_000), st.integers(1, 304))
def test_splits_have_enough_keys_and_do_not_empty_the_machine(programs: int, keys: int, processors: int) -> None:
    splits = splits_for(Target("cuda", 90, processors), programs, keys)
    assert 1 <= splits <= max(1, min(MAX_SPLITS, keys // 256))
    slots = RESIDENT * processors

    def idle(n: int) -> float:
        """Share of the places in all waves that stay empty."""
        waves = -(-programs * n // slots)
        return 1 - programs * n / (waves * slots)

    # Never much worse than leaving the keys in one piece.
    assert 1 - idle(splits) >= 0.9 * (1 - idle(1)) or programs >= 2 * slots
