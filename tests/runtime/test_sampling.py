"""Sampling beside transformers' own processors, and each row on its own whatever its neighbours are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_cli.errors import UsageError
from mla_cli.runtime.sampling import NUCLEUS, RowSampler, SamplingParams, sample


def oracle(logits: Tensor, params: SamplingParams, history: list[int]) -> Tensor:
    """`[1, V]` scores after transformers' processors, in the order of its `generate`."""
    import transformers as t

    steps: list[Any] = []
    if params.repetition_penalty != 1:
        steps.append(t.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature > 0:
        if params.temperature != 1:
            steps.append(t.TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            steps.append(t.TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            steps.append(t.TopPLogitsWarper(params.top_p))
        if params.min_p > 0:
            steps.append(t.MinPLogitsWarper(params.min_p))
    ids = torch.tensor([history or [0]])
    return t.LogitsProcessorList(steps)(ids, logits.clone())


def generators(params: list[SamplingParams]) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(p.seed) for p in params]


def some_logits(rows: int, vocab: int, seed: int, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-8, 0.3, 0.7, 1.0, 2.5]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05, 1e-9]),
    top_k=st.sampled_from([0, 1, 2, 7, 49, 50, 51, 10**6]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7, 100.0]),
    seed=st.integers(0, 2**32),
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(PARAMS, min_size=1, max_size=5), seed=st.integers(0, 10**6), data=st.data())
def test_every_token_is_one_that_transformers_allows_and_rows_do_not_depend_on_neighbours(
    rows: list[SamplingParams], seed: int, data: st.DataObject
) -> None:
    vocab = 50
    logits = some_logits(len(rows), vocab, seed)
    history = [data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=8)) for _ in rows]
    ids = sample(logits, rows, generators(rows), history)
    for row, params in enumerate(rows):
        expected = oracle(logits[row : row + 1], params, history[row])
        if params.temperature == 0:
            assert ids[row] == expected.argmax()
        else:
            assert math.isfinite(expected[0, ids[row]])
        alone = sample(logits[row : row + 1], [params], generators([params]), [history[row]])
        assert alone[0] == ids[row]


@settings(max_examples=100, deadline=None)
@given(rows=st.lists(PARAMS.filter(lambda p: p.temperature > 0), min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_the_scores_equal_those_of_transformers(rows: list[SamplingParams], seed: int) -> None:
    logits = some_logits(len(rows), 50, seed)
    sampler = RowSampler(rows, generators(rows), [[] for _ in rows], 50)
    ours = sampler.allowed(logits)
    for row, params in enumerate(rows):
        without = SamplingParams(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, min_p=params.min_p
        )
        torch.testing.assert_close(ours[row], oracle(logits[row : row + 1], without, [])[0], rtol=0, atol=0)


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0])
def test_a_nucleus_larger_than_what_is_looked_at_first(top_p: float, spread: float) -> None:
    vocab = 5 * NUCLEUS
    logits = some_logits(2, vocab, 3, spread)
    params = [SamplingParams(temperature=1.0, top_p=top_p), SamplingParams(temperature=1.0)]
    ours = RowSampler(params, generators(params), [[], []], vocab).allowed(logits)
    exact, order = logits[0].double().softmax(-1).sort(descending=True)
    # Tokens within rounding of the threshold may go either way, here and in transformers.
    before = exact.cumsum(0) - exact
    kept = ours[0, order].isfinite()
    assert kept[before < top_p - 1e-5].all()
    assert not kept[before > top_p + 1e-5].any()
    assert torch.equal(ours[1], logits[1])


def test_draws_follow_the_probabilities() -> None:
    vocab, draws = 700, 20_000
    logits = some_logits(1, vocab, 5)
    params = [SamplingParams(temperature=1.0, top_k=300)] * draws
    streams = [torch.Generator().manual_seed(seed) for seed in range(draws)]
    ids = sample(logits.expand(draws, -1), params, streams, [[]] * draws)
    expected = oracle(logits, params[0], []).softmax(-1)[0]
    counts = torch.bincount(ids, minlength=vocab)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    wanted = expected[kept] * draws
    common = wanted >= 5
    chi2 = float(((counts[kept] - wanted) ** 2 / wanted)[common].sum())
    degrees = int(common.sum())
    assert abs(chi2 - degrees) < 5 * math.sqrt(2 * degrees)


def test_the_seed_alone_decides() -> None:
    logits = some_logits(1, 300, 7, 0.5).expand(4, -1)
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in (1, 2, 1, 2)]
    streams = generators(params)
    steps = torch.stack([sample(logits, params, streams, [[]] * 4) for _ in range(12)], dim=1)
    assert torch.equal(steps[0], steps[2])
    assert torch.equal(steps[1], steps[3])
    assert not torch.equal(steps[0], steps[1])


def test_greedy_and_drawn_rows_in_one_batch() -> None:
    logits = some_logits(3, 100, 9)
    params = [SamplingParams(), SamplingParams(temperature=1e-8), SamplingParams(temperature=1.0, top_k=1)]
    assert torch.equal(sample(logits, params, generators(params), [[]] * 3), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-8, 1e-29, 5e-324])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_tiny_temperature_is_greedy_and_finite(temperature: float, scale: float) -> None:
    logits = some_logits(1, 100, 11, scale)
    params = [SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)]
    assert sample(logits, params, generators(params), [[]])[0] == logits.argmax()


def test_the_penalty_remembers_what_was_sampled() -> None:
    logits = torch.tensor([[3.0, 2.9, 2.8, -1.0]])
    params = [SamplingParams(repetition_penalty=2.0)]
    sampler = RowSampler(params, generators(params), [[1]], 4)
    assert [int(sampler(logits).ids) for _ in range(4)] == [0, 2, 0, 0]


def test_logprobs_are_of_the_model_itself() -> None:
    logits = some_logits(2, 60, 13)
    params = [SamplingParams(temperature=0.5, top_k=3, repetition_penalty=1.5), SamplingParams()]
    sampled = RowSampler(params, generators(params), [[1], [2]], 60, logprobs=True)(logits)
    expected = logits.log_softmax(-1).gather(1, sampled.ids[:, None])[:, 0]
    assert sampled.logprobs is not None
    torch.testing.assert_close(sampled.logprobs, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_marked_and_spoil_no_other_row(bad: float, temperature: float) -> None:
    logits = some_logits(3, 40, 15)
    params = [SamplingParams(temperature=temperature, top_p=0.9)] * 3
    sound = sample(logits, params, generators(params), [[]] * 3)
    logits[1, 5] = bad
    ids = sample(logits, params, generators(params), [[]] * 3)
    assert ids.tolist() == [sound[0], -1, sound[2]]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0), ("max_new_tokens", -1), ("max_new_tokens", 10**9 + 1), ("max_new_tokens", 1.5),
        ("max_new_tokens", True), ("temperature", -1e-9), ("temperature", math.nan), ("temperature", math.inf),
        ("temperature", "hot"), ("top_p", 0), ("top_p", 1.01), ("top_p", -0.1), ("top_p", math.nan), ("top_k", -1),
        ("top_k", 2.5), ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0), ("repetition_penalty", -1),
        ("repetition_penalty", 1e-320), ("repetition_penalty", 1e9),
        ("repetition_penalty", 10**400), ("seed", -1), ("stop", ("",)), ("stop", "text"), ("ignore_eos", 1),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_the_name_of_its_option(name: str, value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        SamplingParams(**{name: value})
    assert f"--{name.replace('_', '-')}" in str(caught.value)
    assert "give" in str(caught.value)


def test_limits_that_are_allowed() -> None:
    SamplingParams(max_new_tokens=1, temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=1e-3)
    SamplingParams(max_new_tokens=10**9, temperature=100.0, top_p=1e-9, top_k=10**9, min_p=1, seed=2**32)
