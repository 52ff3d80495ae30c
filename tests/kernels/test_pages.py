"""Where the bytes of a page stand, and what is read back from them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_cli.errors import MlaError
from mla_cli.kernels.pages import LATENT_DTYPES, PageLayout, gather, put, slots_of
from mla_cli.kernels.quantized import LatentQuantizer, decode
from tests.kernels.caches import paged_cache

RANKS = st.integers(1, 80).map(lambda n: 8 * n)
ROPES = st.integers(0, 80)


@pytest.mark.parametrize(("dtype", "bytes_per_token"), [("bf16", 1152), ("int8", 644), ("fp8", 644), ("int4", 416)])
def test_bytes_of_a_deepseek_token(dtype: str, bytes_per_token: int) -> None:
    assert PageLayout(dtype, 512, 64).bytes_per_token == bytes_per_token  # type: ignore[arg-type]


@given(st.sampled_from(LATENT_DTYPES), RANKS, ROPES)
@settings(max_examples=200, deadline=None)
def test_runs_are_aligned_and_do_not_overlap(dtype: str, r: int, d: int) -> None:
    layout = PageLayout(dtype, r, d)  # type: ignore[arg-type]
    assert layout.rope_offset % 16 == 0
    assert layout.scale_offset % 16 == 0
    assert layout.page_bytes % 128 == 0
    assert 0 <= layout.page_bytes - layout.used_bytes < 128
    pool = torch.zeros(2, layout.page_bytes, dtype=torch.uint8)
    runs = [layout.latents(pool), layout.k_rope(pool), layout.scale_views(pool)]
    for run in runs:
        if run is not None:
            assert run.shape[:2] == (2, 16)
            run.view(torch.uint8 if run.dtype.itemsize == 1 else torch.int16).add_(1)
    # Every byte was written once: an overlap would have counted twice.
    assert int(pool[:, : layout.used_bytes].max()) == 1
    assert int(pool[:, layout.used_bytes :].sum()) == 0
    written = sum(run.nbytes for run in runs if run is not None)
    assert written == 2 * layout.used_bytes


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
def test_tokens_are_read_back_from_pages_in_any_order(dtype: str) -> None:
    layout = PageLayout(dtype, 40, 6)  # type: ignore[arg-type]
    cache = paged_cache(layout, [0, 1, 33])
    g = torch.Generator().manual_seed(5)
    latent, k_rope = torch.randn(20, 40, generator=g).bfloat16(), torch.randn(20, 6, generator=g).bfloat16()
    places = torch.randperm(33, generator=g)[:20]
    slots = slots_of(cache.block_table, torch.full((20,), 2), places)
    slots[3] = -1  # left out
    if dtype == "bf16":
        expected = latent.float()
        put(cache.pool, layout, slots, latent, None, k_rope)
    else:
        codes, scales = LatentQuantizer(dtype).quantize(latent)  # type: ignore[arg-type]
        expected = decode(codes, scales, 40, torch.float32)
        put(cache.pool, layout, slots, codes, scales, k_rope)
    before, _ = gather(paged_cache(layout, [0, 1, 33]).pool, layout, cache.block_table, cache.lengths)
    found, found_rope = gather(cache.pool, layout, cache.block_table, cache.lengths)
    assert found.shape == (3, 33, 40)
    kept = slots >= 0
    assert torch.equal(found[2, places[kept]], expected[kept])
    assert torch.equal(found_rope[2, places[kept]], k_rope[kept].float())
    assert torch.equal(found[2, places[3]], before[2, places[3]])
    assert int(found[0].count_nonzero()) == int(found[1, 1:].count_nonzero()) == 0  # poison is not read


def test_byte_offsets_are_wider_than_32_bits() -> None:
    """KN-06: the arithmetic of slots and pages."""
    layout = PageLayout("bf16", 512, 64)
    first_beyond = 2**31 // layout.page_bytes + 1
    slots = torch.tensor([first_beyond * 16 + 5], dtype=torch.int32)
    assert int(layout.latent_byte(slots)) == first_beyond * layout.page_bytes + 5 * 1024 > 2**31
    assert (
        int(slots_of(torch.tensor([[2**31 - 1]], dtype=torch.int32), torch.tensor([0]), torch.tensor([15])))
        == 2**35 - 1
    )


def test_aliases_of_a_type_are_one_layout() -> None:
    """KN-08: whatever a type is called."""
    for name in ("fp8", "fp8_e4m3", "FP8-E4M3", "float8_e4m3fn", "torch.float8_e4m3fn"):
        assert PageLayout(name, 64, 8) == PageLayout("fp8", 64, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "r", "d", "said"),
    [("fp4", 64, 8, "'fp4'"), ("bf16", 20, 8, "not 20"), ("bf16", 0, 8, "not 0"), ("int8", 64, -1, "-1")],
)
def test_what_pages_cannot_hold_is_refused(dtype: str, r: int, d: int, said: str) -> None:
    with pytest.raises(MlaError, match=said):
        PageLayout(dtype, r, d)  # type: ignore[arg-type]
