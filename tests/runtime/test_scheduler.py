"""Requests that come, go, are cancelled and lose their pages: texts stay what they are alone, and no page is lost."""

from __future__ import annotations

import random
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch

from mla_cli.checkpoint.cache_dir import cache_dir
from mla_cli.errors import MlaError
from mla_cli.kernels.cpu.build import load_library
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.cache import Cache
from mla_cli.model.cache_store import Store
from mla_cli.model.decoder import Decoder
from mla_cli.model.page_pool import PagePool
from mla_cli.model.tokenizer import Tokenizer
from mla_cli.runtime.batch import Batch, read_chunk
from mla_cli.runtime.cpu_step import CpuStep
from mla_cli.runtime.generator import Generator
from mla_cli.runtime.live_range import LiveRange, StaticRanges
from mla_cli.runtime.request import Completion, Failure, Request
from mla_cli.runtime.sampling_params import SamplingParams
from mla_cli.runtime.scheduler import Scheduler
from mla_cli.runtime.sequence import ActiveSequence
from mla_cli.runtime.statistics import Statistics
from tests.runtime.latent import latent_decoder
from tests.runtime.stand_ins import EOS, VOCAB, ScriptedDecoder, save_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return save_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), config={"eos_token_id": EOS})


def compiled_decoder(positions: int = 2048) -> Decoder:
    """A decoder of random weights whose logits are not flat, stepped by the compiled kernels."""
    from dataclasses import replace

    library = load_library(cache_dir() / "kernels", lambda _: None)
    if isinstance(library, str):
        pytest.skip(library)
    decoder = latent_decoder()
    decoder.spec = replace(decoder.spec, max_position_embeddings=positions)
    decoder.fast_step = CpuStep(decoder, library)
    return decoder


def random_requests(count: int, longest: int, seed: int = 0, shared: int = 0) -> list[Request]:
    chance = random.Random(seed)
    system = tuple(chance.randrange(3, VOCAB) for _ in range(shared))
    found = []
    for i in range(count):
        own = tuple(chance.randrange(3, VOCAB) for _ in range(chance.randint(1, longest)))
        params = SamplingParams(
            max_new_tokens=chance.randint(1, 90), temperature=0.0 if i % 3 else 1.0, seed=i, ignore_eos=True,
            repetition_penalty=1.1 if i % 5 == 0 else 1.0,
        )  # fmt: skip
        found.append(Request((*system, *own) if i % 2 else own, params))
    return found


def tokens_of(generator: Generator, requests: list[Request]) -> list[Any]:
    found = generator.generate(requests)
    assert all(isinstance(answer, Completion) for answer in found), found
    return [(a.token_ids, a.logprobs) for a in found if isinstance(a, Completion)]


@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_texts_are_those_of_each_request_alone_bit_for_bit(tokenizer: Tokenizer, kind: str) -> None:
    decoder = compiled_decoder()
    quantizers = None if kind == "plain" else (LatentQuantizer("int8"),) * decoder.spec.num_layers
    make = partial(Generator, decoder, tokenizer, quantizers=quantizers, logprobs=True)
    requests = random_requests(12, 700, shared=530)
    alone = [tokens_of(make(), [request])[0] for request in requests]
    roomy, tight = make(), make(max_context=1400, pool_tokens=1700)
    assert tokens_of(roomy, requests) == alone
    assert tokens_of(tight, requests) == alone
    assert tokens_of(tight, requests[::-1]) == alone[::-1]  # what is kept from before changes nothing
    assert tight.statistics.preemptions > 0
    assert roomy.statistics.shared_tokens == 5 * 512  # six begin alike, however many of them came in together
    assert roomy.statistics.prompt_tokens + roomy.statistics.shared_tokens == sum(len(r.prompt) for r in requests)
    assert tight.statistics.cache_bytes <= 28 * 64 * tight.statistics.cache_bytes_per_token * 1.1
    for generator in (roomy, tight):
        generator._pool.forget_kept()
        assert generator._pool.used == 0


def test_prompts_of_any_length_share_what_they_begin_with(tokenizer: Tokenizer) -> None:
    decoder = compiled_decoder(positions=4096)
    chance = random.Random(3)
    long = tuple(chance.randrange(3, VOCAB) for _ in range(2200))
    params = SamplingParams(max_new_tokens=3, ignore_eos=True)
    requests = [Request(long[:n] + (5,) * own, params) for n, own in ((2200, 0), (1100, 1), (600, 900), (2048, 1))]
    alone = [tokens_of(Generator(decoder, tokenizer, logprobs=True), [request])[0] for request in requests]
    generator = Generator(decoder, tokenizer, logprobs=True)
    assert tokens_of(generator, requests) == alone
    assert generator.statistics.shared_tokens == 1024 + 512 + 2048


def test_few_tokens_are_read_alike_however_they_are_cut() -> None:
    decoder = compiled_decoder()
    quantizers = (LatentQuantizer("int8"),) * decoder.spec.num_layers
    pool = PagePool(partial(decoder.make_cache, quantizers=quantizers), 8)
    pages, tokens = pool.take(4), [3 + (7 * i) % 200 for i in range(150)]
    assert pages is not None
    found = []
    with torch.inference_mode():
        for cuts in ((100, 150), (100, 101, 120, 150), (100, 137, 150)):
            cache, start = pool.view([pages], [0]), 0
            for end in cuts:
                hidden = read_chunk(decoder, cache, tokens[start:end])
                start = end
            assert cache.longest == 150
            found.append(hidden)
        cache = pool.view([pages], [0])
        decoder(torch.tensor([tokens[:100]]), cache)
        whole = decoder(torch.tensor([tokens[100:]]), cache)[:, -1]
    assert all(torch.equal(hidden, found[0]) for hidden in found)
    assert torch.allclose(whole, found[0], atol=0.05 * float(whole.abs().max()))


def test_static_ranges_are_derived_again_after_pages_were_lost(tokenizer: Tokenizer) -> None:
    """One that was put off goes through the same ranges as before."""
    decoder = latent_decoder()
    quantizers = (LatentQuantizer("int8", granularity="static", clip=8.0),) * decoder.spec.num_layers
    live = LiveRange(StaticRanges(10, (3.0, 3.0)))
    pool = PagePool(partial(decoder.make_cache, quantizers=quantizers), 40)
    scheduler = Scheduler(batch := Batch(decoder, pool, live=live), pool, Statistics(), max_batch=4)
    texts = []
    for lose in (False, True):
        sequence = make_sequence(tokenizer, 0, Request((5, 6, 7), SamplingParams(max_new_tokens=50, ignore_eos=True)))
        scheduler.add(sequence)
        turns = 0
        while scheduler.busy:
            list(scheduler.turn())
            turns += 1
            if lose and turns in (15, 40) and sequence in batch.rows:
                batch.leave(sequence)
                scheduler.add(sequence)
        texts.append(sequence.tokens)
    assert texts[0] == texts[1]
    assert pool.used - pool.kept == 0


def make_sequence(tokenizer: Tokenizer, index: int, request: Request) -> ActiveSequence:
    assert isinstance(request.prompt, tuple)
    return ActiveSequence(
        index, list(request.prompt), request.params, allowed=request.params.max_new_tokens, note=None,
        stream=tokenizer.stream(), eos_ids=frozenset({EOS}), started=0.0,
    )  # fmt: skip


class FailingPool(PagePool):
    """A pool of which one allocation in a few fails."""

    chance = random.Random(7)

    def take(self, count: int) -> list[int] | None:
        return None if self.chance.random() < 0.1 else super().take(count)


def test_soak(tokenizer: Tokenizer) -> None:
    """Many short requests, cancelled at random, in a quarter of the pages, where allocations fail: all end, rightly."""

    def say(tokens: list[int]) -> int:  # follows from the whole sequence: one wrong entry of the cache, and it differs
        return 3 + hash(tuple(tokens)) % (VOCAB - 3)

    chance = random.Random(1)
    count = 2000
    requests = [
        Request(
            tuple(chance.randrange(3, VOCAB) for _ in range(chance.choice((1, 5, 63, 64, 65, 90)))),
            SamplingParams(max_new_tokens=chance.choice((1, 2, 8, 20)), ignore_eos=True),
        )
        for _ in range(count)
    ]
    decoder: Any = ScriptedDecoder(say)
    running = 16
    pool = FailingPool(decoder.make_cache, running * 2 // 4)
    statistics = Statistics()
    scheduler = Scheduler(Batch(decoder, pool), pool, statistics, max_batch=running)
    sequences = [make_sequence(tokenizer, i, request) for i, request in enumerate(requests)]
    arriving = iter(sequences)
    done: set[int] = set()
    cancelled: set[int] = set()
    turns = 0
    while scheduler.busy or len(done | cancelled) < count:
        turns += 1
        assert turns < 60_000, "it goes round in circles"
        for sequence in islice(arriving, chance.randrange(4)):
            if sequence.index not in cancelled:
                scheduler.add(sequence)
        for event in scheduler.turn():
            if isinstance(event, Completion):
                assert event.index not in done | cancelled
                done.add(event.index)
                story = list(requests[event.index].prompt)
                for token in event.token_ids:
                    assert token == say(story)
                    story.append(token)
                assert len(event.token_ids) == requests[event.index].params.max_new_tokens
            elif isinstance(event, Failure):
                assert "no memory" in str(event.error)
                cancelled.add(event.index)
        if chance.random() < 0.1:
            victim = chance.choice(sequences)
            if victim.index not in done:
                scheduler.cancel(victim)
                cancelled.add(victim.index)
        decoder._stories.clear()
        decoder.fed.clear()
    assert len(done) > count * 0.8
    assert statistics.preemptions > 10
    pool.forget_kept()
    assert pool.used == 0


def no_memory(*_: object) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("layers_that_grow", [0, 1, 3])
def test_memory_that_runs_out_amid_the_layers_changes_no_text(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, layers_that_grow: int
) -> None:
    decoder = compiled_decoder()
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    requests = [Request(tuple([5 + i] * (60 + i)), params) for i in range(6)]
    alone = [tokens_of(Generator(decoder, tokenizer), [request])[0] for request in requests]
    generator = Generator(decoder, tokenizer)
    scheduler = generator.scheduler()
    sequences = [generator.prepare(i, request, 0.0) for i, request in enumerate(requests)]
    add_pages, left = Store.add_pages, [layers_that_grow]

    def some(store: Store, pages: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            no_memory()
        add_pages(store, pages)

    scheduler.add(sequences[0])
    list(scheduler.turn())
    monkeypatch.setattr(Store, "add_pages", some)
    for sequence in sequences[1:4]:
        scheduler.add(sequence)
    for _ in range(2):
        list(scheduler.turn())
    monkeypatch.undo()
    for sequence in sequences[4:]:
        scheduler.add(sequence)
    while scheduler.busy:
        list(scheduler.turn())
    assert [tuple(sequence.tokens) for sequence in sequences] == [tokens for tokens, _ in alone]


@pytest.mark.parametrize("kind", ["plain", "int8", "static"])
def test_without_memory_for_pages_requests_are_computed_apart(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Some of them, then the pool is tried again; all have the text that they have alone."""
    decoder = compiled_decoder()
    static = LatentQuantizer("int8", granularity="static", clip=8.0)
    quantizer = {"plain": None, "int8": LatentQuantizer("int8"), "static": static}[kind]
    make = partial(  # PyTorch steps over static ranges, so that log-probabilities are those of the batch to rounding only
        Generator, decoder, tokenizer, quantizers=None if quantizer is None else (quantizer,) * 2,
        logprobs=kind != "static",
        ranges=StaticRanges(10, (3.0, 3.0)) if kind == "static" else None,
    )  # fmt: skip
    requests = random_requests(10, 60, shared=530)
    alone = [tokens_of(make(), [request])[0] for request in requests]
    generator = make(cool_down=3)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "add_pages", no_memory)
        assert tokens_of(generator, requests[:5]) == alone[:5]
    assert generator.statistics.computed_apart == 5
    assert generator.statistics.fallbacks == 2  # three, and the first of three more
    assert generator._pool.held == 0
    assert tokens_of(generator, requests[5:]) == alone[5:]  # one more is computed apart, then there is memory
    summary = generator.statistics.summary()
    assert generator.statistics.computed_apart == 6
    assert summary["fallback_rate"] == 6 / 10
    assert summary["shared_prompt_tokens"] > 0
    assert capsys.readouterr().err.count("caches of their own") == 1
    generator._pool.forget_kept()
    assert generator._pool.used == generator._pool._apart == 0


def test_without_any_memory_a_request_fails_alone(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(latent_decoder(), tokenizer)
    requests = [Request((5, 6), SamplingParams(max_new_tokens=3, ignore_eos=True))] * 2
    with monkeypatch.context() as patch:
        patch.setattr(Store, "add_pages", no_memory)
        patch.setattr(Cache, "reserve", no_memory)
        failures = generator.generate(requests)
        for failure in failures:
            assert isinstance(failure, Failure)
            assert "no memory" in str(failure.error)
    assert all(isinstance(answer, Completion) for answer in generator.generate(requests))


def test_who_hears_of_one_request_may_cancel_another(tokenizer: Tokenizer) -> None:
    """Also in the midst of a turn: of those whose prompts are still to be read in it, and of those to decode."""
    decoder = latent_decoder()
    generator = Generator(decoder, tokenizer)
    scheduler = generator.scheduler()
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    sequences = [generator.prepare(i, Request((70 + i, 80), params), 0.0) for i in range(6)]
    for sequence in sequences:
        scheduler.add(sequence)
    heard: set[int] = set()
    while scheduler.busy:
        for event in scheduler.turn():
            heard.add(event.index)
            if event.index == 0:
                scheduler.cancel(sequences[3])
            if event.index == 4 and len(sequences[4].tokens) > 5:
                scheduler.cancel(sequences[5])
    assert 3 not in heard
    assert [len(s.tokens) for s in sequences][:5] == [20, 20, 20, 0, 20]
    assert len(sequences[5].tokens) < 20
    assert generator._pool.used == 0


def test_a_broken_sequence_ends_alone(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latents that are not finite fail their own request, and leave nothing for who gets the pages next."""
    decoder = latent_decoder()
    embed = decoder.embed
    monkeypatch.setattr(
        decoder, "embed", lambda tokens, at: embed(tokens, at).masked_fill((tokens == 9)[..., None], torch.nan)
    )
    quantizers = (LatentQuantizer("int8"),) * decoder.spec.num_layers
    for chosen in (quantizers, None):
        generator = Generator(decoder, tokenizer, quantizers=chosen, max_batch=3)
        params = SamplingParams(max_new_tokens=8, ignore_eos=True)
        good = Request((5, 6, 7), params)
        alone = generator.generate([good])[0]
        assert isinstance(alone, Completion)
        found = generator.generate([good, Request((5, 9), params), good, Request((9,), params), good])
        for index, answer in enumerate(found):
            if index in (1, 3):
                assert isinstance(answer, Failure)
                assert isinstance(answer.error, MlaError)
            else:
                assert isinstance(answer, Completion)
                assert answer.token_ids == alone.token_ids


def test_long_prompts_do_not_hold_up_who_decodes(tokenizer: Tokenizer) -> None:
    """Between two steps at most a budget of prompt tokens is read."""
    decoder: Any = ScriptedDecoder(lambda tokens: 80, positions=4096)
    generator = Generator(decoder, tokenizer)
    requests = [Request((5,), SamplingParams(max_new_tokens=20))]
    requests += [Request(tuple([7 + i] * 1500), SamplingParams(max_new_tokens=2)) for i in range(3)]
    generator.generate(requests)
    since = 0
    for fed in decoder.fed:
        since = since + fed if fed > 4 else 0
        assert since <= 512


def test_the_pool_limits_the_context(tokenizer: Tokenizer) -> None:
    generator = Generator(latent_decoder(), tokenizer, pool_tokens=100)
    assert generator.context == 128
    long = SamplingParams(max_new_tokens=500, ignore_eos=True)
    first, second = generator.generate([Request(tuple([5] * 130)), Request((5, 6), long)])
    assert isinstance(first, Failure)
    assert "raise --pool-size" in str(first.error.fix)
    assert isinstance(second, Completion)
    assert len(second.token_ids) == 126


def test_a_reader_who_stops_leaves_no_pages(tokenizer: Tokenizer) -> None:
    generator = Generator(latent_decoder(), tokenizer)
    events = generator.events([Request((5, 6), SamplingParams(ignore_eos=True)) for _ in range(5)])
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert generator._pool.used == 0
