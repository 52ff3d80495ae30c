"""What a cache holds: the bytes of it, what is read back, and that this depends on a sequence's own tokens alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_cli.errors import MlaError
from mla_cli.kernels.quantized import PAGE, LatentQuantizer
from mla_cli.model.cache import GROWTH, Cache
from mla_cli.model.spec import DecoderSpec, LatentAttentionSpec, StandardAttentionSpec

RANK, ROPE = 40, 6
LATENT = LatentAttentionSpec(
    num_heads=2, kv_lora_rank=RANK, qk_nope_head_dim=8, qk_rope_head_dim=ROPE, v_head_dim=8, scale=0.3, rotary=None
)
KINDS = {
    "int8": LatentQuantizer("int8"),
    "int8-clip": LatentQuantizer("int8", "token", 2.0),
    "int8-page": LatentQuantizer("int8", "page"),
    "int8-static": LatentQuantizer("int8", "static", 3.0),
    "fp8": LatentQuantizer("fp8"),
    "fp8-page": LatentQuantizer("fp8", "page"),
    "fp8-static": LatentQuantizer("fp8", "static", 3.0, rope_dtype="fp8"),
    "int4": LatentQuantizer("int4", "token", (2.0, 3.0), rope_dtype="int8"),
    "int4-page": LatentQuantizer("int4", "page", (2.0, 3.0)),
    "int4-static": LatentQuantizer("int4", "static", (2.0, 3.0)),
}
UNQUANTISED = None


def spec(*attention: Any) -> DecoderSpec:
    return DecoderSpec(
        model_type="tiny", vocab_size=64, hidden_size=16, intermediate_size=32, max_position_embeddings=64, norm="rms",
        norm_eps=1e-6, activation="silu", gated_mlp=True, mlp_bias=False, tied=True, attention=attention,
    )  # fmt: skip


def make_cache(quantizer: LatentQuantizer | None, batch: int, capacity: int = 1000, layers: int = 2) -> Cache:
    quantizers = None if quantizer is None else (quantizer,) * layers
    return Cache(spec(*[LATENT] * layers), batch, capacity, dtype=torch.float32, quantizers=quantizers)


def entries(batch: int, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Latents `[B, T, r]` of very different sizes, some tokens zero, and rotary keys `[B, T, rope]`."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-6, 3, (batch, tokens, 1), generator=generator)
    sizes[torch.rand(sizes.shape, generator=generator) < 0.1] = 0
    latents = torch.randn(batch, tokens, RANK, generator=generator) * sizes
    return latents, torch.randn(batch, tokens, ROPE, generator=generator)


def write(cache: Cache, latents: Tensor, rope: Tensor, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One step: `counts[b]` tokens of each row, the rest padding; what the first layer gave back."""
    batch, tokens = latents.shape[:2]
    counts = torch.full((batch,), tokens) if counts is None else counts
    ends = cache.host_lengths + counts
    cache.begin(tokens, ends)
    places = cache.lengths[:, None] + torch.arange(tokens)
    kept = [cache.write(layer, places, latents, rope) for layer in range(len(cache.layers))]
    cache.advance(ends)
    return kept[0]


def contents(cache: Cache, row: int = 0) -> tuple[Tensor, Tensor]:
    """What a row holds, in the last layer."""
    length = int(cache.host_lengths[row])
    first, second = cache.read(len(cache.layers) - 1, length, torch.float32)
    return first[row], second[row]


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# --- bytes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantizer", "expected"),
    [
        (None, 384),
        (LatentQuantizer("int8"), 260),
        (LatentQuantizer("fp8"), 260),
        (LatentQuantizer("int8", "page"), 257),  # a sixteenth of four bytes, rounded up
        (LatentQuantizer("int8", "static", 1.0), 256),
        (LatentQuantizer("fp8", "static", 1.0), 256),
        (LatentQuantizer("int4"), 64 + 4 * 2 + 128),
        (LatentQuantizer("int4", "page"), 64 + 1 + 128),
        (LatentQuantizer("int4", "static", 1.0), 64 + 128),
        (LatentQuantizer("int8", rope_dtype="int8"), 128 + 4 + 64 + 4),
        (LatentQuantizer("int4", "static", 1.0, rope_dtype="fp8"), 64 + 64 + 4),
    ],
)
def test_the_bytes_of_a_token_of_smollm_at_ratio_two(quantizer: LatentQuantizer | None, expected: int) -> None:
    attention = replace(LATENT, kv_lora_rank=128, qk_rope_head_dim=64)
    for capacity in (1, 16, 300):
        cache = Cache(spec(attention), 3, capacity, dtype=torch.bfloat16, quantizers=quantizer and (quantizer,))
        assert cache.bytes_per_token() == expected
    thirty = Cache(spec(*[attention] * 30), 1, 1, dtype=torch.bfloat16, quantizers=quantizer and (quantizer,) * 30)
    # The shares of a page's scales are rounded up once, not in each layer.
    assert 30 * (expected - 1) < thirty.bytes_per_token() <= 30 * expected
    assert abs(cache.allocated_bytes() / (3 * GROWTH) - expected) < 1


def test_what_is_not_a_latent_is_stored_as_it_is() -> None:
    standard = StandardAttentionSpec(num_heads=2, num_kv_heads=2, head_dim=8, scale=0.3, rotary=None)
    cache = Cache(spec(standard, LATENT), 1, 4, dtype=torch.float32, quantizers=(None, LatentQuantizer("int8")))
    assert cache.bytes_per_token() == 2 * 16 * 4 + RANK + 4 + 2 * ROPE
    without_rope = Cache(
        spec(replace(LATENT, qk_rope_head_dim=0)), 1, 4, dtype=torch.float32,
        quantizers=(LatentQuantizer("int8", rope_dtype="int8"),),
    )  # fmt: skip
    assert without_rope.bytes_per_token() == RANK + 4


# --- what is read --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_read_back_within_the_rounding(kind: str) -> None:
    quantizer = KINDS[kind]
    cache = make_cache(quantizer, 3)
    latents, rope = entries(3, 50)
    kept = write(cache, latents, rope)
    read = cache.read(0, 50, torch.float32)
    assert_same(kept, read)
    for row in range(3):
        torch.testing.assert_close(read[0][row], quantizer.rounded(latents[row]), rtol=0, atol=0)
    places = torch.tensor([49, 0, 17])
    torch.testing.assert_close(cache.read_at(1, places, torch.float32), read[0][[0, 1, 2], places], rtol=0, atol=0)
    off = (read[1] - rope).abs().max()
    assert 0 < off <= rope.abs().max() * {"bfloat16": 2.0**-8, "int8": 0.5 / 127, "fp8": 2.0**-4}[quantizer.rope_dtype]


@pytest.mark.parametrize("kind", [name for name in KINDS if "page" not in name])
def test_as_stored_is_what_will_be_read(kind: str) -> None:
    cache = make_cache(KINDS[kind], 2)
    latents, rope = entries(2, 1)
    said = cache.as_stored(0, latents[:, 0])
    write(cache, latents, rope)
    torch.testing.assert_close(cache.read_at(0, torch.tensor([0, 0]), torch.float32), said, rtol=0, atol=0)


@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(st.lists(st.integers(0, 20), min_size=3, max_size=3), min_size=1, max_size=8),
    st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_contents_do_not_depend_on_steps_or_neighbours(kind: str, steps: list[list[int]], seed: int) -> None:
    totals = torch.tensor(steps).sum(dim=0)
    latents, rope = entries(3, int(totals.max()) + 1, seed)
    cache, at = make_cache(KINDS[kind], 3), torch.zeros(3, dtype=torch.int64)
    for step in steps:
        counts, widest = torch.tensor(step), max(step)
        if widest == 0:
            continue
        # Padding is far larger than anything real: it must not decide a scale.
        new, new_rope = torch.full((3, widest, RANK), 1e6), torch.full((3, widest, ROPE), 1e6)
        for row, count in enumerate(step):
            new[row, :count] = latents[row, at[row] : at[row] + count]
            new_rope[row, :count] = rope[row, at[row] : at[row] + count]
        write(cache, new, new_rope, counts)
        at += counts
    for row, total in enumerate(totals.tolist()):
        if total:
            alone = make_cache(KINDS[kind], 1)
            write(alone, latents[row : row + 1, :total], rope[row : row + 1, :total])
            assert_same(contents(cache, row), contents(alone))


@pytest.mark.parametrize("granularity", ["token", "page", "static"])
def test_a_latent_that_is_not_finite_names_its_layer(granularity: Any) -> None:
    cache = make_cache(LatentQuantizer("int8", granularity, 3.0), 1)
    latents, rope = entries(1, 3)
    latents[0, 1, 5] = float("nan")
    cache.begin(3, torch.tensor([3]))
    with pytest.raises(MlaError, match="the latents of layer 1 hold NaN or infinity"):
        cache.write(1, torch.arange(3)[None], latents, rope)


def test_padding_that_is_not_finite_is_no_error_where_pages_are_filled() -> None:
    cache = make_cache(KINDS["int8-page"], 2)
    latents, rope = entries(2, 5)
    latents[0, 3:] = float("nan")
    write(cache, latents, rope, torch.tensor([3, 5]))
    assert bool(torch.isfinite(contents(cache, 0)[0]).all())


# --- rows that move ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*KINDS, UNQUANTISED])
def test_growing_keeps_what_there_is(kind: str | None) -> None:
    quantizer = KINDS[kind] if kind else None
    latents, rope = entries(2, GROWTH + 40)
    cache = make_cache(quantizer, 2)
    write(cache, latents[:, :250], rope[:, :250])
    before = cache.read(1, 240, torch.float32)
    write(cache, latents[:, 250:], rope[:, 250:])
    assert_same(cache.read(1, 240, torch.float32), before)
    with pytest.raises(MlaError, match="at most 1000"):
        cache.begin(1, torch.tensor([1001, 3]))


@pytest.mark.parametrize("kind", [*KINDS, UNQUANTISED])
def test_rows_are_copied_replaced_and_cut_back(kind: str | None) -> None:
    quantizer = KINDS[kind] if kind else None
    latents, rope = entries(3, 40)
    cache = make_cache(quantizer, 3)
    write(cache, latents, rope, torch.tensor([40, 21, 33]))
    chosen = cache.select(torch.tensor([2, 0, 2]))
    assert chosen.host_lengths.tolist() == [33, 40, 33]
    for row, source in enumerate((2, 0, 2)):
        assert_same(contents(chosen, row), contents(cache, source))
    # A copy is a copy.
    before = contents(cache, 2)
    chosen.truncate(torch.tensor([0, 0, 0]))
    write(chosen, latents[:, :20] + 1, rope[:, :20])
    assert_same(contents(cache, 2), before)

    longer, more = entries(2, 300, seed=5)
    other = make_cache(quantizer, 2)
    write(other, longer, more, torch.tensor([300, 7]))
    cache.put([2, 0], other)
    assert cache.host_lengths.tolist() == [7, 21, 300]
    for row, source in ((2, 0), (0, 1)):
        assert_same(contents(cache, row), contents(other, source))

    # From the start of a page on, a row that was cut back is as if it had never been longer.
    cache.truncate(torch.tensor([0, PAGE, 2 * PAGE]))
    again, rope_again = entries(3, 9, seed=9)
    write(cache, again, rope_again)
    fresh = make_cache(quantizer, 1)
    write(fresh, torch.cat((latents[1:2, :PAGE], again[1:2]), dim=1), torch.cat((rope[1:2, :PAGE], rope_again[1:2]), 1))
    assert_same(contents(cache, 1), contents(fresh))


@pytest.mark.parametrize("kind", [name for name in KINDS if "page" not in name])
def test_a_token_that_was_cut_off_leaves_no_trace(kind: str) -> None:
    latents, rope = entries(1, 30)
    cache = make_cache(KINDS[kind], 1)
    write(cache, latents, rope)
    cache.truncate(torch.tensor([11]))
    write(cache, latents[:, 11:25], rope[:, 11:25])
    direct = make_cache(KINDS[kind], 1)
    write(direct, latents[:, :25], rope[:, :25])
    assert_same(contents(cache), contents(direct))


# --- pages ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "most"), [("int8", 2 / 127), ("fp8", 2.0**-4 * 1.01), ("int4", 2 / 7)])
def test_a_page_that_fills_never_clips(dtype: Any, most: float) -> None:
    cache = make_cache(LatentQuantizer(dtype, "page"), 1)
    latents, rope = torch.randn(1, 2 * PAGE, RANK, generator=torch.Generator().manual_seed(0)), entries(1, 2 * PAGE)[1]
    # Each token needs more than the one before, so that the page grows again and again.
    latents = latents / latents.abs().amax(dim=-1, keepdim=True) * 1.7 ** torch.arange(2 * PAGE)[None, :, None]
    full: list[Tensor] = []
    for place in range(2 * PAGE):
        write(cache, latents[:, place : place + 1], rope[:, place : place + 1])
        found, _ = contents(cache)
        page = slice(place - place % PAGE, place + 1)
        off = (found[page] - latents[0, page]).abs().max()
        assert off <= most * latents[0, place].abs().max()
        if place == PAGE - 1:
            full.append(found)
    torch.testing.assert_close(contents(cache)[0][:PAGE], full[0], rtol=0, atol=0)  # a full page is final


# --- static scales that change -------------------------------------------------------------------------------------------


def test_tokens_keep_the_scale_they_were_written_with() -> None:
    latents, rope = entries(2, 60)
    quantizer = LatentQuantizer("int8", "static", 1.0)
    cache = make_cache(quantizer, 2)
    write(cache, latents[:, :20], rope[:, :20], torch.tensor([20, 13]))
    before = contents(cache, 0), contents(cache, 1)
    cache.rescale(0, (4.0, 4.0))
    assert_same(contents(cache, 0), before[0])
    write(cache, latents[:, 20:30], rope[:, 20:30])
    cache.rescale(0, (0.5, 0.5))
    cache.rescale(1, (2.0, 3.0))
    write(cache, latents[:, 30:40], rope[:, 30:40])

    def expected(*parts: tuple[Tensor, float]) -> Tensor:
        return torch.cat([replace(quantizer, clip=clip).rounded(part) for part, clip in parts])

    first = expected((latents[0, :20], 1.0), (latents[0, 20:30], 4.0), (latents[0, 30:40], 0.5))
    second = expected((latents[1, :13], 1.0), (latents[1, 20:30], 1.0), (latents[1, 30:40], 3.0))
    torch.testing.assert_close(contents(cache, 0)[0], first)
    torch.testing.assert_close(contents(cache, 1)[0], second)
    at = cache.read_at(1, torch.tensor([25, 30]), torch.float32)
    torch.testing.assert_close(at, torch.stack((first[25], second[30])))
    assert cache.bytes_per_token() == 2 * (RANK + 2 * ROPE)

    # Rows take their scales along, and a new sequence in a row's place has none of them.
    moved = cache.select(torch.tensor([1, 0, 0]))
    torch.testing.assert_close(contents(moved, 0)[0], second)
    torch.testing.assert_close(contents(moved, 2)[0], first)
    newcomer = make_cache(quantizer, 1)
    write(newcomer, latents[:1, :10], rope[:1, :10])
    cache.put([0], newcomer)
    write(cache, latents[:, 40:45], rope[:, 40:45])
    torch.testing.assert_close(contents(cache, 0)[0], expected((latents[0, :10], 1.0), (latents[0, 40:45], 1.0)))
    torch.testing.assert_close(contents(cache, 1)[0][:33], second)
    torch.testing.assert_close(contents(moved, 1)[0], first)

    # Cut back, a row goes on with its newest scales.
    moved.truncate(torch.tensor([33, 5, 40]))
    write(moved, latents[:, 50:53][[1, 0, 0]], rope[:, 50:53][[1, 0, 0]])
    torch.testing.assert_close(contents(moved, 1)[0], expected((latents[0, :5], 1.0), (latents[0, 50:53], 0.5)))
    torch.testing.assert_close(contents(moved, 2)[0][:40], first)


def test_static_layers_show_how_large_their_latents_were() -> None:
    latents, rope = entries(2, 7)
    cache = Cache(
        spec(LATENT, LATENT, LATENT), 2, 10, dtype=torch.float32,
        quantizers=(KINDS["int4-static"], None, KINDS["int8-static"]),
    )  # fmt: skip
    assert cache.latest_ranges() is None
    write(cache, latents, rope)
    ranges = cache.latest_ranges()
    assert ranges is not None
    assert ranges.shape == (2, 2, 7)
    torch.testing.assert_close(ranges[1], latents.abs().amax(dim=-1))
    write(cache, latents[:, :1] * 5, rope[:, :1])
    ranges = cache.latest_ranges()
    assert ranges is not None
    torch.testing.assert_close(ranges[0], 5 * latents[:, :1].abs().amax(dim=-1))
    cache.rescale(1, (1.0, 2.0))
    with pytest.raises(ValueError, match="zip"):
        cache.rescale(1, (1.0, 2.0, 3.0))
