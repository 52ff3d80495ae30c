"""Caches of pages hold what contiguous ones do, bit for bit, and a pool loses no page."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_cli.checkpoint.cache_dir import cache_dir
from mla_cli.kernels.cpu.build import load_library
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.cache import Cache
from mla_cli.model.cache_store import ALIGNMENT, PAGE_TOKENS
from mla_cli.model.decoder import Decoder
from mla_cli.model.page_pool import PagePool, pages_for
from mla_cli.runtime.cpu_step import CpuStep
from tests.runtime.latent import latent_decoder
from tests.runtime.stand_ins import VOCAB

KINDS: dict[str, Any] = {
    "plain": None,
    "int8": LatentQuantizer("int8"),
    "fp8": LatentQuantizer("fp8"),
    "int4": LatentQuantizer("int4"),
    "page": LatentQuantizer("int8", granularity="page"),
    "static": LatentQuantizer("int8", granularity="static", clip=4.0),
}


def pool_of(decoder: Decoder, quantizer: LatentQuantizer | None, limit: int) -> PagePool:
    quantizers = None if quantizer is None else (quantizer,) * decoder.spec.num_layers
    return PagePool(partial(decoder.make_cache, quantizers=quantizers), limit)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compiled", [False, True])
@torch.inference_mode()
def test_pages_hold_what_a_contiguous_cache_does(kind: str, compiled: bool) -> None:
    decoder = latent_decoder()
    if compiled:
        library = load_library(cache_dir() / "kernels", lambda _: None)
        if isinstance(library, str):
            pytest.skip(library)
        decoder.fast_step = CpuStep(decoder, library)
    quantizer = KINDS[kind]
    quantizers = None if quantizer is None else (quantizer,) * decoder.spec.num_layers
    pool = pool_of(decoder, quantizer, 40)
    tokens = torch.randint(3, VOCAB, (2, 140), generator=torch.Generator().manual_seed(0))
    starts = (40, 125)
    # Pages out of order, each row read on its own, then both together.
    spare = pool.take(7)
    assert spare is not None
    pages = [pool.take(3), pool.take(3)]
    assert all(pages)
    own = [list(reversed(each)) for each in pages if each]
    views, plain = [], []
    for row, start in enumerate(starts):
        cache = decoder.make_cache(1, 200, quantizers)
        view = pool.view(own[row : row + 1], [0])
        for begin, end in ((0, 17), (17, start)):
            expected = decoder(tokens[row : row + 1, begin:end], cache)
            assert torch.equal(decoder(tokens[row : row + 1, begin:end], view), expected)
        views.append(view)
        plain.append(cache)
    both, expected_of_both = pool.view(own, list(starts), views), decoder.make_cache(2, 200, quantizers)
    for row, cache in enumerate(plain):
        expected_of_both.put([row], cache)
    for step in range(15):
        now = torch.stack([tokens[row, start + step] for row, start in enumerate(starts)])[:, None]
        assert torch.equal(decoder(now, both), decoder(now, expected_of_both))
    for layer in range(decoder.spec.num_layers):
        for mine, theirs in zip(
            both.read(layer, 140, torch.float32), expected_of_both.read(layer, 140, torch.float32), strict=True
        ):
            for row, start in enumerate(starts):
                assert torch.equal(mine[row, : start + 15], theirs[row, : start + 15])


@torch.inference_mode()
def test_compiled_rows_are_those_of_a_row_alone() -> None:
    library = load_library(cache_dir() / "kernels", lambda _: None)
    if isinstance(library, str):
        pytest.skip(library)
    decoder = latent_decoder()
    decoder.fast_step = CpuStep(decoder, library)
    lengths = [600, 1, 64, 300, 63, 65, 1100, 5, 128]
    pool = PagePool(partial(decoder.make_cache, quantizers=(LatentQuantizer("int8"),) * 2), 100)
    generator = torch.Generator().manual_seed(3)
    pages, views = [], []
    for length in lengths:
        own = pool.take(pages_for(length + 1))
        assert own is not None
        random.Random(length).shuffle(own)
        view = pool.view([own], [0])
        decoder(torch.randint(3, VOCAB, (1, length), generator=generator), view)
        pages.append(own)
        views.append(view)
    now = torch.randint(3, VOCAB, (len(lengths), 1), generator=generator)
    alone = torch.cat([decoder(now[i : i + 1], pool.view([pages[i]], [n])) for i, n in enumerate(lengths)])
    together = decoder(now, pool.view(pages, lengths, views))
    assert torch.equal(alone, together)
    assert torch.equal(decoder.logits(together[:, 0]), torch.cat([decoder.logits(x) for x in alone]))


@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_aligned(kind: str) -> None:
    decoder = latent_decoder()
    pool = pool_of(decoder, KINDS[kind], 9)
    pool.take(9)
    view = pool.view([[1, 2]], [0])
    for store in view.layers[0].stores:
        for name in store.parts:
            tensor = getattr(store, name)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % ALIGNMENT == 0
            if name != "scales" or kind != "page":  # four scales a page are less than a line
                assert tensor[0].nbytes % ALIGNMENT == 0


def tiny_pool(limit: int) -> PagePool:
    return pool_of(latent_decoder(layers=1), None, limit)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6)), max_size=40), st.integers(1, 12))
def test_no_page_is_lost_or_given_twice(actions: list[tuple[int, int]], limit: int) -> None:
    pool = tiny_pool(limit)
    held: list[list[int]] = []
    for action, number in actions:
        if action in (0, 1):
            room = pool.available
            taken = pool.take(number)
            assert (taken is None) == (number > room)
            if taken is not None:
                assert len(taken) == number
                held.append(taken)
        elif action == 2 and held:
            pool.release(held.pop(number % len(held)))
        elif action == 3 and held and held[-1]:
            pool.keep(bytes(held[-1]), held[-1])
            held.append(list(pool.share(bytes(held[-1]))))
        used = {page for pages in held for page in pages}
        assert 0 not in used
        assert pool.used - pool.kept == len(used)
        assert pool.available == limit - len(used)
    for pages in held:
        pool.release(pages)
    pool.forget_kept()
    assert pool.used == 0
    assert sorted(pool.take(limit) or ()) == list(range(1, limit + 1))


def test_what_was_used_least_recently_is_given_up() -> None:
    pool = tiny_pool(4)
    for name in (b"a", b"b", b"c"):
        pages = pool.take(1)
        assert pages is not None
        pool.keep(name, pages)
        pool.release(pages)
    pool.release(pool.share(b"a"))
    assert pool.available == 4
    assert pool.take(3) is not None
    assert pool.share(b"b") == pool.share(b"c") == ()
    assert len(pool.share(b"a")) == 1


def no_memory(*_: object) -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_when_memory_runs_out_the_pool_stays_as_large_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = tiny_pool(100)
    first = pool.take(4)
    with monkeypatch.context() as patch:
        patch.setattr(Cache, "add_pages", no_memory)
        assert pool.take(2) is None
        assert pool.take(1) is None
        assert (pool.held, pool.refusals) == (4, 2)
        pool.release(first or ())
        assert len(pool.take(4) or ()) == 4
        assert pool.refusals == 2  # nothing was asked of memory
    assert len(pool.take(2) or ()) == 2  # there is some again
    assert pool.refusals == 0


def test_a_pool_that_is_held_grows_no_further_until_it_may() -> None:
    pool = tiny_pool(10)
    pool.take(1)
    pool.hold()
    assert (pool.held, pool.limit, pool.available) == (4, 4, 3)
    assert pool.take(4) is None
    assert pool.refusals == 0
    pool.resume()
    assert len(pool.take(4) or ()) == 4


def test_caches_apart_and_pages_share_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = tiny_pool(10)
    taken = pool.take(4)
    assert pool.held == 4
    assert pool.take_apart(PAGE_TOKENS * 6 + 1) is None
    cache = pool.take_apart(PAGE_TOKENS * 5)
    assert cache is not None
    assert (cache.capacity, pool.limit, pool.available) == (PAGE_TOKENS * 5, 5, 1)
    assert pool.allocated_bytes() >= 9 * PAGE_TOKENS * pool.bytes_per_token()
    pool.drop()
    assert pool.held == 4  # they are in use
    pool.release(taken or ())
    pool.drop()
    assert (pool.held, pool.used) == (0, 0)
    pool.release_apart(PAGE_TOKENS * 5)
    monkeypatch.setattr(Cache, "reserve", no_memory)
    assert pool.take_apart(1) is None
    assert len(pool.take(10) or ()) == 10


def test_pages_for_tokens() -> None:
    assert [pages_for(n) for n in (0, 1, PAGE_TOKENS, PAGE_TOKENS + 1)] == [0, 1, 1, 2]
