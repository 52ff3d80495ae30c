"""Triton's write against the rules of `quantized`: the same bits, and nothing outside the tokens' own slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_cli.errors import MlaError
from mla_cli.kernels import paged
from mla_cli.kernels.pages import LATENT_DTYPES, PageLayout, gather
from mla_cli.kernels.quantized import LatentQuantizer
from mla_cli.model.rotary import rotate
from tests.kernels.caches import POISON
from tests.kernels.interpreter import Interpreter

WRITE = "mla_cli.kernels.write.write"
POOL, FLAG = 5, 7  # places among the arguments


def token_inputs(layout: PageLayout, tokens: int, seed: int = 0, size: float = 1.0) -> list[Any]:
    """The arguments of `write`: tokens for random slots of four poisoned pages, one of them padding."""
    g = torch.Generator().manual_seed(seed)
    d = layout.qk_rope_head_dim
    latent = torch.randn(tokens, layout.kv_lora_rank, generator=g).bfloat16() * size
    k_rope = torch.randn(tokens, d, generator=g).bfloat16() if d else None
    angles = torch.rand(tokens, d // 2, generator=g) * 6
    cos, sin = (angles.cos(), angles.sin()) if d else (None, None)
    slots = torch.randperm(64, generator=g)[:tokens]
    slots[0] = -1
    pool = torch.full((4, layout.page_bytes), POISON, dtype=torch.uint8)
    return [latent, k_rope, cos, sin, slots, pool, layout, torch.zeros(1, dtype=torch.int32)]


def written(interpreter: Interpreter, inputs: list[Any], **kwargs: Any) -> tuple[torch.Tensor, int]:
    """The pool and the flag after Triton's write."""
    _, after = interpreter(WRITE, *inputs, changed=True, **kwargs)
    return after[POOL], int(after[FLAG])


def expected(inputs: list[Any], **kwargs: Any) -> tuple[torch.Tensor, int]:
    pool, flag = inputs[POOL].clone(), inputs[FLAG].clone()
    paged.write(*inputs[:POOL], pool, inputs[6], flag, **kwargs)
    return pool, int(flag)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(LATENT_DTYPES),
    r=st.sampled_from([8, 32, 40, 96, 320]),
    power=st.sampled_from([-90, -8, 0, 8, 60]),
    zeros=st.sampled_from([0.0, 0.5, 1.0]),
    clip=st.sampled_from([float("inf"), 1.5]),
)
def test_codes_and_scales_are_the_same_bits(
    interpreter: Interpreter, seed: int, dtype: Any, r: int, power: int, zeros: float, clip: float
) -> None:
    inputs = token_inputs(PageLayout(dtype, r, 0), 9, seed, 2.0**power)
    inputs[0][torch.rand(inputs[0].shape, generator=torch.Generator().manual_seed(seed)) < zeros] = 0
    pool, flag = written(interpreter, inputs, clip=clip)
    right, right_flag = expected(inputs, clip=clip)
    assert torch.equal(pool, right)  # poison elsewhere included
    assert flag == right_flag == 0


@pytest.mark.parametrize("r", [32, 40, 320])
def test_groups_of_channels_have_ranges_of_their_own(interpreter: Interpreter, r: int) -> None:
    layout = PageLayout("int4", r, 0)
    inputs, clips = token_inputs(layout, 9), torch.linspace(0.4, 1.7, layout.scales)
    pool, _ = written(interpreter, inputs, clip=clips)
    assert torch.equal(pool, expected(inputs, clip=clips)[0])
    quantizer = LatentQuantizer("int4", clip=tuple(clips.tolist()))
    read, _ = gather(pool, layout, torch.arange(4, dtype=torch.int32)[None], torch.tensor([64]))
    assert torch.equal(read[0, inputs[4][1:]], quantizer.rounded(inputs[0][1:].float()))


def test_fp8_bits_are_those_of_torch(interpreter: Interpreter) -> None:
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halfway = (grid[1:] + grid[:-1]) / 2
    near = torch.cat((grid, halfway, halfway.nextafter(torch.tensor(1e9)), halfway.nextafter(torch.tensor(0.0))))
    numbers = torch.cat((near, -near, torch.rand(500) * 2.0 ** torch.randint(-12, 9, (500,)))).clamp(-448, 448)
    found = interpreter("tests.kernels.kernel_parts.fp8_to_bits", numbers)
    assert torch.equal(found, numbers.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("d", [2, 20, 64])
def test_rotary_keys_are_turned(interpreter: Interpreter, dtype: Any, interleaved: bool, d: int) -> None:
    inputs = token_inputs(PageLayout(dtype, 24, d), 20)
    pool, _ = written(interpreter, inputs, interleaved=interleaved)
    _, k_rope, cos, sin, slots, _, layout, _ = inputs
    right = rotate(k_rope.float()[None], cos[None], sin[None], interleaved=interleaved)[0]
    kept = slots >= 0
    found = layout.k_rope(pool)[slots[kept] // 16, slots[kept] % 16].float()
    # The interpreter cuts to bfloat16 where a machine rounds.
    torch.testing.assert_close(found, right[kept], rtol=2.0**-7, atol=1e-6)
    plain, _ = written(interpreter, [*inputs[:2], None, None, *inputs[4:]])
    found = layout.k_rope(plain)[slots[kept] // 16, slots[kept] % 16]
    assert torch.equal(found, k_rope[kept])


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
def test_the_norm_comes_first(interpreter: Interpreter, dtype: Any) -> None:
    layout = PageLayout(dtype, 96, 0)
    inputs = token_inputs(layout, 9, size=7.0)
    weight = torch.linspace(0.5, 2, 96).bfloat16()
    table, lengths = torch.arange(4, dtype=torch.int32)[None], torch.tensor([64])
    # Tokens are read where they were written; the rest of the pages is not compared.
    kept = inputs[4][1:]
    found, right = (
        gather(pool, layout, table, lengths)[0][0, kept]
        for pool, _ in (
            written(interpreter, inputs, norm_weight=weight, norm_eps=1e-5),
            expected(inputs, norm_weight=weight, norm_eps=1e-5),
        )
    )
    step = {"bf16": 0.0, "int8": 1 / 127, "fp8": 1 / 8, "int4": 1 / 7}[dtype]
    largest = right.abs().amax(dim=-1, keepdim=True)
    assert bool(
        ((found - right).abs() <= 2.0**-7 * largest + step * (right.abs() if dtype == "fp8" else largest)).all()
    )
    norm = torch.nn.functional.rms_norm(inputs[0][1:].float(), (96,), weight.float(), 1e-5)
    assert (
        float((found - norm).abs().max() / norm.abs().max())
        < {"bf16": 0.01, "int8": 0.02, "fp8": 0.05, "int4": 0.1}[dtype]
    )


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_reported_and_stays_so(interpreter: Interpreter, dtype: Any, broken: float) -> None:
    layout = PageLayout(dtype, 40, 8)
    inputs = token_inputs(layout, 6)
    inputs[0][2, 7] = broken
    pool, flag = written(interpreter, inputs)
    assert flag == 1
    table = torch.arange(4, dtype=torch.int32)[None]
    read, _ = gather(pool, layout, table, torch.tensor([64]))
    assert not bool(read[0, inputs[4][2]].isfinite().all())
    whole = torch.tensor([1, 3, 4, 5])
    assert bool(read[0, inputs[4][whole]].isfinite().all())
    inputs[0][2, 7] = 0
    inputs[1][4, 3] = broken
    assert written(interpreter, inputs)[1] == 2
    inputs[0][0, 0] = broken  # padding
    assert written(interpreter, inputs)[1] == 2
    inputs[0][1, 0] = broken
    assert written(interpreter, inputs)[1] == expected(inputs)[1] == 3


@pytest.mark.parametrize("dtype", LATENT_DTYPES)
def test_slices_of_a_projection_are_written_in_place(interpreter: Interpreter, dtype: Any) -> None:
    layout = PageLayout(dtype, 24, 8)
    inputs = token_inputs(layout, 5)
    projected = torch.cat((inputs[0], inputs[1]), dim=-1)
    sliced = interpreter("tests.kernels.kernel_parts.write_slices", projected, inputs)
    assert torch.equal(sliced, written(interpreter, inputs)[0])


def test_arguments_are_refused_by_name(interpreter: Interpreter) -> None:
    inputs = token_inputs(PageLayout("int8", 32, 8), 5)
    for place, value, said in (
        (0, inputs[0].double(), "latent is float64"),
        (0, inputs[0][:, :31], "latent has the shape"),
        (0, inputs[0].t().contiguous().t(), "latent has the strides"),
        (1, None, "k_rope is missing"),
        (1, inputs[1][:3], "k_rope has 3 rows|k_rope has the shape"),
        (2, inputs[2].double(), "cos is float64"),
        (2, None, "cos and sin come together"),
        (4, inputs[4].int(), "slots is int32"),
        (POOL, inputs[POOL][:, :-128].contiguous(), "pool has the shape"),
        (FLAG, inputs[FLAG].long(), "flag is int64"),
    ):
        with pytest.raises(MlaError, match=said):
            interpreter(WRITE, *inputs[:place], value, *inputs[place + 1 :])
    with pytest.raises(MlaError, match="int8 latents have no groups"):
        interpreter(WRITE, *inputs, clip=torch.ones(1))
    with pytest.raises(MlaError, match="clip has the shape"):
        interpreter(WRITE, *token_inputs(PageLayout("int4", 64, 0), 5), clip=torch.ones(3))
    odd = token_inputs(PageLayout("int8", 32, 7), 5)
    with pytest.raises(MlaError, match="no pairs"):
        interpreter(WRITE, *odd)
