"""Static ranges follow what a sequence generates: by how much, from when on, and independently of what runs beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mla_cli.checkpoint.kv_cache import KvScheme, LayerRange
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.decoder import Decoder
from mla_cli.model.tokenizer import Tokenizer
from mla_cli.runtime import live_range
from mla_cli.runtime.generator import Generator
from mla_cli.runtime.live_range import FEWEST, LiveRange, StaticRanges, factors
from mla_cli.runtime.request import Completion, Request
from mla_cli.runtime.sampling_params import SamplingParams
from mla_cli.runtime.statistics import table
from tests.runtime.latent import latent_decoder
from tests.runtime.stand_ins import EOS, save_byte_tokenizer

PROMPTS = ["The quick brown fox", "a", "Once upon a time there was a very long prompt indeed, " * 2, "xy z"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), config={"eos_token_id": EOS})


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return latent_decoder()


def sequences(count: int) -> list[Any]:
    """Things that windows belong to; nothing of them is read."""
    return [object() for _ in range(count)]


def reaching(*values: float) -> torch.Tensor:
    """`[L, B, 1]` for two layers, the second reaching twice as far, and a row for each value."""
    return torch.tensor([values, [2 * v for v in values]])[..., None]


def run(decoder: Decoder, tokenizer: Tokenizer, clip: float, ranges: StaticRanges | None, *prompts: str, new: int = 40,
        max_batch: int = 4) -> tuple[list[Completion], Generator]:  # fmt: skip
    quantizers = (LatentQuantizer("int8", "static", clip),) * decoder.spec.num_layers
    generator = Generator(decoder, tokenizer, quantizers=quantizers, ranges=ranges, max_batch=max_batch, logprobs=True)
    requests = [
        Request(prompt, SamplingParams(max_new_tokens=new + i, ignore_eos=True)) for i, prompt in enumerate(prompts)
    ]
    answers = generator.generate(requests)
    assert all(isinstance(answer, Completion) for answer in answers)
    return answers, generator  # type: ignore[return-value]


# --- by how much ---------------------------------------------------------------------------------------------------------


def test_ranges_grow_and_shrink_with_the_reach_within_bounds() -> None:
    now = [1.0, 1.01, 0.99, 2.0, 0.5, 1.5, 100.0, 0.01, 0.0, 3.0, 3.0]
    then = [1.0] * 9 + [None, 0.0]
    found = factors(now, then)
    assert found[:3] == [1.0, 1.0, 1.0]  # what is no drift changes no scale
    assert found[3:5] == [2.0, 0.5]
    assert found[5] == pytest.approx(1.5, rel=2 ** (1 / 32) - 1)
    assert found[6:8] == [4.0, 0.25]
    assert found[8:] == [1.0, 1.0, 1.0]  # silence, and what calibration does not say


def test_a_scheme_says_which_layers_are_watched() -> None:
    layers = (LayerRange("int8", 2.0, 9.0, 1.5), LayerRange("bf16", None, 9.0, 3.0), LayerRange("int8", 2.0, 9.0))
    scheme = KvScheme("int8", "static", layers, 8, 256, "files: a.txt", every=1000)
    assert StaticRanges.of(scheme) == StaticRanges(1000, (1.5, None))
    assert StaticRanges.of(KvScheme("int8", "token", layers, 8, 256, "files: a.txt")) is None
    assert StaticRanges.of(None) is None


# --- from when on, and for whom ------------------------------------------------------------------------------------------


def test_each_sequence_goes_by_its_own_last_tokens() -> None:
    live = LiveRange(StaticRanges(10, (1.0, 1.0)))
    first, second = sequences(2)
    changes: list[tuple[int, int, list[float]]] = []
    for step in range(1, 26):
        running = [first] if step <= 5 else [first, second]
        reach = reaching(4.0 if step <= 10 else 0.5) if step <= 5 else reaching(4.0 if step <= 10 else 0.5, 1.0)
        changes += [(step, row, found) for row, found in live.step(reach, running)]
    # One in ten of the second's layer reaches 2: nine in ten decide, here all of them.
    assert changes == [(10, 0, [4.0, 4.0]), (15, 1, [1.0, 2.0]), (20, 0, [0.5, 1.0]), (25, 1, [1.0, 2.0])]
    live.forget(first)
    assert [found for step in range(10) for found in live.step(reaching(1.0), [first])] == [(0, [1.0, 2.0])]


def test_a_few_huge_tokens_decide_nothing() -> None:
    live = LiveRange(StaticRanges(20, (1.0, 2.0)))
    (sequence,) = sequences(1)
    sizes = [1000.0, *[1.0] * 19, *[1.0] * 17, *[1000.0] * 3]
    changes = [found for size in sizes for found in live.step(reaching(size), [sequence])]
    assert changes == [(0, [1.0, 1.0]), (0, [4.0, 4.0])]


def test_only_so_many_tokens_are_looked_back_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_range, "WINDOW", 10)
    live = LiveRange(StaticRanges(30, (1.0, 1.0)))
    (sequence,) = sequences(1)
    changes = [found for step in range(30) for found in live.step(reaching(4.0 if step < 20 else 0.5), [sequence])]
    assert changes == [(0, [0.5, 1.0])]


def test_what_is_not_static_is_not_watched() -> None:
    live = LiveRange(StaticRanges(1, ()))
    assert list(live.step(None, sequences(1))) == []
    live.see(None, torch.tensor([1]))
    assert live.drift is None
    never = LiveRange(StaticRanges(None, (1.0, 1.0)))
    assert [found for _ in range(5) for found in never.step(reaching(9.0), sequences(1))] == []


# --- the metric ----------------------------------------------------------------------------------------------------------


def test_drift_is_the_layer_that_changed_most_and_padding_is_not_seen() -> None:
    live = LiveRange(StaticRanges(None, (1.0, 1.0)))
    reach = torch.ones(2, 3, 40)
    reach[1] = 1.5
    reach[:, 0, 20:] = 1e9  # padding
    live.see(reach[:, :1], torch.tensor([20]))
    assert live.drift is None  # too few to say how far nine in ten reach
    live.see(reach, torch.tensor([20, 40, FEWEST]))
    assert live.drift == pytest.approx(1.5, rel=1 / 16)
    with_unknown = LiveRange(StaticRanges(None, (1.0, None)))
    with_unknown.see(reach[:, 1:], torch.tensor([40, 40]))
    assert with_unknown.drift == pytest.approx(1.0, rel=1 / 16)


def test_statistics_show_the_drift_of_static_ranges_alone(decoder: Decoder, tokenizer: Tokenizer) -> None:
    reach = calibrated_reach(decoder, tokenizer)
    _, generator = run(decoder, tokenizer, 3.0, StaticRanges(None, reach), *PROMPTS)
    summary = generator.statistics.summary()
    assert summary["latent_range_drift"] == pytest.approx(1.0, abs=0.25)
    assert "latent range drift" in table(summary)
    half = tuple(value / 2 for value in reach)
    _, generator = run(decoder, tokenizer, 3.0, StaticRanges(None, half), *PROMPTS)
    assert generator.statistics.summary()["latent_range_drift"] == pytest.approx(
        2 * summary["latent_range_drift"], rel=1e-6
    )
    _, generator = run(decoder, tokenizer, 3.0, None, *PROMPTS)
    assert generator.statistics.summary()["latent_range_drift"] is None
    assert "latent range drift" not in table(generator.statistics.summary())


# --- the generator -------------------------------------------------------------------------------------------------------


def calibrated_reach(decoder: Decoder, tokenizer: Tokenizer) -> tuple[float, ...]:
    """How far nine in ten tokens of the prompts reach, one a layer, without any quantisation."""
    tokens = torch.tensor([[token for prompt in PROMPTS for token in tokenizer.encode(prompt)]])
    cache = decoder.make_cache(1, tokens.shape[1])
    with torch.inference_mode():
        decoder(tokens, cache)
    found = [cache.read(i, tokens.shape[1], torch.float32)[0].abs().amax(-1)[0] for i in range(len(cache.layers))]
    return tuple(float(reach.quantile(0.9)) for reach in found)


def test_a_range_that_is_too_narrow_widens_for_the_tokens_to_come(decoder: Decoder, tokenizer: Tokenizer) -> None:
    # Ranges of a quarter of what nine in ten tokens reach, as if the model had been calibrated on far smaller latents.
    reach = calibrated_reach(decoder, tokenizer)
    clip = max(reach) / 4
    every, new = 5, 100
    small = StaticRanges(every, tuple(value / 4 for value in reach))
    (fixed,), _ = run(decoder, tokenizer, clip, None, PROMPTS[1], new=new)
    (following,), generator = run(decoder, tokenizer, clip, small, PROMPTS[1], new=new)
    assert fixed.logprobs is not None
    assert following.logprobs is not None
    # The first token is the prompt's, and five more are fed before anything changes; the one they give is still as before.
    assert following.token_ids[: every + 1] == fixed.token_ids[: every + 1]
    assert following.logprobs[: every + 1] == fixed.logprobs[: every + 1]
    assert following.logprobs[every + 1 :] != fixed.logprobs[every + 1 :]
    assert generator.statistics.summary()["latent_range_drift"] == pytest.approx(4, rel=0.3)

    def off(completion: Completion) -> float:
        """How far the log-probabilities after the change are from those of an unquantised cache, over the same tokens."""
        ids = torch.tensor([[*tokenizer.encode(PROMPTS[1]), *completion.token_ids]])
        start = ids.shape[1] - new
        with torch.inference_mode():
            exact = decoder.logits(decoder(ids))[0].log_softmax(-1)
        truth = exact[start - 1 : -1].gather(-1, ids[0, start:, None])[:, 0]
        assert completion.logprobs is not None
        return float((torch.tensor(completion.logprobs) - truth)[every + 1 :].abs().mean())

    assert off(following) < 0.9 * off(fixed)  # the first tokens stay cut


def test_no_drift_changes_nothing(decoder: Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_range, "factors", lambda now, then: [1.0] * len(now))
    ranges = StaticRanges(7, (1.0,) * 2)
    assert [(a.token_ids, a.logprobs) for a in run(decoder, tokenizer, 3.0, ranges, *PROMPTS)[0]] == [
        (a.token_ids, a.logprobs) for a in run(decoder, tokenizer, 3.0, None, *PROMPTS)[0]
    ]


@pytest.mark.parametrize("max_batch", [2, 4])
def test_a_request_s_text_does_not_depend_on_what_runs_beside_it(
    decoder: Decoder, tokenizer: Tokenizer, max_batch: int
) -> None:
    reach = tuple(value / 3 for value in calibrated_reach(decoder, tokenizer))
    ranges, clip = StaticRanges(8, reach), max(reach)
    together, _ = run(decoder, tokenizer, clip, ranges, *PROMPTS, max_batch=max_batch)
    for index, prompt in enumerate(PROMPTS):
        (alone,), _ = run(decoder, tokenizer, clip, ranges, prompt, new=40 + index)
        assert together[index].token_ids == alone.token_ids
        assert together[index].logprobs == pytest.approx(alone.logprobs, abs=1e-2)
        (fixed,), _ = run(decoder, tokenizer, clip, None, prompt, new=40 + index)
        assert not math.isclose(sum(fixed.logprobs or ()), sum(alone.logprobs or ()), abs_tol=0.5)
