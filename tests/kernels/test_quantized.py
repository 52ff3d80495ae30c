"""Codes of latents: what the formula says, at every edge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_cli.errors import MlaError
from mla_cli.kernels.quantized import (
    AMAX_FLOOR,
    GROUP,
    LIMITS,
    PAGE,
    STORAGE,
    LatentQuantizer,
    decode,
    normalize_dtype,
)
from mla_cli.runtime.choices import KV_DTYPE_ALIASES

DTYPES = ("int8", "fp8", "int4")


@st.composite
def latents(draw: Any) -> torch.Tensor:
    """Latents of any shape, spread and size, zeros and outliers among them."""
    shape = [*draw(st.lists(st.integers(0, 3), max_size=3)), draw(st.integers(1, 70))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(shape, generator=generator) * 2.0 ** draw(st.integers(-40, 40))
    values[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0
    if draw(st.booleans()) and values.numel():
        values.reshape(-1)[0] *= 100
    return values.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])))


@st.composite
def quantizers(draw: Any) -> LatentQuantizer:
    granularity = draw(st.sampled_from(["token", "static"]))
    clip = 2.0 ** draw(st.integers(-20, 20)) * draw(st.floats(1, 2))
    return LatentQuantizer(draw(st.sampled_from(DTYPES)), granularity, clip)


def read_back(latent: torch.Tensor, quantizer: LatentQuantizer, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    codes, scales = quantizer.quantize(latent)
    return decode(codes, scales, latent.shape[-1], dtype)


def per_channel(scales: torch.Tensor, width: int) -> torch.Tensor:
    """`[..., G]` to `[..., width]`, one channel after the other."""
    groups = [channel // GROUP if scales.shape[-1] > 1 else 0 for channel in range(width)]
    return scales.double()[..., groups]


@given(latents(), st.sampled_from(DTYPES))
@settings(max_examples=150, deadline=None)
def test_the_error_of_a_tokens_own_range_is_bounded(latent: torch.Tensor, dtype: Any) -> None:
    codes, scales = LatentQuantizer(dtype).quantize(latent)
    width = latent.shape[-1]
    assert codes.dtype == STORAGE[dtype]
    assert codes.shape == (*latent.shape[:-1], (width + 1) // 2 if dtype == "int4" else width)
    assert scales.dtype == (torch.bfloat16 if dtype == "int4" else torch.float32)
    assert scales.shape == (*latent.shape[:-1], (width + 31) // 32 if dtype == "int4" else 1)
    assert bool((scales > 0).all())
    back, values = decode(codes, scales, width, torch.float64), latent.double()
    step = per_channel(scales, width)
    assert back.dtype == torch.float64
    error = (back - values).abs()
    if dtype == "fp8":
        # Three mantissa bits from 2^-6 on; below, steps of 2^-9. The scale itself is rounded to float32.
        normal = values.abs() >= step * 2.0**-6
        assert bool((error <= values.abs() * 2.0**-4 * (1 + 1e-5))[normal].all())
        assert bool((error <= step * 2.0**-10 * (1 + 1e-5))[~normal].all())
    else:
        assert bool((error <= step * 0.5 * (1 + 1e-5)).all())
    assert bool((back[values == 0] == 0).all())


@given(latents(), quantizers())
@settings(max_examples=150, deadline=None)
def test_order_and_sign_survive(latent: torch.Tensor, quantizer: LatentQuantizer) -> None:
    codes, scales = quantizer.quantize(latent)
    back = decode(codes, scales, latent.shape[-1], torch.float32)
    assert bool(torch.isfinite(back).all())
    reach = per_channel(scales, latent.shape[-1]) * quantizer.limit
    assert bool((back.double().abs() <= reach * (1 + 1e-6)).all())
    assert bool((back * latent.float() >= 0).all())  # nothing wraps
    for part, stored in zip(latent.float().split(GROUP, dim=-1), back.split(GROUP, dim=-1), strict=True):
        order = part.argsort(dim=-1)
        assert bool((stored.gather(-1, order).diff(dim=-1) >= 0).all())
    mirrored, same = quantizer.quantize(-latent)
    assert torch.equal(decode(mirrored, same, latent.shape[-1], torch.float32), -back)
    assert torch.equal(same, scales)


@given(latents(), quantizers())
@settings(max_examples=150, deadline=None)
def test_what_was_quantised_once_stays_as_it_is(latent: torch.Tensor, quantizer: LatentQuantizer) -> None:
    once = read_back(latent, quantizer)
    if quantizer.dtype == "int4" and quantizer.granularity == "token":
        # Its scale was rounded up, so the largest code may be 6.98 steps of it: within the rounding of a bfloat16, then.
        step = per_channel(quantizer.quantize(latent)[1], latent.shape[-1])
        assert bool(((read_back(once, quantizer) - once).abs() <= 7 * 2.0**-7 * step).all())
        return
    torch.testing.assert_close(read_back(once, quantizer), once, rtol=1e-6, atol=0)


@given(latents(), st.sampled_from(DTYPES), st.integers(-8, 8))
@settings(max_examples=60, deadline=None)
def test_powers_of_two_move_into_the_scale(latent: torch.Tensor, dtype: Any, power: int) -> None:
    codes, scales = LatentQuantizer(dtype).quantize(latent)
    other, moved = LatentQuantizer(dtype).quantize(latent.float() * 2.0**power)
    # The floor of a scale, which zeros keep, and of a group of an otherwise larger token.
    real = (scales.float() > AMAX_FLOOR * 2.0**10).all(dim=-1)
    assert torch.equal(other.float()[real], codes.float()[real])
    assert torch.equal(moved[real], scales[real] * 2.0**power)


def test_half_rounds_to_even() -> None:
    steps = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 3.4999, 3.5001, 127.0])
    codes, scales = LatentQuantizer("int8").quantize(steps)
    assert float(scales) == 1.0
    assert codes.tolist() == [0, 2, 2, 0, -2, 3, 4, 127]
    steps = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 3.4999, 3.5001, 7.0])
    assert read_back(steps, LatentQuantizer("int4")).tolist() == [0, 2, 2, 0, -2, 3, 4, 7]


@pytest.mark.parametrize("factor", [1.0, 2.4, 300 / 127, 1e6, 1e38])
@pytest.mark.parametrize(("dtype", "limit"), [("int8", 127.0), ("int4", 7.0)])
def test_values_beyond_a_static_range_saturate(dtype: Any, limit: float, factor: float) -> None:
    latent = torch.tensor([[limit * factor, -limit * factor, 1.0, 0.0]]).clamp(-3e38, 3e38)
    quantizer = LatentQuantizer(dtype, "static", limit)
    assert read_back(latent, quantizer).tolist() == [[limit, -limit, 1, 0]]
    assert quantizer.clipped(latent) == (0 if factor == 1 else 2)


@pytest.mark.parametrize("value", [448.0, 464.0, 465.0, 1000.0, 3e38])
def test_fp8_past_448_saturates(value: float) -> None:
    codes, scales = LatentQuantizer("fp8", "static", 448.0).quantize(torch.tensor([[value, -value, 1.0]]))
    assert float(scales) == 1.0
    assert codes.float().tolist() == [[448.0, -448.0, 1.0]]


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("granularity", ["token", "page", "static"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_latent_that_is_not_finite_is_an_error(dtype: Any, granularity: Any, value: float) -> None:
    latent = torch.zeros(2, 3, 40)
    latent[1, 2, 35] = value
    with pytest.raises(MlaError, match="a latent holds NaN or infinity"):
        LatentQuantizer(dtype, granularity, 1.0).quantize(latent)
    with pytest.raises(MlaError, match="the latents of layer 7 hold NaN or infinity"):
        LatentQuantizer(dtype, granularity, 1.0).quantize(latent, layer=7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_tiny_ranges_are_exact_and_finite(dtype: Any) -> None:
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        latent = torch.zeros(3, 4, dtype=stored)
        latent[1, 2], latent[2] = 1e-7, 1e-3  # bf16's epsilon, or fp16's, as a floor would flatten these
        codes, scales = LatentQuantizer(dtype).quantize(latent)
        back = decode(codes, scales, 4, torch.float32)
        assert back[0].tolist() == [0.0] * 4
        assert float(scales[0]) > 0
        torch.testing.assert_close(back, latent.float(), rtol=1e-6 if dtype != "int4" else 2.0**-7, atol=0)
    assert (
        read_back(torch.zeros(2, 4), LatentQuantizer(dtype, "static", 1e-30), torch.float16).tolist() == [[0.0] * 4] * 2
    )


def test_a_clip_bounds_a_tokens_range_but_never_widens_it() -> None:
    latent = torch.tensor([[1.0, 0.5], [8.0, 2.0]])
    codes, scales = LatentQuantizer("int8", "token", 4.0).quantize(latent)
    torch.testing.assert_close(scales * 127, torch.tensor([[1.0], [4.0]]))
    assert codes.tolist() == [[127, 64], [127, 64]]


def test_the_scale_reaches_the_values() -> None:
    codes = torch.tensor([[2, -64, 126]], dtype=torch.int8)
    scales = torch.tensor([[0.03]])
    assert torch.equal(decode(codes // 2, scales * 2, 3, torch.float32), decode(codes, scales, 3, torch.float32))
    assert not torch.equal(decode(codes, scales * 2, 3, torch.float32), decode(codes, scales, 3, torch.float32))


# --- INT4 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 31, 32, 33, 64, 127, 128])
def test_every_group_of_four_bit_codes_has_a_range_of_its_own(width: int) -> None:
    latent = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    latent *= 10.0 ** (torch.arange(width) // 32)  # [width]: each group ten times the one before
    codes, scales = LatentQuantizer("int4").quantize(latent)
    assert codes.shape == (5, (width + 1) // 2)
    back = decode(codes, scales, width, torch.float32)
    for channels in torch.arange(width).split(32):
        group, largest = latent[:, channels], latent[:, channels].abs().amax(dim=-1, keepdim=True)
        # Half a step of a range that is at most the 2^-7 of a bfloat16 too wide.
        assert bool(((back[:, channels] - group).abs() <= largest / 7 * 0.5 * (1 + 2.0**-7) * (1 + 1e-6)).all())


def test_four_bit_codes_are_packed_in_the_order_of_the_channels() -> None:
    values = torch.tensor([[7.0, -7.0, 1.0, 0.0, -1.0]])
    codes, scales = LatentQuantizer("int4", "static", 7.0).quantize(values)
    assert float(scales) == 1.0
    assert codes.tolist() == [[0x97, 0x01, 0x0F]]  # low half first, two's complement, the spare half zero
    everything = torch.arange(-7.0, 8.0)[None].repeat(1, 2)
    assert read_back(everything, LatentQuantizer("int4", "static", 7.0)).tolist() == everything.tolist()


@given(latents())
@settings(max_examples=100, deadline=None)
def test_four_bit_scales_are_rounded_up_so_that_nothing_is_clipped(latent: torch.Tensor) -> None:
    quantizer = LatentQuantizer("int4")
    amax = quantizer.amax(latent)
    exact = amax.double().clamp(min=AMAX_FLOOR) / 7
    scales = quantizer.scales(amax).double()
    assert bool((scales >= exact * (1 - 1e-7)).all())
    assert bool((scales <= exact * (1 + 2.0**-7) * (1 + 1e-7)).all())
    assert quantizer.clipped(latent) == 0


def test_each_group_may_have_a_clip_of_its_own() -> None:
    latent = torch.full((1, 40), 6.0)
    quantizer = LatentQuantizer("int4", "token", (3.5, 100.0))
    assert read_back(latent, quantizer)[0].tolist() == pytest.approx([3.5] * 32 + [6.0] * 8, rel=2.0**-7)
    assert quantizer.clipped(latent) == 32
    assert read_back(latent[:, :32], quantizer.narrowed(32)).tolist() == [[3.5] * 32]
    with pytest.raises(MlaError, match="2 ranges for latents of 1 groups"):
        quantizer.quantize(latent[:, :32])
    assert LatentQuantizer("int8", "token", 2.0).narrowed(3) == LatentQuantizer("int8", "token", 2.0)


@pytest.mark.parametrize(
    ("dtype", "granularity", "codes", "scales"),
    [("int8", "token", 33, 4), ("fp8", "page", 33, 4), ("int8", "static", 33, 0), ("int4", "token", 17, 4),
     ("int4", "page", 17, 4), ("int4", "static", 17, 0)],
)  # fmt: skip
def test_what_is_stored_has_the_bytes_that_are_said(dtype: Any, granularity: Any, codes: int, scales: int) -> None:
    quantizer = LatentQuantizer(dtype, granularity, 1.0)
    assert (quantizer.code_bytes(33), quantizer.scale_bytes(33)) == (codes, scales)
    stored = quantizer.quantize(torch.zeros(1, 33))
    assert stored[0].nbytes == codes
    assert scales in (0, stored[1].nbytes)


# --- pages ---------------------------------------------------------------------------------------------------------------


@given(latents(), st.sampled_from(DTYPES), st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_a_page_takes_all_that_its_tokens_hold(row: torch.Tensor, dtype: Any, tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-9, 9, (tokens, 1), generator=generator)
    latent = torch.randn(2, tokens, row.shape[-1], generator=generator) * sizes
    quantizer = LatentQuantizer(dtype, "page")
    codes, scales = quantizer.quantize(latent)
    back = decode(codes, scales, latent.shape[-1], torch.float64)
    for start in range(0, tokens, PAGE):
        page = slice(start, start + PAGE)
        assert bool((scales[:, page] == scales[:, start : start + 1]).all())  # one set of scales a page
        step = per_channel(scales[:, start], latent.shape[-1])[:, None]
        largest = per_channel(quantizer.amax(latent[:, page]).amax(dim=1), latent.shape[-1])[:, None]
        # Wide enough for the largest value, but never more than twice (and what a bfloat16 rounds).
        assert bool((step * LIMITS[dtype] >= largest * (1 - 1e-6)).all())
        assert bool((step * LIMITS[dtype] <= 2 * largest * (1 + 2.0**-7)).all())
        # Rounded when written, and once more for each doubling: never off by more than a step.
        error = (back[:, page] - latent[:, page].double()).abs()
        bound = step if dtype != "fp8" else latent[:, page].double().abs() * 2.0**-4 + step * 2.0**-9
        assert bool((error <= bound * (1 + 1e-5)).all())


def test_the_first_token_of_a_page_decides_its_scale_and_zeros_leave_that_to_the_next() -> None:
    latent = torch.zeros(PAGE + 2, 4)
    latent[3], latent[5], latent[PAGE] = 127.0, 300.0, 1.0
    codes, scales = LatentQuantizer("int8", "page").quantize(latent)
    assert scales[0].item() == 4.0  # 1 from the first that is not zero, doubled until 300 fits
    assert codes[3].tolist() == [32] * 4  # 127 / 4 = 31.75
    assert codes[5].tolist() == [75] * 4
    assert scales[PAGE].item() == pytest.approx(1 / 127)
    assert codes[0].tolist() == codes[4].tolist() == [0] * 4


@given(st.sampled_from(DTYPES), st.floats(0.02, 50.0), st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_a_page_does_not_reach_beyond_a_clip(dtype: Any, clip: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(2, PAGE, 40, generator=generator) * 2.0 ** torch.randint(-6, 6, (PAGE, 1), generator=generator)
    quantizer, plain = LatentQuantizer(dtype, "page", clip), LatentQuantizer(dtype, "page")
    codes, scales = quantizer.quantize(latent)
    reach = per_channel(scales[:, 0], 40)[:, None] * LIMITS[dtype]  # [2, 1, 40]
    largest = per_channel(quantizer.amax(latent).amax(dim=1), 40)[:, None]
    room = 2.0**-7 if dtype == "int4" else 1e-6  # scales of INT4 are bfloat16, rounded up
    assert bool((reach <= clip * (1 + room)).all())
    assert bool((reach >= largest.clamp(max=clip) * (1 - 1e-6)).all())
    # What is beyond saturates there; what is within is rounded, at most once more for each time that the page grew.
    wanted, back = latent.double().clamp(-clip, clip), decode(codes, scales, 40, torch.float64)
    step = 1.5 * reach / LIMITS[dtype] if dtype != "fp8" else wanted.abs() * 2.0**-3 + reach / LIMITS[dtype] * 2.0**-8
    assert bool(((back - wanted).abs() <= step * (1 + 1e-5) + clip * room).all())
    if float(largest.max()) <= clip / 2:  # far from the clip, there is none
        assert torch.equal(back, decode(*plain.quantize(latent), 40, torch.float64))


def test_a_page_does_not_widen_its_range_for_one_token() -> None:
    latent = torch.ones(3, 4)
    latent[1, 2] = 1000.0
    for clip in (2.0, 1.25):  # a doubling away from what the first token needs, and less
        codes, scales = LatentQuantizer("int8", "page", clip).quantize(latent)
        back = decode(codes, scales, 4, torch.float32)
        assert back[1, 2] == clip
        torch.testing.assert_close(back[[0, 2]], latent[[0, 2]], atol=1.5 * clip / 127, rtol=0)


# --- names ---------------------------------------------------------------------------------------------------------------


def test_aliases_are_known_in_one_place() -> None:
    names = ["fp8", "FP8", "fp8_e4m3", "fp8-e4m3", "fp8_e4m3fn", "float8_e4m3fn", "e4m3", "torch.float8_e4m3fn"]
    assert {normalize_dtype(name) for name in names} == {"fp8"}
    assert normalize_dtype("bfloat16") == "bf16"
    assert normalize_dtype("INT4") == "int4"
    assert normalize_dtype("fp8_e5m2") not in LIMITS
    # What the command line understands without loading torch is the same.
    assert all(normalize_dtype(alias) == name for alias, name in KV_DTYPE_ALIASES.items())


@pytest.mark.parametrize(
    "arguments",
    [("fp8_e4m3",), ("int8", "channel"), ("int8", "static"), ("int8", "token", 0.0), ("fp8", "static", float("nan")),
     ("int8", "token", -1.0), ("int8", "token", (1.0, 2.0)), ("int4", "token", ()), ("int4", "token", (1.0, 0.0)),
     ("int4", "static", (1.0, float("inf"))), ("int8", "token", 1.0, "int4")],
)  # fmt: skip
def test_what_gives_no_scale_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(MlaError):
        LatentQuantizer(*arguments)


def test_a_rotary_key_has_a_quantizer_of_its_own() -> None:
    assert LatentQuantizer("int4").rope is None
    assert LatentQuantizer("int4", "static", 2.0, "int8").rope == LatentQuantizer("int8")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", ["token", "page", "static"])
def test_cpu_and_gpu_agree(dtype: Any, granularity: Any) -> None:
    latent = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * 3
    quantizer = LatentQuantizer(dtype, granularity, 2.0)
    codes, scales = quantizer.quantize(latent)
    theirs, their_scales = quantizer.quantize(latent.cuda())
    assert torch.equal(theirs.cpu().float(), codes.float())
    assert torch.equal(their_scales.cpu(), scales)
