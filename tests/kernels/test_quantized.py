"""Codes of latents: what the formula says, at every edge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_cli.errors import MlaError
from mla_cli.kernels.quantized import AMAX_FLOOR, LIMITS, STORAGE, LatentQuantizer, dequantize, normalize_dtype
from mla_cli.runtime.choices import KV_DTYPE_ALIASES

DTYPES = ("int8", "fp8")


@st.composite
def latents(draw: Any) -> torch.Tensor:
    """Latents of any shape, spread and size, zeros and outliers among them."""
    shape = [*draw(st.lists(st.integers(0, 3), max_size=3)), draw(st.integers(1, 40))]
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


@given(latents(), st.sampled_from(DTYPES))
@settings(max_examples=150, deadline=None)
def test_the_error_of_a_tokens_own_range_is_bounded(latent: torch.Tensor, dtype: str) -> None:
    codes, scales = LatentQuantizer(dtype).quantize(latent)  # type: ignore[arg-type]
    assert codes.dtype == STORAGE[dtype]
    assert codes.shape == latent.shape
    assert scales.dtype == torch.float32
    assert scales.shape == latent.shape[:-1]
    assert bool((scales > 0).all())
    back, values, step = dequantize(codes, scales, torch.float64), latent.double(), scales.double()[..., None]
    assert back.dtype == torch.float64
    error = (back - values).abs()
    if dtype == "int8":
        assert bool((error <= step * 0.5 * (1 + 1e-5)).all())
    else:
        # Three mantissa bits from 2^-6 on; below, steps of 2^-9. The scale itself is rounded to float32.
        normal = values.abs() >= step * 2.0**-6
        assert bool((error <= values.abs() * 2.0**-4 * (1 + 1e-5))[normal].all())
        assert bool((error <= step * 2.0**-10 * (1 + 1e-5))[~normal].all())
    assert bool((back[values == 0] == 0).all())


@given(latents(), quantizers())
@settings(max_examples=150, deadline=None)
def test_order_and_sign_survive(latent: torch.Tensor, quantizer: LatentQuantizer) -> None:
    codes, scales = quantizer.quantize(latent)
    back = dequantize(codes, scales, torch.float32)
    assert bool(torch.isfinite(back).all())
    assert bool((codes.float().abs() <= quantizer.limit).all())
    assert bool((back * latent.float() >= 0).all())  # nothing wraps
    order = latent.float().argsort(dim=-1)
    assert bool((back.gather(-1, order).diff(dim=-1) >= 0).all())
    mirrored, same = quantizer.quantize(-latent)
    assert torch.equal(mirrored.float(), -codes.float())
    assert torch.equal(same, scales)


@given(latents(), quantizers())
@settings(max_examples=150, deadline=None)
def test_what_was_quantised_once_stays_as_it_is(latent: torch.Tensor, quantizer: LatentQuantizer) -> None:
    codes, scales = quantizer.quantize(latent)
    again, scales_again = quantizer.quantize(dequantize(codes, scales, torch.float32))
    torch.testing.assert_close(scales_again, scales, rtol=1e-6, atol=0)
    assert torch.equal(again.float(), codes.float())


@given(latents(), st.sampled_from(DTYPES), st.integers(-8, 8))
@settings(max_examples=60, deadline=None)
def test_powers_of_two_move_into_the_scale(latent: torch.Tensor, dtype: Any, power: int) -> None:
    codes, scales = LatentQuantizer(dtype).quantize(latent)
    other, moved = LatentQuantizer(dtype).quantize(latent.float() * 2.0**power)
    real = latent.float().abs().amax(dim=-1) > AMAX_FLOOR * 2.0**10  # zero tokens keep the floor
    assert torch.equal(other.float()[real], codes.float()[real])
    assert torch.equal(moved[real], scales[real] * 2.0**power)


def test_half_rounds_to_even() -> None:
    steps = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 3.4999, 3.5001, 127.0])
    codes, scales = LatentQuantizer("int8").quantize(steps)
    assert float(scales) == 1.0
    assert codes.tolist() == [0, 2, 2, 0, -2, 3, 4, 127]


@pytest.mark.parametrize("factor", [1.0, 2.4, 300 / 127, 1e6, 1e38])
def test_values_beyond_a_static_range_saturate(factor: float) -> None:
    latent = torch.tensor([[127.0 * factor, -127.0 * factor, 1.0, 0.0]])
    codes, _ = LatentQuantizer("int8", "static", 127.0).quantize(latent.clamp(-3e38, 3e38))
    assert codes.tolist() == [[127, -127, 1, 0]]


@pytest.mark.parametrize("value", [448.0, 464.0, 465.0, 1000.0, 3e38])
def test_fp8_past_448_saturates(value: float) -> None:
    codes, scales = LatentQuantizer("fp8", "static", 448.0).quantize(torch.tensor([[value, -value, 1.0]]))
    assert float(scales) == 1.0
    assert codes.float().tolist() == [[448.0, -448.0, 1.0]]


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("granularity", ["token", "static"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_latent_that_is_not_finite_is_an_error(dtype: Any, granularity: Any, value: float) -> None:
    latent = torch.zeros(2, 3, 8)
    latent[1, 2, 5] = value
    with pytest.raises(MlaError, match="NaN or infinity"):
        LatentQuantizer(dtype, granularity, 1.0).quantize(latent)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_tiny_ranges_are_exact_and_finite(dtype: Any) -> None:
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        latent = torch.zeros(3, 4, dtype=stored)
        latent[1, 2], latent[2] = 1e-7, 1e-3  # bf16's epsilon, or fp16's, as a floor would flatten these
        codes, scales = LatentQuantizer(dtype).quantize(latent)
        back = dequantize(codes, scales, torch.float32)
        assert back[0].tolist() == [0.0] * 4
        assert float(scales[0]) > 0
        torch.testing.assert_close(back, latent.float(), rtol=1e-6, atol=0)
    silent = LatentQuantizer(dtype, "static", 1e-30).quantize(torch.zeros(2, 4))
    assert dequantize(*silent, torch.float16).tolist() == [[0.0] * 4] * 2


def test_a_clip_bounds_a_tokens_range_but_never_widens_it() -> None:
    latent = torch.tensor([[1.0, 0.5], [8.0, 2.0]])
    codes, scales = LatentQuantizer("int8", "token", 4.0).quantize(latent)
    torch.testing.assert_close(scales * 127, torch.tensor([1.0, 4.0]))
    assert codes.tolist() == [[127, 64], [127, 64]]


def test_the_scale_reaches_the_values() -> None:
    codes = torch.tensor([[2, -64, 126]], dtype=torch.int8)
    scales = torch.tensor([0.03])
    assert torch.equal(dequantize(codes // 2, scales * 2, torch.float32), dequantize(codes, scales, torch.float32))
    assert not torch.equal(dequantize(codes, scales * 2, torch.float32), dequantize(codes, scales, torch.float32))


def test_aliases_are_known_in_one_place() -> None:
    names = ["fp8", "FP8", "fp8_e4m3", "fp8-e4m3", "fp8_e4m3fn", "float8_e4m3fn", "e4m3", "torch.float8_e4m3fn"]
    assert {normalize_dtype(name) for name in names} == {"fp8"}
    assert normalize_dtype("bfloat16") == "bf16"
    assert normalize_dtype("fp8_e5m2") not in LIMITS
    # What the command line understands without loading torch is the same.
    assert all(normalize_dtype(alias) == name for alias, name in KV_DTYPE_ALIASES.items())


@pytest.mark.parametrize("arguments", [("fp8_e4m3",), ("int8", "page"), ("int8", "static"), ("int8", "token", 0.0),
                                       ("fp8", "static", float("nan")), ("int8", "token", -1.0)])  # fmt: skip
def test_what_gives_no_scale_is_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(MlaError):
        LatentQuantizer(*arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", ["token", "static"])
def test_cpu_and_gpu_agree(dtype: Any, granularity: Any) -> None:
    latent = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * 3
    quantizer = LatentQuantizer(dtype, granularity, 2.0)
    codes, scales = quantizer.quantize(latent)
    theirs, their_scales = quantizer.quantize(latent.cuda())
    assert torch.equal(theirs.cpu().float(), codes.float())
    assert torch.equal(their_scales.cpu(), scales)
