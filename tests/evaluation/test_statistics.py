"""Intervals and verdicts that hold for one item, for no difference and for numbers that overflow (case EV-11)."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_cli.evaluation.statistics import (
    Items,
    finite,
    paired_interval,
    relative_drop_percent,
    standard_error,
    value,
    within,
)

NUMBERS = st.floats(-1e3, 1e3, allow_nan=False, width=32)


def test_the_mean_and_its_error_are_the_textbook_s() -> None:
    numbers = [0.0, 1.0, 1.0, 0.0, 1.0]
    items = Items.of(numbers)
    assert value(items) == pytest.approx(0.6)
    assert standard_error(items) == pytest.approx(np.std(numbers, ddof=1) / math.sqrt(5))


def test_perplexity_weighs_tokens_not_windows() -> None:
    items = Items.of([10.0, 30.0], [5, 20], "exp")
    assert value(items) == pytest.approx(math.exp(40 / 25))


def test_the_error_of_a_perplexity_is_that_of_many_draws() -> None:
    rng = np.random.default_rng(0)
    weights = rng.integers(50, 100, 400)
    items = Items.of(list(2.5 * weights + rng.normal(0, 20, 400)), list(weights), "exp")
    draws = []
    for _ in range(2000):
        rows = rng.integers(0, 400, 400)
        draws.append(math.exp(items.totals[rows].sum() / items.weights[rows].sum()))
    assert standard_error(items) == pytest.approx(float(np.std(draws)), rel=0.1)


def test_one_item_has_a_value_and_no_more() -> None:
    items = Items.of([1.0])
    assert value(items) == 1.0
    assert standard_error(items) is None
    assert paired_interval(items, items) is None


def test_an_overflow_is_unknown_and_writes_valid_json() -> None:
    items = Items.of([1000.0, 1000.0], transform="exp")
    numbers = [value(items), standard_error(items), paired_interval(items, items)]
    assert json.dumps(numbers, allow_nan=False) == "[null, null, null]"


def test_pairing_sees_what_two_intervals_would_hide() -> None:
    rng = np.random.default_rng(1)
    baseline = rng.normal(0.5, 0.3, 500)
    ours, theirs = Items.of(list(baseline - 0.01)), Items.of(list(baseline))
    low, high = paired_interval(ours, theirs) or (0.0, 0.0)
    assert low == pytest.approx(-0.01)
    assert high == pytest.approx(-0.01)


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for seed in range(200):
        baseline = (rng.random(150) < 0.6).astype(float)
        ours = np.where(rng.random(150) < 0.1, (rng.random(150) < 0.5).astype(float), baseline)
        interval = paired_interval(Items.of(list(ours)), Items.of(list(baseline)), seed=seed, resamples=400)
        assert interval is not None
        covered += interval[0] <= 0.1 * (0.5 - 0.6) <= interval[1]
    assert 0.90 <= covered / 200 <= 0.99


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=30), st.integers(0, 5))
def test_intervals_are_ordered_seeded_and_mirrored(pairs: list[tuple[float, float]], seed: int) -> None:
    ours, theirs = (Items.of([pair[side] for pair in pairs]) for side in (0, 1))
    interval = paired_interval(ours, theirs, seed=seed, resamples=50)
    assert interval is not None
    assert interval[0] <= interval[1]
    assert interval == paired_interval(ours, theirs, seed=seed, resamples=50)
    mirrored = paired_interval(theirs, ours, seed=seed, resamples=50)
    assert mirrored == pytest.approx((-interval[1], -interval[0]), abs=1e-9)


def test_other_items_are_never_paired() -> None:
    assert paired_interval(Items.of([1.0, 2.0]), Items.of([1.0, 2.0, 3.0])) is None
    assert paired_interval(Items.of([1.0, 2.0], [1, 2]), Items.of([1.0, 2.0], [2, 1])) is None
    one, other = (Items(np.ones(3), np.ones(3), identity=number) for number in (1, 2))
    assert paired_interval(one, other) is None


@settings(deadline=None)
@given(st.floats(0, 1e6), st.floats(1e-3, 1e6), st.booleans())
def test_a_drop_is_positive_exactly_where_it_is_worse(ours: float, theirs: float, higher: bool) -> None:
    drop = relative_drop_percent(ours, theirs, higher)
    assert drop is not None
    worse = ours < theirs if higher else ours > theirs
    assert (drop > 0) == worse or abs(drop) < 1e-9


@pytest.mark.parametrize(
    ("ours", "theirs", "higher", "passes"),
    [
        (0.49, 0.50, True, True),  # 2 %
        (0.48, 0.50, True, False),  # 4 %
        (10.2, 10.0, False, True),
        (10.3, 10.0, False, False),
        (0.0, 0.0, True, True),  # nothing to lose
        (0.1, 0.0, True, True),
        (0.1, 0.0, False, False),
        (None, 0.5, True, False),
        (None, None, True, False),
        (0.5, None, True, True),
    ],
)
def test_the_gate(ours: float | None, theirs: float | None, higher: bool, passes: bool) -> None:
    assert within(ours, theirs, higher, 2.3) is passes


def test_a_zero_baseline_has_no_relative_drop() -> None:
    assert relative_drop_percent(0.1, 0.0, True) is None
    assert finite(float("nan")) is None
    assert finite(float("inf")) is None
