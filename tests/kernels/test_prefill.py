"""Triton's prefill against the float64 formula: ragged chunks over paged caches, and the two forms joined."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_cli.errors import MlaError
from mla_cli.kernels import paged, reference, torch_ops
from mla_cli.kernels.pages import LATENT_DTYPES, PageLayout, gather
from mla_cli.kernels.prefill import absorbed_is_cheaper
from tests.kernels.caches import PagedCache, paged_cache, random_queries
from tests.kernels.interpreter import Interpreter

PREFILL, EXPLICIT, MERGE = (
    f"mla_cli.kernels.{name}" for name in ("prefill.prefill", "prefill.explicit", "merge.merge")
)
EXACT = {"atol": 5e-6, "rtol": 2e-5}


def starts(queries: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)


def arguments(q: torch.Tensor, queries: list[int], cache: PagedCache, scale: float = 0.2) -> tuple[Any, ...]:
    return q, starts(queries), cache.pool, cache.layout, cache.block_table, cache.lengths, scale


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(LATENT_DTYPES),
    sequences=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=3),
    heads=st.sampled_from([1, 3, 9, 16]),
    r=st.sampled_from([8, 48, 64]),
    d=st.sampled_from([0, 8, 20]),
    window=st.sampled_from([None, 1, 9]),
    softcap=st.sampled_from([None, 3.0]),
    own=st.booleans(),
    bounded=st.booleans(),
)
def test_ragged_chunks_equal_the_formula(
    interpreter: Interpreter, seed: int, dtype: Any, sequences: list[tuple[int, int]], heads: int, r: int, d: int,
    window: int | None, softcap: float | None, own: bool, bounded: bool,
) -> None:  # fmt: skip
    queries = [chunk for chunk, _ in sequences]
    lengths = [past + (chunk if own else 0) for chunk, past in sequences]
    cache = paged_cache(PageLayout(dtype, r, d), lengths, seed)
    q = random_queries(sum(queries), heads, r + d, seed=seed)
    options = {"window": window, "softcap": softcap, "own": own}
    expected = paged.prefill_reference(*arguments(q, queries, cache), **options)
    options |= {"out_dtype": torch.float32, "max_queries": max(queries) if bounded else None}
    found = interpreter(PREFILL, *arguments(q, queries, cache), **options)
    by_torch = paged.prefill(*arguments(q, queries, cache), **options)
    for result in (found, by_torch):
        for mine, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(mine.double(), theirs, **EXACT)


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
def test_chunks_give_what_the_whole_prompt_gives(interpreter: Interpreter, dtype: Any) -> None:
    cache = paged_cache(PageLayout(dtype, 48, 8), [50])
    q = random_queries(50, 3, 56)
    whole, whole_lse = interpreter(PREFILL, *arguments(q, [50], cache), out_dtype=torch.float32)
    for begin, end in itertools.pairwise((0, 1, 18, 32, 50)):
        so_far = PagedCache(cache.layout, cache.pool, cache.block_table, torch.tensor([end], dtype=torch.int32))
        args = arguments(q[begin:end].contiguous(), [end - begin], so_far)
        out, lse = interpreter(PREFILL, *args, out_dtype=torch.float32)
        torch.testing.assert_close(out, whole[begin:end], **EXACT)
        torch.testing.assert_close(lse, whole_lse[begin:end], **EXACT)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0)])
@pytest.mark.parametrize(("k_width", "v_width"), [(24, 16), (8, 40), (96, 20), (20, 24), (40, 96)])
def test_explicit_attention_stays_within_each_chunk(
    interpreter: Interpreter, k_width: int, v_width: int, window: int | None, softcap: float | None
) -> None:
    """KN-04: head widths that are no multiples of 16, too."""
    queries = [5, 0, 40, 1]
    q, k = random_queries(46, 3, k_width), random_queries(46, 3, k_width, seed=1)
    v = random_queries(46, 3, v_width, seed=2)
    out, lse = interpreter(
        EXPLICIT, q, k, v, starts(queries), 0.3, window=window, softcap=softcap, out_dtype=torch.float32
    )
    assert lse.shape == (46, 3)
    for begin, end in itertools.pairwise(starts(queries).tolist()):
        own = [x[None, begin:end].double() for x in (q, k, v)]
        visible = reference.visible_keys(torch.arange(end - begin)[None], end - begin, window)
        expected = torch_ops.attention(*own, visible, 0.3, softcap)
        torch.testing.assert_close(out[None, begin:end].double(), expected, **EXACT)


def test_context_and_own_chunk_join_by_merge(interpreter: Interpreter) -> None:
    """Absorbed attention over what is cached, explicit attention over the chunk: together what absorbed attention gives."""
    layout, heads, n, v, past, chunk = PageLayout("bf16", 32, 8), 3, 16, 24, 37, 20
    cache = paged_cache(layout, [past + chunk])
    g = torch.Generator().manual_seed(3)
    w_uk, w_uv = torch.randn(heads, n, 32, generator=g) / 6, torch.randn(heads, v, 32, generator=g) / 6
    q_nope, q_rope = random_queries(chunk, heads, n).float(), random_queries(chunk, heads, 8, seed=1).float()
    absorbed = torch.cat((torch.einsum("thn,hnr->thr", q_nope, w_uk), q_rope), dim=-1).bfloat16()
    latent, k_rope = (x[0, past:] for x in gather(cache.pool, layout, cache.block_table, cache.lengths))
    k = torch.cat((torch.einsum("sr,hnr->shn", latent, w_uk), k_rope[:, None].expand(-1, heads, -1)), dim=-1).bfloat16()
    values = torch.einsum("sr,hvr->shv", latent, w_uv).bfloat16()

    whole, _ = paged.prefill_reference(*arguments(absorbed, [chunk], cache))
    before = PagedCache(layout, cache.pool, cache.block_table, torch.tensor([past], dtype=torch.int32))
    context, context_lse = interpreter(
        PREFILL, *arguments(absorbed, [chunk], before), own=False, out_dtype=torch.float32
    )
    query = torch.cat((q_nope, q_rope), dim=-1).bfloat16()
    own, own_lse = interpreter(EXPLICIT, query, k, values, starts([chunk]), 0.2, out_dtype=torch.float32)
    up = torch.einsum("thr,hvr->thv", context, w_uv)
    found, _ = interpreter(MERGE, torch.stack((up, own)), torch.stack((context_lse, own_lse)))
    expected = torch.einsum("thr,hvr->thv", whole.float(), w_uv)
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)  # keys, values and queries were rounded to bfloat16
    assert float((found - own).abs().max()) > 0.3  # the context matters


def test_rebuilding_pays_where_many_queries_read_a_key() -> None:
    shape = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "v_head_dim": 128}
    assert absorbed_is_cheaper(1, 4096, **shape)
    assert not absorbed_is_cheaper(1024, 4096, **shape)
    assert absorbed_is_cheaper(1024, 0, **shape) is False  # nothing to rebuild, but queries would still be absorbed


def test_arguments_are_refused_by_name(interpreter: Interpreter) -> None:
    cache = paged_cache(PageLayout("int8", 32, 8), [20, 9])
    q = random_queries(7, 4, 40)
    good = arguments(q, [5, 2], cache)
    for place, value, said in (
        (0, q.half(), "q is float16"),
        (0, q.transpose(0, 1), "q has the strides"),
        (1, good[1].long(), "cu_seqlens is int64"),
        (1, good[1][:2], "block_table has the shape"),
        (4, cache.block_table[:, ::2], "block_table has the strides"),
        (5, cache.lengths.long(), "lengths is int64"),
    ):
        with pytest.raises(MlaError, match=said):
            interpreter(PREFILL, *good[:place], value, *good[place + 1 :])
    with pytest.raises(MlaError, match="k has the shape"):
        interpreter(EXPLICIT, q, q[:6], q, good[1], 0.2)
