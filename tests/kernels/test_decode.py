"""Triton's decode against the float64 formula, over caches that hold NaN wherever nothing may be read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_cli.errors import MlaError
from mla_cli.kernels import paged
from mla_cli.kernels.paged import decode as torch_decode
from mla_cli.kernels.pages import LATENT_DTYPES, PageLayout
from tests.kernels.caches import PagedCache, paged_cache, random_queries
from tests.kernels.interpreter import Interpreter

DECODE = "mla_cli.kernels.decode.decode"
EXACT = {"atol": 5e-6, "rtol": 2e-5}  # float32 sums against float64 ones


def triton_decode(
    interpreter: Interpreter, q: torch.Tensor, cache: PagedCache, scale: float = 0.2, **kwargs: Any
) -> Any:
    kwargs = {"out_dtype": torch.float32, **kwargs}
    return interpreter(DECODE, q, cache.pool, cache.layout, cache.block_table, cache.lengths, scale, **kwargs)


def formula(q: torch.Tensor, cache: PagedCache, scale: float = 0.2, **kwargs: Any) -> Any:
    return paged.decode_reference(q, cache.pool, cache.layout, cache.block_table, cache.lengths, scale, **kwargs)


def assert_same(found: Any, expected: Any, **tolerance: float) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, **(tolerance or EXACT))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(LATENT_DTYPES),
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=2),
    queries=st.sampled_from([1, 1, 2, 5]),
    heads=st.sampled_from([1, 3, 6, 9, 12, 28]),
    r=st.sampled_from([8, 24, 48, 64, 96]),
    d=st.sampled_from([0, 2, 8, 20, 32]),
    splits=st.sampled_from([None, 1, 2, 7]),
    window=st.sampled_from([None, 1, 7, 40]),
    softcap=st.sampled_from([None, 3.0]),
)
def test_every_shape_equals_the_formula(
    interpreter: Interpreter, seed: int, dtype: Any, lengths: list[int], queries: int, heads: int, r: int, d: int,
    splits: int | None, window: int | None, softcap: float | None,
) -> None:  # fmt: skip
    cache = paged_cache(PageLayout(dtype, r, d), lengths, seed)
    q = random_queries(len(lengths), queries, heads, r + d, seed=seed)
    expected = formula(q, cache, window=window, softcap=softcap)
    assert_same(triton_decode(interpreter, q, cache, num_splits=splits, window=window, softcap=softcap), expected)
    found = torch_decode(
        q, cache.pool, cache.layout, cache.block_table, cache.lengths, 0.2, window=window, softcap=softcap,
        out_dtype=torch.float32,
    )  # fmt: skip
    assert_same(found, expected)


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
@pytest.mark.parametrize("r", [8, 48, 256, 320, 512, 576])
@pytest.mark.parametrize("d", [0, 8, 32, 64])
def test_ranks_are_right_and_repeatable(interpreter: Interpreter, dtype: Any, r: int, d: int) -> None:
    """KN-02: any rank and rotary width, three times."""
    cache = paged_cache(PageLayout(dtype, r, d), [35])
    q = random_queries(1, 1, 5, r + d)
    first, *again = (triton_decode(interpreter, q, cache, 0.05, num_splits=2) for _ in range(3))
    assert_same(first, formula(q, cache, 0.05))
    assert all(torch.equal(a, b) for other in again for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 6, 12, 28])
def test_no_head_reads_what_is_anothers_or_another_sequences(interpreter: Interpreter, dtype: Any, heads: int) -> None:
    """KN-03: head counts that fill no tile, in a batch."""
    cache = paged_cache(PageLayout(dtype, 24, 8), [18, 33, 7])
    q = random_queries(3, 1, heads, 32)
    found = triton_decode(interpreter, q, cache)
    assert_same(found, formula(q, cache))
    outputs = found[0].flatten(0, 2)
    assert len(outputs.unique(dim=0)) == 3 * heads


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
@pytest.mark.parametrize("d", [20, 24, 40, 96])
def test_rotary_widths_that_fill_no_tile(interpreter: Interpreter, dtype: Any, d: int) -> None:
    """KN-04: widths that are no multiples of 16."""
    cache = paged_cache(PageLayout(dtype, 40, d), [30, 3])
    q = random_queries(2, 2, 3, 40 + d)
    assert_same(triton_decode(interpreter, q, cache), formula(q, cache))


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_128_heads_are_cut_into_tiles_of_rows(interpreter: Interpreter, dtype: Any) -> None:
    cache = paged_cache(PageLayout(dtype, 64, 16), [20, 33])
    q = random_queries(2, 1, 128, 80)
    assert_same(triton_decode(interpreter, q, cache), formula(q, cache))


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
def test_splits_without_keys_weigh_nothing(interpreter: Interpreter, dtype: Any) -> None:
    """KN-05: lengths 0 and 1, and more splits than blocks of keys."""
    cache = paged_cache(PageLayout(dtype, 32, 8), [0, 1, 40])
    q = random_queries(3, 1, 4, 40)
    one = triton_decode(interpreter, q, cache, num_splits=1)
    many = triton_decode(interpreter, q, cache, num_splits=8)
    out, lse = many
    assert bool((out[0] == 0).all())
    assert bool((lse[0] == float("-inf")).all())
    assert torch.equal(out[1], one[0][1])  # a single split with keys comes back as it is
    assert_same(many, (one[0].double(), one[1].double()))


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_large_logits_stay_finite(interpreter: Interpreter, size: float) -> None:
    """KN-05: logits beyond 1e4 in both directions."""
    cache = paged_cache(PageLayout("bf16", 64, 8), [50], size=size)
    q = random_queries(1, 1, 4, 72) * size
    out, lse = triton_decode(interpreter, q, cache, 1.0, num_splits=3)
    expected, expected_lse = formula(q, cache, 1.0)
    assert float(expected_lse.abs().max()) > (1e4 if size > 1 else 0)
    # Scores of 1e4 have steps of 1e-3 in float32, and their exponentials that relative error.
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=2e-7)
    torch.testing.assert_close(out.double(), expected, atol=size * 1e-4, rtol=1e-2)


def test_a_sequences_result_does_not_depend_on_its_neighbours(interpreter: Interpreter) -> None:
    cache = paged_cache(PageLayout("int8", 48, 8), [61, 3, 18, 70])
    q = random_queries(4, 1, 9, 56)
    together = triton_decode(interpreter, q, cache, num_splits=4)
    alone = PagedCache(cache.layout, cache.pool, cache.block_table[:1].contiguous(), cache.lengths[:1])
    for mine, all_of_them in zip(triton_decode(interpreter, q[:1], alone, num_splits=4), together, strict=True):
        assert torch.equal(mine[0], all_of_them[0])


def double_codes(cache: PagedCache) -> None:
    """Codes that can be halved: even ones."""
    codes = cache.layout.latents(cache.pool)
    if cache.layout.dtype == "int8":
        codes.copy_(codes.clamp(-63, 63) * 2)
    elif cache.layout.dtype == "int4":  # two's complement, two to a byte
        low, high = codes & 7, codes >> 4 & 7
        codes.copy_((low % 4 * 2) | (high % 4 * 2) << 4)
    else:
        codes.copy_((codes.float().clamp(-200, 200) * 2).to(codes.dtype))


def halve_codes(cache: PagedCache) -> None:
    codes = cache.layout.latents(cache.pool)
    if cache.layout.dtype == "int4":
        codes.copy_(codes >> 1)  # all are even and positive
    else:
        codes.copy_((codes.float() / 2).to(codes.dtype))


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_the_scale_reaches_the_kernel(interpreter: Interpreter, dtype: Any) -> None:
    """KN-08: twice the scale is another output, and with half the codes the same."""
    cache = paged_cache(PageLayout(dtype, 64, 8), [40])
    q = random_queries(1, 1, 4, 72)
    double_codes(cache)
    plain, _ = triton_decode(interpreter, q, cache)
    scales = cache.layout.scale_views(cache.pool)
    assert scales is not None
    scales.mul_(2)
    doubled, _ = triton_decode(interpreter, q, cache)
    assert float((doubled - plain).abs().max()) > 0.1
    assert_same((doubled,), formula(q, cache)[:1])
    halve_codes(cache)
    undone, _ = triton_decode(interpreter, q, cache)
    torch.testing.assert_close(undone, plain, atol=1e-6, rtol=1e-6)


def test_every_softmax_scale_is_used(interpreter: Interpreter) -> None:
    """KN-09: one process, scale 1.0 and then another."""
    cache = paged_cache(PageLayout("bf16", 32, 8), [40])
    q = random_queries(1, 1, 4, 40)
    for scale in (1.0, 0.37):
        assert_same(triton_decode(interpreter, q, cache, scale), formula(q, cache, scale))


def test_fp8_is_taken_apart_where_the_machine_cannot(interpreter: Interpreter) -> None:
    """KN-07: a GPU without FP8."""
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 127) != 127]  # all but the two NaN
    found = interpreter("tests.kernels.kernel_parts.fp8_from_bits", every)
    assert torch.equal(found, every.view(torch.float8_e4m3fn).float())


def test_a_broken_token_shows(interpreter: Interpreter) -> None:
    cache = paged_cache(PageLayout("bf16", 32, 0), [40, 20])
    q = random_queries(2, 1, 4, 32)
    page = int(cache.block_table[0, 1])
    cache.layout.latents(cache.pool)[page, 3, 5] = float("nan")
    out, lse = triton_decode(interpreter, q, cache, num_splits=4)
    assert bool(out[0, ..., 5].isnan().all())
    assert bool(lse[0].isnan().all())
    assert bool(out[1].isfinite().all())


def test_arguments_are_refused_by_name(interpreter: Interpreter) -> None:
    """KN-05: queries that are not contiguous among them."""
    cache = paged_cache(PageLayout("bf16", 32, 8), [40, 20])
    q = random_queries(2, 1, 4, 40)
    good = (q, cache.pool, cache.layout, cache.block_table, cache.lengths, 0.2)
    strided = random_queries(2, 1, 8, 40)[:, :, ::2]
    bad: list[tuple[int, Any, str]] = [
        (0, q.float(), "q is float32, not bfloat16"),
        (0, strided, r"q has the strides .* q.contiguous\(\)"),
        (0, q[..., :39], "q has the shape"),
        (1, cache.pool[:, ::2], "pool has the shape"),
        (1, cache.pool.view(torch.int8), "pool is int8"),
        (2, PageLayout("bf16", 32, 16), "q has the shape"),
        (3, cache.block_table.long(), "block_table is int64"),
        (3, cache.block_table.t(), "block_table has the shape"),
        (4, cache.lengths[:1], "lengths has the shape"),
        (4, cache.lengths.float(), "lengths is float32"),
    ]
    for place, value, said in bad:
        args = [*good[:place], value, *good[place + 1 :]]
        with pytest.raises(MlaError, match=f"(?s)decode.*{said}|{said}.*"):
            interpreter(DECODE, *args)
    with pytest.raises(MlaError, match="num_splits"):
        interpreter(DECODE, *good, num_splits=0)
    wide = PageLayout("bf16", 4096, 8)
    with pytest.raises(MlaError, match="bf16 latents of at most 1024 channels"):
        interpreter(DECODE, random_queries(1, 1, 1, 4104), wide.pool(1), wide, *(x[:1] for x in good[3:5]), 0.2)


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
def test_pages_beyond_two_gigabytes_are_found(interpreter: Interpreter, dtype: Any) -> None:
    """KN-06: page numbers times their size beyond 32 bits, of write, decode and prefill."""
    near, far, begins = interpreter("tests.kernels.kernel_parts.attend_far_away", dtype)
    assert begins > 2**31
    for here, there in zip(near, far, strict=True):
        assert float(here.abs().max()) > 0.1
        assert torch.equal(here, there)
